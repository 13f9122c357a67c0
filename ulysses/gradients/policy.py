"""What a gradient policy is, and what it is told about the optimizer step."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ulysses.gradients.gradients import Gradients

Report = dict[str, float]  # metric name -> value


@dataclass
class StepContext:
    """Describe one optimizer step to the gradient policies, and collect their decisions.

    step: optimizer steps taken before this one. loss: global mean of the step's objective. lr: the schedule's value.
    Decisions: `lr_scale` multiplies the learning rate of this step alone. `skip` leaves the weights unchanged in this
    step, and `stop` ends the run before they change; each holds the reason, or None.
    """

    step: int
    total_steps: int
    loss: float = 0.0
    lr: float = 0.0
    seed: int = 0
    lr_scale: float = 1.0
    skip: str | None = None
    stop: str | None = None


@dataclass
class GradientPolicy:
    """See, and possibly change, the reduced gradient once per optimizer step.

    A policy is a dataclass. The fields that its constructor takes are its settings; a number whose default is above 0
    must be above 0, except max_norm, where 0 means no clipping. The fields with `init=False` are its state, which
    checkpoints hold as plain JSON. Decisions may depend only on these, on the context and on the floats that
    `Gradients` returns (equal on all ranks), so that all ranks decide alike. `reads` names the statistics besides
    "norm" that `apply` asks for in every step ("mean_abs"): the chain measures those of all its policies at once.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            is_positive = f.init and isinstance(f.default, float | int) and f.default > 0
            does_not_clip = f.name == "max_norm" and value == 0
            if is_positive and value <= 0 and not does_not_clip:
                raise ValueError(f"{f.name} is {value} but must be above 0")

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Act, and return what was seen and done as metrics, whose names begin with "grad/"."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.init}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])
