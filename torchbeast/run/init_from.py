"""A new run from the weights of another, of this project or of TorchBeast."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchbeast.errors import UsageError
from torchbeast.run import checkpoint

# The names of PolyBeast's net in TorchBeast; stage i of the deep net is `convs` 4 i to 4 i + 3.
TORCHBEASTS = (
    (r"feat_convs\.(\d+)\.0", lambda m: f"encoder.convs.{4 * int(m[1])}"),
    (
        r"resnet([12])\.(\d+)\.([13])",
        lambda m: f"encoder.convs.{4 * int(m[2]) + 1 + int(m[1])}.conv{(int(m[3]) + 1) // 2}",
    ),
    (r"fc", lambda m: "encoder.linear"),
    (r"core", lambda m: "lstm"),
)


def init_from(source: str, savedir: Path, model: nn.Module) -> str:
    """Give `model` the weights that fit it; returns a sentence that says which."""
    path = _find(source, savedir)
    _, contents = checkpoint.load_or_fall_back(path)
    theirs = {_our_name(name): value for name, value in contents["model_state_dict"].items()}
    ours = model.state_dict()
    fitting = {n: t for n, t in theirs.items() if n in ours and t.shape == ours[n].shape}
    others = [_difference(n, ours[n], theirs.get(n)) for n in ours if n not in fitting]
    if not fitting:
        raise UsageError(
            f"No tensor in {path} fits the model here ({'; '.join(others[:3])} ...); name another "
            "with --init_from, or give the --model it was trained with."
        )
    model.load_state_dict({**ours, **fitting})
    text = f"{len(fitting)} of {len(ours)} tensors have the weights of {path}"
    return f"{text}; the others start anew: {'; '.join(others)}." if others else f"{text}."


def _find(source: str, savedir: Path) -> Path:
    """A file, a folder, or the name of a run."""
    for path in (Path(source).expanduser(), savedir.expanduser() / source):
        if path.is_file():
            return path
        if checkpoint.find(path / checkpoint.FILE_NAME):
            return path / checkpoint.FILE_NAME
    raise UsageError(
        f"--init_from {source} must be a checkpoint, a folder with one, or the name of a run in "
        f"{savedir}."
    )


def _our_name(name: str) -> str:
    for pattern, rename in TORCHBEASTS:
        name, found = re.subn(rf"^{pattern}(?=\.)", rename, name)
        if found:
            break
    return name


def _difference(name: str, ours: Tensor, theirs: Any) -> str:
    if theirs is None:
        return f"{name} is not there"
    return f"{name} is {list(theirs.shape)} there, {list(ours.shape)} here"
