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

    A policy is a dataclass. The fields that its constructor takes are its settings; those with `init=False` are its
    state, which checkpoints hold as plain JSON. Decisions may depend only on these, on the context and on the floats
    that `Gradients` returns (equal on all ranks), so that all ranks decide alike. `reads` names the statistics besides
    "norm" that `apply` asks for in every step ("mean_abs"): the chain measures those of all its policies at once.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()

    def apply(self, gradients: Gradients, context: StepContext) -> Report:
        """Act, and return what was seen and done as metrics, whose names begin with "grad/"."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.init}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"the checkpoint holds {sorted(state)} for the gradient policy {self.name}, whose state is "
                f"{sorted(self.state_dict())}; use a checkpoint of the same [gradients] section"
            )
        vars(self).update(state)
