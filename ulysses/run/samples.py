"""Look at answers while a run trains: `run.samples` names prompts that the policy answers at every evaluation.

    samples.jsonl   {"step": 20, "by": "step 20", "prompt": "...", "answer": "..."}

Answers are greedy. Those by "step 0" are the initial policy's, which is the reference of a run that holds no other;
"reference" and "teacher" are such a model's, and "data" is the row's own. "rollout 3" drew all answers to its first
prompts, each of which stands after its score. A resumed run adds the lines of its steps again.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from ulysses.data.read.messages import Message
from ulysses.disk import writing
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.rollout import Rollout
from ulysses.rl.sampler import Completion, SamplingOptions


def start_samples(run: Any) -> Callable[[int], None]:
    """Return what writes a run's answers after a step, and write those of its start; all ranks call both together."""
    config, inputs, wanted = run.config, run.inputs, run.config.run.samples
    decode = partial(inputs.tokenizer.decode, skip_special_tokens=True)
    path = config.output / "samples.jsonl"

    def write(by: str, prompts: Iterable[Any], answers: Iterable[Completion]) -> None:
        if not run.log:  # rank 0 writes
            return
        step, board = run.trainer.step, run.log.trackers.get("tensorboard")
        with writing(path), path.open("a") as file:
            for prompt, answer in zip(prompts, answers):
                score = f"{answer.score:g}: " if answer.scores else ""
                texts = {"prompt": decode(prompt), "answer": score + decode(answer.tokens)}
                print(json.dumps({"step": step, "by": by, **texts}), file=file)
                if board:
                    board.writer.add_text(f"samples/{by}", "\n\n".join(texts.values()), step)

    def ask(by: str, sampler: EngineSampler) -> None:
        # every rank answers all of them: they are few
        write(by, prompts, sampler.sample(dict(enumerate(prompts))).values())

    def show(rollout: Rollout) -> None:
        each = rollout.answers_per_prompt
        asked = [prompt for prompt in rollout.prompts[: len(prompts)] for _ in range(each)]
        write(f"rollout {rollout.number}", asked, rollout.answers)

    if isinstance(wanted, int):
        rows = [example.sequences[0] for example in islice(run.eval_data, wanted)]
        # before the first token that is trained; a prompt alone has none
        heads = [max(1, [*map(bool, row.loss_weights), True].index(True)) for row in rows]
        prompts = [row.tokens[:head].tolist() for row, head in zip(rows, heads)]
        rest = [row.tokens[head:] for row, head in zip(rows, heads)]
        answers = [Completion(tokens) for tokens in rest if len(tokens)]
    else:
        turns = [inputs.template.render([Message("user", text)]) for text in wanted]
        encode = inputs.template.encoder.encode_batch
        prompts, answers = [encode(turn)[0][0] for turn in turns], []
    longest, stops = config.ppo.max_new_tokens, inputs.shape.eos_token_id
    options = SamplingOptions(longest, top_k=1, stop_tokens=stops)
    sampler = EngineSampler.of(run, config, options)
    if not run.trainer.step:
        write("data", prompts, answers)
        for role, engine in run.language_models.items():
            ask(role, replace(sampler, engine=engine, lora=None))
        ask("step 0", sampler)
    if maker := getattr(run.trainer.stage, "maker", None):  # of rollouts
        maker.show = show
    return lambda step: ask(f"step {step}", sampler)
