"""Try every promise of docs/reliability.md on real launchers: python tests/e2e/drills.py [NAME ...] [--timeout 60]

Each drill starts tiny runs on the CPU, over loopback or between two network namespaces, breaks them and prints one row:
its name, the seconds until the run told it, and what it told. A drill that this machine does not permit is skipped with
the reason. The exit code is 1 if a promise was broken.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import rows_of  # noqa: E402
from tests.e2e import test_kill_resume as saves  # noqa: E402
from tests.e2e import test_watch as faults  # noqa: E402
from tests.e2e.launch import Ranks, command, environment, metrics, tiny, without_times  # noqa: E402
from tests.harness import PATIENCE, free_port, until  # noqa: E402
from ulysses.disk import digest_of  # noqa: E402

FAULT = "ULYSSES_DRILLS_FAULT"
INSIDE = "ULYSSES_DRILLS_INSIDE_NAMESPACES"
# addresses 10.9.0.1 and 10.9.0.2 on a bridge in this process's own network namespace
NODES = ("node-a", "node-b")
ENDLESS = "--run.steps 100000"  # until the drill ends the run
METRICS = "run/metrics.jsonl"


def leave(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """A reward function that ends its process behind everybody's back."""
    os._exit(0)


class Fault:
    """A tracker, which runs on rank 0, in which something breaks at the third step of a first attempt."""

    def start(self, run: Any) -> None: ...

    def log(self, step: int, values: dict[str, float]) -> None:
        name, attempt = os.environ[FAULT], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if step == 3 and attempt == "0":
            faults.strike({"abort": os.abort}.get(name) or getattr(faults, name, 0))

    def fail(self) -> None: ...

    def close(self) -> None: ...


class Run:
    """Two processes of train.py under a launcher, or under one on each of two nodes, and what these print.

    It is a context, at whose end whatever is left of it is killed.
    """

    def __init__(
        self, drills: "Drills", launcher: str, typed: str = "", stage: str = "sft", nodes: int = 1, restarts: int = 0
    ) -> None:  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(dir=drills.folder))
        usual = f"{ENDLESS} --run.save_every 0 --run.export false --run.log_every 1 --run.timeout {drills.timeout}"
        arguments = tiny(
            stage, self.folder / "run", f"{usual} {typed}", drills.folder / "cache"
        )
        self.launchers, self.logs = [], [self.folder / f"launcher{i}.log" for i in range(nodes)]
        line, env = command(launcher, 2 // nodes, free_port(), nodes), environment()
        line += [f"--max-restarts={restarts}"] * (restarts > 0)
        for node, log in enumerate(self.logs):
            start = line
            if nodes > 1:
                env["GLOO_SOCKET_IFNAME"] = "eth0"
                place = f"--local-addr=10.9.0.{node + 1} --rdzv_conf=is_host={1 - node}"
                there = [word.replace("127.0.0.1", "10.9.0.1") for word in line]
                start = [*on_node(node), *there, *place.split()]
            with log.open("w") as out:
                self.launchers.append(psutil.Popen(
                    [*start, ROOT / "train.py", *arguments], cwd=ROOT, env=env, stdout=out, stderr=out,
                    start_new_session=True
                ))  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in [*self.processes()]:
            if process.is_running():
                process.kill()

    def processes(self) -> Iterator[psutil.Process]:
        for launcher in self.launchers:
            if launcher.is_running():
                yield from (*launcher.children(recursive=True), launcher)

    def rank(self, rank: int) -> psutil.Process:
        """Find a rank's process."""
        for process in self.processes():
            with suppress(psutil.Error):  # it has just ended
                own = process.environ().get("RANK") == str(rank)
                if own and "train.py" in str(process.cmdline()):
                    return process
        raise LookupError(f"rank {rank} does not run:\n{self.text()[-2000:]}")

    def text(self) -> str:
        return "\n".join(log.read_text().replace("\r", "\n") for log in self.logs)

    def steps(self) -> int:
        file = self.folder / METRICS
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> float:
        """Wait for a condition and return after how many seconds it came; TimeoutError if it does not."""
        began = time.monotonic()
        if not until(condition, seconds):
            raise TimeoutError(f"not within {seconds:.0f} s:\n{self.text()[-3000:]}")
        return time.monotonic() - began

    def trains(self) -> None:
        self.until(lambda: self.steps() > 3)

    def ends(self) -> None:
        """Wait for the launchers' end, with the code of success."""
        self.until(lambda: all(x.poll() is not None for x in self.launchers))
        assert not any(x.wait() for x in self.launchers), self.text()[-3000:]

    def told(
        self, pattern: str, seconds: float = PATIENCE, where: int | None = None
    ) -> tuple[float, str]:
        """Wait for a line, of one launcher if `where` says so."""
        read = self.text if where is None else self.logs[where].read_text
        after = self.until(lambda: re.search(pattern, read()), seconds)
        return after, re.search(f".*({pattern}.*)", read())[1]


class Drills:
    """What the drills do; each method returns (seconds, what was told) of a promise that was kept."""

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.folder = timeout, folder

    def named(self, launcher: str, victim: str, number: str) -> tuple[float, str]:
        """A signal to one rank: the others name it; rank 0 under deepspeed, which holds the store, by its address."""
        place = "at" if (launcher, victim) == ("deepspeed", "0") else "on"
        with Run(self, launcher) as run:
            run.trains()
            time.sleep(3)
            run.rank(int(victim)).send_signal(signal.Signals[number])
            return run.told(f"error: rank {victim} {place}", self.timeout + 5)

    def silent(self, launcher: str) -> tuple[float, str]:
        """A reward function ends all processes, with the code of success."""
        with Run(self, launcher, "--ppo.reward tests.e2e.drills:leave", "ppo") as run:
            run.ends()
            return run.told("error: rank 0 on")

    def fault(self, launcher: str, name: str) -> tuple[float, str]:
        """Rank 0 breaks from inside; it is named, and started again by torchrun it continues."""
        os.environ[FAULT] = name
        typed = '--run.steps 20 --run.save_every 1 --run.trackers ["tests.e2e.drills:Fault"]'
        again = launcher == "torchrun"
        with Run(self, launcher, typed, restarts=int(again)) as run:
            run.until(lambda: run.steps() > 2)
            told = run.told("error: rank 0(?: on|,)", self.timeout + 10)
            if again:
                run.ends()
                assert run.steps() == 20 and "resumed " in run.text(), run.text()[-3000:]
            return told

    def tokenising(self) -> tuple[float, str]:
        """Rows without end keep the first process busy."""
        pipe, tokenised = self.folder / "endless.jsonl", self.folder / "cache/tokenized"
        pipe.write_text((ROOT / "configs/demo/data/sft_train.jsonl").read_text() * 200)
        known = set(tokenised.glob("*.tmp"))
        with Run(self, "torchrun", f"--data.train {pipe}") as run:
            run.until(lambda: set(tokenised.glob("*.tmp")) - known)
            time.sleep(2)
            [held] = set(tokenised.glob("*.tmp")) - known
            psutil.Process(int(held.name.rpartition("-")[2].removesuffix(".tmp"))).suspend()
            moved = r"error: rank \d on \S+ has not moved since tokenising"
            return run.told(moved, self.timeout + 5)

    def full(
        self, stage: str, place: str, begun: str, left: int | None, told: str, typed: str = ""
    ) -> tuple[float, str]:
        """One of the run's folders has a disk of its own, which fills up; the seconds are those until the run's end.

        Args:
            begun: the disk fills up as soon as there is such a file in the drill's folder.
            left: the bytes that stay free; without a number the disk becomes read-only instead.
        """
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        disk, checkpoints = folder / place, folder / "run/checkpoints"
        disk.mkdir(parents=True)
        subprocess.run([*"mount -t tmpfs -o size=16m tmpfs".split(), disk], check=True)
        try:
            if place == "run":  # the others have room
                for other in ("checkpoints", "tensorboard"):
                    (folder / other).mkdir()
                    (disk / other).symlink_to(folder / other)
            if place.startswith(
                "run"
            ):  # as if a run had begun, which alone may find such folders there
                (folder / "run/config.json").write_text('{"stage": "sft"}')
            usual = "--run.steps 100 --run.export false --run.log_every 1 --run.save_last false"
            line = tiny(stage, folder / "run", f"{usual} {typed}", folder / "cache")
            run = Ranks(line, 2)
            run.until(lambda: list(folder.glob(begun)), 120)
            if left is None:
                told += ".* Read-only file system; use another disk"
                remount = ["mount", "-o", "remount,ro", disk]
                # it is refused while a checkpoint is written there
                run.until(
                    lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode
                )
            else:
                told += ".* No space left on device .*GiB are free"
                with suppress(OSError):  # the run writes too, and may take the last bytes
                    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))
            began = time.monotonic()
            outcome = run.wait()
            after, saved = time.monotonic() - began, [*checkpoints.glob("step-*")]
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
        [sentence] = outcome.errors
        traces = int(place == "run/tensorboard")  # of TensorBoard's own thread
        assert outcome.stderr.count("Traceback") == traces, outcome.stderr
        assert re.search(told, sentence), sentence
        assert saved or typed != ENDLESS, "the run ended without a checkpoint"
        return after, sentence

    def asked(self, launcher: str, number: str) -> tuple[float, str]:
        with Run(self, launcher) as run:
            run.trains()
            ranks = [run.rank(rank) for rank in (0, 1)]
            run.launchers[0].send_signal(signal.Signals[number])
            after = run.until(lambda: not any(rank.is_running() for rank in ranks))
            [checkpoint] = (run.folder / "run/checkpoints").glob("step-*")
            assert int(checkpoint.name[5:]) == run.steps(), "the last step is not saved"
            return after, f"saved {checkpoint.name} and ended"

    def saves(self) -> tuple[float, str]:
        """After each kill every checkpoint is complete, and the next start continues."""
        output = self.folder / "saves"
        draw, began = random.Random(0), time.monotonic()
        line = saves.arguments(output, "--run.steps 1000 --run.export false --run.eval_every 0")
        for _ in range(30):
            place = draw.choice(("files", "before rename", "after rename", "rotation"))
            step = max([0, *(int(p.name[5:]) for p in output.glob("checkpoints/step-*"))])
            saves.dies(output, line, place, step + 3)
        kept = f"30 kills, every checkpoint complete, continued up to step {step}"
        return time.monotonic() - began, kept

    def restarts(self, nodes: str, times: int = 5) -> tuple[float, str]:
        """One process dies; on two nodes it is the only one of its node."""
        draw, began = random.Random(int(nodes)), time.monotonic()
        more: dict[str, Any] = {"nodes": int(nodes), "restarts": 3}
        for _ in range(times):
            with Run(self, "torchrun", "--run.steps 40 --run.save_every 5", **more) as run:
                run.until(lambda run=run: [*(run.folder / "run/checkpoints").glob("step-*")])
                time.sleep(draw.uniform(0, 1))
                run.rank(draw.randrange(2)).kill()
                run.ends()
                assert run.steps() == 40 and "resumed " in run.text(), run.text()[-3000:]
                assert re.search(r"error: rank \d on \S+ has not moved", run.text())
        kept = f"{times} of {times} recovered and finished (seconds of each run)"
        return (time.monotonic() - began) / times, kept

    def random_kills(self, kills: int = 4) -> tuple[float, str]:
        """Random ranks die at random moments, one while the model is exported; the end is that of a quiet run."""
        draw, began, ends = random.Random(kills), time.monotonic(), []
        settings = "--run.steps 200 --run.save_every 10 --run.export true"
        for times in (0, kills):
            with Run(self, "torchrun", settings, restarts=kills) as run:
                output, before = run.folder / "run", set()
                for i in range(times):
                    last = "*export*" if i == times - 1 else "checkpoints/step-*"
                    run.until(lambda o=output, seen=before, name=last: {*o.glob(name)} - seen)
                    time.sleep(draw.uniform(0, 0.2) if i < times - 1 else 0)
                    run.rank(draw.randrange(2)).kill()
                    before = {*output.glob("checkpoints/step-*")}
                run.ends()
                assert run.text().count("resumed ") >= times - 1, run.text()[-3000:]
                digests = {p.name: digest_of(p) for p in (output / "export").iterdir()}
                ends.append((without_times(metrics(output)), digests))
        assert ends[0] == ends[1], "the metrics or the export differ"
        return time.monotonic() - began, f"{kills} kills: metrics and export equal to the bit"

    def cut(self) -> tuple[float, str]:
        """Both nodes tell it; the seconds are the later one's."""
        bridge = "ip link set bridge0".split()
        with Run(self, "torchrun", nodes=2) as run:
            run.trains()
            subprocess.run([*bridge, "down"], check=True)
            try:
                began, patience = time.monotonic(), self.timeout + 5
                told = [run.told("error: r?", patience, where=node)[1] for node in (0, 1)]
                return time.monotonic() - began, " | ".join(told)
            finally:
                subprocess.run([*bridge, "up"], check=True)


# The method of Drills and its arguments.
DRILLS = dict(rows_of("""
killed-rank-torchrun => named torchrun 1 SIGKILL
killed-rank-deepspeed => named deepspeed 1 SIGKILL
killed-rank-0-torchrun => named torchrun 0 SIGKILL
killed-rank-0-deepspeed => named deepspeed 0 SIGKILL
stopped-rank-torchrun => named torchrun 1 SIGSTOP
stopped-rank-deepspeed => named deepspeed 1 SIGSTOP
stopped-rank-0-deepspeed => named deepspeed 0 SIGSTOP
silent-end-torchrun => silent torchrun
silent-end-deepspeed => silent deepspeed
silent-end-python => silent python
held-interpreter-python => fault python hold_interpreter
held-interpreter-torchrun => fault torchrun hold_interpreter
abort-python => fault python abort
abort-torchrun => fault torchrun abort
crash-python => fault python crash
crash-torchrun => fault torchrun crash
raised-from-outside-python => fault python raise_from_outside
raised-from-outside-torchrun => fault torchrun raise_from_outside
hanging-tracker-python => fault python sleep
stopped-while-tokenising => tokenising
cut-link => cut
sigterm-torchrun => asked torchrun SIGTERM
sigterm-deepspeed => asked deepspeed SIGTERM
sigint-torchrun => asked torchrun SIGINT
sigint-deepspeed => asked deepspeed SIGINT
killed-launcher-deepspeed => asked deepspeed SIGKILL
restarts-on-one-node => restarts 1
restarts-on-two-nodes => restarts 2
random-kills => random_kills
thirty-kills-while-saving => saves
"""))  # fmt: skip
# Arguments of Drills.full.
SAVING = r"checkpoints/.step-\d+.tmp", "--run.save_every 5"
FULL: dict[str, tuple[Any, ...]] = {
    "full-disk-metrics": ("sft", "run", METRICS, 0, r"run/metrics.jsonl .* at step \d", ENDLESS),
    "full-disk-tensorboard": ("sft", "run/tensorboard", METRICS, 0, r"tensorboard.* at step \d", ENDLESS),
    "full-disk-checkpoint": ("sft", "run/checkpoints", "run", 1 << 16, *SAVING),
    "read-only-checkpoint": ("sft", "run/checkpoints", METRICS, None, *SAVING),
    "full-disk-export": ("sft", "run", METRICS, 1 << 17, "run/export", "--run.export true"),
    "full-disk-token-cache": ("sft", "cache", "cache", 1 << 16, "data cache .*/cache"),
    "full-disk-reference-cache": ("dpo", "cache", "run", 1 << 13, "cache/reference-.*"),
}  # fmt: skip
# They need namespaces of their own: for a network or for a mounted disk.
NAMESPACES = {"restarts-on-two-nodes", "cut-link", *FULL}


def on_node(number: int) -> list[str]:
    """Return what runs a command on one of the two nodes, under its name."""
    name = NODES[number]
    shell = f'hostname {name}; exec "$@"'
    return [*f"ip netns exec {name} unshare --uts sh -c".split(), shell, "sh"]


def build_network() -> None:
    """Make two nodes on a bridge; this process is in namespaces of its own."""
    shell = ["mount -t tmpfs tmpfs /run", "ip link set lo up"]
    shell += ["ip link add bridge0 type bridge", "ip link set bridge0 up"]
    for number, node in enumerate(NODES, 1):
        inside = f"ip netns exec {node} ip"
        shell += [
            f"ip netns add {node}", f"ip link add port{number} type veth peer name eth0 netns {node}",
            f"ip link set port{number} master bridge0 up", f"{inside} link set lo up", f"{inside} link set eth0 up",
            f"{inside} addr add 10.9.0.{number}/24 dev eth0",
        ]  # fmt: skip
    subprocess.run(["sh", "-ec", "\n".join(shell)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*DRILLS, *FULL]
    parser.add_argument("names", nargs="*", help=", ".join(known))
    patience = "run.timeout of all runs, in seconds"
    parser.add_argument("--timeout", type=float, default=60.0, help=patience)
    options = parser.parse_args()
    chosen, refused = options.names or known, ""
    if unknown := {*chosen} - {*known}:
        parser.error(f"no such drill: {', '.join(sorted(unknown))}")
    # a shell has the programs in its background ignore it, and they their own programs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if INSIDE in os.environ:
        build_network()
    elif NAMESPACES & {*chosen}:
        unshare = "unshare --user --map-root-user --net --mount".split()
        probe = subprocess.run([*unshare, "true"], capture_output=True, text=True)
        if probe.returncode == 0 and shutil.which("ip"):
            again = [*unshare, sys.executable, *sys.argv]
            os.execvpe(unshare[0], again, os.environ | {INSIDE: "1"})
        refused = probe.stderr.strip() or "there is no program `ip`"
    broken = 0
    with tempfile.TemporaryDirectory(prefix="drills-", ignore_cleanup_errors=True) as folder:
        drills = Drills(options.timeout, Path(folder))
        for name in chosen:
            try:
                if refused and name in NAMESPACES:
                    row = f"skipped | namespaces are not permitted: {refused}"
                else:
                    drill, *given = DRILLS.get(name, "full").split()
                    seconds, told = getattr(drills, drill)(*given, *FULL.get(name, ()))
                    row = f"{seconds:.1f} s | {told}"
            except (
                AssertionError,
                LookupError,
                TimeoutError,
                ValueError,
                psutil.Error,
            ) as error:
                broken += 1
                row = f"BROKEN | {error}"
            print(f"| {name} | {row} |", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
