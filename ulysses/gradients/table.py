"""A table of the gradient by parameter, for `--debug`."""

import math
from collections.abc import Callable

from ulysses.gradients.gradients import Gradients
from ulysses.gradients.policy import Report, StepContext


def gradient_table(gradients: Gradients, rows: int = 8) -> str:
    """Return lines with the largest and smallest gradient norms, and every parameter that is not finite.

    All ranks call it together (one collective); print it on one.
    """
    gradients.measure("norm", "mean_abs", "nonfinite")
    norms, bad = gradients.parameter_norms(), gradients.nonfinite_counts()
    columns = zip(norms, gradients.parameter_mean_abs(), gradients, bad)
    lines = [
        f"{norm:12.4e} {mean_abs:12.4e} {entry.numel:14,}  {entry.name}"
        for norm, mean_abs, entry, count in sorted(columns, key=lambda column: -column[0])
        if not count
    ]
    if len(lines) > 2 * rows:
        lines[rows:-rows] = [f"{'...':>12}"]
    lines += [
        f"{'not finite':>12} {count:,.0f} of {entry.numel:,} elements are inf or nan  {entry.name}"
        for entry, count in zip(gradients, bad)
        if count
    ]
    return "\n".join([f"{'norm':>12} {'mean |g|':>12} {'elements':>14}  parameter", *lines])


class GradientTable:
    """Show the table every `every` steps, and at each step whose gradient is not finite; the `watch` of a chain.

    `say` prints it, and is None on all ranks but one.
    """

    def __init__(self, every: int, say: Callable[[str], None] | None) -> None:
        self.every, self.say = every, say

    def __call__(self, gradients: Gradients, context: StepContext) -> Report:
        if context.step % self.every and math.isfinite(gradients.norm()):
            return {}
        text = gradient_table(gradients)
        if self.say is not None:  # steps are counted from 1, as in metrics.jsonl
            self.say(f"gradient of step {context.step + 1}, before gradient policies\n{text}")
        return {"grad/mean_abs": gradients.mean_abs(), "grad/max_abs": gradients.max_abs()}
