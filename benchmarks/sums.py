"""Do scores rise under PPO, and only by its updates? Two tasks of a tiny model, in twenty minutes on a CPU.

    python benchmarks/sums.py --out runs/sums
    python benchmarks/sums.py --out /tmp/toy --tasks sums --run.steps 4

politeness    the demo's questions: 1 for the right word, up to 1.5 more or less for manners (configs/demo/grpo.toml)
sums          "Tom has 12 apples and buys 9 more. How many?": 1 if the answer's last number is right, else 0

A random Llama learns to answer from a short SFT. From its export two runs start on the same prompts with the same
random numbers: one with group advantages, and one whose learning rate is 0. At their ends both answer the
same held-out questions. Prints the mean scores there with standard errors over the questions, and draws the scores of
all rollouts with bands of one standard error, as if answers were independent, as sums.png. Any of train.py's settings
but the learning rate may follow, for the runs after SFT.
"""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import plain_parser, table
from matplotlib.figure import Figure

from examples.demo import launch, read_metrics

NAMES, THINGS = ("Tom", "Anna", "Ben", "Mia"), ("apples", "pens", "eggs")
LARGEST, HELD_OUT = 12, 384
# 64 prompts with 8 answers each in every step
SETTINGS = """--ppo.reward=ulysses.rl.rewards:gsm8k_reward --ppo.answers_per_prompt=8 --batch.examples=64
    --ppo.epochs=1 --ppo.minibatches=1 --ppo.max_new_tokens=16 --optimizer.lr=2e-4 --optimizer.warmup=5
    --run.steps=160 --run.eval_every=160 --batch.tokens_per_microbatch=4096""".split()
RUNS = {"group advantages": [], "learning rate 0": ["--optimizer.lr=0"]}
SCORE = "objective/scores"


def main() -> None:
    p = plain_parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/sums"), help="folder of everything")
    p.add_argument("--tasks", nargs="+", default=["politeness", "sums"], help="one or both")
    options, more = p.parse_known_args()
    out = options.out.absolute()
    write_sums(out)
    figure, rows = Figure(figsize=(9, 3.4), layout="constrained"), []
    for axis, task in zip(figure.subplots(1, 2), options.tasks):
        data = [f"--data.{part}={out / part}.jsonl" for part in ("train", "eval")]
        data, settings = (data, SETTINGS) if task == "sums" else ([], [])
        train("sft", out / task / "sft", *data)
        start = [f"--model.path={out / task / 'sft/export'}", "--model.init=pretrained"]
        for name, own in RUNS.items():
            folder = out / task / name.replace(" ", "-")
            train("grpo", folder, *start, *data, *settings, *own, *more)
            rows.append({"task": task, "run": name, **draw(axis, name, folder)})
        axis.set(title=task, xlabel="rollout", ylabel="mean score of its answers")
        axis.legend()
    figure.savefig(out / "sums.png", dpi=90)
    print(table(rows, rows[0]))


def write_sums(folder: Path) -> None:
    """Write the questions with worked answers, which SFT learns and of which the reward reads the last number."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(1, LARGEST + 1)
    rows = [
        {
            "question": f"{name} has {a} {thing} and buys {b} more. How many?",
            "answer": f"{a} + {b} = {a + b}",
        }
        for name, thing, a, b in product(NAMES, THINGS, numbers, numbers)
    ]
    random.Random(0).shuffle(rows)
    for part, chosen in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        lines = (json.dumps(row) + "\n" for row in chosen)
        (folder / f"{part}.jsonl").write_text("".join(lines))


def train(stage: str, folder: Path, *settings: str) -> None:
    """Run a demo configuration in one process."""
    own = [f"--run.output={folder}", "--run.overwrite", "--parallel.sequence_parallel_size=1"]
    launch(1, f"configs/demo/{stage}.toml", *own, *settings)


def draw(axis: Any, name: str, folder: Path) -> dict[str, str]:
    """Draw a run's scores over its rollouts, and return the first, the last and the held-out one in words."""
    config, steps = json.loads((folder / "config.json").read_text()), read_metrics(folder)
    answers = config["batch"]["examples"] * config["ppo"]["answers_per_prompt"]
    scores = {m["rollout"]: (m[SCORE], m[f"{SCORE}_std"] / answers**0.5) for m in steps}
    means, errors = np.array([*scores.values()]).T
    axis.plot(means, label=name)
    axis.fill_between(range(len(means)), means - errors, means + errors, alpha=0.3)
    questions = len(Path(*np.atleast_1d(config["data"]["eval"])).read_text().splitlines())
    held_out = steps[-1][f"eval/{SCORE}"], steps[-1][f"eval/{SCORE}_std"] / questions**0.5
    places = {
        "first rollout": scores[0],
        "last rollout": (means[-1], errors[-1]),
        "held out": held_out,
    }
    return {place: f"{mean:.3f} ± {error:.3f}" for place, (mean, error) in places.items()}


if __name__ == "__main__":
    main()
