"""Numbers in `info` at the end of episodes: summed by hosts, averaged in the learner's logs.

They travel beside the rows, in a lane's header, in a Step or over an actor's pipe. They are
statistics: nothing says to which rollout they belong. Names are few and short, numbers finite.

Nothing here is compiled, and nothing needs more than NumPy.
"""

from typing import Any

import numpy as np

InfoSums = dict[str, tuple[float, int]]
"""By name: the sum, and of how many episodes."""

MAX_NAMES = 32
MAX_NAME_BYTES = 48
MAX_NUMBER = 1e30  # so that the sum over a group is a float32, which is what the network takes
OUR_OWN = ("episode/r", "episode/l", "episode/t")  # return, length and time, by Gymnasium's wrapper


def add_info(sums: InfoSums, info: Any) -> None:
    """Take in what one environment said at the end of its episode."""
    add_sums(sums, {name: (number, 1) for name, number in numbers_in(info).items()})


def add_sums(sums: InfoSums, others: InfoSums, most: int | None = MAX_NAMES) -> None:
    """Add to the sums under names that are known, or find a place."""
    for name, (total, count) in others.items():
        if name in sums or most is None or len(sums) < most:
            before, number = sums.get(name, (0.0, 0))
            sums[name] = (before + total, number + count)


def numbers_in(info: Any) -> dict[str, float]:
    """The numbers of an `info`, also those in its `final_info` and `episode`, by name."""
    if not isinstance(info, dict):
        return {}
    numbers: dict[str, float] = {}
    for name, value in info.items():
        if name == "final_info":
            numbers.update(numbers_in(value))
        elif name == "episode" and isinstance(value, dict):
            numbers.update({f"episode/{k}": v for k, v in numbers_in(value).items()})
        elif is_name(name) and (number := _as_number(value)) is not None:
            numbers[name] = number
    return {name: number for name, number in numbers.items() if name not in OUR_OWN}


def is_name(name: Any) -> bool:
    """Whether it can be the name of a figure."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
    )


def info_of(info: Any, i: int) -> dict[str, Any]:
    """Of a Gymnasium vector environment's `info`, the one of environment i.

    Beside each array `name` [num_envs] stands `_name`, which says who has such a value. Where it
    has reset the environment already, that of the episode's end is its `final_info`.
    """
    if isinstance(info, dict) and "final_info" in info:
        final, has_final = info["final_info"], info.get("_final_info")
        if has_final is None or has_final[i]:
            return info_of(final, i) if isinstance(final, dict) else final[i] or {}
    picked = {}
    for name, values in info.items() if isinstance(info, dict) else ():
        has_value = info.get(f"_{name}")
        if str(name).startswith("_") or (has_value is not None and not has_value[i]):
            continue
        if isinstance(values, dict):
            picked[name] = info_of(values, i)
        elif hasattr(values, "__len__") and len(values) > i:
            picked[name] = values[i]
    return picked


def _as_number(value: Any) -> float | None:
    """A number that stands alone, or None."""
    if not isinstance(value, (bool, int, float, np.number, np.bool_, np.ndarray)):
        return None
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "biuf"):
        return None
    try:
        number = float(np.asarray(value).reshape(()))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_NUMBER else None
