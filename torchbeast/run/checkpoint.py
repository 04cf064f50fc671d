"""Checkpoints: one file, always whole, loadable with weights_only=True."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchbeast.core.learner import Learner
from torchbeast.errors import UsageError
from torchbeast.run.flags import TrainingFlags

FILE_NAME = "model.tar"


def save(path: Path, learner: Learner, flags: TrainingFlags) -> None:
    """Write beside and rename: whoever dies in the middle leaves the last one as it was."""
    contents = {
        **learner.state_dict(),
        "flags": flags.as_plain_dict(),
        "random_state": _random_state(),
    }
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            _write(contents, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _write(contents: dict[str, Any], file: Any) -> None:
    try:
        torch.save(contents, file)
    except RuntimeError as error:  # how PyTorch says that a file could not be written
        raise OSError(str(error)) from error


def load(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(
            f"There is no checkpoint at {path}; train first, or name another run with --xpid."
        ) from None
    except OSError as error:
        raise UsageError(f"The checkpoint at {path} cannot be read: {error}.") from error
    except Exception as error:  # whatever a damaged file makes of torch.load
        raise UsageError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); move it away to "
            "train from the start, or name another run with --xpid."
        ) from error


def load_model(
    path: Path, contents: dict[str, Any], model: nn.Module, env: str, remedy: str
) -> None:
    """Give `model`, made for `env`, the weights in a checkpoint's contents."""
    try:
        model.load_state_dict(contents["model_state_dict"])
    except RuntimeError as error:
        raise UsageError(
            f"The agent in {path} was trained on {contents['flags'].get('env')} and does not fit "
            f"{env} as it is now; {remedy}."
        ) from error


def resume(path: Path, learner: Learner, flags: TrainingFlags) -> dict[str, Any] | None:
    """Go on from the checkpoint at `path` if there is one; returns the flags in it."""
    for unfinished in path.parent.glob(f"{path.name}.*.tmp"):  # of a run that was killed
        unfinished.unlink(missing_ok=True)
    if not path.exists():
        return None
    contents = load(path)
    _check_same_agent(path, contents["flags"], flags)
    remedy = "bring back its environment and model, or name another run with --xpid"
    load_model(path, contents, learner.model, flags.env, remedy)
    learner.load_state_dict(contents)
    if "random_state" in contents:  # TorchBeast's have none
        _set_random_state(contents["random_state"])
    return contents["flags"]


def _check_same_agent(path: Path, saved: dict[str, Any], flags: TrainingFlags) -> None:
    for name in ("env", "model", "use_lstm", "normalize_observations"):
        if saved.get(name, getattr(flags, name)) != getattr(flags, name):
            raise UsageError(
                f"{path} was trained with --{name} {saved[name]}, got {getattr(flags, name)}; "
                "give the same, or another --xpid for a new run."
            )


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
