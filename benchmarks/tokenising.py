"""How long does it take to tokenise chat rows? Ours and datasets.map, in turns, with the same tokenizer and template.

    python benchmarks/tokenising.py --vocabulary dolma2/tokenizer.json --rows 50000 --workers 1 2
    python benchmarks/tokenising.py --vocabulary dolma2/tokenizer.json --pattern qwen2.5 --data chat.jsonl
    python benchmarks/tokenising.py --rows 300 --rounds 1                        # the demo's tokenizer, a toy size

`--vocabulary` is the tokenizer.json of any byte-level BPE; it is given the published pre-tokenizer pattern and the
special tokens of Llama-3 or Qwen2.5. Rows are those of `--data` (JSON lines with `messages`) or made-up questions and
answers of 60 to 120 words. Ours reads the file, finds the trained tokens and writes the dataset; datasets.map loads the
file and tokenises what the template renders, in batches and without a mask (Qwen2.5's template writes a newline after
the last turn, which ours leaves out). Prints JSON lines, and a table of each one's median seconds and of the CPU time
of all its processes, which is what to compare on a machine that others use.
"""

import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from common import add_options, plain_parser, say, table
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.demo_data import COLOURS, MATERIALS, OWNERS, ROOMS, THINGS, write_demo
from ulysses.config.schema import DataSection
from ulysses.data.read.sources import parse_sources
from ulysses.data.serve.dataset import open_dataset

ENDING = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    name: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + ENDING % digits
    for name, digits in (("llama3", "1,3"), ("qwen2.5", "1"))
}
LLAMA3 = "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag"
QWEN = "im_end im_start endoftext object_ref_start object_ref_end box_start box_end"
SPECIAL = {
    "llama3": [*LLAMA3.split(), *(f"reserved_special_token_{i}" for i in range(249))],
    "qwen2.5": QWEN.split(),
}
WORDS = (*COLOURS, *MATERIALS, *OWNERS, *ROOMS, *THINGS)


def main() -> None:
    p = plain_parser(__doc__)
    p.add_argument("--pattern", choices=PATTERNS, default="llama3")
    p.add_argument("--data", type=Path, help="JSON lines with messages")
    add_options(
        p,
        vocabulary=("", "a tokenizer.json"),
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
        write_demo(folder / "demo")
        vocabulary = a.vocabulary or folder / "demo/tokenizer/tokenizer.json"
        tokenizer = build_tokenizer(vocabulary, a.pattern)
        data = a.data or write_rows(folder / "chat.jsonl", a.rows)
        for number, count in product(range(a.rounds), a.workers):
            for work in (ours, theirs):
                scratch = folder / f"{number}-{count}-{work.__name__}"
                row = timed(work, tokenizer, a.pattern, data, count, scratch)
                say(row, a.out)
                measured.setdefault((count, row["who"]), []).append(row)
    rows = [
        {
            **found[0],
            **{name: median(row[name] for row in found) for name in ("seconds", "cpu_s")},
        }
        for found in measured.values()
    ]
    print(table(rows, ["workers", "who", "seconds", "cpu_s"]))


def timed(
    work: Callable[..., int],
    tokenizer: Any,
    pattern: str,
    data: Path,
    workers: int,
    scratch: Path,
) -> dict[str, Any]:
    """Measure a piece of work; return its seconds, the CPU seconds of all processes, and its tokens."""
    began, before = time.perf_counter(), cpu_seconds()
    tokens = work(tokenizer, pattern, data, workers, scratch)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - before
    return {"who": "ours" if work is ours else "datasets.map", "workers": workers, "seconds": round(seconds, 2),
            "cpu_s": round(cpu, 2), "tokens": tokens}  # fmt: skip


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def ours(tokenizer: Any, pattern: str, data: Path, workers: int, scratch: Path) -> int:
    """Read and tokenise the rows into a new cache; return the number of tokens."""
    settings = DataSection(
        max_length=1 << 20, cache=str(scratch), chat_template=pattern, workers=workers
    )
    dataset = open_dataset(parse_sources(str(data)), "sequence", tokenizer, settings)
    return dataset.report.tokens


def theirs(tokenizer: Any, pattern: str, data: Path, workers: int, scratch: Path) -> int:
    """Load and tokenise the rows with `datasets`; return the number of tokens."""
    import datasets

    import ulysses.data.read.chat

    template = Path(ulysses.data.read.chat.__file__).with_name(f"{pattern}.jinja")
    tokenizer.chat_template = template.read_text()
    rows = datasets.load_dataset(
        "json", data_files=str(data), split="train", cache_dir=str(scratch)
    )

    def tokenise(batch: Any) -> Any:
        ids = tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]
        return {"input_ids": ids, "length": [len(each) for each in ids]}

    done = rows.map(tokenise, batched=True, num_proc=workers, remove_columns=rows.column_names)
    return sum(done["length"])


def build_tokenizer(vocabulary: str | Path, pattern: str) -> PreTrainedTokenizerFast:
    """Return a vocabulary with the pre-tokenizer pattern and special tokens of a published tokenizer."""
    content = json.loads(Path(vocabulary).read_text())
    content |= {"added_tokens": [], "post_processor": None}
    built = Tokenizer.from_str(json.dumps(content))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = [f"<|{name}|>" for name in SPECIAL[pattern]]
    built.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in texts]
    )
    end = "<|eot_id|>" if pattern == "llama3" else "<|im_end|>"
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token=end, bos_token=texts[0])


def write_rows(path: Path, count: int) -> Path:
    """Write made-up conversations of one question and one answer, no two alike."""
    draw = random.Random(1)

    def text(number: int) -> Iterator[str]:
        for _ in range(draw.randint(30, 60)):
            yield draw.choice(WORDS) + draw.choice(("", "", "", ",", ".", f" {number}"))

    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": role, "content": " ".join(text(number))}
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


if __name__ == "__main__":
    main()
