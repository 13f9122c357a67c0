"""The table of a run's checks: when each is made, what it reads and what it finds. `prepare` makes the first ones.

    settings     each process by itself, before any file is opened
    files        each process by itself: all that is wrong or absent is told at once
    all files    each process by itself, if nothing was absent
    data         after the data are tokenised and open
    resuming     before a checkpoint is continued
    processes    after the processes have met
    folder       after they agree; nothing is written there yet but who holds it
    plan         after the run is planned, before it takes memory

Each error is one sentence: what was given, what is required and what to change.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from models.arch import ModelConfig
from models.initial_weights import InitialWeights
from ulysses.config.schema import Config
from ulysses.config.section import error_context, refuse
from ulysses.data.read.chat import ChatTemplate
from ulysses.parallel.kernels.choice import KernelChoice
from ulysses.registry import load, stage_of
from ulysses.stages.base import Stage


class Check(NamedTuple):
    """One check. It is imported when it is made.

    function: MODULE:FUNCTION in ulysses. It raises an error, or yields errors or sentences about what is wrong.
    reads: its arguments. One with "?" may be unknown. If another is unknown, the check is left out: that it is absent
        or wrong has been told.
    finds: the names of what it returns; without any it only refuses.
    setting: what the sentence of an error begins with.
    """

    function: str
    reads: str
    finds: str = ""
    setting: str = ""


CHECKS = {
    "settings": [
        Check("check.setting_checks:check_settings", "config world_size"),
    ],
    "files": [
        Check("check.setting_checks:check_deepspeed", ""),
        Check("check.input_files:check_sources", "config", setting="data"),
        Check("check.input_files:published_shape", "config", "shape"),
        Check("check.input_files:read_shape", "config strict", "shape folder"),
        Check("check.input_files:check_pretrained", "config stage shape folder", setting="model.path"),
        Check("check.input_files:fit_window", "config shape", "shape"),
        Check("check.input_files:check_export", "stage shape"),
        Check("check.setting_checks:check_rank", "config shape", setting="model.lora.rank"),
        Check("check.setting_checks:check_experts", "config shape"),
        Check("check.input_files:read_tokenizer", "config stage shape folder?", "tokenizer tokenizer_place template"),
        Check("check.input_files:read_others", "config stage strict others"),
        Check("check.kernel_proof:choose_kernel", "config stage shape strict", "attention kernel", "model.attention"),
        Check("check.kernel_proof:check_fp8", "config strict"),
        Check("check.input_files:check_rewards", "config strict"),
        Check("check.checkpoint_folders:find_checkpoint", "config strict", "resume_from"),
        Check("check.continuation:check_same_run", "config shape resume_from"),
    ],
    "all files": [
        Check("check.input_files:check_models", "stage shape tokenizer others"),
        Check("check.input_files:exported_shape", "config stage shape tokenizer template?", "shape"),
        Check("check.input_files:initial_weights", "config shape folder?", "weights"),
        Check("check.disk_space:check_folders", "config folder? weights others"),
        Check("check.disk_space:check_disk", "config shape resume_from?", "disk_warning"),
    ],
    "data": [
        Check("check.input_files:check_examples", "config train held_out?"),
    ],
    "resuming": [
        Check("check.continuation:changes", "config resume_from digests", "changes"),
    ],
    "processes": [
        Check("check.agreement:facts_of", "inputs digests verify", "facts"),
        Check("check.agreement:agree", "facts"),
    ],
    "folder": [
        Check("check.agreement:hold_output", "config resources", "run_id left_by"),
    ],
    "plan": [
        Check("check.kernel_proof:check_kernel", "config stage shape attention device mesh"),
        Check("plan.memory_choice:choose_memory", "case", "memory"),
    ],
}  # fmt: skip


@dataclass
class RunInputs:
    """What a run starts from, as the checks found it; after a dry run with findings some of it is None."""

    config: Config
    stage: Stage
    shape: ModelConfig
    folder: Path | None  # of the model; None for a shape given by name or keys
    tokenizer: Any
    tokenizer_place: Path  # the folder, or the tokenizer.json, that it was read from
    template: ChatTemplate | None  # None for plain text
    weights: InitialWeights
    others: dict[
        str, InitialWeights
    ]  # of the stage's other models, by the settings that name them
    attention: str  # what the layers are told of the kernel
    kernel: KernelChoice
    resume_from: Path | None
    disk_warning: str


def make_checks(moment: str, findings: list[str] | None = None, **known: Any) -> dict[str, Any]:
    """Make a moment's checks in their order, and return `known` with what they found.

    Args:
        findings: as in `prepare`.
        known: what the checks read, by name.

    Raises ConfigError for all that is wrong.
    """
    errors: list[Any] = []
    for check in CHECKS[moment]:
        given = {name: known.get(name.rstrip("?")) for name in check.reads.split()}
        if any(value is None and name[-1] != "?" for name, value in given.items()):
            continue
        with error_context(check.setting, errors):
            found = load(f"ulysses.{check.function}")(*given.values())
            names = check.finds.split()
            if not names:
                errors += found or ()
            known.update(zip(names, found if len(names) > 1 else [found]))
    refuse(errors, findings)
    return known


def prepare(config: Config, world_size: int = 0, findings: list[str] | None = None) -> RunInputs:
    """Check a configuration against the machine and the files, and read what they say about the model.

    Nothing is written, and no data are opened. With `run.deterministic`, torch's switches are set here.

    Args:
        world_size: number of processes; 0 asks the launcher.
        findings: collects, for a dry run, what is merely absent: weights, data, tokenizer, hub, disk space. Without it
            absence refuses the run like everything else. A dry run downloads no weights and checks no kernel.

    Raises ConfigError: all errors about settings or, if there are none, about what they name.
    """
    known: dict[str, Any] = {
        "config": config,
        "stage": stage_of(config),
        "world_size": world_size,
        "strict": findings is None,
        "others": {},
    }
    for moment in ("settings", "files", "all files"):
        if not findings:
            known = make_checks(moment, findings, **known)
    return RunInputs(**{field.name: known.get(field.name) for field in fields(RunInputs)})
