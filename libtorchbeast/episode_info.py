"""Numbers in `info` at the end of episodes: summed by hosts, averaged in the learner's logs.

Numbers in nested dicts get joined names: {"reward_terms": {"speed": 1}} is reward_terms/speed.
They travel beside the rows, in a lane's header, in a gRPC `Step` or over an actor's pipe. They are
statistics, so no rollout refers to them. The number and the length of names are limited, and the
numbers must be finite.

Pure Python; needs only NumPy.
"""

import logging
from typing import Any

import numpy as np

logger = logging.getLogger("torchbeast")

InfoSums = dict[str, tuple[float, int]]
"""For each name the sum, and the number of episodes in it."""

MAX_NAMES = 32
MAX_INFO_NAME_BYTES = 48
MAX_INFO_NUMBER = 1e30  # keeps the sum over a group within float32, the type in messages
MAX_DEPTH = 4  # of dicts within dicts
OUR_OWN = ("episode/r", "episode/l", "episode/t")  # return, length and time, by Gymnasium's wrapper
# Skipped without a report: masks, and what Gymnasium and Stable-Baselines3 add for their own use.
NOT_FOR_LOGS = {"action_mask", "final_obs", "final_observation", "terminal_observation"}
MAX_REPORTED = 8  # names in one report
MAX_REPORTS = 3  # of a process


def add_info(sums: InfoSums, info: Any) -> None:
    """Add the numbers in one environment's `info` at the end of an episode to `sums`."""
    numbers, others = _split(info)
    outer_first = sorted(numbers, key=lambda name: name.count("/"))  # these get places first
    add_sums(sums, {name: (numbers[name], 1) for name in outer_first})
    for name in numbers:
        if name not in sums:
            others[name] = f"more than {MAX_NAMES} names"
    _left_out.report(others)


def add_sums(sums: InfoSums, others: InfoSums, most: int | None = MAX_NAMES) -> None:
    """Add `others` to `sums`; a new name only while there are fewer than `most`."""
    for name, (total, count) in others.items():
        if name in sums or most is None or len(sums) < most:
            before, number = sums.get(name, (0.0, 0))
            sums[name] = (before + total, number + count)


def is_name(name: Any) -> bool:
    """Whether `name` is valid: printable, and of 1 to `MAX_INFO_NAME_BYTES` bytes."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= MAX_INFO_NAME_BYTES
        and name.isprintable()
    )


def info_of(info: Any, i: int) -> dict[str, Any]:
    """Return environment i's part of the `info` of a Gymnasium vector environment.

    Each array `name` [num_envs] comes with a mask `_name` of the environments that have a value.
    If environment i has been reset already, the `info` of its episode's end is in `final_info`.
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


class _LeftOut:
    """Reports once, in each process, which entries of `info` are not logged."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._num_reports = 0

    def report(self, others: dict[str, str]) -> None:
        """`others`: for each such name, a description of the value."""
        if self._num_reports == MAX_REPORTS or not (others.keys() - self._names):
            return
        new = [f"{name} ({what})" for name, what in others.items() if name not in self._names]
        self._names.update(others)
        self._num_reports += 1
        more = [f"{len(new) - MAX_REPORTED} more"] if len(new) > MAX_REPORTED else []
        logger.info(
            "Only single finite numbers in `info` are logged, and not: %s.",
            ", ".join([*new[:MAX_REPORTED], *more]),
        )


_left_out = _LeftOut()


def _split(info: Any, prefix: str = "", depth: int = 1) -> tuple[dict[str, float], dict[str, str]]:
    """Return the numbers in `info` by joined name, and descriptions of all other values."""
    numbers: dict[str, float] = {}
    others: dict[str, str] = {}
    for key, value in info.items() if isinstance(info, dict) else ():
        name = f"{prefix}{key}"
        if key in NOT_FOR_LOGS or value is None or name in OUR_OWN:
            continue
        if isinstance(value, dict) and depth < MAX_DEPTH:
            below = prefix if key == "final_info" else f"{name}/"
            more_numbers, more_others = _split(value, below, depth + 1)
            numbers.update(more_numbers)
            others.update(more_others)
        elif not (isinstance(key, str) and is_name(name)):
            others[repr(name)[:MAX_INFO_NAME_BYTES]] = (
                f"not a name of at most {MAX_INFO_NAME_BYTES} bytes"
            )
        elif (number := _as_number(value)) is not None:
            numbers[name] = number
        else:
            others[name] = _describe(value)
    return numbers, others


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"array of shape {list(value.shape)}"
    if isinstance(value, (float, int, np.number, np.ndarray)):
        return "not a finite number"
    return type(value).__name__


def _as_number(value: Any) -> float | None:
    """A single number of at most `MAX_INFO_NUMBER` as a float; None for anything else."""
    if not isinstance(value, (bool, int, float, np.number, np.bool_, np.ndarray)):
        return None
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "biuf"):
        return None
    try:
        number = float(np.asarray(value).reshape(()))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_INFO_NUMBER else None
