"""Resource amounts as exact integers.

One unit is 1/10,000: RL stacks ask for `{"accelerator": 1e-4}`, which milli-units cannot hold. A request is
`Resources`, a plain dict from name to units; absent means zero.
"""

from __future__ import annotations

from collections.abc import Mapping

UNIT = 10_000
Resources = dict[str, int]
RUNTIME_ENV = "HPCRAY_RUNTIME_ENV"
"""Tells a worker at its start, as JSON, what its environment has beside variables. Nobody else ever sees it."""
ASSIGNED_GPUS = "HPCRAY_ASSIGNED_GPUS"
"""The last variable of the environment in which a GPU worker is asked for: the ids of its devices, with commas. The
template process turns it into the vendor's variable. A worker keeps its devices for life, since a library that has
found its devices cannot be told of others: workers of different devices are of different environments, which the pool
never mixes."""


def to_units(amounts: Mapping[str, float]) -> Resources:
    """Convert user amounts (CPU: 0.5) into exact units; zero amounts are dropped.

    Args:
        amounts: resource name to amount, non-negative, at most four decimals.

    Raises:
        ValueError: an amount is negative, not finite, or finer than 1/10,000.
    """
    out: Resources = {}
    for name, amount in amounts.items():
        try:
            scaled = float(amount) * UNIT
            units = round(scaled)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"resource {name!r}: {amount!r} is not a finite number") from None
        if units < 0:
            raise ValueError(f"resource {name!r}: {amount!r} is negative")
        if abs(scaled - units) > 1e-6 * max(1.0, scaled):
            raise ValueError(f"resource {name!r}: {amount!r} is finer than 1/{UNIT}; hint: round it to four decimals")
        if units:
            out[name] = units
    return out


def to_amounts(units: Mapping[str, int]) -> dict[str, float]:
    """Convert units back into user amounts."""
    return {name: value / UNIT for name, value in units.items()}


def fits(request: Mapping[str, int], available: Mapping[str, int]) -> bool:
    """Whether `available` covers `request`."""
    return all(available.get(name, 0) >= units for name, units in request.items())


def add(into: Resources, amount: Mapping[str, int]) -> None:
    """Add `amount` to `into`, in place."""
    for name, units in amount.items():
        into[name] = into.get(name, 0) + units


def subtract(into: Resources, amount: Mapping[str, int]) -> None:
    """Subtract `amount` from `into`, in place. May go negative: a worker that resumes after a blocking `get`
    takes its CPU back at once, even if somebody else got it meanwhile."""
    for name, units in amount.items():
        into[name] = into.get(name, 0) - units
