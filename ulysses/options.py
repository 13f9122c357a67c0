"""The doors of the engine's options: for each name that a setting may have, the one import that enters the option.

An option's files can be deleted (CONTRIBUTING lists them). A setting that asks for a deleted one is refused by name,
before any work.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from models.arch import ModelConfig
from ulysses.config.schema import Config, GradientsSection
from ulysses.config.section import ConfigError
from ulysses.gradients.chain import GradientPolicyChain, build_chain
from ulysses.run.trackers import Tracker
from ulysses.stages.base import Stage
from ulysses.stages.sft import SftStage


def _pt() -> type[Stage]:
    from ulysses.stages.pt import PtStage

    return PtStage


def _distill() -> type[Stage]:
    from ulysses.stages.distill import DistillStage

    return DistillStage


def _on_policy() -> type[Stage]:
    from ulysses.rl.on_policy import OnPolicyStage

    return OnPolicyStage


def _rm() -> type[Stage]:
    from ulysses.stages.rm import RmStage

    return RmStage


def _dpo() -> type[Stage]:
    from ulysses.stages.dpo import DpoStage

    return DpoStage


def _kto() -> type[Stage]:
    from ulysses.stages.kto import KtoStage

    return KtoStage


def _ppo() -> type[Stage]:
    from ulysses.rl.ppo import PpoStage

    return PpoStage


STAGES: dict[str, Callable[[], type[Stage]]] = {
    "pt": _pt,
    "sft": lambda: SftStage,
    "distill": _distill,
    "rm": _rm,
    "dpo": _dpo,
    "kto": _kto,
    "ppo": _ppo,
}


def _tensorboard() -> type[Tracker]:
    from ulysses.run.trackers.tensorboard import TensorBoard

    return TensorBoard


def _wandb() -> type[Tracker]:
    from ulysses.run.trackers.wandb import Wandb

    return Wandb


def _mlflow() -> type[Tracker]:
    from ulysses.run.trackers.mlflow import Mlflow

    return Mlflow


def _trackio() -> type[Tracker]:
    from ulysses.run.trackers.trackio import Trackio

    return Trackio


def _swanlab() -> type[Tracker]:
    from ulysses.run.trackers.swanlab import Swanlab

    return Swanlab


# The names in run.trackers, each of which is also the name of the package that it needs.
TRACKERS: dict[str, Callable[[], type[Tracker]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "swanlab": _swanlab,
}


def _absent(what: str, module: str | None) -> str:
    return f"{what} needs {module}, which is not part of this installation; install the whole engine"


def check_parts(config: Config, shape: ModelConfig | None = None) -> Iterator[str]:
    """Yield sentences about options that settings or a model's layers need and this installation lacks."""
    model, ppo = config.model, config.ppo
    for what, is_wanted, module in (
        ("model.lora.rank", model.lora.rank, "models.lora"),
        ("model.quantize", model.quantize != "none", "models.quantized"),
        ("optimizer.moments", config.optimizer.moments == "8bit", "ulysses.zero.eight_bit"),
        ("run.samples", config.run.samples, "ulysses.run.samples"),
        ("ppo.rollout", ppo.rollout, "ulysses.rl.episodes"),
        ("ppo.sampler_sync", ppo.sampler_sync != "disk", "ulysses.rl.weight_push"),
        ('ppo.sampler "rows"', "rows" in ppo.sampler, "ulysses.rl.rows"),
        *(
            (f'run.trackers "{name}"', True, f"ulysses.run.trackers.{name}")
            for name in config.run.trackers
            if name in TRACKERS
        ),
        ("a model with experts", shape and shape.moe, "models.moe"),
        ("a model with linear attention", shape and shape.delta, "models.delta"),
    ):
        if not is_wanted:
            continue
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:  # the folder around it has been taken away, too
            spec = None
        if spec is None:
            yield _absent(what, module)


def stage_of(config: Config) -> Stage:
    """Return the stage of a configuration, which is not yet built around an engine.

    Raises ConfigError, one sentence, if the stage's files have been taken away.
    """
    what, door = f'stage "{config.stage}"', STAGES[config.stage]
    if getattr(getattr(config, config.stage), "on_policy", 0):  # a setting of distill alone
        what, door = f"{config.stage}.on_policy", _on_policy
    try:
        return door()(config)
    except ModuleNotFoundError as error:
        raise ConfigError(_absent(what, error.name)) from None


def build_policies(settings: GradientsSection) -> GradientPolicyChain:
    """Build the chain of gradient policies; ValueError names the table and the key that cannot be honoured."""
    return build_chain(settings.policies or settings.preset, settings.max_norm)
