"""The gradients of plain torch parameters, for users of gradient policies as a library."""

from collections.abc import Iterable

from torch import nn

from ulysses.gradients.gradients import Gradients, GradientSlice


class TorchGradients(Gradients):
    """Use the `.grad` of plain torch parameters: `TorchGradients(model.named_parameters())`.

    Every process holds whole gradients (one process, or replicas that are already averaged), so nothing is reduced.
    Parameters that are frozen or have no gradient are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        entries = []
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                grad = parameter.grad.detach().view(-1)
                entries.append(GradientSlice(name, parameter.shape, grad))
        super().__init__(entries)

    def scale(self, factor: float, scope: str | None = None) -> None:
        """Multiply at once, in place: torch's optimizers take no factor."""
        super().scale(factor, scope)
        if factor != 1:
            self.apply_factors()
