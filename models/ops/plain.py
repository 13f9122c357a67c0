"""When an operation may read the weights of modules directly, and stand in for their calls.

The nodes of this folder keep little for backward, and what is cheap they compute again:

    LinearNode     x -> W x + b                               keeps x
    ProjectNode    hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                   where heads have norms: q and k before these, too
    GatedMLPNode   hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                   in tiles: keeps hidden only, backward runs norm, gate and up again, never down

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. Adapters, hooks, quantised and partitioned parameters need a call of the
module.
"""

from typing import Any

from torch import nn

from ulysses.memory.levels import HOOKS


def is_watched(module: nn.Module) -> bool:
    """Return whether the module has a hook of any kind, which only a call of the module itself would run."""
    return any(getattr(module, kind) for kind in HOOKS)


def is_plain(*modules: Any) -> bool:
    """Return whether the modules' weights may be read directly: no hooks, whole, and of a class that says so.

    A class says so by `plain = True` of its own; one that is derived from it may compute something else.
    """
    return all(
        vars(type(m)).get("plain", False)
        and not is_watched(m)
        and (m.weight is None or m.weight.numel() > 0)
        for m in modules
    )
