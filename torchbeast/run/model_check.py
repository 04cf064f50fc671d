"""Tries a model once before training, so that a mistake in it is one sentence and not a traceback
from inside the loss or a queue. Called by both beasts for every model."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ACTION_MASK, ArraySpec, describe, split_mask
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.agent_output import as_output
from torchbeast.core.distributions import MAX_BOUND
from torchbeast.errors import UsageError
from torchbeast.report.figures import FIGURES
from torchbeast.runtime.inference_model import prepare_to_act
from torchbeast.user_code import say_where

logger = logging.getLogger("torchbeast")

B = 3  # a batch size that is hardly another dimension by chance
TOLERANCE = 1e-3


def try_model(model: nn.Module, spec: Spec, num_params: int) -> None:
    """UsageError if the model cannot be trained with such environments.

    `num_params` is the number of `policy_logits`. What may be intended, but rarely is, is logged.
    """
    modes = {module: module.training for module in model.modules()}
    random_state = torch.get_rng_state()
    try:
        with torch.no_grad():
            _try(prepare_to_act(model), spec, num_params)
    finally:
        torch.set_rng_state(random_state)  # the trial must not change the run's random numbers
        for module, training in modes.items():
            module.training = training


def _try(model: nn.Module, spec: Spec, num_params: int) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not callable(getattr(model, "initial_state", None)):
        raise UsageError(
            f"The model must have a method `initial_state(batch_size)`, got {type(model).__name__} "
            "without; one without memory returns ()."
        )
    state = _call("initial_state", model.initial_state, batch_size=B)
    _check_state(state)
    state = tuple(part.to(device) for part in state)
    rows = map_tree(lambda x: torch.from_numpy(x).to(device), random_rows(spec, 2, B))
    rows["done"] = torch.tensor([[False] * B, [True] * B], device=device)  # one ends in the middle

    both, _ = _forward(model, rows, state, spec, num_params)
    with torch.enable_grad():  # as the learner does: some models have `losses` only there
        _forward(model, rows, state, spec, num_params)
    first, middle = _forward(model, _row(rows, 0), state, spec, num_params)
    second, _ = _forward(model, _row(rows, 1), middle, spec, num_params)
    fresh, _ = _forward(model, _row(rows, 1), state, spec, num_params)
    one_by_one = torch.cat([first["policy_logits"], second["policy_logits"]])
    if not _alike(both["policy_logits"], one_by_one):
        logger.warning(
            "The model's output for two rows at once differs from that for one after the other, so "
            "the learner does not compute what the actors did; check how `forward` handles time "
            "and `done`."
        )
    elif state and not _alike(second["policy_logits"], fresh["policy_logits"]):
        logger.warning(
            "The model remembers across the end of an episode; zero its state where `done` is set, "
            "unless that is meant."
        )


def _forward(
    model: nn.Module, rows: dict[str, Any], state: tuple[Tensor, ...], spec: Spec, num_params: int
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    T = len(rows["done"])
    answer = _call("forward", model, dict(rows), tuple(part.clone() for part in state))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise UsageError(
            f"The model's `forward` must return (output, state), got {_kind(answer)}; a model "
            "without memory returns (output, ())."
        )
    output, new_state = answer
    try:
        output = as_output(output)
    except (TypeError, ValueError):
        raise UsageError(
            "The model's output must be a dict with `action`, `policy_logits` and `baseline`, or a "
            f"tuple of these three, got {_kind(output)}."
        ) from None
    shapes = {"policy_logits": (num_params,), "baseline": ()}
    for name in ("action", *shapes):
        if name not in output:
            raise UsageError(f"The model's output must have `{name}`, got {sorted(output)}.")
    for name, rest in shapes.items():
        _check_shape(f"`{name}`", output[name], T, rest)
        if not output[name].isfinite().all():
            raise UsageError(f"The model's `{name}` must be finite, got nan or inf in it.")
    _check_losses(output.get("losses", {}), T)
    _check_action(output["action"], T, spec)
    _check_same_state(state, new_state)
    return output, new_state


def _check_shape(what: str, tensor: Any, T: int, rest: tuple[int, ...]) -> None:
    expected = [T, B, *rest]
    if not isinstance(tensor, Tensor):
        raise UsageError(f"The model's {what} must be a tensor, got {_kind(tensor)}.")
    if list(tensor.shape) != expected:
        names = ", ".join(["T", "B", *(str(n) for n in rest)])
        raise UsageError(
            f"The model's {what} must be [{names}] = {expected}, got {list(tensor.shape)}."
        )


def _check_action(action: Any, T: int, spec: Spec) -> None:
    expected, found = dict(leaves_of(spec.action)), dict(leaves_of(action))
    if expected.keys() != found.keys():
        raise UsageError(
            f"The model's `action` must be nested as the action space, {describe(spec.action)}, "
            f"got {_kind(action)}."
        )
    for name, leaf in found.items():
        _check_shape(f"`action/{name}`" if name else "`action`", leaf, T, expected[name].shape)


def _check_losses(losses: Any, num_rows: int) -> None:
    """UsageError unless each loss is one number, or one for each row, with or without the last."""
    if not isinstance(losses, dict) or not all(isinstance(name, str) for name in losses):
        raise UsageError(f"The model's `losses` must be a dict by name, got {_kind(losses)}.")
    if taken := sorted(FIGURES.keys() & losses.keys()):
        raise UsageError(
            f"A loss of the model's own needs another name than {taken[0]!r}, which is a figure of "
            "every run."
        )
    shapes = ((), (num_rows, B), (num_rows - 1, B))
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.shape not in shapes:
            found = _tensor_kind(loss)
            raise UsageError(
                f"The model's loss {name!r} must be a tensor with one float, or with one for each "
                f"row, [T, B] = [{num_rows}, {B}], got {found}."
            )


def _check_state(state: Any) -> None:
    if not isinstance(state, (tuple, list)) or not all(isinstance(s, Tensor) for s in state):
        raise UsageError(
            f"The model's `initial_state` must return a tuple of tensors, got {_kind(state)}; "
            "one without memory returns ()."
        )
    for i, part in enumerate(state):
        if part.dim() < 2 or part.shape[1] != B:
            raise UsageError(
                f"Part {i} of the model's `initial_state(batch_size={B})` must be [L, B, ...] with "
                f"B = {B}, got {list(part.shape)}."
            )


def _check_same_state(state: tuple[Tensor, ...], new_state: Any) -> None:
    if not isinstance(new_state, (tuple, list)) or len(new_state) != len(state):
        raise UsageError(
            f"The model's `forward` must return a state of {len(state)} tensors as "
            f"`initial_state` does, got {_kind(new_state)}."
        )
    for i, (before, after) in enumerate(zip(state, new_state, strict=True)):
        expected, found = _tensor_kind(before), _tensor_kind(after)
        if expected != found:
            raise UsageError(
                f"Part {i} of the model's state must stay {expected}, got {found} from `forward`."
            )


def random_rows(spec: Spec, T: int, B: int) -> dict[str, Any]:
    """Rows [T, B, ...] within the bounds of `spec`, in which every action is possible."""
    generator = np.random.default_rng(0)
    rows = map_tree(lambda leaf: draw(leaf, (T, B), generator), spec.row)
    rows["truncated"][:] = False
    if split_mask(rows["frame"])[1] is not None:
        rows["frame"][ACTION_MASK] = map_tree(np.ones_like, rows["frame"][ACTION_MASK])
    return rows


def draw(leaf: ArraySpec, size: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Random numbers [*size, ...] between the bounds; near 0 or the other bound without one."""
    if leaf.dtype == "bool":
        return np.ones((*size, *leaf.shape), np.bool_)
    is_integer = np.issubdtype(leaf.dtype, np.integer)
    low, high = leaf.bounds
    if leaf.dtype == "uint8" and leaf.low is None and leaf.high is None:
        low, high = np.zeros_like(low), np.full_like(high, 255.0)
    if not leaf.categories:
        low = np.where(low < -MAX_BOUND, -np.inf, low)
        high = np.where(high > MAX_BOUND, np.inf, high)
    # An integer of unknown range may be an index: 0 is the one most likely to be valid.
    first = np.where(np.isfinite(low), low, np.minimum(0.0, high))
    last = np.where(np.isfinite(high), high, np.maximum(0.0 if is_integer else 1.0, first))
    unit = generator.uniform(0.0, 1.0, (*size, *leaf.shape))
    if is_integer:
        return np.minimum(np.floor(first + unit * (last - first + 1)), last).astype(leaf.dtype)
    return (first + unit * (last - first)).astype(leaf.dtype)


def _call(name: str, function: Any, *args: Any, **options: Any) -> Any:
    """Call a user's function; what it raises becomes a UsageError that names the place."""
    try:
        return function(*args, **options)
    except UsageError:
        raise
    except Exception as error:
        logger.debug("The model's `%s` failed.", name, exc_info=True)
        raise UsageError(f"The model's `{name}` fails with {say_where(error)}.") from error


def _row(rows: dict[str, Any], t: int) -> dict[str, Any]:
    return map_tree(lambda x: x[t : t + 1], rows)


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.float(), b.float(), rtol=TOLERANCE, atol=TOLERANCE))


def _tensor_kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return _kind(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _kind(value: Any) -> str:
    """What kind of value it is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {sorted(map(str, value))}"
    return f"{type(value).__name__}"
