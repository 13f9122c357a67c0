"""TrainingRun: a configuration in, a trained and exported model out. It only puts the parts together.

configuration -> checks -> data -> processes meet -> plan -> engine -> stage -> Trainer -> export

The constructor only holds what it is given; entering does all the rest up to the first step.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from models.decoder import VALUE
from models.writing import is_wider
from ulysses import environment
from ulysses.check.agreement import agree, changes, facts_of
from ulysses.check.kernel_proof import check_kernel
from ulysses.check.preflight import prepare, remarks, remarks_on_data
from ulysses.check.run_folder import HELD_OUT, digests_of_inputs, hold_output
from ulysses.config.command_line import check
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.disk import replace_file, writing
from ulysses.options import build_policies
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.hardware import GIB, slow_products, this_machine
from ulysses.plan.layer_cost import model_flops
from ulysses.plan.planner import (
    choose_memory,
    memory_line,
    micro_batch_line,
    run_question,
)
from ulysses.plan.step_cost import predict
from ulysses.run.build import frozen_engine, open_data, step_loader, trained_engine
from ulysses.run.export_model import export_model, save_tokenizer, served_weights
from ulysses.run.metrics import MetricsLog
from ulysses.run.trackers import TrackedRun
from ulysses.run.trainer import Trainer
from ulysses.stages.base import AuxiliaryModel, Metrics, RunParts
from ulysses.watch.failure import LAUNCHER_SECONDS
from ulysses.watch.watch import Watch
from ulysses.zero.construct import (
    end_distributed,
    initialize_distributed,
    lift_time_limits,
    meet,
)
from ulysses.zero.engine import ZeroEngine, full_parameters


class TrainingRun:
    """Train by a configuration; use it as a context manager so that everything is released even after an error.

    Entering raises ConfigError, before the model is built, for anything that cannot be honoured; `train`, `sample` and
    `learn` raise it for a tracker that does not start.

    Args:
        config: a checked configuration, or a dict of nested tables as in the TOML file.
        debug: let other ranks than the first print their lines too.
        imports: seconds that imports took, for the line about the start.

    Attributes:
        trainer: the loop, from entering on.
        log: the metrics' log, on rank 0 from the first step on.
        is_logged: whether `log` is open, and `run.samples` are answered.
        resources: what must be released at the end, whatever happens.
    """

    def __init__(
        self,
        config: Config | dict[str, object],
        *,
        debug: bool = False,
        imports: float = 0.0,
    ) -> None:
        self.config = check(config) if isinstance(config, dict) else config
        self.debug = debug
        self.watch = Watch(self.config.run.stall_warning, self.config.run.timeout, imports)
        self.resources = ExitStack()
        self.trainer: Trainer | None = None
        self.log: MetricsLog | None = None
        self.is_logged = False

    def __enter__(self) -> "TrainingRun":
        self.watch.phase("checks")
        # the processes meet in another thread, while each of them checks and tokenises
        self.watch.start(partial(meet, max(self.config.run.timeout, LAUNCHER_SECONDS)))
        try:
            self.inputs = prepare(self.config)
            self.config = self.inputs.config  # with what the checks have chosen
            self._read_data()
        except BaseException:
            self.watch.stop()
            raise
        self.watch.phase("start")
        self.device = initialize_distributed(self.watch.meeting.result())
        try:
            self._agree()
            self._plan()
            self.trainer = self._build()
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _read_data(self) -> None:
        """Open the data, tokenised, and note what has changed since the checkpoint that the run continues."""
        inputs = self.inputs
        self.watch.phase("tokenising")
        self.say("reading the data ...")
        train, held_out = open_data(inputs)
        self.train_data, self.eval_data = train, held_out
        self.digests = digests_of_inputs(inputs, train, held_out)
        self.changes: dict[str, str] = {}
        if inputs.resume_from:
            self.changes = changes(inputs.config, inputs.resume_from, self.digests)

    def _agree(self) -> None:
        """Refuse processes that differ, and take the run folder."""
        inputs, output = self.inputs, self.config.output
        with error_context():
            if dist.get_world_size() > 1:
                agree(facts_of(inputs, self.digests))
            self.run_id, earlier_run = hold_output(self.config, self.resources)
        if earlier_run:
            self.say(f"{output} was left by {earlier_run}, which has ended, and is taken over")
        if self.config.run.resume == "never" and environment.may_restart():
            self.say("torchrun may restart this run, so run.resume is auto")

    def _plan(self) -> None:
        """Choose the degree of sequence parallelism, the micro-batches and what layers keep, and say so."""
        config, inputs, shape = self.config, self.inputs, self.inputs.shape
        torch.backends.cuda.matmul.allow_tf32 = False
        machine = this_machine(self.device, config.memory.host_memory)
        question = run_question(inputs.stage, shape, machine, self.train_data)
        if config.parallel.sequence_parallel_size == "auto":
            self.say(f"parallel.sequence_parallel_size is auto: {question.sp}")
        self.mesh = ParallelMesh(
            question.sp, num_heads=question.common_heads, windows=shape.windows
        )
        self.watch.phase("kernels")
        with error_context():
            check_kernel(
                inputs.stage,
                shape,
                inputs.attention,
                self.device,
                self.mesh,
                question.shares,
            )
            self.plan = plan = choose_memory(question)
        self.say(f"attention kernel: {inputs.kernel.name} ({inputs.kernel.reason})")
        if self.device.type == "cpu" and (slow := slow_products(config.model.dtype)):
            self.say(slow)
        for name, data in (("training", self.train_data), ("held-out", self.eval_data)):
            if data:
                self.say(f"{name} data: {data.report}")
        self.say(memory_line(plan))
        self.say(micro_batch_line(question, config.batch.tokens_per_microbatch == "auto"))

    def _build(self) -> Trainer:
        """Build the engines, the stage around them, and the loop."""
        config, inputs, plan = self.config, self.inputs, self.plan
        self.watch.phase("building the model")
        self.say(f"building the model of {plan.question.model.parameters:,} parameters ...")
        self.engine = trained_engine(
            inputs.stage, inputs.weights, self.mesh, plan, inputs.attention
        )
        self._register(self.engine)
        lift_time_limits()  # the process groups exist, and the watch ends a run without progress
        self.watch.phase("preparing the stage")
        self.frozen = {m.role: self._frozen_engine(m) for m in inputs.stage.requirements.models}
        parts = RunParts(
            engine=self.engine,
            weights=inputs.weights,
            frozen=self.frozen,
            mesh=self.mesh,
            kernel=inputs.kernel.name,
            tokenizer=inputs.tokenizer,
            template=inputs.template,
            tokens_per_microbatch=plan.question.tokens_per_microbatch,
            share_prompts=config.batch.share_prompts and not plan.graphs,
            resources=self.resources,
            phase=self.watch.phase,
            renew=self.watch.renew,
            export=partial(self.export, for_servers=True),
            served_weights=self.served_weights,
            say=self.say,
        )
        stage = inputs.stage.build(parts)
        train_data = stage.extend_data(parts, self.train_data)
        if plan.graphs:  # CUDA graphs take whole sequences
            train_data = train_data.apart
        serve = partial(
            step_loader,
            inputs,
            tokens_per_microbatch=plan.question.tokens_per_microbatch,
            groups=self.mesh.data_parallel_size,
            group=self.mesh.dp_rank,
        )
        loader = serve(train_data)
        eval_loader = None
        if self.eval_data:
            eval_data = stage.extend_data(parts, self.eval_data)
            eval_loader = serve(eval_data, evaluation=True)
        for line in remarks(inputs, loader):
            self.say(line)
        is_gpu = plan.question.machine.is_gpu
        return Trainer(
            stage=stage,
            loader=loader,
            eval_loader=eval_loader,
            total_steps=stage.total_steps(loader),
            policies=build_policies(config.gradients),
            flops=partial(model_flops, plan.question.model),
            predicted_gib=predict(plan).allocated / GIB if is_gpu else 0.0,
            description={
                "run": self.run_id,
                "config": config.model_dump(mode="json"),
                "shape": inputs.shape.to_hf(),
                "inputs": self.digests,
            },
            say=self.say,
            watch=self.watch,
        )

    def _begin(self) -> None:
        """Restore the checkpoint that the run continues, and begin the run folder, now that nothing is refused."""
        config, inputs, checkpoint = self.config, self.inputs, self.inputs.resume_from
        if checkpoint is not None:
            self.trainer.resume(checkpoint)
            self.say(f"resumed {checkpoint} at step {self.trainer.step}")
            for sentence in self.changes.values():
                self.say(f"  changed since then: {sentence}")
            others = (HELD_OUT, "stage", f"{config.stage}.", "the weights of ")
            if any(key.startswith(others) for key in self.changes):
                self.trainer.best = None  # eval/loss is now another number
        if self.mesh.is_main:
            with writing(config.output):
                os.makedirs(os.path.realpath(config.output / "checkpoints"), exist_ok=True)
                replace_file(config.output / "config.json", config.model_dump_json(indent=2))
            save_tokenizer(inputs, config.output / "tokenizer")
        dist.barrier()

    def _frozen_engine(self, model: AuxiliaryModel) -> ZeroEngine:
        """Build the engine of a frozen model, or return the trained one if that serves as it."""
        if model.shares_weights:
            if not self.config.model.lora.rank:
                return self.engine
            from models.lora import BasePolicy

            return BasePolicy(self.engine)
        inputs = self.inputs
        weights = inputs.others[model.setting] if model.path else inputs.weights
        engine = frozen_engine(
            self.config,
            weights,
            self.mesh,
            inputs.attention,
            reward=model.is_reward,
            resident=self.plan.resident,
        )
        self._register(engine)
        return engine

    def _register(self, engine: ZeroEngine) -> None:
        """Release an engine at the end of the run, and count each forward pass that begins as progress."""
        engine.module.register_forward_pre_hook(lambda *_: self.watch.renew())
        self.resources.callback(engine.destroy)

    # ---------------------------------------------------------------- the run

    def train(self) -> None:
        """Train to the end (or to a requested stop), evaluating, saving and exporting as configured."""
        trainer, run, folder = self.trainer, self.config.run, self.config.output
        # a program's own loop may name data for the plan alone
        for line in remarks_on_data(self.config, trainer.loader):
            self.say(line)
        self._open_log(signals=True)
        trainer.train()
        if run.export and not trainer.stop_requested:
            out = folder / "export"
            if out.exists():  # the run that is continued had ended, and exported
                out = folder / f"export-step-{trainer.step}"
            if out.exists():
                self.say(f"{out} is there already and stays as it is; remove it to export anew")
            else:
                self.export(out)
        if self.mesh.world_size == 1:
            self.watch.pause()  # no other process waits while the program goes on to something else

    def _open_log(self, signals: bool = False) -> None:
        """Begin to log, and to answer `run.samples`, if this has not been done yet.

        Args:
            signals: whether signals ask the run to stop; a program with its own loop has handlers of its own.
        """
        is_first = not self.is_logged
        self.is_logged = True
        trainer, run, folder = self.trainer, self.config.run, self.config.output
        if is_first and self.mesh.is_main:
            settings = {"run_id": self.run_id, **trainer.description["config"]}
            # run.wandb names a project, and asks for the tracker too
            project = run.wandb or run.project
            trackers = [*run.trackers, "wandb"] if run.wandb else run.trackers
            tracked = TrackedRun(folder, project, self.run_id, trainer.step, settings)
            self.log = trainer.log = MetricsLog(tracked, trackers, trainer.total_steps)
            self.resources.callback(self.log.close)
        if signals:  # after the trackers, which may catch them too
            self.resources.enter_context(self.watch.signals())
        if is_first and run.samples:
            from ulysses.run.samples import Samples

            samples = Samples(trainer, self.inputs, self.eval_data, self.log)
            samples.begin(self.frozen)
            trainer.samples = samples.ask

    def sample(self, prompts: list[list[int]]) -> list:
        """Return the policy's answers to prompts of token ids; stage ppo, all ranks call it together."""
        from ulysses.run.own_loop import sample

        self._open_log()
        return sample(self.trainer, prompts)

    def learn(self, rows: list[dict[str, object]]) -> Metrics:
        """Train on a rollout of trajectories (docs/ppo.md), and return its last step's metrics; all ranks call it."""
        from ulysses.run.own_loop import learn

        self._open_log()
        return learn(self.trainer, rows)

    def export(self, folder: Path, *, for_servers: bool = False) -> None:
        """Write the trained model (or its adapters) in Hugging Face format; all ranks call it together.

        `for_servers` writes whole weights, with the adapters added, and prints nothing.
        """
        config = self.config
        self.watch.phase("export")
        dtype = config.model.dtype if for_servers else config.export_dtype
        exact = is_wider(dtype, config.model.dtype)
        note = export_model(
            partial(full_parameters, self.engine, without=(VALUE,), exact=exact),
            folder,
            self.inputs.shape,
            config,
            self.trainer.step,
            reward=self.inputs.stage.reward,
            dtype=dtype,
            for_servers=for_servers,
        )
        if self.mesh.is_main and not for_servers:
            self.say(f"exported {folder}; {note}" if note else f"exported {folder}")
        dist.barrier()

    def served_weights(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that an export for servers holds; all ranks iterate together, and the first one gets them.

        Args:
            device: in whose memory they are.
        """
        self.watch.phase("export")
        read = partial(full_parameters, self.engine, without=(VALUE,), device=device)
        return served_weights(read, self.inputs.shape, self.config)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one; only with `debug` on other ranks than the first."""
        rank = environment.rank()
        if self.log is not None:
            self.log.bar.write(text)
        elif rank == 0:
            print(text, flush=True)
        elif self.debug:
            print(f"[rank {rank}] {text}", flush=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release files, engines and, unless other processes must still hear of an error, the process group."""
        if error is not None:
            self.watch.name_lost_rank(error)  # while a launcher's signals are still caught
            if self.log is not None:
                self.log.fail()
        try:
            self.resources.close()
        except BaseException:
            self.watch.stop()  # the caller reports this error
            raise
        self.trainer = self.engine = self.log = None
        self.frozen = {}
        if dist.get_world_size() > 1 and error is not None:
            # this process may go on with another run, whose good end must not look like a failure of this one
            self.watch.stop()
            return
        self.watch.phase("end")
        try:
            dist.barrier()  # the first process may have to wait long for its trackers
        except RuntimeError as lost:
            self.watch.name_lost_rank(lost)
            self.watch.stop()  # the caller reports this error
            raise
        self.watch.stop()
        dist.barrier()  # the store stays until no process watches it any more
        end_distributed()
