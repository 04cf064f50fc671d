"""Makes the model that --model names, for environments with a given spec."""

import inspect
import math
from dataclasses import replace
from typing import Any

from torch import nn

from libtorchbeast.action_masks import count_choices
from libtorchbeast.rollout_layout import MODEL_FLAGS
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, describe, split_mask
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast import user_code
from torchbeast.core.distributions import Distribution, make_distribution
from torchbeast.envs.spaces import space_of_spec
from torchbeast.errors import UsageError
from torchbeast.models.agent import Agent
from torchbeast.models.encoders import ENCODERS
from torchbeast.models.frames import MIN_IMAGE_SIDE, find_layout
from torchbeast.models.normalization import NormalizedObservations

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def build_model(flags: Any, spec: Spec) -> nn.Module:
    """Make the model that the flags ask for."""
    return make_model(flags.model, spec, **{name: getattr(flags, name) for name in MODEL_FLAGS})


def build_distribution(flags: Any, spec: Spec) -> Distribution:
    """The distribution whose parameters are the agent's `policy_logits`."""
    return _distribution_of(spec, flags.squash_actions)


def make_model(
    name: str,
    spec: Spec,
    use_lstm: bool,
    normalize_observations: bool = False,
    squash_actions: bool = False,
    separate_nets: bool = False,
    normalize_images: bool = False,
) -> nn.Module:
    """Make an agent for environments with this `spec`.

    Args:
        name: auto, shallow, deep, mlp, or `package.module:Class` of the user's own, which behaves
            as `Agent` does (docs/your_environment.md); see `_make_own` for its arguments.
        normalize_observations: wrap it in `NormalizedObservations`.
        squash_actions: see `torchbeast.core.distributions.make_distribution`.
        separate_nets: for the built-in agents, see `Agent`.
        normalize_images: for the built-in agents, see `torchbeast.models.frames.Images`.
    """
    shown = spec
    if normalize_observations:  # the agent sees normalised numbers, without these bounds
        shown = replace(spec, observation=map_tree(_without_float_bounds, spec.observation))
    distribution = _distribution_of(spec, squash_actions)
    if ":" in name:
        agent = _make_own(name, shown, distribution, use_lstm)
    else:
        _check_mask(shown)
        agent = Agent(
            shown.observation,
            shown.action,
            use_lstm,
            choose_encoder(name, shown),
            squash=squash_actions,
            separate_nets=separate_nets,
            normalize_images=normalize_images,
        )
    return NormalizedObservations(agent, spec.observation) if normalize_observations else agent


def _check_mask(spec: Spec) -> None:
    """UsageError if action masks do not fit; environments elsewhere have not been checked yet."""
    rest, mask = split_mask(spec.observation)
    if mask is None:
        return
    needed = count_choices(spec.action)
    got = sum(math.prod(leaf.shape) for _, leaf in leaves_of(mask))
    if not needed or got != needed or rest == {}:
        raise UsageError(
            f"An observation's action_mask must have one number for each choice of a Discrete, "
            f"MultiDiscrete or MultiBinary action, here {needed}, and another part beside it; got "
            f"{describe(spec.observation)} for actions {describe(spec.action)}."
        )


def _make_own(name: str, spec: Spec, distribution: Distribution, use_lstm: bool) -> nn.Module:
    """Make a model of the user's own; it gets the `known` values that it has arguments for.

    Unless one of these is `observation_space`, `action_space` or `distribution`, it is called as in
    TorchBeast if it takes three arguments, or two and `use_lstm`: with the frame's shape (a tree of
    shapes for a tree), the number of `policy_logits` (for Discrete actions, the number of actions)
    and `use_lstm`.
    """
    make = user_code.find(name, "--model")
    known = {
        "frame_shape": map_tree(lambda leaf: leaf.shape, spec.observation),
        "num_actions": distribution.num_params,
        "use_lstm": use_lstm,
        "observation_space": space_of_spec(spec.observation),
        "action_space": space_of_spec(spec.action),
        "distribution": distribution,
    }
    signature = inspect.signature(make)
    named = {key: value for key, value in known.items() if key in signature.parameters}
    shape, num_actions = known["frame_shape"], known["num_actions"]
    calls: list[Call] = []
    if not named.keys() & {"observation_space", "action_space", "distribution"}:
        calls.append(((shape, num_actions, use_lstm), {}))
    if named or (isinstance(make, type) and issubclass(make, nn.Module)):
        calls.append(((), named))  # not a function without such arguments
    calls.append(((shape, num_actions), {"use_lstm": use_lstm}))
    args, kwargs = next((call for call in calls if _binds(signature, call)), calls[0])
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"--model {name} takes {signature}, and can be called with "
            f"(frame_shape, num_actions, use_lstm), or with arguments named as some of "
            f"{', '.join(known)} ({error})."
        ) from error
    try:
        model = make(*args, **kwargs)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--model {name} cannot be made: {user_code.say_where(error)}.") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} must make a torch.nn.Module, got {type(model).__name__}.")
    return model


def _binds(signature: inspect.Signature, call: Call) -> bool:
    try:
        signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def _distribution_of(spec: Spec, squash: bool) -> Distribution:
    try:
        return make_distribution(spec.action, squash)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _without_float_bounds(leaf: ArraySpec) -> ArraySpec:
    return ArraySpec(leaf.dtype, leaf.shape) if "float" in leaf.dtype else leaf


def choose_encoder(name: str, spec: Spec) -> str:
    """The encoder for `name`; auto: shallow if an array looks like an image, else the MLP."""
    if name != "auto":
        return name
    frame, _ = split_mask(spec.observation)
    encoders = {_encoder_for(leaf) for _, leaf in leaves_of(frame)}
    return "shallow" if "shallow" in encoders else "mlp"


def _encoder_for(frame: ArraySpec) -> str:
    if find_layout(frame.shape) is not None:
        return "shallow"
    large = [n for n in frame.shape if n >= MIN_IMAGE_SIDE]
    if len(large) < 2:
        return "mlp"
    raise UsageError(
        f"Observations {describe(frame)} may be images, but which dimensions are height and width "
        "cannot be guessed; say --model shallow (channels first), --model mlp, or give your own "
        "with --model package.module:Class."
    )


def check_model(name: str) -> None:
    """Raise UsageError unless `name` names a model."""
    if ":" in name:
        user_code.find(name, "--model")
    elif name not in ("auto", *ENCODERS):
        raise UsageError(
            f"--model must be auto, {', '.join(ENCODERS)} or package.module:Class, got {name!r}."
        )
