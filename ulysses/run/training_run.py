"""TrainingRun: a configuration in, a trained and exported model out. It only puts the parts together.

configuration -> checks (no allocation) -> data -> processes and mesh -> engine -> stage -> Trainer -> export
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.decoder import VALUE
from ulysses import environment
from ulysses.check.agreement import agree, facts_of, hold_output
from ulysses.check.continuation import changes, digests_of_inputs
from ulysses.check.kernel_proof import prove_once
from ulysses.check.preflight import prepare
from ulysses.config.command_line import check
from ulysses.config.schema import Config
from ulysses.disk import replace_file
from ulysses.parallel.layout import head_layout
from ulysses.parallel.mesh import ParallelMesh
from ulysses.plan.memory_choice import (
    choose_memory,
    memory_line,
    micro_batch_line,
    planner_run,
    this_machine,
)
from ulysses.run.build import build_engine
from ulysses.run.checkpoint import clear_run_folder, restarts
from ulysses.run.export_model import export_model, save_tokenizer
from ulysses.run.metrics import MetricsLog, model_flops, slow_products
from ulysses.run.optim import gradient_policies
from ulysses.run.trainer import Trainer
from ulysses.stages.base import AuxiliaryModel
from ulysses.watch.watch import Watch
from ulysses.zero.construct import (
    end_distributed,
    initialize_distributed,
    lift_time_limits,
    meet,
)
from ulysses.zero.engine import full_parameters

IMPORT_SECONDS = 60.0  # by which a process may start later than another


class TrainingRun:
    """Train by a configuration; use it as a context manager so that everything is released even after an error.

    The configuration is a checked one, or a dict of nested tables as in the TOML file. Raises ConfigError for anything
    that cannot be honoured, before any process group or allocation.
    """

    def __init__(
        self,
        config: Config | dict[str, Any],
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
            self.prepared = prepare(config)
            self.watch.phase("tokenising")
            self.say("reading the data ...")
            self.train_data, self.eval_data = data = self.prepared.open_data()
            frozen, cache = self.prepared.frozen, Path(config.data.cache)
            self.inputs = digests_of_inputs(*data, frozen, cache)
            self.changes = changes(config, self.prepared.resume_from, self.inputs)
            self.watch.pause()  # a host program may look at the data, and never enter
        except BaseException:
            self.watch.stop()
            raise
        self.trainer: Any = None  # a Trainer, from entering on
        self.resources = ExitStack()  # what must be released, whatever happens

    def __enter__(self) -> "TrainingRun":
        self.watch.phase("start")
        self.watch.leave_witness()
        self.device = initialize_distributed(self.watch.wait_for_store())
        try:
            self.trainer = self._build()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _build(self) -> Trainer:
        """Put all parts together, and restore the checkpoint that the run continues."""
        config, prepared, shape = self.config, self.prepared, self.prepared.shape
        stage, resume_from = prepared.stage, prepared.resume_from
        # refuse to start if the ranks differ
        agree(facts_of(prepared, self.inputs, verify=self.verify_weights))
        self.run_id, before = hold_output(config.output, self.resources)
        if before:
            self.say(
                f"{config.output} was left by {before}, which has ended, and is taken over"
            )
        torch.backends.cuda.matmul.allow_tf32 = False
        machine = this_machine(self.device, config.memory.host_memory)
        case = planner_run(prepared, machine, self.train_data)
        if config.parallel.sequence_parallel_size == "auto":
            self.say(f"parallel.sequence_parallel_size is auto: {case.sp}")
        mesh = self.mesh = ParallelMesh(
            case.sp, num_heads=case.common_heads, windows=shape.windows
        )
        # what may not work on this machine is tried before anything is written
        heads = head_layout(
            shape.num_attention_heads, shape.num_key_value_heads, mesh.head_parallel_size
        )
        self.watch.phase("kernels")
        prove_once(
            Path(config.data.cache).expanduser(),
            prepared.attention,
            self.device,
            getattr(torch, config.model.dtype),
            heads.query,
            heads.key,
            shape.head_dim,
            stage.requirements.longest_example,
            shape.windows or (None,),
        )
        if restarts(config.run):
            self.say("torchrun may restart this run, so run.resume is auto")
        self.say(f"attention kernel: {prepared.kernel.name} ({prepared.kernel.reason})")
        if self.device.type == "cpu" and (slow := slow_products(config.model.dtype)):
            self.say(slow)
        for name, data in (("training", self.train_data), ("held-out", self.eval_data)):
            if data:
                self.say(f"{name} data: {data.report}")
        memory = self.memory = choose_memory(case)
        self.say(memory_line(memory))
        self.say(micro_batch_line(memory, config.batch.tokens_per_microbatch == "auto"))
        self.watch.phase("building the model")
        self.say(f"building the model of {memory.model.parameters:,} parameters ...")
        self.engine = build_engine(
            config, prepared.weights, mesh, memory, attention=prepared.attention
        )
        self.resources.callback(self.engine.destroy)
        lift_time_limits()  # the groups exist, and the watch ends a run that does not move
        self.watch.phase("preparing the stage")
        stage = stage.build(self)
        train_data, eval_data = stage.extend_data(self)
        loader = self.loader(train_data, launched_tokens=memory.launched_tokens)
        for line in prepared.remarks(loader):
            self.say(line)
        trainer = Trainer(
            stage=stage,
            loader=stage.loader(loader),
            eval_loader=eval_data and self.loader(eval_data, evaluation=True),
            total_steps=stage.total_steps(loader),
            policies=gradient_policies(config.gradients),
            flops=partial(model_flops, memory.model),
            description={
                "run": self.run_id,
                "config": config.model_dump(mode="json"),
                "shape": shape.to_hf(),
                "inputs": self.inputs,
            },
            say=self.say,
            watch=self.watch,
        )
        if resume_from is not None:
            trainer.resume(resume_from)
            self.say(f"resumed {resume_from} at step {trainer.step}")
            for change in self.changes:
                self.say(f"  changed since then: {change}")
        if mesh.is_main:  # now that nothing can be refused any more
            if config.run.overwrite:
                for path in clear_run_folder(config.output, resume_from):
                    self.say(f"deleted {path}")
            (config.output / "checkpoints").mkdir(exist_ok=True)
            replace_file(config.output / "config.json", config.model_dump_json(indent=2))
            save_tokenizer(prepared, config.output / "tokenizer")
        dist.barrier()
        return trainer

    # ---------------------------------------------------------------- what a stage asks for

    def loader(self, dataset: Any, *, evaluation: bool = False, **options: Any) -> Any:
        """Return the loader of this data-parallel group; an evaluation is a pass without gradient."""
        mesh, memory = self.mesh, self.memory
        tokens = memory.pass_tokens if evaluation else memory.tokens
        place = mesh.data_parallel_size, mesh.dp_rank
        return self.prepared.loader(dataset, tokens, *place, evaluation=evaluation, **options)

    def frozen(self, model: AuxiliaryModel) -> Any:
        """Build a frozen engine of another model, or find one of the initial policy."""
        if model.shares_weights:
            if not self.config.model.lora.rank:
                return self.engine
            from models.lora import BasePolicy  # peft is an optional dependency

            return BasePolicy(self.engine)
        weights = self.prepared.others[model.setting] if model.path else self.prepared.weights
        engine = build_engine(
            self.config,
            weights,
            self.mesh,
            attention=self.prepared.attention,
            reward=model.is_reward,
            resident=self.memory.resident,
        )
        self.resources.callback(engine.destroy)
        return engine

    # ---------------------------------------------------------------- the run

    def train(self) -> None:
        """Train to the end (or to a requested stop), evaluating, saving and exporting as configured."""
        trainer, run, folder, wandb = self.trainer, self.config.run, self.config.output, None
        if self.mesh.is_main:
            if run.wandb:
                from wandb import init

                wandb = init(
                    project=run.wandb,
                    config=trainer.description["config"],
                    name=folder.name,
                    dir=folder,
                    resume="allow",
                )
                self.resources.callback(wandb.finish)
            self.log = MetricsLog(folder, trainer.total_steps, trainer.step, self.run_id, wandb)
            self.resources.callback(self.log.close)
        self.resources.enter_context(self.watch.signals())
        trainer.train(self.log)
        if run.export and not trainer.stop_requested:
            self.export(folder / "export")

    def export(self, folder: Path, *, for_servers: bool = False) -> None:
        """Write the trained model (or its adapters) in Hugging Face format; all ranks call it together.

        `for_servers` writes whole weights, with the adapters added, and says nothing.
        """
        config, step = self.config, self.trainer.step
        self.watch.phase("export")

        def read(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
            found = full_parameters(
                self.engine, lambda name: wanted(name) and not name.startswith(VALUE)
            )
            return self.prepared.weights.originals(found, self.engine.module, for_servers)

        merge = for_servers or config.model.lora.merge
        note = export_model(read, folder, self.prepared.shape, config, step, merge=merge)
        if self.mesh.is_main and not for_servers:
            self.say(f"exported {folder}" + f"; {note}" * bool(note))
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Release files, engines and the process group, which after an error still has to tell the other processes."""
        self.watch.report_failure(error)  # while the signals of a launcher are still caught
        self.resources.close()
        self.trainer = self.engine = self.log = None
        if dist.get_world_size() > 1 and error is not None:
            self.watch.stop()  # this process may go on, and a later run's good end is no failure
            return
        self.watch.phase("end")
        dist.barrier()
        self.watch.stop()
        dist.barrier()  # nobody takes the store away from one who still watches it
        end_distributed()
