"""TrainingRun: a configuration in, a trained and exported model out. It only puts the parts together.

configuration -> checks -> data -> processes meet -> plan -> engine -> stage -> Trainer -> export
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from models.decoder import VALUE
from ulysses import environment
from ulysses.check.agreement import agree, facts_of
from ulysses.check.kernel_proof import check_kernel
from ulysses.check.preflight import prepare, remarks
from ulysses.check.resuming import changes
from ulysses.check.run_folder import digests_of_inputs, hold_output, restarts
from ulysses.config.command_line import check
from ulysses.config.schema import Config
from ulysses.config.section import error_context
from ulysses.data.serve.dataset import TokenizedDataset
from ulysses.data.serve.steps import StepLoader
from ulysses.disk import replace_file
from ulysses.options import gradient_policies
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.hardware import GIB, slow_products, this_machine
from ulysses.plan.layer_cost import model_flops
from ulysses.plan.planner import (
    check_host,
    choose_memory,
    memory_line,
    micro_batch_line,
    run_question,
)
from ulysses.plan.step_cost import predict
from ulysses.run.build import frozen_engine, open_data, step_loader, trained_engine
from ulysses.run.export_model import export_model, save_tokenizer
from ulysses.run.metrics import MetricsLog
from ulysses.run.trackers import TrackedRun
from ulysses.run.trainer import Trainer
from ulysses.stages.base import AuxiliaryModel
from ulysses.watch.watch import Watch
from ulysses.zero.construct import (
    end_distributed,
    initialize_distributed,
    lift_time_limits,
    meet,
)
from ulysses.zero.engine import ZeroEngine, full_parameters

if TYPE_CHECKING:
    from ulysses.rl.rollout import Rollout
    from ulysses.run.samples import Samples

IMPORT_SECONDS = 60.0  # by which a process may start later than another


class TrainingRun:
    """Train by a configuration; use it as a context manager so that everything is released even after an error.

    The configuration is a checked one, or a dict of nested tables as in the TOML file. Raises ConfigError for anything
    that cannot be honoured, before any process group or allocation.
    """

    def __init__(
        self,
        config: Config | dict[str, object],
        *,
        debug: bool = False,
        verify_weights: bool = False,
        imports: float = 0.0,
    ) -> None:
        config = check(config) if isinstance(config, dict) else config
        self.config = config
        self.debug, self.verify_weights = debug, verify_weights
        self.log: MetricsLog | None = None  # of rank 0, while it trains
        self.watch = Watch(config.run.stall_warning, config.run.timeout, imports)
        self.watch.start(partial(meet, max(config.run.timeout, IMPORT_SECONDS)))
        try:
            self.watch.phase("checks")
            self.inputs = inputs = prepare(config)
            self.config = inputs.config
            self.watch.phase("tokenising")
            self.say("reading the data ...")
            self.train_data, self.eval_data = data = open_data(inputs)
            self.digests = digests_of_inputs(inputs, *data)
            self.changes: list[str] = []  # since the checkpoint that the run continues
            if inputs.resume_from:
                self.changes = changes(inputs.config, inputs.resume_from, self.digests)
            self.watch.pause()  # a host program may look at the data, and never enter
        except BaseException:
            self.watch.stop()
            raise
        self.trainer: Trainer | None = None  # from entering on
        self.samples: Samples | None = None  # of run.samples, while it trains
        self.language_models: dict[str, ZeroEngine] = {}  # the frozen ones by their roles
        self.resources = ExitStack()  # what must be released, whatever happens

    def __enter__(self) -> "TrainingRun":
        self.watch.phase("start")
        self.device = initialize_distributed(self.watch.wait_for_store())
        try:
            self._meet()
            self._plan()
            self.trainer = self._build()
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _meet(self) -> None:
        """Refuse processes that differ, and take the run folder."""
        inputs, output = self.inputs, self.config.output
        if dist.get_world_size() > 1:
            with error_context():
                agree(facts_of(inputs, self.digests, self.verify_weights))
        with error_context():
            self.run_id, left_by = hold_output(self.config, self.resources)
        if left_by:
            self.say(f"{output} was left by {left_by}, which has ended, and is taken over")
        if restarts(self.config.run):
            self.say("torchrun may restart this run, so run.resume is auto")

    def _plan(self) -> None:
        """Choose the degree of sequence parallelism, the micro-batches and what layers keep, and say so."""
        config, inputs, shape = self.config, self.inputs, self.inputs.shape
        torch.backends.cuda.matmul.allow_tf32 = False
        machine = this_machine(self.device, config.memory.host_memory)
        question = run_question(config, shape, machine, self.train_data)
        if config.parallel.sequence_parallel_size == "auto":
            self.say(f"parallel.sequence_parallel_size is auto: {question.sp}")
        heads = question.common_heads
        self.mesh = ParallelMesh(question.sp, num_heads=heads, windows=shape.windows)
        self.watch.phase("kernels")
        with error_context():
            given = config, inputs.stage, shape, inputs.attention, self.device, self.mesh
            check_kernel(*given)
            self.memory = memory = choose_memory(question)
            check_host(config, memory)
        self.say(f"attention kernel: {inputs.kernel.name} ({inputs.kernel.reason})")
        if self.device.type == "cpu" and (slow := slow_products(config.model.dtype)):
            self.say(slow)
        for name, data in (("training", self.train_data), ("held-out", self.eval_data)):
            if data:
                self.say(f"{name} data: {data.report}")
        self.say(memory_line(memory))
        self.say(micro_batch_line(question, config.batch.tokens_per_microbatch == "auto"))

    def _build(self) -> Trainer:
        """Put the parts together."""
        config, inputs, memory = self.config, self.inputs, self.memory
        self.watch.phase("building the model")
        self.say(f"building the model of {memory.question.model.parameters:,} parameters ...")
        self.engine = trained_engine(
            config, inputs.weights, self.mesh, memory, inputs.attention
        )
        self._hold(self.engine)
        lift_time_limits()  # the groups exist, and the watch ends a run that does not move
        self.watch.phase("preparing the stage")
        stage = inputs.stage.build(self)
        train_data, eval_data = stage.extend_data(self)
        if memory.graphs:  # which take whole sequences
            train_data = train_data.apart
        loader = self.loader(train_data)
        for line in remarks(inputs, loader):
            self.say(line)
        return Trainer(
            stage=stage,
            loader=stage.loader(loader),
            eval_loader=eval_data and self.loader(eval_data, evaluation=True),
            total_steps=stage.total_steps(loader),
            policies=gradient_policies(config.gradients),
            flops=partial(model_flops, memory.question.model),
            predicted_gib=predict(memory).allocated / GIB
            if memory.question.machine.is_gpu
            else 0.0,
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
        """Restore the checkpoint that the run continues and, now that nothing can be refused, begin its folder."""
        config, inputs, checkpoint = self.config, self.inputs, self.inputs.resume_from
        if checkpoint is not None:
            self.trainer.resume(checkpoint)
            self.say(f"resumed {checkpoint} at step {self.trainer.step}")
            for change in self.changes:
                self.say(f"  changed since then: {change}")
        if self.mesh.is_main:
            os.makedirs(os.path.realpath(config.output / "checkpoints"), exist_ok=True)
            replace_file(config.output / "config.json", config.model_dump_json(indent=2))
            save_tokenizer(inputs, config.output / "tokenizer")
        dist.barrier()

    # ---------------------------------------------------------------- what a stage asks for

    def loader(self, dataset: TokenizedDataset, *, evaluation: bool = False) -> StepLoader:
        """Return the loader of this data-parallel group; an evaluation takes every example once, in order."""
        place = self.mesh.data_parallel_size, self.mesh.dp_rank
        tokens = self.memory.tokens_per_microbatch
        return step_loader(self.inputs, dataset, tokens, *place, evaluation=evaluation)

    def frozen(self, model: AuxiliaryModel) -> ZeroEngine:
        """Build a frozen engine of another model, or find one of the initial policy."""
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
            resident=self.memory.resident,
        )
        self._hold(engine)
        if not model.is_reward:
            self.language_models[model.role] = engine
        return engine

    def _hold(self, engine: ZeroEngine) -> None:
        """Release an engine at the end of the run; each pass that it begins is progress."""
        engine.module.register_forward_pre_hook(lambda *_: self.watch.renew())
        self.resources.callback(engine.destroy)

    # ---------------------------------------------------------------- the run

    def train(self) -> None:
        """Train to the end (or to a requested stop), evaluating, saving and exporting as configured."""
        trainer, run, folder = self.trainer, self.config.run, self.config.output
        if self.mesh.is_main:
            settings = {"run_id": self.run_id, **trainer.description["config"]}
            # run.wandb is short for the tracker and its project
            project = run.wandb or run.project
            names = [*run.trackers, "wandb"] if run.wandb else run.trackers
            tracked = TrackedRun(folder, project, self.run_id, trainer.step, settings)
            self.log = MetricsLog(tracked, names, trainer.total_steps)
            self.resources.callback(self.log.close)
        self.resources.enter_context(self.watch.signals())
        if run.samples:
            from ulysses.run.samples import Samples

            self.samples = Samples(self)
            if self.log:
                self.log.bar.unpause()  # what comes once tells nothing of the time that remains
        trainer.train(self.log, self.samples and self.samples.ask)
        if run.export and not trainer.stop_requested:
            out = folder / "export"
            if out.exists():  # of the run that was continued, at an earlier end
                out = folder / f"export-step-{trainer.step}"
            if out.exists():
                self.say(f"{out} is there already")
            else:
                self.export(out)
        if self.mesh.world_size == 1:
            self.watch.pause()  # nobody waits for what else the program does

    def show(self, rollout: "Rollout") -> None:
        """Let run.samples show a finished rollout."""
        if self.samples:
            self.samples.show(rollout)

    def export(self, folder: Path, *, for_servers: bool = False) -> None:
        """Write the trained model (or its adapters) in Hugging Face format; all ranks call it together.

        `for_servers` writes whole weights, with the adapters added, and says nothing.
        """
        config, step = self.config, self.trainer.step
        self.watch.phase("export")
        dtype = config.model.dtype if for_servers else config.export_dtype

        def read(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
            return full_parameters(
                self.engine,
                lambda name: wanted(name) and not name.startswith(VALUE),
                exact=dtype > config.model.dtype,
            )

        given = read, folder, self.inputs.shape, config, step
        note = export_model(*given, dtype=dtype, for_servers=for_servers)
        if self.mesh.is_main and not for_servers:
            self.say(f"exported {folder}; {note}" if note else f"exported {folder}")
        dist.barrier()

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one; other ranks than the first say it with --debug only."""
        rank = environment.rank()
        if self.log is not None:
            self.log.bar.write(text)
        elif rank == 0:
            print(text, flush=True)
        elif self.debug:
            print(f"[rank {rank}] {text}", flush=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release files, engines and the process group, which after an error still has to tell the other processes."""
        if error is not None:
            self.watch.report_failure(error)  # while the signals of a launcher are still caught
            if self.log is not None:
                self.log.fail()
        try:
            self.resources.close()
        except BaseException:
            self.watch.stop()  # who catches this error tells it
            raise
        self.trainer = self.engine = self.log = None
        if dist.get_world_size() > 1 and error is not None:
            self.watch.stop()  # this process may go on, and a later run's good end is no failure
            return
        self.watch.phase("end")
        dist.barrier()
        self.watch.stop()
        dist.barrier()  # nobody takes the store away from one who still watches it
        end_distributed()
