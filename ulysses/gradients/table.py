"""A per-parameter table of the gradient, for `--debug`."""

import math
from collections.abc import Callable

from ulysses.gradients.chain import Report, StepContext
from ulysses.gradients.gradients import Gradients


def gradient_table(gradients: Gradients, rows: int = 8) -> str:
    """Return the parameters with the largest and smallest gradient norms, and all that are not finite, as text lines.

    All ranks call it together (one collective); print it on one.
    """
    gradients.measure("norm", "mean_abs", "nonfinite")
    norms, means = gradients.parameter_norms().tolist(), gradients.parameter_mean_abs().tolist()
    bad = gradients.nonfinite_counts().tolist()
    order = sorted((i for i in range(len(norms)) if not bad[i]), key=lambda i: -norms[i])
    chosen = order if len(order) <= 2 * rows else [*order[:rows], -1, *order[-rows:]]
    lines = [f"{'norm':>12} {'mean |g|':>12} {'elements':>14}  parameter"]
    for i in chosen:
        if i < 0:
            lines.append(f"{'...':>12}")
        else:
            lines.append(
                f"{norms[i]:12.4e} {means[i]:12.4e} {gradients.entries[i].numel:14,}  {gradients.names[i]}"
            )
    for i, count in enumerate(bad):
        if count:
            what = f"{int(count):,} of {gradients.entries[i].numel:,} elements are inf or nan"
            lines.append(f"{'not finite':>12} {what}  {gradients.names[i]}")
    return "\n".join(lines)


class GradientTable:
    """Measure the table every `every` steps, and at each step whose gradient is not finite; the `watch` of a chain.

    `say` prints it, and is None on all ranks but one. Between tables it asks for the gradient norm alone, which
    the chain needs anyway.
    """

    def __init__(self, every: int, say: Callable[[str], None] | None) -> None:
        self.every, self.say = every, say

    def __call__(self, gradients: Gradients, context: StepContext) -> Report:
        if context.step % self.every and math.isfinite(gradients.norm()):
            return {}
        text = gradient_table(gradients)
        if self.say is not None:
            self.say(
                f"gradient of step {context.step + 1}, before gradient policies\n{text}"
            )  # counted as in metrics.jsonl
        return {"grad/mean_abs": gradients.mean_abs(), "grad/max_abs": gradients.max_abs()}
