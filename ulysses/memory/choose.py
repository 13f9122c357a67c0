"""Choose where the weights are and what the layers keep, by the planner's bytes and seconds.

weights    resident or sharded: the faster of those that fit
levels     the fastest level that fits for all layers, then the next faster one for as many of the last as fit
offload    the fewest of the first layers with which the GPU suffices
"""

from bisect import bisect_left

from ulysses.memory.plan import Workload, pinned_bytes, predict, step_seconds


def one_level(case: Workload, level: str) -> Workload:
    """Return the case with one level for all layers, offloaded as it asks for."""
    layers = case.model.layers
    case = case._replace(levels=(level,) * layers, offloaded_layers=0)
    if "none" in (case.offload, level):
        return case
    room = case.machine.host_budget - predict(case).host
    most = int(max(0, min(layers, room / pinned_bytes(case))))
    if case.offload == "auto":
        for count in range(most):
            fewer = case._replace(offloaded_layers=count)
            if predict(fewer).fits_gpu:
                return fewer
    return case._replace(offloaded_layers=most)


def choose(case: Workload) -> Workload | None:
    """Return where the weights are and what the layers keep, the fastest choice that fits, or None."""
    places = ["resident", "sharded"] if case.weights == "auto" else [case.weights]
    found = (_choose_levels(case._replace(weights=place)) for place in places)
    return min(filter(None, found), key=step_seconds, default=None)


def _choose_levels(case: Workload) -> Workload | None:
    """Return the fastest level that fits, on as many of the last layers as fit the next faster one; None if none fits.

    A level that needs layers on the host to fit is not mixed with another.
    """
    faster = ""
    for level in case.allowed:
        found = one_level(case, level)
        if predict(found).fits:
            can_mix = faster and not found.offloaded_layers
            return _speed_up_last_layers(found, faster) if can_mix else found
        faster = level
    return None


def _speed_up_last_layers(case: Workload, faster: str) -> Workload:
    """Give as many of the last layers as fit a faster level; the first layer keeps its own."""
    for count in range(1, case.model.layers):
        mixed = case._replace(levels=(*case.levels[:-count], *(faster,) * count))
        if not predict(mixed).fits:
            break
        case = mixed
    return case


def longest_sequence(case: Workload) -> int:
    """Return the most tokens per document, a multiple of 1024, that some allowed level fits; 0 if not even 1024 do.

    The case says how many equal documents are in the micro-batch and how many ranks share it.
    """

    def fits(blocks: int) -> bool:
        asked = case._replace(tokens=1024 * blocks * case.documents)
        return any(predict(one_level(asked, level)).fits for level in case.allowed)

    # From some length on the MLP runs in tiles, so a longer sequence can need less memory: try all powers of two.
    low = max((1 << i for i in range(18) if fits(1 << i)), default=0)
    return 1024 * (low + bisect_left(range(low + 1, 2 * low), True, key=lambda n: not fits(n)))
