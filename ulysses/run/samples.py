"""Look at answers while a run trains: `run.samples` names prompts that the policy answers at every evaluation.

    samples.jsonl   {"step": 20, "run": "1a2b3c4d", "by": "step 20", "prompt": "...", "answer": "..."}

Answers are greedy, and end at the model's window. Those by "step 0" are the initial policy's, which is the reference of
a run that holds no other; "reference" and "teacher" are such a model's, and "data" is the row's own. "rollout 3" drew
all answers to its first prompts, each of which stands after its score. A resumed run adds the lines of its steps again,
with its own id.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from ulysses.check.input_files import RunInputs
from ulysses.data.read.messages import Message
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import writing
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.rollout import Rollout
from ulysses.rl.sampler import Completion, SamplingOptions
from ulysses.run.metrics import MetricsLog
from ulysses.run.trainer import Trainer
from ulysses.zero.engine import ZeroEngine


class Samples:
    """Write the answers of a run that begins to train; all ranks make this, and call its methods, together.

    Args:
        others: engines of the language models that the run holds besides, by their roles.
        log: of rank 0, which writes; None on the other ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: RunInputs,
        eval_data: TokenizedDataset | None,
        others: dict[str, ZeroEngine],
        log: MetricsLog | None,
    ) -> None:
        config, wanted = inputs.config, inputs.config.run.samples
        self.trainer, self.log, self.path = trainer, log, config.output / "samples.jsonl"
        self.decode = partial(inputs.tokenizer.decode, skip_special_tokens=True)
        if isinstance(wanted, int):
            rows = [example.sequences[0] for example in islice(eval_data, wanted)]
            # before the first token that is trained; a prompt alone has none
            heads = [max(1, [*map(bool, row.loss_weights), True].index(True)) for row in rows]
            self.prompts = [row.tokens[:head].tolist() for row, head in zip(rows, heads)]
            rest = [row.tokens[head:] for row, head in zip(rows, heads)]
            answers = [Completion(tokens) for tokens in rest if len(tokens)]
        else:
            turns = [inputs.template.render([Message("user", text)]) for text in wanted]
            encode = inputs.template.encoder.encode
            self.prompts, answers = [encode(turn)[0][0] for turn in turns], []
        longest, stops = config.ppo.max_new_tokens, inputs.shape.eos_token_id
        options = SamplingOptions(longest, top_k=1, stop_tokens=stops)
        how = config.ppo.generation_batch == "auto", config.model, self._renew
        self.sampler = EngineSampler(trainer.engine, trainer.mesh, options, *how)
        self.window = inputs.shape.max_position_embeddings
        if not trainer.step:
            self._write("data", self.prompts, answers)
            for role, engine in others.items():
                self._ask(role, replace(self.sampler, engine=engine, settings=None))
            self.ask(0)

    def ask(self, step: int) -> None:
        """Answer the prompts after a step."""
        self._ask(f"step {step}", self.sampler)

    def show(self, rollout: Rollout) -> None:
        """Write all answers to the first prompts of a rollout."""
        each, count = rollout.answers_per_prompt, len(self.prompts)
        asked = [prompt for prompt in rollout.prompts[:count] for _ in range(each)]
        self._write(f"rollout {rollout.number}", asked, rollout.answers)

    def _ask(self, by: str, sampler: EngineSampler) -> None:
        # every rank answers all of them: they are few
        with suppress(InterruptedError):
            answers = sampler.sample(dict(enumerate(self.prompts)))
            for prompt, answer in zip(self.prompts, answers.values()):
                del answer.tokens[max(0, self.window - len(prompt)) :]
            self._write(by, self.prompts, answers.values())

    def _renew(self) -> None:
        """Show progress, and end the sampling where the run is asked to stop; each rank by itself samples on."""
        self.trainer.watch.renew()
        if self.trainer.watch.stop_wanted:
            raise InterruptedError

    def _write(
        self, by: str, prompts: Iterable[list[int]], answers: Iterable[Completion]
    ) -> None:
        if not self.log:
            return
        step, run_id = self.trainer.step, self.trainer.description["run"]
        board = self.log.trackers.get("tensorboard")
        with writing(self.path), self.path.open("a") as file:
            for prompt, answer in zip(prompts, answers):
                score = f"{answer.score:g}: " if answer.scores else ""
                texts = {
                    "prompt": self.decode(prompt),
                    "answer": score + self.decode(answer.tokens),
                }
                line = {"step": step, "run": run_id, "by": by, **texts}
                print(json.dumps(line), file=file)
                if board:
                    board.writer.add_text(f"samples/{by}", "\n\n".join(texts.values()), step)
