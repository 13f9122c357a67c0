"""A per-parameter table of the gradient, for `--debug`."""

from ulysses.gradients.gradients import Gradients


def gradient_table(gradients: Gradients, rows: int = 8) -> str:
    """Return the parameters with the largest and smallest gradient norms, and all that are not finite, as text lines.

    All ranks call it together (two collectives); print it on one.
    """
    norms, means = gradients.parameter_norms().tolist(), gradients.parameter_mean_abs().tolist()
    bad = gradients.nonfinite_counts().tolist()
    order = sorted((i for i in range(len(norms)) if not bad[i]), key=lambda i: -norms[i])
    chosen = order if len(order) <= 2 * rows else [*order[:rows], -1, *order[-rows:]]
    lines = [f"{'norm':>12} {'mean |g|':>12} {'elements':>14}  parameter"]
    for i in chosen:
        if i < 0:
            lines.append(f"{'...':>12}")
        else:
            lines.append(f"{norms[i]:12.4e} {means[i]:12.4e} {gradients.entries[i].numel:14,}  {gradients.names[i]}")
    for i, count in enumerate(bad):
        if count:
            what = f"{int(count):,} of {gradients.entries[i].numel:,} elements are inf or nan"
            lines.append(f"{'not finite':>12} {what}  {gradients.names[i]}")
    return "\n".join(lines)
