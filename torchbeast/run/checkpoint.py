"""Checkpoints in a run's folder: written atomically, loadable with weights_only=True.

model.tar             the newest
model-step-<N>.tar    the last few, the newest among them (--keep_checkpoints)
model-best.tar        the one with the best mean return
"""

import io
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from libtorchbeast.rollout_layout import MODEL_FLAGS
from libtorchbeast.rows import Spec
from libtorchbeast.specs import from_json, to_json
from torchbeast.core.learner import Learner
from torchbeast.core.stats import EPISODE_WINDOW
from torchbeast.errors import UsageError
from torchbeast.run.flags import TrainingFlags

logger = logging.getLogger("torchbeast")

FILE_NAME = "model.tar"
BEST_NAME = "model-best.tar"
STEP_PREFIX = "model-step-"
UPDATE_S = 600.0  # more than any update takes


def save(path: Path, learner: Learner, flags: TrainingFlags, spec: Spec | None = None) -> None:
    """Write the newest checkpoint; keep it as one of the last few, and as the best if it is.

    It is serialised between two updates, and written while the next ones go on. `spec` describes
    the environments, so that the agent can be used without any.
    """
    packed = io.BytesIO()
    with between_updates(learner, UPDATE_S) as is_between:
        if not is_between:  # an update that hangs must not spoil the checkpoint
            logger.error("The update in progress did not end; the checkpoint stays as it was.")
            return
        contents = {
            **learner.state_dict(),
            "flags": flags.as_plain_dict(),
            "random_state": _random_state(),
            "spec": None if spec is None else _to_text(spec),
        }
        # To memory: torch.save hides a file's error (no space left) behind one of its own.
        torch.save(contents, packed)
        step, mean = learner.stats.step, _mean_return(contents)
    write_whole(path, packed.getbuffer())
    if flags.keep_checkpoints > 1:
        _keep(path, path.with_name(f"{STEP_PREFIX}{step}.tar"))
    num_kept = flags.keep_checkpoints if flags.keep_checkpoints > 1 else 0
    for old in _last_few(path.parent)[num_kept:]:
        old.unlink(missing_ok=True)
    best = path.with_name(BEST_NAME)
    if mean is not None and _is_best(best, mean):
        _keep(path, best)
        _best_means[best] = mean


@contextmanager
def between_updates(learner: Learner, timeout_s: float) -> Iterator[bool]:
    """Keep updates from starting while entered; yields False if one does not end in time."""
    is_between = learner.lock.acquire(timeout=timeout_s)
    try:
        yield is_between
    finally:
        if is_between:
            learner.lock.release()


def write_whole(path: Path, data: memoryview) -> None:
    """Write a file atomically: a crash in the middle leaves the previous file as it was."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _keep(path: Path, name: Path) -> None:
    """Give a checkpoint a second name: as a hard link, which takes no room, or else as a copy."""
    beside = name.with_name(f"{name.name}.{os.getpid()}.tmp")
    try:
        try:
            beside.hardlink_to(path)
        except OSError:  # a file system without links
            shutil.copyfile(path, beside)
        beside.replace(name)
    finally:
        beside.unlink(missing_ok=True)


def _last_few(folder: Path) -> list[Path]:
    """The recent checkpoints that were kept, the newest first."""
    kept = folder.glob(f"{STEP_PREFIX}*.tar")
    return sorted(kept, key=lambda path: path.stat().st_mtime_ns, reverse=True)


_best_means: dict[Path, float] = {}  # by path, of files this process has read or written


def _is_best(best: Path, mean: float) -> bool:
    """Whether `mean` is higher than that of the file `best`, which is read only once."""
    if best not in _best_means or not best.exists():
        try:
            before = _mean_return(load(best))
        except UsageError:  # none, or unreadable
            before = None
        _best_means[best] = -math.inf if before is None else before
    return mean > _best_means[best]


def _mean_return(contents: dict[str, Any]) -> float | None:
    """Mean return of the last EPISODE_WINDOW episodes; None if there are fewer (maybe luck)."""
    returns = contents["stats"]["returns"]
    return float(np.mean(returns)) if len(returns) == EPISODE_WINDOW else None


def _to_text(spec: Spec) -> str:
    taken = spec.action if spec.taken is None else spec.taken
    return json.dumps({**spec.to_json(), "taken": to_json(taken)})


def spec_in(contents: dict[str, Any]) -> Spec | None:
    """The environments' spec in a checkpoint; None in older ones, which lack it."""
    if contents.get("spec") is None:
        return None
    saved = json.loads(contents["spec"])
    return replace(Spec.from_json(saved), taken=from_json(saved["taken"]))


def load(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, with tensors on the CPU; UsageError if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(
            f"There is no checkpoint at {path}; train first, or name another run with --xpid."
        ) from None
    except OSError as error:
        raise UsageError(f"The checkpoint at {path} cannot be read: {error}.") from error
    except Exception as error:  # a damaged file may make torch.load raise anything
        raise UsageError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); move it away to "
            "train from the start, or name another run with --xpid."
        ) from error


def find(path: Path) -> list[Path]:
    """The checkpoints that exist: `path`, then, if it is model.tar, the recent ones before it."""
    before = _last_few(path.parent) if path.name == FILE_NAME else []
    return [candidate for candidate in (path, *before) if candidate.exists()]


def find_in(source: str, savedir: Path, name: str = FILE_NAME) -> Path | None:
    """The checkpoint of a run, given as file, folder, or name below `savedir`; None without one."""
    for path in (Path(source).expanduser(), savedir.expanduser() / source):
        if path.is_file():
            return path
        if find(path / name):
            return path / name
    return None


def load_newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """The first checkpoint of `find(path)` that can be read: its path and contents."""
    failure: UsageError | None = None
    for candidate in find(path) or [path]:
        try:
            return candidate, load(candidate)
        except UsageError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def load_or_fall_back(path: Path) -> tuple[Path, dict[str, Any]]:
    """`load_newest`, with a warning if the checkpoint is not the one at `path`."""
    found, contents = load_newest(path)
    if found != path:
        logger.warning("%s %s; using %s instead, of step %s.", path,
                       "cannot be read" if path.exists() else "is missing", found.name,
                       f"{contents['stats']['step']:,}")  # fmt: skip
    return found, contents


def load_model(
    path: Path, contents: dict[str, Any], model: nn.Module, env: str, remedy: str
) -> None:
    """Load the weights in a checkpoint's contents into `model`, which was made for `env`."""
    try:
        model.load_state_dict(contents["model_state_dict"])
    except RuntimeError as error:
        before = contents["flags"].get("env")
        other_version = ", or with this version of TorchBeast" if before == env else ""
        raise UsageError(
            f"The agent in {path} was trained on {before} and does not fit {env} as it is "
            f"now{other_version}; {remedy}."
        ) from error


def resume(path: Path, learner: Learner, flags: TrainingFlags) -> dict[str, Any] | None:
    """Resume from the checkpoint at `path` if there is one; returns the flags in it, or None."""
    for unfinished in path.parent.glob("model*.tmp"):  # left by a run that was killed
        unfinished.unlink(missing_ok=True)
    if not find(path):
        return None
    path, contents = load_or_fall_back(path)
    _check_same_agent(path, contents["flags"], flags)
    remedy = "bring back its environment and model, or name another run with --xpid"
    load_model(path, contents, learner.model, flags.env, remedy)
    learner.load_state_dict(contents)
    if "random_state" in contents:  # TorchBeast's checkpoints have none
        _set_random_state(contents["random_state"])
    return contents["flags"]


_SAME_AGENT = ("env", "model", *MODEL_FLAGS)


def _check_same_agent(path: Path, saved: dict[str, Any], flags: TrainingFlags) -> None:
    for name in _SAME_AGENT:
        if saved.get(name, getattr(flags, name)) != getattr(flags, name):
            raise UsageError(
                f"{path} was trained with --{name} {saved[name]}, got {getattr(flags, name)}; "
                "give the same, or another --xpid for a new run."
            )


@contextmanager
def keep_random_state() -> Iterator[None]:
    """On exit, put the random generators of this process back to their state on entry."""
    before = _random_state()
    try:
        yield
    finally:
        _set_random_state(before)


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
