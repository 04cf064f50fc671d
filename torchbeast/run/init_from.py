"""--init_from: a new run with the weights of another run, of this project or of TorchBeast."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchbeast.core.running_moments import RunningMoments
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint

# TorchBeast's names in PolyBeast's net, and ours; section i of that net is `convs` 4 i to 4 i + 3.
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
    """Copy the weights that fit to `model`; returns text that says which do and which do not."""
    path = checkpoint.find_in(source, savedir)
    if path is None:
        raise UsageError(
            f"--init_from {source} must be a checkpoint, a folder with one, or the name of a run "
            f"in {savedir}."
        )
    _, contents = checkpoint.load_or_fall_back(path)
    theirs = {_our_name(name): value for name, value in contents["model_state_dict"].items()}
    ours = model.state_dict()
    names = {name: _their_name(name, theirs) for name in ours}
    fitting = {
        n: theirs[names[n]] for n, t in ours.items() if _shape(theirs.get(names[n])) == t.shape
    }
    for statistics in _names_of_statistics(model):
        if not fitting.keys() >= statistics:  # statistics are of use only as a whole
            fitting = {n: t for n, t in fitting.items() if n not in statistics}
    others = [_difference(n, ours[n], theirs.get(names[n])) for n in ours if n not in fitting]
    unused = [name for name in theirs if name not in {names[n] for n in fitting}]
    if not fitting:
        raise UsageError(
            f"No tensor in {path} fits the model here ({'; '.join(others[:3])} ...); name another "
            "with --init_from, or give the --model it was trained with."
        )
    model.load_state_dict({**ours, **fitting})
    sentences = [f"{len(fitting)} of {len(ours)} tensors have the weights of {path}."]
    if others:
        sentences.append(f"The others keep their initial values: {'; '.join(others)}.")
    if unused:
        sentences.append(f"Not used: {', '.join(unused)}.")
    return " ".join(sentences)


def _our_name(name: str) -> str:
    for pattern, rename in TORCHBEASTS:
        name, found = re.subn(rf"^{pattern}(?=\.)", rename, name)
        if found:
            break
    return name


def _their_name(name: str, theirs: dict[str, Tensor]) -> str:
    """The saved name of our tensor `name`; --normalize_observations adds the prefix `agent.`."""
    candidates = (name, f"agent.{name}", name.removeprefix("agent."))
    return next((candidate for candidate in candidates if candidate in theirs), name)


def _names_of_statistics(model: nn.Module) -> list[set[str]]:
    return [
        {f"{name}.{buffer}" for buffer, _ in module.named_buffers()}
        for name, module in model.named_modules()
        if isinstance(module, RunningMoments)
    ]


def _shape(tensor: Any) -> Any:
    return None if tensor is None else tensor.shape


def _difference(name: str, ours: Tensor, theirs: Any) -> str:
    if theirs is None:
        return f"{name} is not there"
    if theirs.shape == ours.shape:
        return f"{name} goes with statistics that do not fit"
    return f"{name} is {list(theirs.shape)} there, {list(ours.shape)} here"
