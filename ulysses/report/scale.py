"""Axes: from values to places on paper, with round ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` at `start` to `high` at `end`; ticks are (value, text)."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def scale_of(
    values: Sequence[float], start: float, end: float, *, log: bool = False, whole: bool = False
) -> Scale:
    """Return an axis that holds all finite values; `whole` is for steps, which fill it from end to end."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    if low == high:  # a line through the middle
        pad = 0.5 if whole else abs(low) / 10 or 1.0
        low, high = (low / 2, high * 2) if log else (low - pad, high + pad)
    elif log:
        margin = (high / low) ** 0.04
        low, high = low / margin, high * margin
    elif not whole:
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    ticks = _log_ticks(low, high) if log else _ticks(low, high, whole)
    return Scale(low, high, start, end, log, [(t, number(t)) for t in ticks])


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * f for f in (1, 2, 2.5, 5, 10) if size * f >= rough)
    if whole:
        step = max(1.0, round(step))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    factors = (1, 2, 5) if decades <= 2 else (1,)
    every = max(1, decades // 6)
    return [
        f * 10.0**k
        for k in range(first, last + 1, every)
        for f in factors
        if low <= f * 10.0**k <= high
    ]


def number(value: float) -> str:
    """Write a number shortly: 4 digits, thousands separated, powers of ten for what is very large or small."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return (
        f"{value:,.0f}"
        if 1e4 <= abs(value) < 1e7
        else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    )
