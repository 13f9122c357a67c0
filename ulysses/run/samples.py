"""Look at answers while a run trains: `run.samples` names prompts that the policy answers at every evaluation.

    samples.jsonl   {"step": 20, "run": "1a2b3c4d", "by": "step 20", "prompt": "...", "answer": "..."}

Answers are greedy, and end at the model's window. "by" says where an answer comes from: "step 0" is the initial policy,
"reference" and "teacher" are the run's other models, and "data" is the answer of the data row. "rollout 3" stands with
all answers to the rollout's first prompts, each of them after its score; in episodes of several turns [said] stands
before what the model said and [told] before what it was told. A resumed run adds the lines of its steps again, with its
own id.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter

from ulysses.check.input_files import RunInputs
from ulysses.data.read.messages import Message
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.disk import DiskError, writing
from ulysses.rl.engine_sampler import EngineSampler
from ulysses.rl.rollout_dataset import Rollout
from ulysses.rl.sampler import SamplingOptions
from ulysses.rl.trajectory import Trajectory
from ulysses.run.metrics import MetricsLog
from ulysses.run.trainer import Trainer
from ulysses.zero.engine import ZeroEngine


class Samples:
    """Write answers to the prompts of `run.samples`; all ranks construct this, and call its methods, together.

    Args:
        eval_data: the held-out data, whose first rows are answered if `run.samples` is a number.
        log: the log of rank 0, which writes; None on the other ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: RunInputs,
        eval_data: TokenizedDataset | None,
        log: MetricsLog | None,
    ) -> None:
        config, samples = inputs.config, inputs.config.run.samples
        self.trainer = trainer
        self.log = log
        self.path = config.output / "samples.jsonl"
        self.decode = partial(inputs.tokenizer.decode, skip_special_tokens=True)
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []  # of the data
        if isinstance(samples, int):
            for example in islice(eval_data, samples):
                row = example.sequences[0]
                # the prompt ends before the first trained token; a row of PPO's data has none
                end = max(1, [*map(bool, row.loss_weights), True].index(True))
                self.prompts.append(row.tokens[:end].tolist())
                if len(row.tokens) > end:
                    self.answers.append(row.tokens[end:].tolist())
        else:
            for text in samples:
                turn = inputs.template.render([Message("user", text)])
                self.prompts.append(inputs.template.encoder.encode_batch(turn)[0].ids)
        options = SamplingOptions(
            config.ppo.max_new_tokens, top_k=1, stop_tokens=inputs.shape.eos_token_id
        )
        automatic = config.ppo.generation_batch == "auto"
        self.sampler = EngineSampler(
            trainer.engine, trainer.mesh, options, automatic, config.model, self._renew
        )
        self.window = inputs.shape.max_position_embeddings

    def begin(self, frozen: dict[str, ZeroEngine]) -> None:
        """Write the answers of the data, of the run's other language models and of the initial policy.

        A resumed run has them already. `frozen` are the engines of the other models, by their roles.
        """
        stage = self.trainer.stage
        if not self.trainer.step:
            self._write("data", zip(self.prompts, self.answers))
            for model in stage.requirements.models:
                if not (model.is_reward or model.shares_weights):
                    engine = frozen[model.role]
                    self._ask(model.role, replace(self.sampler, engine=engine, settings=None))
            self.ask(0)
        stage.show_rollouts(self.show)
        if self.log:
            self.log.bar.unpause()  # the first samples say nothing about the time that remains

    def ask(self, step: int) -> None:
        """Answer the prompts after a step."""
        self._ask(f"step {step}", self.sampler)

    def show(self, rollout: Rollout) -> None:
        """Write all answers to the first prompts of a rollout."""
        first = [t for t in rollout.trajectories if t.group < len(self.prompts)]
        answered = [(t.prompt, f"{t.score:g}: {self._dialogue(t)}") for t in first]
        self._write(f"rollout {rollout.number}", answered)

    def _ask(self, by: str, sampler: EngineSampler) -> None:
        # every rank answers all prompts, because they are few
        with suppress(InterruptedError):
            answers = sampler.sample(dict(enumerate(self.prompts)))
            for prompt, answer in zip(self.prompts, answers.values()):
                del answer.tokens[max(0, self.window - len(prompt)) :]
            tokens = [answer.tokens for answer in answers.values()]
            self._write(by, zip(self.prompts, tokens))

    def _renew(self) -> None:
        """Show progress, and end this rank's sampling if it was asked to stop; the other ranks sample on."""
        self.trainer.watch.renew()
        if self.trainer.watch.stop_wanted:
            raise InterruptedError

    def _write(self, by: str, answered: Iterable[tuple[list[int], list[int] | str]]) -> None:
        """Write prompts with their answers, which may be texts; a full disk ends the run after a checkpoint."""
        if not self.log:
            return
        step, run_id = self.trainer.step, self.trainer.description["run"]
        board = self.log.trackers.get("tensorboard")
        lines = []
        try:
            for prompt, answer in answered:
                text = answer if isinstance(answer, str) else self.decode(answer)
                texts = {"prompt": self.decode(prompt), "answer": text}
                lines.append(
                    json.dumps({"step": step, "run": run_id, "by": by, **texts}) + "\n"
                )
                if board:
                    board.show(f"samples/{by}", "\n\n".join(texts.values()), step)
            with writing(self.path, f" at step {step}"), self.path.open("a") as file:
                file.write("".join(lines))  # at once: a kill leaves whole lines
        except DiskError as error:
            self.log.failure = self.log.failure or error

    def _dialogue(self, one: Trajectory) -> str:
        """Return an answer's text; in an episode with a mark where the model says something, or is told something."""
        runs = groupby(zip(one.sampled, one.tokens), itemgetter(0))
        turns = [(said, self.decode([token for _, token in run])) for said, run in runs]
        if len(turns) == 1:
            return turns[0][1]
        return "\n".join(
            f"[{'said' if said else 'told'}] {text.strip()}" for said, text in turns
        )
