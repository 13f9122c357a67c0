"""Use a trained model on one device: `ulysses chat FOLDER`, `ulysses generate FOLDER ROWS OUT`, `ulysses score ...`.

FOLDER is an export, adapters, a run (its newest checkpoint), a checkpoint, or a model's hub id. Adapters are merged
first. The model runs in transformers, and a prompt has the tokens that it has in training.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulysses.imports import explained_imports

with explained_imports():
    import torch
    import transformers

    from models.folders import ADAPTER_CONFIG, resolve_model
    from models.hf_format import weight_paths
    from ulysses.check.run_folder import saved_checkpoints
    from ulysses.config.section import ConfigError
    from ulysses.data import BadRowError
    from ulysses.data.read.chat import ChatTemplate
    from ulysses.data.read.formats import Event, Record, dropping, read_row
    from ulysses.data.read.messages import Message
    from ulysses.data.read.sources import Report, locate_rows, parse_sources
    from ulysses.data.read.tokenizer import load_tokenizer
    from ulysses.export import export_checkpoint, merge_adapter

BATCH = 8  # prompts that are answered together


def load_model(kind: type[transformers.PreTrainedModel], folder: Path) -> Any:
    """Load a model that has all its weights, no others, and finite ones, from safetensors; else raise an error."""
    weight_paths(folder)
    options = {"use_safetensors": True, "output_loading_info": True}
    # the report has weights of another shape too
    model, report = kind.from_pretrained(
        folder, dtype="auto", ignore_mismatched_sizes=True, **options
    )
    for fault, names in report.items():
        if names:
            raise ValueError(
                f"{folder} does not fit its config.json: {fault} {sorted(map(str, names))!s:.300}; check that it "
                "belongs to these weights"
            )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise FloatingPointError(
                f"{name} in {folder} holds infinite weights, or some that are not numbers; download it again"
            )
    return model.eval()


class Trained:
    """A model with its tokenizer and its chat template; `options` are those of transformers' generate."""

    def __init__(self, folder: Path, **options: object) -> None:
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
        model = load_model(getattr(transformers, name), folder)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.template, self.options = ChatTemplate(self.tokenizer), options

    def tokens(self, record: Record, *answer: Message) -> list[int]:
        """Return the tokens of a prompt, open for an answer or with one and what ends it."""
        messages = [*record.prompt, *answer]
        answers = [len(messages) - 1] if answer else []
        given = messages, record.tools, answers
        texts = self.template.render(*given, variables=record.variables)
        return self.template.encoder.encode_batch(texts)[0][0]

    def answers(
        self, *records: Record, streamer: transformers.TextStreamer | None = None
    ) -> list[str]:
        """Answer prompts together."""
        prompts = {"input_ids": [*map(self.tokens, records)]}
        padded = self.tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        given = padded.to(self.model.device)
        said = self.model.generate(**given, **self.options, streamer=streamer)
        new = said[:, padded["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def scores(self, record: Record) -> list[float]:
        """Return the rewards of a record's answers."""
        rows = (self.tokens(record, *answer) for answer in record.answers)
        device = self.model.device
        found = [self.model(torch.tensor([row], device=device)).logits.item() for row in rows]
        if not all(map(isfinite, found)):
            raise FloatingPointError(
                f"the scores of a row are {found}, of a model in {self.model.dtype}; export it with --dtype float32"
            )
        return found


def chat(trained: Trained) -> None:
    """Answer what is typed, line by line, until an empty one or the end of the input."""
    show = transformers.TextStreamer(trained.tokenizer, True, skip_special_tokens=True)
    said: list[Message] = []
    with suppress(EOFError):
        for line in iter(partial(input, "> "), ""):
            said.append(Message("user", line))
            answers = trained.answers(Record(said, []), streamer=show)
            said.append(Message("assistant", *answers))


def read(rows: str, kind: str, report: Report) -> Iterator[Record]:
    """Yield the rows of a file as records; `report` counts what is left out.

    Raises DataError: a missing or broken file or row.
    """
    sources = parse_sources(rows)
    events: list[Event] = []
    for row in filter(None, locate_rows(sources, report)):

        def note(what: str, where: str = row.where) -> None:
            events.append(("notes", what, where))

        given = row.found, sources[row.source]
        with dropping(events, "error", row.where):
            try:
                yield from read_row(*given, kind, note)
            except BadRowError:
                if kind == "prompt":
                    raise
                yield from read_row(*given, "sequence", note)  # of one answer
    for event in events:
        report.count(*event)


def write(load: Callable[[], Trained], rows: str, out: Path, *, reward: bool) -> None:
    """Write the rows with the responses that were generated, or with the scores of their answers.

    Rows that are missing are told before the model is loaded. What fails before the first answers leaves no file.
    """
    if out.exists():
        raise ValueError(f"{out.absolute()} exists already; name another file")
    report = Report()
    records = read(rows, "ranked" if reward else "prompt", report)
    batch = [*islice(records, BATCH)]
    trained = load()
    while batch:
        found = [*map(trained.scores, batch)] if reward else trained.answers(*batch)
        with out.open("a" if report.kept else "x", encoding="utf-8") as file:
            for record, value in zip(batch, found):
                name = "scores" if reward else "response"
                named = {f"new_{name}" if name in record.row else name: value}
                line = json.dumps(record.row | named, ensure_ascii=False, default=str)
                print(line, file=file)
                report.kept += 1
        batch = [*islice(records, BATCH)]
    print(report)


def whole_model(given: str, temporary: Path) -> Path:
    """Return the folder of a whole model, which is written to `temporary` if there is none yet."""
    folder = Path(given)
    if (folder / "checkpoints").is_dir():
        folder = [folder / "export", *saved_checkpoints(folder / "checkpoints")][-1]
    if (folder / "run.json").exists():
        export_checkpoint(folder.absolute(), temporary, merge=True)
        return temporary
    folder = resolve_model(str(folder), key="FOLDER")
    if (folder / ADAPTER_CONFIG).exists():
        merge_adapter(folder, temporary)
        return temporary
    return folder


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; return 2, after one sentence, where that is impossible."""
    command, *rest = arguments
    reward, options = command == "score", {}
    parser = argparse.ArgumentParser(f"ulysses {command}")
    add = parser.add_argument
    add("folder", help="an export, a run, a checkpoint, adapters, or the hub id of a model")
    if command != "chat":
        add("rows", help="prompts, or answers to be scored, in any format of the training data")
        add("out", type=Path, help="new file of JSON lines: the rows and what the model says")
    if not reward:
        add("--tokens", type=int, default=1024, help="of the longest answer")
        add(
            "--greedy",
            action="store_true",
            help="no drawing, whatever generation_config.json says",
        )
    given = parser.parse_args(rest)
    if not reward:
        options = {"max_new_tokens": given.tokens} | (
            {"do_sample": False} if given.greedy else {}
        )
    try:
        if not reward and given.tokens < 1:
            raise ValueError(f"--tokens is {given.tokens} but must be at least 1")
        with TemporaryDirectory() as temporary, torch.inference_mode():

            def load() -> Trained:
                place = Path(temporary, "export")
                trained = Trained(whole_model(given.folder, place), **options)
                if trained.model.can_generate() == reward:
                    raise ValueError(
                        f"{given.folder} is a {type(trained.model).__name__}; ulysses score takes a reward model, chat "
                        "and generate any other"
                    )
                return trained

            if command == "chat":
                chat(load())
            else:
                write(load, given.rows, given.out, reward=reward)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0
