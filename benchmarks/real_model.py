"""What training does to a real pretrained model: four studies, each a table with standard errors and a picture.

    python benchmarks/real_model.py sft MODEL gsm8k_train.jsonl --out OUT --gpus 1 2 --seeds 0 1    # {question, answer}
    python benchmarks/real_model.py window MODEL books.jsonl --out OUT --gpus 1 2                   # {text}, long ones
    python benchmarks/real_model.py dpo MODEL pairs.jsonl more.json --out OUT                       # any pairs
    python benchmarks/real_model.py grpo OUT/sft/1gpu-seed0/export gsm8k_train.jsonl --out OUT

MODEL is a folder or hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct. The last 473 rows of gsm8k, the last book and
every tenth pair are held out. `--peer 'COMMAND'` trains on the same rows beside ours, with {model}, {rows}, {out},
{seed} and {kind} ("all weights" or "LoRA") filled in; its folder {out} is judged as ours is. Answers are decoded
greedily, and right if their last number is. Settings of train.py may follow, for all runs of a study.
"""

import json
import random
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import add_options, plain_parser, table, torchrun
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from examples.demo import read_lines, read_metrics
from models.decoder import CausalLM
from models.folders import read_config, resolve_model
from models.initial_weights import InitialWeights
from ulysses.check.preflight import prepare
from ulysses.config.command_line import parse_command_line
from ulysses.data.serve.steps import StepLoader
from ulysses.parallel.batch import pack_shard
from ulysses.parallel.mesh import ParallelMesh
from ulysses.rl.rewards import gsm8k_reward
from ulysses.rl.sampler import Requests, Sampler, SamplingOptions
from ulysses.run.build import open_data

ROOT = Path(__file__).parents[1]
HELD_OUT = 473
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SFT = {
    "batch.examples": 32, "batch.tokens_per_microbatch": 8192, "data.max_length": 1024, "optimizer.lr": 2e-4,
    "optimizer.warmup": 20, "optimizer.betas": [0.9, 0.999], "run.epochs": 2,
}  # fmt: skip
WINDOW = {
    "data.max_length": 32768, "batch.examples": 4, "batch.tokens_per_microbatch": 65536, "optimizer.lr": 1e-4,
    "optimizer.warmup": 10, "run.steps": 60, "run.eval_every": 60,
}  # fmt: skip
YARN = {"model.rope.type": "yarn", "model.rope.factor": 4.0}
DPO = {
    "batch.examples": 32, "batch.tokens_per_microbatch": 16384, "data.max_length": 1024, "optimizer.warmup": 10,
    "data.bad_rows": "drop", "data.truncation": "drop", "run.epochs": 1, "dpo.beta": 0.1,
}  # fmt: skip
GRPO = {
    "ppo.reward": "ulysses.rl.rewards:gsm8k_reward", "ppo.advantage": "group", "ppo.answers_per_prompt": 16,
    "ppo.kl_coefficient": 0.0, "ppo.clip_high": 0.28, "ppo.epochs": 1, "ppo.minibatches": 1, "ppo.max_new_tokens": 300,
    "batch.examples": 64, "batch.tokens_per_microbatch": 32768, "data.max_length": 1024, "optimizer.warmup": 5,
    "optimizer.schedule": "constant", "run.steps": 60,
}  # fmt: skip


class Study:
    """One study's folder, runs and results."""

    def __init__(self, options: Any, more: list[str]) -> None:
        self.o, self.more = options, more
        self.out = options.out.absolute() / options.study
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.figure = Figure((7, 3.6), layout="constrained")
        self.axis = self.figure.subplots()

    def train(self, name: str, gpus: int, **settings: Any) -> Path:
        """Run train.py with one process per GPU, all of one sequence-parallel group; return the run's folder."""
        own = {
            "model.path": self.o.model, "run.output": self.out / name, "run.save_last": False,
            "parallel.sequence_parallel_size": gpus, "data.cache": self.out / "cache",
        }  # fmt: skip
        words = [
            word
            for key, value in (own | settings).items()
            for word in (
                f"--{key}",
                value if isinstance(value, str) else json.dumps(value, default=str).strip('"'),
            )
        ]
        shutil.rmtree(self.out / name, ignore_errors=True)  # of an earlier study
        with open(self.out / f"{name}.log", "w") as log:
            line = [*torchrun(gpus), "-m", "ulysses.train", *words, *self.more]
            subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, check=True, cwd=ROOT)
        return self.out / name

    def peer(self, rows: Path, seed: int, kind: str = "all weights") -> Path:
        """Let the peer train on the same rows."""
        out = self.out / f"peer-{kind.replace(' ', '-')}-{seed}"
        given = {"model": self.o.model, "rows": rows, "out": out, "seed": seed, "kind": kind}
        with open(f"{out}.log", "w") as log:
            line = shlex.split(self.o.peer.format(**given))
            subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, check=True)
        return out

    def write(self, name: str, rows: Iterable[Any]) -> Path:
        path = self.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def finish(self, columns: Iterable[str]) -> None:
        text = table(self.rows, list(columns))
        (self.out / "table.md").write_text(text + "\n")
        self.figure.savefig(self.out / f"{self.o.study}.png", dpi=110)
        print(text, flush=True)


# ---------------------------------------------------------------- what is measured


def load(folder: str | Path) -> tuple[CausalLM, Any]:
    """Return a model with its weights, and its tokenizer."""
    place = resolve_model(str(folder))
    shape = read_config(place)
    model, source = CausalLM(shape), InitialWeights(shape, 0, place)
    model.to(device=DEVICE, dtype=DTYPE).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        source.fill(name, parameter.shape, 0, parameter.view(-1))
    return model, AutoTokenizer.from_pretrained(place)


def answers(folder: str | Path, prompts: list[Any], limit: int, top_k: int = 1) -> list[str]:
    """Continue conversations or plain texts given as tokens: greedily, or from the whole distribution with top_k 0."""
    model, tokenizer = load(folder)
    asked = {
        i: prompt if isinstance(prompt, torch.Tensor) else torch.tensor(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        )
        for i, prompt in enumerate(prompts)
    }  # fmt: skip
    longest = max(map(len, asked.values()))
    batch = max(1, min(512, 2_000_000 // (longest + limit)))
    stops = (tokenizer.eos_token_id,)
    options = SamplingOptions(limit, top_k=top_k, stop_tokens=stops, batch=batch)
    weights = dict(model.named_parameters())
    requests = Requests(asked, limit)
    Sampler(model.config, weights, requests, options).sample()
    found = requests.completions.values()
    return [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]


def mean(values: Any, unit: float = 1.0, digits: int = 2) -> str:
    """Return a mean with its standard error."""
    found = torch.as_tensor(values, dtype=torch.float64) * unit
    return f"{found.mean():.{digits}f} ± {found.std() / len(found) ** 0.5:.{digits}f}"


def accuracy(folder: str | Path, rows: list[Any], tries: int = 1) -> str:
    """Return the percentage of gsm8k's answers that are right: greedy ones, or several sampled ones per question."""
    asked = [row for row in rows for _ in range(tries)]
    questions = [user(row["question"]) for row in asked]
    texts = answers(folder, questions, 300, top_k=int(tries == 1))
    right = [gsm8k_reward("", text, row) for text, row in zip(texts, asked)]
    return mean(torch.tensor(right).view(len(rows), tries).mean(1), 100, 1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@torch.no_grad()
def margins(folder: str | Path, pairs: Any) -> torch.Tensor:
    """Return log p(chosen) - log p(rejected) for each pair of a dataset."""
    model, _ = load(folder)
    found = []
    for i in range(len(pairs)):
        sides = pairs[i].sequences
        logps = model(pack_shard(sides, ParallelMesh(1), DEVICE)).logps
        first = len(sides[0].tokens)
        found.append(float(logps[:first].sum() - logps[first:].sum()))
    return torch.tensor(found)


def texts(example: Any, tokenizer: Any) -> dict[str, str]:
    """Return a pair's prompt and answers, templates and end-of-turn tokens included."""
    found = {}
    for side, sequence in zip(("chosen", "rejected"), example.sequences):
        start = int(sequence.loss_weights.tolist().index(1.0))
        found["prompt"] = tokenizer.decode(sequence.tokens[:start])
        found[side] = tokenizer.decode(sequence.tokens[start:])
    return found


# ---------------------------------------------------------------- the studies


def sft(study: Study) -> None:
    """Accuracy of the model as it is, and after two epochs."""
    rows = read_lines(study.o.data[0])
    train, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    chats = [
        [*user(r["question"]), {"role": "assistant", "content": r["answer"]}] for r in train
    ]
    data = study.write("train", ({"messages": chat} for chat in chats))
    raw = study.write("raw", train)
    study.write("held_out", held_out)
    study.rows.append({"run": "as it is", "right (%)": accuracy(study.o.model, held_out)})
    for seed in study.o.seeds:
        for gpus in study.o.gpus:
            given = SFT | {"data.train": data, "run.seed": seed}
            run = study.train(f"{gpus}gpu-seed{seed}", gpus, stage="sft", **given)
            steps = read_metrics(run)
            right = accuracy(run / "export", held_out)
            seconds = sum(step["seconds"] for step in steps)
            study.rows.append(
                {"run": f"ours, {gpus} GPU, seed {seed}", "right (%)": right, "seconds of steps": seconds}
            )  # fmt: skip
            study.axis.plot([s["loss"] for s in steps], lw=0.8, label=study.rows[-1]["run"])
        if study.o.peer:
            right = accuracy(study.peer(raw, seed), held_out)
            study.rows.append({"run": f"peer, seed {seed}", "right (%)": right})
    study.axis.set(xlabel="step", ylabel="loss (nats per token)")
    study.axis.legend()
    study.finish(["run", "right (%)", "seconds of steps"])


def window(study: Study) -> None:
    """Held-out nats by position, and retrieval of a hidden number, before and after training with YaRN."""
    *books, last = read_lines(study.o.data[0])
    data = {"data.train": study.write("books", books), "data.eval": study.write("last", [last])}
    as_it_is = {
        "model.rope.extrapolate": True,
        "optimizer.lr": 0.0,
        "run.steps": 1,
        "run.eval_every": 1,
    }
    runs = {"as it is": WINDOW | as_it_is, "YaRN, untrained": WINDOW | YARN | as_it_is}
    runs |= {f"YaRN, trained on {gpus} GPU": WINDOW | YARN for gpus in study.o.gpus}
    folders = {}
    for name, settings in runs.items():
        gpus = int(name.split()[-2]) if "trained on" in name else study.o.gpus[0]
        place = name.replace(",", "").replace(" ", "-")
        folders[name] = study.train(place, gpus, stage="pt", **data, **settings)
        final = read_metrics(folders[name])[-1]
        octaves = [key[9:] for key in final if key.startswith("eval/nll/") and key[9].isdigit()]
        means, errors = (
            [final[f"eval/{kind}/{o}"] for o in octaves] for kind in ("nll", "nll_se")
        )
        study.rows.append(
            {
                "run": name,
                **{o: f"{m:.3f} ± {e:.3f}" for o, m, e in zip(octaves, means, errors)},
            }
        )
        study.axis.errorbar(octaves, means, errors, label=name)
    study.axis.set(xlabel="position (tokens)", ylabel="nats per token, held-out book")
    study.axis.legend()
    study.finish(["run", *octaves])
    chosen = ["as it is", "YaRN, untrained", list(runs)[-1]]
    figure = Figure((9, 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, 3), chosen):
        found = retrieval(folders[name] / "export", last["text"])
        axis.imshow(list(found.values()), vmin=0, vmax=1, cmap="viridis")
        axis.set(title=name, xlabel="depth", xticks=range(5), xticklabels=DEPTHS,
                 yticks=range(len(found)), yticklabels=[f"{n // 1024}k" for n in found])  # fmt: skip
        print(name, {n: [round(x, 2) for x in line] for n, line in found.items()}, flush=True)
    figure.savefig(study.out / "retrieval.png", dpi=110)


DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)


def retrieval(folder: Path, text: str, tries: int = 10) -> dict[int, list[float]]:
    """Return how often a number hidden in a book is completed, by length in tokens and by depth."""
    tokenizer, draw = AutoTokenizer.from_pretrained(folder), random.Random(0)
    book = tokenizer(text)["input_ids"]
    lengths, prompts, wanted = [4096, 8192, 16384, 32000], [], []
    for length in lengths:
        for depth in DEPTHS:
            for _ in range(tries):
                number = str(draw.randrange(10000, 99999))
                fact, ask = (
                    tokenizer(words)["input_ids"]
                    for words in (
                        f"\nThe secret number of the lighthouse is {number}.\n",
                        "\n\nRemember: The secret number of the lighthouse is",
                    )
                )
                start = draw.randrange(len(book) - length)
                room = length - len(fact) - len(ask) - 8
                pieces = book[start : start + room]
                at = int(depth * room)
                prompts.append(torch.tensor(pieces[:at] + fact + pieces[at:] + ask))
                wanted.append(number)
    texts = answers(folder, prompts, 8)
    right = [float(number in text) for number, text in zip(wanted, texts)]
    means = torch.tensor(right).view(len(lengths), len(DEPTHS), tries).mean(-1).tolist()
    return dict(zip(lengths, means))


def dpo(study: Study) -> None:
    """Held-out preferences before and after, all weights and adapters; the peer gets the rows in our order."""
    files = {"data.train": [str(path) for path in study.o.data], "data.eval_fraction": 0.1}
    alone = {
        "stage": "dpo",
        "model.path": study.o.model,
        "batch.share_prompts": False,
        "run.seed": 0,
    }
    config = parse_command_line(
        [], **DPO, **files, **alone, **{"data.cache": str(study.out / "cache")}
    ).config
    train, held_out = open_data(prepare(config, 1))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(study.o.model))
    loader = StepLoader(train, 32, tokens_per_microbatch=16384, seed=0)
    order = [i for step in range(loader.steps_per_epoch) for i in loader.indices(0, step)]
    rows = study.write("pairs", (texts(train[i], tokenizer) for i in order))
    before = margins(study.o.model, held_out)
    asked = [held_out[i].sequences[0] for i in (0, 1, 2)]
    starts = [int(sequence.loss_weights.tolist().index(1.0)) for sequence in asked]
    heads = [torch.tensor(sequence.tokens[:start]) for sequence, start in zip(asked, starts)]
    said = [{"prompt": tokenizer.decode(head)} for head in heads]

    def speak(name: str, folder: str | Path) -> None:
        for line, text in zip(said, answers(folder, heads, 120)):
            line[name] = text

    speak("before", study.o.model)

    def judge(name: str, folder: Path, seconds: float = 0.0) -> None:
        gain = margins(folder, held_out) - before
        study.rows.append({
            "run": name, "pairs ranked right (%)": mean(gain > 0, 100, 1), "gain in log-odds": mean(gain),
            "seconds of steps": seconds or None,
        })  # fmt: skip

    kinds = {
        "all weights": {"optimizer.lr": 2e-5},
        "LoRA": {"model.lora.rank": 16, "model.lora.merge": True, "optimizer.lr": 2e-4},
    }
    for seed in study.o.seeds:
        for kind, own in kinds.items():
            run = study.train(f"{kind.replace(' ', '-')}-{seed}", study.o.gpus[0], stage="dpo",
                              **DPO, **own, **files, **{"run.seed": seed})  # fmt: skip
            steps = read_metrics(run)
            speak(f"after, {kind}, seed {seed}", run / "export")
            judge(
                f"ours, {kind}, seed {seed}", run / "export", sum(s["seconds"] for s in steps)
            )
            study.axis.plot(
                [s["rewards/margins"] for s in steps], lw=0.8, label=study.rows[-1]["run"]
            )
            if study.o.peer:
                judge(f"peer, {kind}, seed {seed}", study.peer(rows, seed, kind))
    study.write("answers", said)
    study.axis.set(xlabel="step", ylabel="margin of rewards")
    study.axis.legend()
    study.finish(["run", "pairs ranked right (%)", "gain in log-odds", "seconds of steps"])


def grpo(study: Study) -> None:
    """Rewards while training on gsm8k, and accuracy after it, against the first rate (0 to learn nothing)."""
    rows = read_lines(study.o.data[0])
    train, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    data = study.write("train", train)

    def judge(name: str, folder: str | Path, **more: Any) -> None:
        study.rows.append({
            "run": name, "greedy (%)": accuracy(folder, held_out),
            "sampled (%)": accuracy(folder, held_out, 16), **more,
        })  # fmt: skip

    judge("before", study.o.model)
    still: list[float] = []
    for lr in study.o.rates:
        given = {**GRPO, "data.train": data, "optimizer.lr": lr}
        run = study.train(f"lr{lr:g}", study.o.gpus[0], stage="ppo", **given)
        steps = read_metrics(run)
        scores = [s["objective/scores"] for s in steps]
        still = still or scores
        gained = [here - there for here, there in zip(scores[10:], still[10:])]
        judge(
            f"learning rate {lr:g}", run / "export", **{"reward gained (points)": mean(gained, 100),
            "seconds a step": sum(s["seconds"] for s in steps[1:]) / len(steps[1:])},
        )  # fmt: skip
        study.axis.plot(scores, label=study.rows[-1]["run"])
    study.axis.set(xlabel="rollout", ylabel="share of right answers")
    study.axis.legend()
    study.finish(
        ["run", "greedy (%)", "sampled (%)", "reward gained (points)", "seconds a step"]
    )


def main() -> None:
    studies = {f.__name__: f for f in (sft, window, dpo, grpo)}
    p = plain_parser(__doc__)
    p.add_argument("study", choices=studies)
    p.add_argument("model", help="folder or hub id")
    p.add_argument("data", nargs="+", type=Path, help="files of rows")
    p.add_argument("--out", type=Path, required=True, help="folder of everything")
    add_options(
        p,
        gpus=([1], "numbers of GPUs that train"),
        seeds=([0], "seeds"),
        rates=([0.0, 1e-5], "learning rates of grpo"),
        peer=("", "command that trains beside ours"),
    )
    options, more = p.parse_known_args()
    studies[options.study](Study(options, more))


if __name__ == "__main__":
    main()
