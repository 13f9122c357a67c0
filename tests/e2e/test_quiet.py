"""A run prints its own lines and a progress bar, nothing that a library says about itself; --debug shows all."""

import re
import subprocess
import sys
from itertools import chain

from tests.e2e.launch import ROOT, environment, python, tiny

OURS = re.compile(
    r"(loading the libraries|reading the data|building the model|attention kernel|"
    r"training data|held-out data|memory|micro-batches|start|gradients|computing reference|"
    r"reference: \d+|step \d+|exported|resumed|  [\d.]+% of the tokens are prompts)\b"
    r"|\d+/\d+ steps, |tokenising: |\s*$"
)
# what silences libraries in the other tests
LOUD = "PYTHONWARNINGS DS_ACCELERATOR TOKENIZERS_PARALLELISM".split()


def lines(tmp_path, typed=""):
    settings = f"--run.steps 2 --optimizer.warmup 1 {typed}"
    loud = {name: value for name, value in environment().items() if name not in LOUD}
    line = [sys.executable, "train.py", *tiny("dpo", tmp_path / f"run{len(typed)}", settings)]
    out = subprocess.check_output(line, cwd=ROOT, env=loud, stderr=subprocess.STDOUT, text=True)
    return re.split(r"[\r\n]", out)


def test_every_line_is_the_runs_own(tmp_path):
    found = lines(tmp_path)
    assert len([line for line in found if line.strip()]) >= 5
    assert not [line for line in found if not OURS.match(line)]
    assert re.search("DeepSpeed|Warning|WARNING", "".join(lines(tmp_path, "--debug")))


# The options, which are imported by runs that ask for them.
OPTIONAL = """
losses.distill losses.dpo losses.kto losses.ppo losses.preference losses.reward_model
models.delta models.lora models.moe models.quantized models.scored
ulysses.check.adapter_settings ulysses.check.other_models ulysses.gradients.skipping ulysses.gradients.ulysses_pro
ulysses.parallel.recurrence ulysses.report
ulysses.rl.ppo ulysses.run.routers ulysses.run.samples ulysses.stages.dpo ulysses.stages.passes
ulysses.stages.referenced ulysses.zero.deepspeed_internals ulysses.zero.eight_bit
""".split()


# What plain fine-tuning on one process calls: functions, and the files that they are in.
MOST_FUNCTIONS, MOST_CALLED = 572, 77  # the heartbeat of one process among them
# notes the code of all that is called
NOTES = """
import inspect, sys, threading, torch, transformers
seen = set()
def note(frame, *_): seen.add(frame.f_code)
sys.setprofile(note)
threading.setprofile(note)
"""
# prints what ran, file by file, without modules, classes, lambdas and comprehensions
CALLED = """
sys.setprofile(None)
threading.setprofile(None)
found = {c for c in seen if c.co_flags & inspect.CO_OPTIMIZED and c.co_name[0] != "<"}
print(*(f"{c.co_filename}:{c.co_qualname}" for c in found))
"""


def test_a_start_imports_no_compiler_and_no_part_that_it_does_not_use(tmp_path):
    """The import of each of the packages takes seconds; DeepSpeed's is for weights that are not whole on every rank."""
    alone = (
        "--run.steps 1 --parallel.sequence_parallel_size 1 --data.eval [] --run.eval_every 0"
    )
    # with a cache of its own, so that tokenising and the kernel's proof are part of it, whatever ran before
    given = tiny("sft", tmp_path / "run", alone, cache=tmp_path / "cache")
    pairs = [
        pair for pair in zip(given[::2], given[1::2]) if "zero_optimization" not in pair[0]
    ]
    line = f"{NOTES}from ulysses.train import main; main({[*chain(*pairs)]}){CALLED}"
    line += f"print({{'deepspeed', 'torch._dynamo', 'sympy', *{OPTIONAL}}} & {{*sys.modules}})"
    done = python("-c", line)
    *_, functions, found = done.stdout.splitlines()
    assert found == "set()", done.stdout + done.stderr
    homes = tuple(f"{ROOT}/{name}/" for name in ("ulysses", "models", "losses"))
    called = {name for name in functions.split() if name.startswith(homes)}
    assert len(called) <= MOST_FUNCTIONS
    assert len({name.partition(":")[0] for name in called}) <= MOST_CALLED
