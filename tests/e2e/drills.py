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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.e2e import test_kill_resume as saves  # noqa: E402
from tests.e2e.launch import Ranks, command, environment, metrics, tiny, without_times  # noqa: E402
from tests.harness import free_port  # noqa: E402
from ulysses.disk import digest_of  # noqa: E402
from ulysses.zero.state import SavedSlices  # noqa: E402

INSIDE = "ULYSSES_DRILLS_INSIDE_NAMESPACES"
NODES = (
    "node-a",
    "node-b",
)  # addresses 10.9.0.1 and 10.9.0.2 on a bridge in this process's own network namespace
LONG = 100_000  # steps: until the drill ends the run
METRICS, ENDLESS = "run/metrics.jsonl", {"run__steps": LONG}


def leave(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """A reward function that ends its process behind everybody's back."""
    os._exit(0)


class Run:
    """train.py under launchers, and what they print.

    Args:
        lines: how each launcher is started.
    """

    def __init__(
        self,
        folder: Path,
        lines: list[list[str]],
        more: dict[str, str],
        stage: str = "sft",
        **settings: Any,
    ) -> None:
        settings = {
            "run__steps": LONG,
            "run__save_every": 0,
            "run__export": False,
            "run__log_every": 1,
        } | settings
        arguments = tiny(stage, folder / "run", folder.parent / "cache", **settings)
        self.folder, self.logs = (
            folder,
            [folder / f"launcher{i}.log" for i in range(len(lines))],
        )
        folder.mkdir(parents=True)
        self.launchers = []
        for line, log in zip(lines, self.logs, strict=True):
            with log.open("w") as out:
                whole = [*line, str(ROOT / "train.py"), *arguments]
                self.launchers.append(psutil.Popen(
                    whole, cwd=ROOT, env=environment() | more, stdout=out, stderr=out, start_new_session=True
                ))  # fmt: skip

    def rank(self, rank: int) -> psutil.Process:
        """Find a rank's process."""
        for launcher in self.launchers:
            for process in launcher.children(recursive=True):
                if process.environ().get("RANK") == str(rank) and "train.py" in " ".join(
                    process.cmdline()
                ):
                    return process
        raise LookupError(f"rank {rank} does not run:\n{self.text()[-2000:]}")

    def text(self) -> str:
        return "\n".join(log.read_text().replace("\r", "\n") for log in self.logs)

    def steps(self) -> int:
        file = self.folder / "run/metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until(self, condition: Callable[[], Any], seconds: float = 240) -> float:
        """Wait for a condition and return after how many seconds it came; TimeoutError if it does not."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:.0f} s:\n{self.text()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def told(self, pattern: str, seconds: float, where: int | None = None) -> tuple[float, str]:
        """Wait for a line, of one launcher if `where` says so."""
        read = self.text if where is None else self.logs[where].read_text
        after = self.until(lambda: re.search(pattern, read()), seconds)
        return after, re.search(f".*({pattern}.*)", read())[1]

    def end(self) -> None:
        for launcher in self.launchers:
            for process in (
                *(launcher.children(recursive=True) if launcher.is_running() else ()),
                launcher,
            ):
                if process.is_running():
                    process.kill()


class Drills:
    """What the drills do; each method returns (seconds, what was told) of a promise that was kept."""

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.folder, self.count = timeout, folder, 0

    @contextmanager
    def run(
        self, launcher: str, *, nodes: int = 1, restarts: int = 0, **settings: Any
    ) -> Iterator[Run]:
        """Start two processes, on one node or on two, and end whatever is left of them."""
        self.count += 1
        line, more = command(launcher, 2 // nodes, free_port(), nodes), {}
        line += [f"--max-restarts={restarts}"] * (restarts > 0)
        lines = [line]
        if nodes > 1:
            more = {"GLOO_SOCKET_IFNAME": "eth0"}
            line = [word.replace("127.0.0.1", "10.9.0.1") for word in line]
            lines = [
                [
                    *on_node(i),
                    *line,
                    f"--local-addr=10.9.0.{i + 1}",
                    f"--rdzv_conf=is_host={1 - i}",
                ]
                for i in range(nodes)
            ]
        run = Run(
            self.folder / str(self.count), lines, more, run__timeout=self.timeout, **settings
        )
        try:
            yield run
        finally:
            run.end()

    def named(
        self, launcher: str, victim: int, number: int, holds_store: bool = False
    ) -> tuple[float, str]:
        """A signal to one rank: the others name it."""
        with self.run(launcher) as run:
            run.until(lambda: run.steps() > 3)
            time.sleep(3)
            run.rank(victim).send_signal(number)
            return run.told(
                f"error: rank {victim} {'at' if holds_store else 'on'}", self.timeout + 5
            )

    def silent(self, launcher: str) -> tuple[float, str]:
        """A reward function ends all processes, with the code of success."""
        reward = {"ppo__reward": "tests.e2e.drills:leave"}
        with self.run(launcher, stage="ppo", **reward) as run:
            run.until(lambda: run.launchers[0].poll() is not None)
            assert run.launchers[0].wait() == 0, run.text()
            return run.told("error: rank 0 on", 10)

    def tokenising(self) -> tuple[float, str]:
        """Rows without end keep the first process busy."""
        pipe = self.folder / "endless.jsonl"
        rows = (ROOT / "configs/demo/data/sft_train.jsonl").read_text()
        pipe.write_text(rows * 200)
        with self.run("torchrun", data__train=str(pipe)) as run:
            tokenised = self.folder / "cache/tokenized"
            known = set(tokenised.glob("*.tmp")) if tokenised.exists() else set()
            run.until(lambda: set(tokenised.glob("*.tmp")) - known)
            time.sleep(2)
            [held] = set(tokenised.glob("*.tmp")) - known
            psutil.Process(int(held.name.rpartition("-")[2].removesuffix(".tmp"))).suspend()
            return run.told(
                r"error: rank \d on \S+ has not moved since tokenising", self.timeout + 5
            )

    def full(
        self,
        stage: str,
        place: str,
        begun: str,
        left: int | None,
        told: str,
        more: dict[str, Any] | None = None,
    ) -> tuple[float, str]:
        """One of the run's folders has a disk of its own, which fills up; the seconds are those until the run's end.

        Args:
            begun: the disk fills up as soon as there is such a file in the drill's folder.
            left: the bytes that stay free; without a number the disk becomes read-only instead.
        """
        self.count += 1
        folder = self.folder / str(self.count)
        disk = folder / place
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
        try:
            for other in (
                ("checkpoints", "tensorboard") if place == "run" else ()
            ):  # these have room
                (folder / other).mkdir()
                (disk / other).symlink_to(folder / other)
            settings = {
                "run__steps": 100,
                "run__export": False,
                "run__log_every": 1,
                "run__save_last": False,
            }
            settings |= more or {}
            run = Ranks(
                tiny(stage, folder / "run", folder / "cache", **settings), 2, folder / "logs"
            )
            run.until(lambda: list(folder.glob(begun)), 120)
            reason = "No space left on device .*GiB are free"
            if left is None:
                reason = "Read-only file system; use another disk"
                remount = ["mount", "-o", "remount,ro", disk]
                # it is refused while a checkpoint is written there
                run.until(
                    lambda: not subprocess.run(remount, stderr=subprocess.DEVNULL).returncode
                )
            else:
                with suppress(OSError):  # the run writes too, and may take the last bytes
                    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))
            began = time.monotonic()
            outcome = run.wait()
            after, saved = (
                time.monotonic() - began,
                list((folder / "run/checkpoints").glob("step-*")),
            )
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
        sentences = re.findall("error: .*", outcome.stderr)
        traces = int(place == "run/tensorboard")  # of TensorBoard's own thread
        assert len(sentences) == 1 and outcome.stderr.count("Traceback") == traces, (
            outcome.stderr
        )
        assert re.search(f"{told}.* {reason}", sentences[0]), sentences
        assert saved or settings["run__steps"] != LONG, "the run ended without a checkpoint"
        return after, sentences[0]

    def asked(self, launcher: str, number: int) -> tuple[float, str]:
        with self.run(launcher) as run:
            run.until(lambda: run.steps() > 3)
            ranks = [run.rank(rank) for rank in (0, 1)]
            run.launchers[0].send_signal(number)
            after = run.until(lambda: not any(rank.is_running() for rank in ranks), 30)
            [checkpoint] = (run.folder / "run/checkpoints").glob("step-*")
            assert int(checkpoint.name[5:]) == run.steps(), "the last step is not saved"
            return after, f"saved {checkpoint.name} and ended"

    def saves(self) -> tuple[float, str]:
        """After each kill every checkpoint is complete, and the next start continues."""
        folder = self.folder / "saves"
        folder.mkdir()
        shutil.copy(ROOT / "configs/demo/data/sft_eval.jsonl", folder / "held_out.jsonl")
        draw, began = random.Random(0), time.monotonic()
        settings = {"run__steps": 1000, "run__export": False, "run__eval_every": 0}
        line = saves.arguments(folder / "run", folder / "cache", **settings)
        expected: dict[str, int] = {}
        for _ in range(30):
            place = draw.choice(("files", "before rename", "after rename", "rotation"))
            step = max(
                [0, *(int(p.name[5:]) for p in (folder / "run/checkpoints").glob("step-*"))]
            )
            run = Ranks(line, 2, folder / "logs", before=saves.kill_at(place, step + 3))
            assert not saves.wait_until_dead(run, 120), "the run ended by itself"
            for path in (folder / "run/checkpoints").glob("step-*"):
                slices = SavedSlices(path)
                expected = expected or {name: slices.numel(name) for name in slices.places}
            saves.assert_complete(folder / "run/checkpoints", expected)
        return (
            time.monotonic() - began,
            f"30 kills, every checkpoint complete, continued up to step {step}",
        )

    def restarts(self, nodes: int, times: int = 5) -> tuple[float, str]:
        """One process dies; on two nodes it is the only one of its node."""
        draw, began = random.Random(nodes), time.monotonic()
        for _ in range(times):
            with self.run(
                "torchrun", nodes=nodes, restarts=3, run__steps=40, run__save_every=5
            ) as run:
                run.until(lambda run=run: list((run.folder / "run/checkpoints").glob("step-*")))
                time.sleep(draw.uniform(0, 1))
                run.rank(draw.randrange(2)).kill()
                run.until(lambda run=run: all(x.poll() is not None for x in run.launchers), 180)
                codes = [launcher.wait() for launcher in run.launchers]
                assert codes == [0] * nodes and run.steps() == 40, run.text()[-3000:]
                assert (
                    re.search(r"error: rank \d on \S+ has not moved", run.text())
                    and "resumed " in run.text()
                )
        return (
            time.monotonic() - began
        ) / times, f"{times} of {times} recovered and finished (seconds of each run)"

    def random_kills(self, kills: int = 4) -> tuple[float, str]:
        """Random ranks die at random moments, one while the model is exported; the end is that of a quiet run."""
        draw, began, ends = random.Random(kills), time.monotonic(), []
        settings = {"run__steps": 200, "run__save_every": 10, "run__export": True}
        for times in (0, kills):
            with self.run("torchrun", restarts=kills, **settings) as run:
                output, before = run.folder / "run", set()
                for i in range(times):
                    last = "*export*" if i == times - 1 else "checkpoints/step-*"
                    run.until(lambda o=output, seen=before, name=last: {*o.glob(name)} - seen)
                    time.sleep(draw.uniform(0, 0.2) if i < times - 1 else 0)
                    run.rank(draw.randrange(2)).kill()
                    before = {*output.glob("checkpoints/step-*")}
                run.until(lambda run=run: run.launchers[0].poll() is not None, 180)
                assert run.launchers[0].wait() == 0, run.text()[-3000:]
                assert run.text().count("resumed ") >= times - 1, run.text()[-3000:]
                digests = {p.name: digest_of(p) for p in (output / "export").iterdir()}
                ends.append((without_times(metrics(output)), digests))
        assert ends[0] == ends[1], "the metrics or the export differ"
        return time.monotonic() - began, f"{kills} kills: metrics and export equal to the bit"

    def cut(self) -> tuple[float, str]:
        """Both nodes tell it; the seconds are the later one's."""
        with self.run("torchrun", nodes=2) as run:
            run.until(lambda: run.steps() > 3)
            subprocess.run(["ip", "link", "set", "bridge0", "down"], check=True)
            try:
                began = time.monotonic()
                told = [
                    run.told("error: r?", self.timeout + 5, where=node)[1] for node in (0, 1)
                ]
                return time.monotonic() - began, " | ".join(told)
            finally:
                subprocess.run(["ip", "link", "set", "bridge0", "up"], check=True)


DRILLS: dict[str, tuple[Any, ...]] = {
    "killed-rank-torchrun": (Drills.named, "torchrun", 1, signal.SIGKILL),
    "killed-rank-deepspeed": (Drills.named, "deepspeed", 1, signal.SIGKILL),
    "killed-rank-0-torchrun": (Drills.named, "torchrun", 0, signal.SIGKILL),
    "killed-rank-0-deepspeed": (Drills.named, "deepspeed", 0, signal.SIGKILL, True),
    "stopped-rank-torchrun": (Drills.named, "torchrun", 1, signal.SIGSTOP),
    "stopped-rank-deepspeed": (Drills.named, "deepspeed", 1, signal.SIGSTOP),
    "stopped-rank-0-deepspeed": (Drills.named, "deepspeed", 0, signal.SIGSTOP, True),
    "silent-end-torchrun": (Drills.silent, "torchrun"),
    "silent-end-deepspeed": (Drills.silent, "deepspeed"),
    "silent-end-python": (Drills.silent, "python"),
    "stopped-while-tokenising": (Drills.tokenising,),
    "cut-link": (Drills.cut,),
    "sigterm-torchrun": (Drills.asked, "torchrun", signal.SIGTERM),
    "sigterm-deepspeed": (Drills.asked, "deepspeed", signal.SIGTERM),
    "sigint-torchrun": (Drills.asked, "torchrun", signal.SIGINT),
    "sigint-deepspeed": (Drills.asked, "deepspeed", signal.SIGINT),
    "killed-launcher-deepspeed": (Drills.asked, "deepspeed", signal.SIGKILL),
    "restarts-on-one-node": (Drills.restarts, 1),
    "restarts-on-two-nodes": (Drills.restarts, 2),
    "random-kills": (Drills.random_kills,),
    "thirty-kills-while-saving": (Drills.saves,),
    "full-disk-metrics": (Drills.full, "sft", "run", METRICS, 0, r"run/metrics.jsonl .* at step \d", ENDLESS),
    "full-disk-tensorboard": (Drills.full, "sft", "run/tensorboard", METRICS, 0, r"tensorboard.* at step \d", ENDLESS),
    "full-disk-checkpoint": (Drills.full, "sft", "run/checkpoints", "run", 1 << 16, r"checkpoints/.step-\d+.tmp",
                             {"run__save_every": 5}),
    "read-only-checkpoint": (Drills.full, "sft", "run/checkpoints", METRICS, None, r"checkpoints/.step-\d+.tmp",
                             {"run__save_every": 5}),
    "full-disk-export": (Drills.full, "sft", "run", METRICS, 1 << 17, "run/export", {"run__export": True}),
    "full-disk-token-cache": (Drills.full, "sft", "cache", "cache", 1 << 16, "data cache .*/cache"),
    "full-disk-reference-cache": (Drills.full, "dpo", "cache", "run/config.json", 1 << 13, "cache/reference-.*"),
}  # fmt: skip
# They need namespaces of their own: for a network or for a mounted disk.
NAMESPACES = {
    "restarts-on-two-nodes",
    "cut-link",
    *(name for name in DRILLS if name.startswith(("full-disk", "read-only"))),
}


def on_node(number: int) -> list[str]:
    """Return what runs a command on one of the two nodes, under its name."""
    name = NODES[number]
    shell = f'hostname {name}; exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", shell, "sh"]


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
    parser.add_argument("names", nargs="*", help=", ".join(DRILLS))
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="run.timeout of all runs, in seconds"
    )
    options = parser.parse_args()
    if unknown := {*options.names} - {*DRILLS}:
        parser.error(f"no such drill: {', '.join(sorted(unknown))}")
    # a shell has the programs in its background ignore it, and they their own programs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen, refused = options.names or [*DRILLS], ""
    if NAMESPACES & {*chosen} and INSIDE not in os.environ:
        unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
        probe = subprocess.run([*unshare, "true"], capture_output=True, text=True)
        if probe.returncode == 0 and shutil.which("ip"):
            os.execvpe(
                unshare[0], [*unshare, sys.executable, *sys.argv], os.environ | {INSIDE: "1"}
            )
        refused = probe.stderr.strip() or "there is no program `ip`"
    elif INSIDE in os.environ:
        build_network()
    broken = 0
    with tempfile.TemporaryDirectory(prefix="drills-", ignore_cleanup_errors=True) as folder:
        drills = Drills(options.timeout, Path(folder))
        for name in chosen:
            if refused and name in NAMESPACES:
                print(
                    f"| {name} | skipped | namespaces are not permitted: {refused} |",
                    flush=True,
                )
                continue
            try:
                drill, *arguments = DRILLS[name]
                seconds, told = drill(drills, *arguments)
                print(f"| {name} | {seconds:.1f} s | {told} |", flush=True)
            except (AssertionError, LookupError, TimeoutError, psutil.Error) as error:
                broken += 1
                print(f"| {name} | BROKEN | {error} |", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
