"""Start train.py in real processes and collect exit code, stdout and stderr.

    run("python" | "torchrun" | "deepspeed", ...)    through the real launcher
    ranks(...)                                       the same processes without one, forked from this process, whose
                                                     imports they share (a second instead of ten on a small machine)

All of them run on the CPU, also where there are GPUs: these tests compare numbers and bytes.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests import ROOT
from tests.harness import (
    AS_LARGE,
    PATIENCE,
    Processes,
    begin_rank,
    free_port,
    hide_gpus,
    preload,
    set_rank,
)

BIN = Path(sys.executable).parent
CACHE = tempfile.TemporaryDirectory(
    prefix="tests-", ignore_cleanup_errors=True
)  # tokenised data of all tests
LAUNCHER_KEYS = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK".split()
)


@dataclass
class Outcome:
    """How a launch ended: the largest exit code in size, and all that was printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The sentences that tell what went wrong, not the interpreter's; a progress bar may stand before one."""
        return re.findall(r"(?<!Fatal Python )error: .*", self.stderr)

    def check(self, code: int = 0) -> "Outcome":
        texts = f"{self.stdout[-3000:]}\n{self.stderr[-3000:]}"
        assert self.code == code, f"exit code {self.code}\n{texts}"
        return self

    def refused(self, pattern: str) -> str:
        """Check that there is one sentence, which fits and has no stack trace beside it, and return it."""
        [sentence] = self.errors
        assert re.search(pattern, sentence) and "Traceback" not in self.stderr, self.stderr
        return sentence


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_KEYS}
    quiet = """
    DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1
    TOKENIZERS_PARALLELISM=false
    """
    kept |= dict(word.split("=") for word in quiet.split())
    return kept | {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"}


def command(launcher: str, processes: int, port: int, agents: int = 1) -> list[str]:
    options = {
        "python": "",
        # The rendezvous' store serves the processes too, so each agent needs nothing but its address.
        "torchrun": f"-m torch.distributed.run --nnodes={agents} --nproc_per_node={processes} --rdzv_backend=c10d "
        f"--rdzv_endpoint=127.0.0.1:{port} --rdzv_id=run{port}",
        "deepspeed": f"{BIN}/deepspeed --num_gpus {processes} --master_port {port}",
    }
    return [sys.executable, *options[launcher].split()]


def run(launcher: str, arguments: list[str], processes: int = 1, *, agents: int = 1) -> Outcome:
    """Run train.py to its end; with several agents, `processes` belong to each of them."""
    line = [*command(launcher, processes, free_port(), agents), ROOT / "train.py", *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [
        subprocess.Popen(line, cwd=ROOT, env=environment(), start_new_session=True, **pipes)
        for _ in range(agents)
    ]
    try:
        texts = [child.communicate(timeout=PATIENCE) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    worst = max((child.returncode for child in children), key=abs)
    return Outcome(worst, *map("".join, zip(*texts)))


def python(*arguments: Any, cwd: Path = ROOT, **more: str) -> Outcome:
    """Run Python in a process of its own to its end; `more` are variables of its environment."""
    line, env = [sys.executable, *map(str, arguments)], environment() | more
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True)
    return Outcome(done.returncode, done.stdout, done.stderr)


class Ranks(Processes):
    """Processes of one run without a launcher, or under torchrun's agent, which is then the only one of `processes`.

    Args:
        before: called in every process with its rank before the script starts: where a test plants a fault.
        script: what they run.
        restarts: how often an agent starts them again.
    """

    def __init__(
        self, arguments: list[Any], processes: int, logs: Path | None = None, before: Any = None,
        script: str = "train.py", restarts: int = 0,
    ) -> None:  # fmt: skip
        preload("torch.utils.tensorboard", "tqdm", "models.lora", "ulysses.run.training_run")
        self.logs = logs or Path(tempfile.mkdtemp(prefix="logs-", dir=CACHE.name))
        self.logs.mkdir(parents=True, exist_ok=True)
        line = [script, *map(str, arguments)]
        setting = free_port(), line, self.logs, before
        if restarts:
            super().__init__(_become_agent, 1, *setting, processes, restarts)
        else:
            super().__init__(_become_rank, processes, *setting)

    def wait(self, timeout: float = PATIENCE) -> Outcome:
        """Wait for the end, and fail if it does not come in time."""
        late = self.end(timeout)
        texts = [
            "".join(path.read_text() for path in sorted(self.logs.glob(f"*.{name}")))
            for name in ("out", "err")
        ]
        assert not late, (
            f"not finished after {timeout} s\n{texts[0][-2000:]}\n{texts[1][-2000:]}"
        )
        return Outcome(max(self.codes, key=abs), *texts)


def ranks(arguments: list[Any], processes: int, *, code: int = 0, **more: Any) -> Outcome:
    """Run train.py, or another script, on forked processes to its end, which has this exit code."""
    return Ranks(arguments, processes, **more).wait().check(code)


def run_script(text: str, folder: Path) -> Outcome:
    """Run a program of its own in a folder, on a forked process, to its end, which is a good one."""
    file = Path(tempfile.mkdtemp(prefix="script-", dir=CACHE.name)) / "script.py"
    file.write_text(text)
    return ranks([], 1, script=str(file), before=lambda _: os.chdir(folder))


def _become_agent(
    _: int, __: int, port: int, line: list[str], logs: Path, before: Any, processes: int, restarts: int
) -> None:  # fmt: skip
    """Do what torchrun does for train.py, but fork the processes, which it tells by the environment who they are."""

    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prepare(int(os.environ["RANK"]), logs, before)
        from ulysses.train import main

        if code := main(line[1:]):  # a good end has a value, for which the agent waits
            os._exit(code)

    os.environ.update(environment())
    config = LaunchConfig(
        1, 1, processes, run_id=f"run{port}", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}",
        max_restarts=restarts, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, rank)()


def _become_rank(
    rank: int, world: int, port: int, line: list[str], logs: Path, before: Any
) -> None:
    code = 1
    try:
        if world > 1 or line[0] != "train.py":  # which alone starts without a launcher
            set_rank(rank, world)
            os.environ["MASTER_PORT"] = str(port)
        _prepare(rank, logs, before)
        sys.argv = line
        runpy.run_path(
            str(ROOT / line[0]), run_name="__main__"
        )  # train.py ends by itself through os._exit
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare(rank: int, logs: Path, before: Any) -> None:
    """Let this process print into files of its own and look at nothing of the tests' process."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(
            os.open(logs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number
        )
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(environment())
    hide_gpus()
    os.chdir(ROOT)
    begin_rank()
    if before is not None:
        before(rank)


def plant_in_losses(fault: Callable[[int, Callable[[], Any]], Any]) -> None:
    """Call `fault(steps taken, compute)` in this rank wherever SFT asks for the loss terms, which `compute` returns."""
    from ulysses.run.trainer import Trainer
    from ulysses.stages.sft import SftStage

    train_step, losses, trainers = Trainer.train_step, SftStage.losses, []

    def noted(trainer: Trainer) -> dict[str, float]:
        trainers[:] = [trainer]
        return train_step(trainer)

    def faulty(*batch: Any, **of_step: Any) -> Any:
        return fault(trainers[0].step, lambda: losses(*batch, **of_step))

    Trainer.train_step, SftStage.losses = noted, faulty


def metrics(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


TIMES = "run seconds tokens_per_second mfu peak_memory_gib".split()
TIMES += "time/sampling time/waiting time/rollout".split()


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


# A model of a few thousand weights. Three layers are the fewest of which DeepSpeed still gathers some ahead when an
# evaluation ends.
SIZE = "--model.config.hidden_size 32 --model.config.intermediate_size 64 --model.config.num_hidden_layers 3"
EXPERTS = """
--model.config.model_type qwen3_moe --model.config.num_experts 4 --model.config.num_experts_per_tok 2
--model.config.moe_intermediate_size 32 --model.config.head_dim 16
"""
TINY = """
--run.steps 5 --run.eval_every 0 --batch.examples 8 --batch.tokens_per_microbatch 512 --data.eval []
--data.max_length 256 --parallel.sequence_parallel_size 1
"""


def tiny(
    stage: str, output: Path, typed: str = "", cache: Path | str = CACHE.name, **settings: Any
) -> list[str]:
    """Arguments of a run of seconds: the demo's data, tokenised once, a tiny model, and what a test types after that.

    Values that cannot be typed without spaces are keyword arguments, a__b for [a] b.
    """
    base = f"{ROOT}/configs/demo/{stage}.toml {TINY} --run.output {output} --data.cache {cache}"
    if "--model.path" not in typed and "model__path" not in settings:  # which brings its shape
        base += f" {SIZE}"
    if stage == "dpo":  # the preference loss alone, which starts at ln 2
        base += " --dpo.sft_weight 0"
    large = {f"deepspeed.zero_optimization.{key}": value for key, value in AS_LARGE.items()}
    return ["--config", *base.split(), *words(large | settings), *typed.split()]


def rows(file: str, most: int) -> str:
    """Some rows of the demo's data, as one typed value."""
    return f'{{"path":"{ROOT}/configs/demo/data/{file}.jsonl","max_examples":{most}}}'


def words(settings: dict[str, Any]) -> list[str]:
    """Write settings as train.py's arguments, a__b for [a] b."""
    pairs = ((f"--{name.replace('__', '.')}", value) for name, value in settings.items())
    return [
        w
        for name, v in pairs
        for w in (name, str(v) if isinstance(v, str | Path) else json.dumps(v))
    ]
