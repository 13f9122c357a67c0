"""TrainingRun: the composition root. Configuration in, trained and exported model out.

Config -> checks (no allocation) -> processes and mesh -> tokenised data -> engine -> stage -> Trainer -> export
"""

import hashlib
import json
import os
from contextlib import ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ulysses.gradients.chain import GradientPolicyChain
from ulysses.gradients.table import GradientTable
from ulysses.parallel.kernels import kernels_of, prove_kernel
from ulysses.parallel.layout import head_layout
from ulysses.parallel.mesh import ParallelMesh
from ulysses.training.build import StageParts, build_engine, open_data, step_loader, weights_of
from ulysses.training.checkpoint import Checkpoints, read_run_state, remove_folder
from ulysses.training.checks import check_run, data_digest
from ulysses.training.command_line import parse_command_line
from ulysses.training.config import DTYPES, Config
from ulysses.training.export import export_engine, save_tokenizer
from ulysses.training.failure import FailureWatch, StepError
from ulysses.training.memory import (
    adapter_parameters,
    choose_memory,
    planner_work,
    this_machine,
)
from ulysses.training.metrics import MetricsLog, device_peak_flops, model_flops
from ulysses.training.optim import learning_rate
from ulysses.training.section import ConfigError
from ulysses.training.trainer import Trainer
from ulysses.zero.canary import check_deepspeed
from ulysses.zero.construct import end_distributed, initialize_distributed


class TrainingRun:
    """Train by a configuration; use it as a context manager so that everything is released even after an error.

    Raises ConfigError for anything that cannot be honoured, before any process group or allocation.
    """

    def __init__(self, config: Config, *, debug: bool = False) -> None:
        self.config = config
        self.debug = debug
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.plan = check_run(config, self.world_size)
        self.train_data: Any
        self.eval_data: Any
        self.train_data, self.eval_data = open_data(self.plan)
        for data in (self.train_data, self.eval_data):
            if data is not None:
                step_loader(self.plan, data, 1, 0)  # refuses sequences longer than the budget
        self.log: MetricsLog | None = None
        self.trainer: Trainer | None = None
        self.engine: Any = None
        self.stage: Any = None
        self.resources = ExitStack()  # what must be released, whatever happens
        self.ended: dict[str, Any] = {}  # the last status

    @classmethod
    def from_toml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "TrainingRun":
        """Read a TOML file; `overrides` maps dotted keys to values, paths included."""
        arguments = ["--config", str(path)]
        for key, value in (overrides or {}).items():
            arguments += [
                f"--{key}",
                str(value) if isinstance(value, str | Path) else json.dumps(value, default=str),
            ]
        return cls(parse_command_line(arguments).config)

    def __enter__(self) -> "TrainingRun":
        self.device = initialize_distributed()
        self.watch = FailureWatch()
        try:
            self._same_everywhere()
            torch.backends.cuda.matmul.allow_tf32 = False
            self.mesh = ParallelMesh(
                self.config.parallel.sequence_parallel_size, num_heads=self.plan.num_heads
            )
            self._prove_kernel()
            check_deepspeed(self.device)
            self._prepare_folder()
            self._build()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _build(self) -> None:
        config, plan, shape = self.config, self.plan, self.plan.shape
        self._say(f"attention kernel: {plan.kernel} ({plan.kernel_reason})")
        for name, data in (("training", self.train_data), ("held-out", self.eval_data)):
            if data is not None:
                self._say(f"{name} data: {data.report}")
        source = weights_of(config, shape, plan.folder)
        machine = this_machine(self.device, device_peak_flops(), config.memory.host_memory)
        memory = choose_memory(
            config,
            shape,
            machine,
            planner_work(config, config.stage_class.budget(config), world=plan.world_size),
        )
        self._say(memory.line)
        self.engine = build_engine(
            config,
            shape,
            source,
            self.mesh,
            config.model.attention,
            memory=memory,
        )
        self.resources.callback(self.engine.destroy)
        parts = StageParts(
            plan,
            self.engine,
            self.mesh,
            self.device,
            self.train_data,
            self.eval_data,
            self.resume_from is None,
            self._say,
            self.resources,
        )
        self.stage = config.stage_class.build(parts)
        self.train_data, self.eval_data = parts.train_data, parts.eval_data
        loader = parts.loader(self.train_data)
        total = parts.total_steps(loader)
        self.checkpoints = Checkpoints(config.output / "checkpoints", config.run.keep)
        head = shape.vocab_size * shape.hidden_size
        adapters = adapter_parameters(config, shape) if config.model.lora.rank else 0
        self.trainer = Trainer(
            mesh=self.mesh,
            engine=self.engine,
            stage=self.stage,
            loader=self.stage.loader(loader),
            eval_loader=parts.loader(self.eval_data, evaluation=True)
            if self.eval_data is not None
            else None,
            total_steps=total,
            learning_rate=lambda step: learning_rate(step, total, config.optimizer),
            policies=self._policies(),
            flops=lambda tokens, squares, projected: model_flops(
                shape.num_parameters(),
                shape.num_hidden_layers,
                shape.num_attention_heads * shape.head_dim,
                tokens,
                squares,
                head=head,
                projected=projected if not config.stage_class.reward else 0.0,
                adapters=adapters,
            ),
            peak_flops=device_peak_flops(),
            seed=config.run.seed,
        )

    def _prove_kernel(self) -> None:
        """Refuse to start, before anything is written, if attention is wrong on this device."""
        shape = self.plan.shape
        local = head_layout(
            shape.num_attention_heads, shape.num_key_value_heads, self.mesh.head_parallel_size
        )
        name, dtype = self.config.model.attention, DTYPES[self.config.model.dtype]
        for kernel in kernels_of(
            name, self.device, dtype, shape.head_dim, deterministic=self.config.run.deterministic
        ):
            prove_kernel(kernel, self.device, dtype, local.query, local.key, shape.head_dim)

    def _policies(self) -> GradientPolicyChain:
        chain = self.config.gradients.chain()
        if self.debug_anywhere:
            chain.watch = GradientTable(
                self.config.gradients.table_every, self._say if self.mesh.is_main else None
            )
        return chain

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Train to the end (or to a requested stop), evaluating, saving and exporting as configured."""
        trainer, run = self.trainer, self.config.run
        assert trainer is not None
        if self.resume_from is not None:
            trainer.load_state_dict(
                self.checkpoints.load(self.resume_from, {"policy": self.engine})
            )
            self.stage.load(self.resume_from)
            self._say(f"resumed {self.resume_from} at step {trainer.step}")
        if self.mesh.is_main:
            self.log = MetricsLog(
                self.config.output,
                total_steps=trainer.total_steps,
                first_step=trainer.step,
                wandb_project=run.wandb,
                config=self._resolved(),
            )
            self.resources.callback(self.log.close)
        trainer.stop_on_signal(self.resources)
        try:
            self._loop(trainer)
        except Exception as error:
            raise StepError(trainer.step + 1, error) from error
        if not trainer.stop_requested and run.export:
            self.export(self.config.output / "export")

    def _loop(self, trainer: Trainer) -> None:
        run = self.config.run
        saved = trainer.step
        while trainer.step < trainer.total_steps and not trainer.stop_requested:
            profiling = run.profile and trainer.step + 1 == run.profile
            with _profiler(self.config.output, profiling, self.mesh.rank):
                values = trainer.train_step()
            step = trainer.step
            if trainer.skipped:
                self._say(f"skipped {trainer.skipped}")
            last = step == trainer.total_steps
            improved = False
            if (run.eval_every and step % run.eval_every == 0) or last:
                values = {**values, **trainer.evaluate()}
                loss = values.get("eval/loss")
                improved = loss is not None and (trainer.best is None or loss < trainer.best[1])
                if improved:
                    trainer.best = (step, loss)
            self._report(trainer, step, values, last)
            due = run.save_every and (step % run.save_every == 0 or improved)
            if due or (last and run.save_last) or trainer.stop_requested:
                self._save(trainer, step)
                saved = step
        if trainer.stop_requested:
            self._say(
                f"stopped at step {trainer.step} as requested; checkpoint step-{saved} continues with --run.resume auto"
            )

    def _save(self, trainer: Trainer, step: int) -> None:
        state = {
            **trainer.state_dict(),
            "config": self._resolved(),
            "shape": self.plan.shape.to_hf(),
        }
        self.checkpoints.save(
            step,
            {"policy": self.engine},
            state,
            best=trainer.best[0] if trainer.best else None,
            more=self.stage.save,
        )

    def _report(self, trainer: Trainer, step: int, values: dict[str, float], last: bool) -> None:
        if self.log is None:
            return
        shown = {
            "loss": f"{values['loss']:.4f}",
            "lr": f"{values['lr']:.2e}",
            "tok/s": f"{values['tokens_per_second']:.0f}",
        }
        self.log.advance(step, shown)
        evaluated = [f"{k} {v:.4f}" for k, v in sorted(values.items()) if k.startswith("eval/")]
        if step % self.config.run.log_every == 0 or last or evaluated:
            self.log.write(step, values)
        if evaluated:
            self.log.say(f"step {step}: " + ", ".join(evaluated))

    def export(self, folder: str | Path) -> Path:
        """Write the trained model (or its adapters) in Hugging Face format; all ranks call it together."""
        folder = Path(folder)
        step = self.trainer.step if self.trainer is not None else 0
        main = self.mesh.is_main
        export_engine(self.engine, folder, self.plan.shape, self.config, step=step, main=main)
        if main:
            self._say(f"exported {folder}")
        dist.barrier()
        return folder

    def status(self) -> dict[str, Any]:
        """Return stage, step, total_steps, world (processes), mesh, the last step's loss, tokens and speed, and eta in seconds."""
        t = self.trainer
        if t is None:
            return self.ended
        metrics = t.metrics
        return {
            "stage": self.config.stage,
            "step": t.step,
            "total_steps": t.total_steps,
            "world": self.mesh.world_size,
            "mesh": {
                "sequence_parallel_size": self.mesh.sequence_parallel_size,
                "data_parallel_size": self.mesh.data_parallel_size,
            },
            "loss": metrics.get("loss"),
            "tokens": metrics.get("tokens"),
            "tokens_per_second": metrics.get("tokens_per_second"),
            "eta": (t.total_steps - t.step) * metrics["seconds"] if metrics else None,
        }

    # ---------------------------------------------------------------- folder and agreement

    def _prepare_folder(self) -> None:
        """Create or clear the run folder and find what to resume from; the same decision on every rank."""
        config, output = self.config, self.config.output
        self.resume_from = self.plan.resume_from
        if self.mesh.is_main:
            if config.run.overwrite and self.resume_from is None:
                for name in ("checkpoints", "export", "tensorboard", "metrics.jsonl"):
                    path = output / name
                    remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif config.run.overwrite:
                step = read_run_state(self.resume_from)["step"]
                for path in Checkpoints(output / "checkpoints", 0).not_before(
                    self.resume_from, step
                ):
                    remove_folder(path)
                    self._say(f"deleted {path}, which came after {self.resume_from}")
            (output / "checkpoints").mkdir(parents=True, exist_ok=True)
            (output / "config.json").write_text(json.dumps(self._resolved(), indent=2))
            save_tokenizer(self.plan, output / "tokenizer")
        dist.barrier()

    def _resolved(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def _same_everywhere(self) -> None:
        """Refuse to start if configuration, data or versions differ between ranks; learn whether any of them debugs."""
        places = [data_digest(self.plan), str(self.plan.resume_from)]
        text = json.dumps(
            [self._resolved(), *places, torch.__version__, version("deepspeed")], sort_keys=True
        )
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        low = torch.tensor(
            [digest, -digest, -int(self.debug)], dtype=torch.int64, device=self.device
        )
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        self.debug_anywhere = (
            int(low[2]) != 0
        )  # what all must do together follows from this, never from a rank's own flag
        if int(low[0]) != -int(low[1]):
            raise ConfigError(
                "configuration, data, checkpoint or library versions differ between the processes; start all of them with the "
                "same files and versions"
            )

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log.say(text)
        elif int(os.environ.get("RANK", "0")) == 0:
            print(text, flush=True)
        if self.debug and int(os.environ.get("RANK", "0")) != 0:
            print(f"[rank {os.environ['RANK']}] {text}", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Release files, engines and the process group; after an error other processes still need the latter to be told."""
        self.ended = self.status()
        self.resources.close()
        self.log = self.trainer = self.stage = self.engine = None
        if self.world_size > 1 and error is not None:
            self.watch.close()  # this process may go on, and a later run's good end is no failure
            return
        dist.barrier()
        self.watch.close()
        dist.barrier()  # nobody takes the store away from one who still watches it
        end_distributed()


def _profiler(folder: Path, active: Any, rank: int) -> Any:
    if not active:
        return nullcontext()
    activities = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    )
    file = str(folder / f"profile-rank{rank}.json.gz")
    return torch.profiler.profile(
        activities=activities, on_trace_ready=lambda profile: profile.export_chrome_trace(file)
    )
