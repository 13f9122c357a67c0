"""Start train.py in real processes and collect exit code, stdout and stderr.

    run("python" | "torchrun" | "deepspeed", ...)    through the real launcher
    ranks(...)                                       the same processes without one, forked from this process, whose
                                                     imports they share (a second instead of ten on a small machine)

All of them run on the CPU, also where there are GPUs: these tests compare numbers and bytes.
"""

import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import AS_LARGE, begin_rank, free_port, hide_gpus, preload, set_rank

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CACHE = tempfile.TemporaryDirectory(
    prefix="tests-", ignore_cleanup_errors=True
)  # tokenised data of all tests
LAUNCHER_KEYS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


@dataclass
class Outcome:
    """How a launch ended: the largest exit code in size, and all that was printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The sentences that tell what went wrong; a progress bar may stand before one."""
        return re.findall(r"error: .*", self.stderr)

    def check(self) -> "Outcome":
        assert self.code == 0, (
            f"exit code {self.code}\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"
        )
        return self


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_KEYS}
    return kept | {
        "PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def command(launcher: str, processes: int, port: int, agents: int = 1) -> list[str]:
    match launcher:
        case "python":
            return [sys.executable]
        case "torchrun":
            # The rendezvous' store serves the processes too, so each agent needs nothing but its address.
            return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}",
                    f"--nproc_per_node={processes}",
                    "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id=run{port}"]  # fmt: skip
        case "deepspeed":
            return [
                sys.executable,
                str(BIN / "deepspeed"),
                "--num_gpus",
                str(processes),
                "--master_port",
                str(port),
            ]
    raise ValueError(launcher)


def run(
    launcher: str,
    arguments: list[str],
    processes: int = 1,
    *,
    agents: int = 1,
    timeout: float = 240,
) -> Outcome:
    """Run train.py to its end; with several agents, `processes` belong to each of them."""
    port = free_port()
    line = [
        *command(launcher, processes, port, agents),
        str(ROOT / "train.py"),
        *map(str, arguments),
    ]
    options: Any = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    children = [
        subprocess.Popen(line, cwd=ROOT, env=environment(), **options) for _ in range(agents)
    ]
    deadline, texts = time.monotonic() + timeout, []
    try:
        for child in children:
            texts.append(child.communicate(timeout=max(1.0, deadline - time.monotonic())))
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    worst = max((child.returncode for child in children), key=abs)
    return Outcome(worst, "".join(o for o, _ in texts), "".join(e for _, e in texts))


class Ranks:
    """Processes of one run without a launcher.

    Args:
        before: called in every process with its rank before the script starts: where a test plants a fault.
        script: what they run.
    """

    def __init__(
        self,
        arguments: list[Any],
        processes: int,
        logs: Path,
        before: Any = None,
        script: str = "train.py",
    ) -> None:
        preload("torch.utils.tensorboard", "tqdm", "models.lora", "ulysses.run.training_run")
        logs.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.logs, setting = (
            logs,
            (processes, free_port(), [script, *map(str, arguments)], logs, before),
        )
        fork = multiprocessing.get_context("fork")
        self.processes = [
            fork.Process(target=_become_rank, args=(rank, *setting))
            for rank in range(processes)
        ]
        for process in self.processes:
            process.start()

    @property
    def codes(self) -> list[int | None]:
        """The exit codes by rank, None of those that still run."""
        return [process.exitcode for process in self.processes]

    def send(self, number: int, *which: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in which or range(len(self.processes)):
            if self.codes[rank] is None:
                os.kill(self.processes[rank].pid, number)

    def until(self, condition: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until the condition holds, all processes have ended or the time is over."""
        deadline = time.monotonic() + timeout
        while None in self.codes and not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def wait(self, timeout: float = 120) -> Outcome:
        """Wait for the end, and fail if it does not come in time."""
        self.until(lambda: False, timeout)
        late = None in self.codes
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.join()
        texts = [
            "".join(path.read_text() for path in sorted(self.logs.glob(f"*.{name}")))
            for name in ("out", "err")
        ]
        assert not late, (
            f"not finished after {timeout} s\n{texts[0][-2000:]}\n{texts[1][-2000:]}"
        )
        return Outcome(max(self.codes, key=abs), *texts)


def ranks(
    arguments: list[Any], processes: int, logs: Path, *, timeout: float = 120, **more: Any
) -> Outcome:
    """Run train.py, or another script, on forked processes to its end."""
    return Ranks(arguments, processes, logs, **more).wait(timeout)


def _become_rank(
    rank: int, world: int, port: int, line: list[str], logs: Path, before: Any
) -> None:
    code = 1
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(
                os.open(logs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number
            )
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(environment())
        hide_gpus()
        if world > 1 or line[0] != "train.py":  # which alone starts without a launcher
            set_rank(rank, world)
            os.environ["MASTER_PORT"] = str(port)
        os.chdir(ROOT)
        begin_rank()
        if before is not None:
            before(rank)
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


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in ("run", "seconds", "tokens_per_second")}
        for line in lines
    ]


# Three layers are the fewest of which DeepSpeed still gathers some ahead when an evaluation ends.
SIZE = {"hidden_size": "32", "intermediate_size": "64", "num_hidden_layers": "3"}


def tiny(
    stage: str, output: Path, cache: Path | str = CACHE.name, **settings: Any
) -> list[str]:
    """Arguments of a run of seconds: the demo's data, tokenised once, and a model of a few thousand weights."""
    values: dict[str, Any] = {
        "run.output": output, "data.cache": cache, "run.steps": 5, "run.eval_every": 0, "batch.examples": 8,
        "data.eval": "[]", "parallel.sequence_parallel_size": 1, "batch.tokens_per_microbatch": 512,
        "data.max_length": 256,
        **({"dpo.sft_weight": 0.0} if stage == "dpo" else {}),  # the preference loss alone, which starts at ln 2
        **{f"deepspeed.zero_optimization.{key}": value for key, value in AS_LARGE.items()},
    }  # fmt: skip
    if "model__path" not in settings:  # which brings its shape
        values |= {f"model.config.{name}": value for name, value in SIZE.items()}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    return ["--config", str(ROOT / f"configs/demo/{stage}.toml"), *words(values)]


def words(settings: dict[str, Any]) -> list[str]:
    """Write settings as train.py's arguments, a__b for [a] b."""
    pairs = ((f"--{name.replace('__', '.')}", value) for name, value in settings.items())
    return [
        w
        for name, v in pairs
        for w in (name, str(v) if isinstance(v, str | Path) else json.dumps(v))
    ]
