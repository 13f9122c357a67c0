"""Plant faults in real runs and see what each preset of gradient policies does: python benchmarks/fault_drill.py --output runs/drill

For every preset one run of the demo configuration is started under torchrun. Its loss goes wrong at fixed steps:

    spike     loss and gradient of one step are multiplied by 1000
    vanish    the gradients of some steps are multiplied by 1e-4, the loss is not
    nan       the loss of the last rank is not a number for one step

Then `ulysses-pro` is started once more from its checkpoint in the middle of the vanishing steps, where the learning rate is
boosted, and must repeat the uninterrupted run. Reports how each run ended, draws OUTPUT/fault_drill.png, and exits with 1 if
a run hung, ended with weights that are not finite, or did not continue as it was (bit for bit on a CPU).

    fault_drill.py --faults '[{"kind": "nan", "first": 3, "last": 3, "rank": 1}]' ARGUMENTS OF train.py

is train.py with these faults: nothing of the engine is replaced, the trainer is handed a stage that wraps its own.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PRESETS = {  # the engine refuses to run without a word on values that are not finite, so "none" stops on those too
    "none": ["--gradients.max_norm", "0"],
    "default": ["--gradients.preset", "default"],
    "ulysses-pro": ["--gradients.preset", "ulysses-pro"],
    "steady": ["--gradients.preset", "steady"],
}
COLOURS = {
    "none": "tab:gray",
    "default": "tab:blue",
    "ulysses-pro": "tab:red",
    "steady": "tab:green",
}
STEPS, SPIKE, VANISH, NAN = 120, 50, (70, 80), 100
SAVE_EVERY = 15  # a checkpoint at 75, among the vanishing steps


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong from step `first` to `last` (counted from 1, as in metrics.jsonl), on one rank or on all (-1)."""

    kind: str
    first: int
    last: int
    rank: int = -1
    factor: float = 1.0

    def strikes(self, step: int, rank: int) -> bool:
        return self.first <= step <= self.last and self.rank in (-1, rank)

    def spoil(self, value: Tensor) -> Tensor:
        """Return a loss term as the fault leaves it."""
        match self.kind:
            case "spike":
                return value * self.factor
            case "vanish":
                return value.detach() + self.factor * (value - value.detach())
            case "nan":
                return value * math.nan
        raise ValueError(f"a fault is of kind {self.kind!r} but must be spike, vanish or nan")


class FaultyStage:
    """A stage whose loss goes wrong at some steps; all else is the wrapped stage's own."""

    def __init__(self, stage: Any, faults: list[Fault], rank: int) -> None:
        self.stage, self.faults, self.rank = stage, faults, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)

    @property
    def step(self) -> int:
        return self.stage.step

    @step.setter
    def step(self, step: int) -> None:
        self.stage.step = step

    def losses(self, batch: Any, metrics: Any) -> list[Any]:
        terms = self.stage.losses(batch, metrics)
        for fault in self.faults:
            if fault.strikes(self.step + 1, self.rank):
                terms = [term._replace(value=fault.spoil(term.value)) for term in terms]
        return terms


def run_with_faults(faults: list[Fault], arguments: list[str]) -> int:
    """Do what train.py does, with faults; every rank writes OUTPUT/end-RANK.json about its weights, however the run ends."""
    from ulysses.training.command_line import parse_command_line
    from ulysses.training.failure import tell
    from ulysses.training.run import TrainingRun

    config = parse_command_line(arguments).config
    try:
        with TrainingRun(config) as run:
            run.trainer.stage = FaultyStage(run.trainer.stage, faults, dist.get_rank())
            try:
                run.train()
            finally:
                end = {"step": run.trainer.step, **weights(run.engine)}
                (config.output / f"end-{dist.get_rank()}.json").write_text(json.dumps(end))
        return 0
    except Exception as error:
        tell(error, debug=False)
        return 1


def weights(engine: Any) -> dict[str, Any]:
    """Say whether this rank's master weights are finite, and give their digest (that of a checkpoint's `data`)."""
    from ulysses.zero.state import pieces

    flats = engine.zero.fp32_partitioned_groups_flat
    data = torch.cat(
        [flats[p.group].detach().narrow(0, p.offset, p.length).cpu() for p in pieces(engine)]
    )
    return {
        "finite": bool(torch.isfinite(data).all()),
        "digest": hashlib.sha256(data.numpy().tobytes()).hexdigest(),
    }


# ---------------------------------------------------------------- the drill


def launch(
    a: argparse.Namespace, name: str, preset: str, faults: list[Fault], *arguments: str
) -> dict[str, Any]:
    """Start one run and wait for its end; what is left of it, read from its folder."""
    folder = a.output / name
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={a.processes}", __file__,
            "--faults", json.dumps([dataclasses.asdict(f) for f in faults]), "--config", a.config, "--run.output", str(folder),
            "--run.overwrite", "--run.steps", str(a.steps), "--run.eval_every", "0", "--run.save_every", str(a.save_every),
            "--run.keep", "0", "--run.export", "false", "--data.cache", str(a.output / "cache"),
            "--parallel.sequence_parallel_size", "1", *PRESETS[preset], *a.arguments, *arguments]  # fmt: skip
    began = time.monotonic()
    try:
        done = subprocess.run(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=a.timeout
        )
        code, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        code, errors = None, (late.stderr or b"").decode(errors="replace")
    told = [e.removeprefix("error: ") for e in errors.splitlines() if e.startswith("error: ")]
    ends = [json.loads(p.read_text()) for p in sorted(folder.glob("end-*.json"))]
    if code is None or len(ends) != a.processes:
        print(errors[-3000:], file=sys.stderr)
    log = folder / "metrics.jsonl"
    steps = [json.loads(row) for row in log.read_text().splitlines()] if log.exists() else []
    return {"run": name, "preset": preset, "hung": code is None, "code": code, "seconds": round(time.monotonic() - began),
            "told": told, "finite": len(ends) == a.processes and all(e["finite"] for e in ends), "ends": ends, "steps": steps}  # fmt: skip


def continues(whole: dict[str, Any], resumed: dict[str, Any], *, exactly: bool) -> str:
    """Compare the resumed run with the uninterrupted one; "" or what differs."""
    if not resumed["steps"]:
        return "the resumed run took no step"
    first = resumed["steps"][0]["step"]
    if not all(m["grad/lr_scale"] > 1 for m in whole["steps"] if m["step"] in (first - 1, first)):
        return f"the learning rate was not boosted on both sides of step {first}"
    tolerance = 0.0 if exactly else 2e-2  # kernels on GPUs are not deterministic
    names = ("loss", "lr", "grad_norm", "grad/mean_abs", "grad/lr_scale")
    before = [m for m in whole["steps"] if m["step"] >= first]
    if [m["step"] for m in before] != [m["step"] for m in resumed["steps"]]:
        return "the resumed run took other steps"
    for m, n in zip(before, resumed["steps"], strict=True):
        for name in names:
            if abs(m[name] - n[name]) > tolerance * abs(m[name]):
                return f"step {m['step']}: {name} is {n[name]}, was {m[name]}"
    return "the weights differ" if exactly and whole["ends"] != resumed["ends"] else ""


def row(r: dict[str, Any], a: argparse.Namespace) -> str:
    at = {m["step"]: m for m in r["steps"]}

    def did(first: int, last: int) -> str:
        found = [at[s] for s in range(first, last + 1) if s in at]
        if not found:
            return "stopped" if r["told"] else "-"
        parts = []
        if any(m["grad/skipped"] for m in found):
            parts.append("skipped")
        if any(m.get("grad/zclip_factor", 1.0) < 1 or m.get("grad/clipped", 0) for m in found):
            parts.append("clipped")
        if any(m["grad/lr_scale"] > 1 for m in found):
            parts.append("boosted")
        if any(m.get("grad/noise_sigma", 0) for m in found):
            parts.append("noise")
        return ", ".join(parts) or "nothing"

    end = f"{r['steps'][-1]['loss']:.3f} at {r['steps'][-1]['step']}" if r["steps"] else "-"
    cells = (
        r["run"],
        did(a.spike, a.spike),
        did(*a.vanish),
        did(a.nan, a.nan),
        end,
        "yes" if r["finite"] else "NO",
    )
    return f"| {' | '.join(cells)} |"


def draw(runs: list[dict[str, Any]], a: argparse.Namespace) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("loss", "loss", "log"),
        ("grad_norm", "gradient norm", "log"),
        ("lr", "learning rate", "linear"),
    )
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, figsize=(8, 7), layout="constrained"
    )
    for axis, (key, label, scale) in zip(axes, panels, strict=True):
        for r in runs:
            points = [(m["step"], m[key]) for m in r["steps"] if m.get(key)]
            axis.plot(
                *zip(*points, strict=True),
                color=COLOURS[r["preset"]],
                linewidth=1.2,
                label=r["preset"],
            )
            if r["told"]:
                axis.plot(*points[-1], "x", color=COLOURS[r["preset"]], markersize=8)
        axis.axvspan(*a.vanish, color="0.92")
        for step in (a.spike, a.nan):
            axis.axvline(step, color="0.8", linestyle=":")
        axis.set(ylabel=label, yscale=scale)
    for step, text in ((a.spike, "spike"), (sum(a.vanish) / 2, "vanishing"), (a.nan, "NaN")):
        axes[0].annotate(
            text, (step, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9
        )
    losses = [
        m["loss"]
        for r in runs
        for m in r["steps"]
        if m["loss"] and not a.spike <= m["step"] <= a.spike + 1
    ]
    axes[0].set_ylim(0.9 * min(losses), 1.2 * max(losses))  # the spike's own loss is off the panel
    axes[0].legend(fontsize=8)
    axes[-1].set(xlabel="step (x: the run stopped)")
    path = a.output / "fault_drill.png"
    figure.savefig(path, dpi=90)
    return path


def main() -> int:
    if "--faults" in sys.argv[1:2]:
        return run_with_faults([Fault(**f) for f in json.loads(sys.argv[2])], sys.argv[3:])
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--output", type=Path, default=Path("runs/fault_drill"))
    p.add_argument("--config", default="configs/demo/pt.toml")
    p.add_argument(
        "--processes",
        type=int,
        default=max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else 2,
    )
    p.add_argument(
        "--timeout", type=float, default=600, help="seconds after which a run counts as hung"
    )
    a, a.arguments = p.parse_known_args()
    a.steps, a.save_every, a.spike, a.vanish, a.nan = STEPS, SAVE_EVERY, SPIKE, VANISH, NAN
    a.output.mkdir(parents=True, exist_ok=True)
    faults = [
        Fault("spike", SPIKE, SPIKE, factor=1e3),
        Fault("vanish", *VANISH, factor=1e-4),
        Fault("nan", NAN, NAN, rank=a.processes - 1),
    ]
    runs = []
    for name in PRESETS:
        runs.append(launch(a, name, name, faults))
        if not runs[-1]["steps"]:
            print(f"{name}: the run took no step; see the messages above", file=sys.stderr)
            return 1
        print(
            f"{name}: {runs[-1]['seconds']} s, exit code {runs[-1]['code']} {' / '.join(runs[-1]['told'])}",
            flush=True,
        )
    saved = sum(VANISH) // 2
    pro = next(r for r in runs if r["preset"] == "ulysses-pro")
    checkpoint = str(a.output / f"ulysses-pro/checkpoints/step-{saved}")
    resumed = launch(a, "resumed", "ulysses-pro", faults, "--run.resume", checkpoint)
    difference = continues(pro, resumed, exactly=not torch.cuda.is_available())
    print(f"ulysses-pro resumed at step {saved}: {difference or 'the same run'}", flush=True)
    print(
        "\n| preset | spike | vanishing | NaN on one rank | last loss | weights finite |\n|---|---|---|---|---|---|"
    )
    print("\n".join(row(r, a) for r in runs))
    print(f"\ndrawn: {draw(runs, a)}", flush=True)
    return int(bool(difference) or any(r["hung"] or not r["finite"] for r in [*runs, resumed]))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown can abort while communication threads still run
