"""Use a trained model on one device: `ulysses chat FOLDER`, `ulysses generate FOLDER ROWS OUT`, `ulysses score ...`.

FOLDER is an export, adapters, a run (its newest checkpoint), a checkpoint, or a model's hub id. Adapters are merged
first. The model runs in transformers, and a prompt has the tokens that it has in training, chat_template_kwargs
included.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from math import isfinite
from os.path import expanduser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from models.folders import ADAPTER_CONFIG, CONFIG, read_json, resolve_model
from models.hf_format import weight_paths
from models.writing import GENERATION
from ulysses.check.run_folder import is_run_folder, saved_checkpoints
from ulysses.config.section import ConfigError, Values
from ulysses.data import DropRowError
from ulysses.data.read.chat import ChatTemplate
from ulysses.data.read.formats import Record, dropping, read_row
from ulysses.data.read.messages import Message, Row, as_list
from ulysses.data.read.sources import Report, locate_rows, parse_sources
from ulysses.data.read.tokenizer import load_tokenizer
from ulysses.export import export_checkpoint, merge_adapter

BATCH = 8  # prompts that are answered together
# The fields of generation_config.json that we follow, because they say how a token is drawn, and those that need no
# mention. All others, such as several answers to a prompt, are for other programs.
DRAWING = "do_sample temperature top_k top_p min_p typical_p repetition_penalty no_repeat_ngram_size".split()
UNTOLD = "bos_token_id eos_token_id pad_token_id transformers_version".split()


def load_model(model_class: type[transformers.PreTrainedModel], folder: Path) -> Any:
    """Load a model from safetensors; raise an error for weights that are missing, unknown, misshapen or not finite."""
    weight_paths(folder)
    model, report = model_class.from_pretrained(
        folder,
        dtype="auto",
        use_safetensors=True,
        return_dict=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # weights of a wrong shape are then in the report, too
    )
    for wrong in report.pop("mismatched_keys"):
        raise ValueError("its {} is {}, but config.json says {}".format(*wrong))
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
    """A model with its tokenizer and its chat template, to score answers (`reward`) or to write them.

    `options` are those of transformers' generate: max_new_tokens, and do_sample if it replaces what the folder says.

    Raises errors of any kind for a folder that cannot be loaded.
    """

    def __init__(self, folder: Path, reward: bool, options: Values) -> None:
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(folder)
        name = str((config.architectures or ["model without architectures in config.json"])[0])
        model_class, labels = getattr(transformers, name, None), config.num_labels
        scores = model_class and name.endswith("ForSequenceClassification") and labels == 1
        if not (scores if reward else getattr(model_class, "can_generate", bool)()):
            raise ValueError(
                f"it is a {name}; ulysses score takes a reward model, a ...ForSequenceClassification of one label "
                f"(this has {labels}), chat and generate any language model that transformers knows"
            )
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # what the run passed to its template (export_model.py)
        variables = self.tokenizer.init_kwargs.get("chat_template_kwargs", {})
        self.template = ChatTemplate(self.tokenizer, variables=variables)
        self.shape, self.options = config.get_text_config(), options
        self.window = getattr(self.shape, "max_position_embeddings", sys.maxsize)
        drawing = None if reward else self._drawing(folder / GENERATION)
        model = load_model(model_class, folder)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.model.generation_config = drawing

    def _drawing(self, path: Path) -> transformers.GenerationConfig:
        """Return how answers are drawn; print a line if generation_config.json has fields worth a mention."""
        written = read_json(path) if path.exists() else {}
        file, size = path.name if "eos_token_id" in written else CONFIG, self.shape.vocab_size
        ends = written.get("eos_token_id", self.shape.eos_token_id)
        for end in as_list(ends):
            if end is not None and (type(end) is not int or not 0 <= end < size):
                raise ValueError(
                    f"eos_token_id in {file} is {ends!r}, but must be a number, or a list of numbers, below the "
                    f"vocab_size {size}; correct it"
                )
        used = {
            key: written[key] for key in DRAWING if isinstance(written.get(key), int | float)
        }
        used |= self.options
        if any(key not in UNTOLD and written[key] not in (None, 0, 1) for key in written):
            print(
                f"{path.name} has {json.dumps(written):.400}; answers follow {json.dumps(used)}",
                file=sys.stderr,
            )
        pad = self.tokenizer.pad_token_id
        return transformers.GenerationConfig(**used, eos_token_id=ends, pad_token_id=pad)

    def tokens(self, record: Record, *answer: Message) -> list[int]:
        """Return the tokens of a prompt, up to where its answer begins, or with an answer and the token that ends it.

        Raises DropRowError if the model's window does not hold them or, without an answer, one token more.
        """
        messages = [*record.prompt, *answer]
        answers = [len(messages) - 1] if answer else []
        texts = self.template.render(
            messages, record.tools, answers, variables=record.variables
        )
        tokens = self.template.encoder.encode_batch(texts)[0].ids
        if len(tokens) + (not answer) > self.window:
            raise DropRowError(
                f"the model's window of {self.window:,} tokens is too short for it"
            )
        return tokens

    def answers(
        self, *prompts: list[int], streamer: transformers.TextStreamer | None = None
    ) -> list[str]:
        """Answer prompts together, each within the model's window."""
        padded = self.tokenizer.pad(
            {"input_ids": [*prompts]}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        room = [self.window - len(prompt) for prompt in prompts]
        longest = min(self.options["max_new_tokens"], max(room))
        whole = self.model.generate(**padded, max_new_tokens=longest, streamer=streamer)
        new = whole[:, padded["input_ids"].shape[1] :].tolist()
        new = [tokens[:most] for tokens, most in zip(new, room)]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def scores(self, *rows: list[int]) -> list[float]:
        """Return the rewards of whole sequences."""
        device = self.model.device
        scores = [self.model(torch.tensor([row], device=device)).logits.item() for row in rows]
        if not all(map(isfinite, scores)):
            raise FloatingPointError(
                f"the scores of a row are {scores}, of a model in {self.model.dtype}; export it with --dtype float32"
            )
        return scores


def chat(trained: Trained) -> None:
    """Answer what is typed, line by line, until an empty one or the end of the input."""
    show = transformers.TextStreamer(trained.tokenizer, True, skip_special_tokens=True)
    messages = []
    with suppress(EOFError):
        for line in iter(partial(input, "> "), ""):
            # a tokenizer takes no half letters, which input of another encoding has
            line = line.encode(errors="replace").decode()
            messages.append(Message("user", line))
            answers = trained.answers(trained.tokens(Record(messages, [])), streamer=show)
            messages.append(Message("assistant", *answers))


def read(
    load: Callable[[], Trained], rows: str, kind: str, report: Report
) -> Iterator[tuple[Row, list[list[int]]]]:
    """Yield the rows of a file with the tokens of the prompt, or of each answer; `report` counts rows left out.

    The model is loaded when the first row is read. Raises DataError for a missing or broken file or row.
    """
    sources = parse_sources(rows)
    for row in locate_rows(sources, report):
        with dropping(report, "error", row.where) as note:
            for record in read_row(row.value, sources[row.source], kind, note):
                trained = load()
                yield record.row, [trained.tokens(record, *each) for each in record.answers]


def write(load: Callable[[], Trained], rows: str, out: Path, *, reward: bool) -> None:
    """Write the rows with generated responses, or with the scores of their answers.

    A failure before the first of them leaves no file.
    """
    if out.exists():
        raise ValueError(f"{out.absolute()} exists already; name another file")
    if not out.parent.is_dir():
        raise ValueError(
            f"there is no folder {out.parent.absolute()} for {out.name}; make it, or name another file"
        )
    report = Report()
    tokenised = read(load, rows, "scored" if reward else "prompt", report)
    while batch := [*islice(tokenised, BATCH)]:
        read_rows, tokens = zip(*batch)
        if reward:
            values = [load().scores(*answers) for answers in tokens]
        else:
            values = load().answers(*chain(*tokens))
        with out.open("a" if report.kept else "x", encoding="utf-8") as file:
            for row, value in zip(read_rows, values):
                name = "scores" if reward else "response"
                named = {f"new_{name}" if name in row else name: value}
                line = json.dumps(row | named, ensure_ascii=False, default=str)
                print(line, file=file)
                report.kept += 1
    load()  # a model of the wrong kind is refused even if there were no rows
    print(report)


def whole_model(name: str, temporary: Path) -> Path:
    """Return the folder of a whole model, which is first written to `temporary` for adapters or a checkpoint."""
    folder = Path(expanduser(name))
    if is_run_folder(folder) or (folder / "checkpoints").is_dir():
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
        add("out", help="new file of JSON lines: the rows and what the model says")
    if not reward:
        add("--tokens", type=int, default=1024, help="of the longest answer")
        add(
            "--greedy",
            action="store_true",
            help="no drawing, whatever generation_config.json says",
        )
    args = parser.parse_args(rest)
    if not reward:
        options["max_new_tokens"] = args.tokens
        if args.greedy:
            options["do_sample"] = False
    try:
        if not reward and args.tokens < 1:
            raise ValueError(f"--tokens is {args.tokens} but must be at least 1")
        with TemporaryDirectory() as temporary, torch.inference_mode():

            @cache
            def load() -> Trained:
                try:
                    folder = whole_model(args.folder, Path(temporary, "export"))
                    return Trained(folder, reward, options)
                except Exception as error:  # every library below has its own classes
                    reason = " ".join(str(error).split()) or repr(error)
                    raise ValueError(f"{args.folder} cannot be used: {reason:.600}") from None

            if command == "chat":
                chat(load())
            else:
                write(load, args.rows, Path(expanduser(args.out)), reward=reward)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        # torch raises the last one for probabilities that it cannot draw from, and for too little memory
        print(f"error: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0
