"""How long does it take to tokenise chat rows? Ours and datasets.map, in turns, with the same tokenizer and template.

    python benchmarks/tokenising.py --tokenizer MODEL_FOLDER --rows 50000 --workers 1 2
    python benchmarks/tokenising.py --tokenizer MODEL_FOLDER --data chat.jsonl
    python benchmarks/tokenising.py --rows 300 --rounds 1              the demo's tokenizer, a toy size

Rows are those of `--data` (JSON lines with `messages`) or made-up questions and answers of 60 to 120 words. Ours reads
the file, finds the trained tokens and writes the dataset; datasets.map loads the file and tokenises what the template
renders, in batches and without a mask (some templates write a newline after the last turn, which ours leaves out).
Prints JSON lines, and a table of each one's median seconds and of the CPU time of all its processes, which is what to
compare on a machine that others use.
"""

import json
import os
import random
import resource
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from common import WORDS, add_options, plain_parser, say, table

from ulysses.config.schema import DataSection
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.sources import parse_sources
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.data.serve.tokenise import Tokenising


def main() -> None:
    p = plain_parser(__doc__)
    add_options(
        p,
        tokenizer=("", "a folder, with a chat template"),
        data=("", "JSON lines with messages"),
        rows=(50_000, "made-up rows"),
        workers=([1, 2], "numbers of processes"),
        rounds=(3, "turns that are measured"),
        out=("", "append the JSON lines to this file too"),
    )
    a = p.parse_args()
    # as in train.py: the processes are what works in parallel
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    measured: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = load_tokenizer(a.tokenizer or "configs/demo/data/tokenizer")
        data = a.data or write_rows(folder / "chat.jsonl", a.rows)
        for number, count, work in product(range(a.rounds), a.workers, (ours, theirs)):
            began, before = time.perf_counter(), cpu_seconds()
            tokens = work(tokenizer, data, count, folder / f"{number}-{count}-{work.__name__}")
            row = {
                "who": "ours" if work is ours else "datasets.map",
                "workers": count,
                "seconds": round(time.perf_counter() - began, 2),
                "cpu_s": round(cpu_seconds() - before, 2),
                "tokens": tokens,
            }
            say(row, a.out)
            measured.setdefault((count, row["who"]), []).append(row)
    rows = [
        found[0] | {name: median(row[name] for row in found) for name in ("seconds", "cpu_s")}
        for found in measured.values()
    ]
    print(table(rows, ["workers", "who", "seconds", "cpu_s"]))


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def ours(tokenizer: Any, data: Path, workers: int, scratch: Path) -> int:
    """Read and tokenise the rows into a new cache; return the number of tokens."""
    settings = DataSection(max_length=1 << 20, cache=str(scratch), workers=workers)
    read, template = parse_sources(str(data)), ChatTemplate(tokenizer)
    dataset = Tokenising(read, "sequence", tokenizer, template, settings).open()
    return dataset.report.tokens


def theirs(tokenizer: Any, data: Path, workers: int, scratch: Path) -> int:
    """Load and tokenise the rows with `datasets`; return the number of tokens."""
    import datasets

    rows = datasets.load_dataset(
        "json", data_files=str(data), split="train", cache_dir=str(scratch)
    )

    def tokenise(batch: Any) -> Any:
        ids = tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]
        return {"input_ids": ids, "length": [len(each) for each in ids]}

    done = rows.map(tokenise, batched=True, num_proc=workers, remove_columns=rows.column_names)
    return sum(done["length"])


def write_rows(path: Path, count: int) -> Path:
    """Write made-up conversations of one question and one answer."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            texts = [" ".join(draw.choices(WORDS, k=draw.randint(30, 60))) for _ in range(2)]
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


if __name__ == "__main__":
    main()
