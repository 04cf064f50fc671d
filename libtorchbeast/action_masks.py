"""Action masks: read from wherever an environment offers them, added to its frames in one form.

An environment offers its mask as the part `action_mask` of a dict observation, as
`info["action_mask"]`, or by a method `action_masks()`. In rows the mask is always the part
`action_mask` of the frame: bools [num_choices], true where an action is possible. The bools of all
choices are concatenated, arrays in the order of `leaves_of`.

Pure Python; needs only NumPy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from libtorchbeast.specs import ACTION_MASK, ArraySpec, UnknownSpace, describe
from libtorchbeast.tree import leaves_of

METHOD = "action_masks"
OBSERVATION = "observation"  # key of an observation that was not a dict, beside its mask


class WrongMask(UnknownSpace):
    """A mask does not fit the action's spec; rebuilding the environment would not help."""


class ActionMasks:
    """Reads and checks the masks of environments of one kind; adds them to their observations."""

    def __init__(self, action: Any, place: str) -> None:
        """`action` is the spec of the agents' action; `place` is where the mask comes from."""
        self._action = action
        self.place = place
        self._size = count_choices(action)
        if self._size == 0:
            raise WrongMask(
                f"An action_mask is for Discrete, MultiDiscrete and MultiBinary actions, got one "
                f"from {place} for {describe(action)}; leave it out with a wrapper (--wrappers)."
            )
        self._choices, self._starts = _find_choices(action)

    def add(self, env: Any, observation: Any, info: Any, is_last: bool = False) -> Any:
        """Return the observation as a dict with its mask as bools.

        `is_last`: no action follows this observation, so its mask may allow none.
        """
        mask = self.find(env, observation, info)
        return with_mask(observation, self.check(_flatten(self._action, mask), is_last))

    def check(self, masks: np.ndarray, is_last: Any = False) -> np.ndarray:
        """Return masks [..., num_choices] as bools that allow an action at each choice.

        Where `is_last`, a mask that allows no action becomes one that allows all. Elsewhere it
        raises ValueError; a wrong size or a value that is neither 0 nor 1 raises `WrongMask`.
        """
        if masks.shape[-1] != self._size:
            raise WrongMask(
                f"The action_mask from {self.place} must have {self._size} numbers for actions "
                f"{describe(self._action)}, got {masks.shape[-1]}."
            )
        if masks.dtype != np.bool_:
            if masks.dtype.kind not in "iuf" or not ((masks == 0) | (masks == 1)).all():
                raise WrongMask(
                    f"The action_mask from {self.place} must hold 1 for what is possible and 0 for "
                    f"what is not, got {masks.ravel()[:8].tolist()}."
                )
            masks = masks.astype(np.bool_)
        allows = self.allow(masks)
        if allows.all():
            return masks
        if not (allows | is_last).all():
            raise ValueError(
                f"The action_mask from {self.place} must allow an action at each choice, got one "
                "that allows none; end the episode where nothing can be done."
            )
        return np.where(allows[..., None], masks, True)

    def allow(self, masks: np.ndarray) -> Any:
        """Whether masks [..., num_choices] allow an action at each choice; bools [...]."""
        if not len(self._starts):  # only bits (MultiBinary), which may all be 0
            return np.ones(masks.shape[:-1], np.bool_)
        return np.logical_or.reduceat(masks[..., self._choices], self._starts, -1).all(-1)

    def spec(self, observation: Any) -> Any:
        """Add the mask's spec to an observation's spec; None if the latter is None."""
        mask = ArraySpec("bool", (self._size,))
        return None if observation is None else with_mask(observation, mask)

    def find(self, env: Any, observation: Any, info: Any) -> Any:
        """The mask as the environment gives it; ValueError if it is missing."""
        if self.place == METHOD_PLACE:
            return find_method(env)()  # type: ignore[misc]
        place = observation if self.place == OBSERVATION_PLACE else info
        if not isinstance(place, dict) or ACTION_MASK not in place:
            raise ValueError(
                f"The action_mask from {self.place} must be there at each reset and step, as it "
                "was at the first reset, got none."
            )
        return place[ACTION_MASK]


OBSERVATION_PLACE, INFO_PLACE, METHOD_PLACE = "the observation", "info", f"{METHOD}()"


def find_masks(env: Any, observation: Any, info: Any, action: Any) -> ActionMasks | None:
    """Find out at an environment's first reset where it offers masks; None if it offers none."""
    if isinstance(observation, dict) and ACTION_MASK in observation:
        if len(observation) == 1:
            raise WrongMask(
                "An observation must have a part besides its action_mask; add one, if only a 0."
            )
        return ActionMasks(action, OBSERVATION_PLACE)
    if isinstance(info, dict) and ACTION_MASK in info:
        return ActionMasks(action, INFO_PLACE)
    return ActionMasks(action, METHOD_PLACE) if find_method(env) is not None else None


def expect_no_mask(info: Any) -> None:
    """Raise `WrongMask` if an environment without a mask at reset has one after its first step."""
    if isinstance(info, dict) and ACTION_MASK in info:
        raise WrongMask(
            "An environment with info['action_mask'] must have one at reset, too, got the first "
            "after a step; add it there, have a method action_masks(), or leave it out with a "
            "wrapper (--wrappers)."
        )


def find_method(env: Any) -> Callable[[], Any] | None:
    """The environment's method `action_masks`, also from below its wrappers; None without one."""
    if hasattr(env, "has_wrapper_attr"):  # Gymnasium's wrappers do not forward attributes
        method = env.get_wrapper_attr(METHOD) if env.has_wrapper_attr(METHOD) else None
    else:
        method = getattr(env, METHOD, None)
    return method if callable(method) else None


def with_mask(observation: Any, mask: Any) -> dict[str, Any]:
    """An observation, or its spec, as a dict with a mask."""
    rest = observation if isinstance(observation, dict) else {OBSERVATION: observation}
    return {**rest, ACTION_MASK: mask}


def count_choices(action: Any) -> int:
    """The number of values in the mask of such an action; 0 if it cannot be masked."""
    return sum(leaf.num_choices for _, leaf in leaves_of(action))


def first_allowed(action: ArraySpec, masks: np.ndarray) -> np.ndarray:
    """One allowed action of an array for each of `masks` [K, num_choices]; [K, *shape]."""
    if action.is_bits:
        return np.zeros((len(masks), *action.shape), action.dtype)
    parts = np.split(masks, np.cumsum(action.num_categories)[:-1], axis=-1)
    chosen = np.stack([part.argmax(axis=-1) for part in parts], axis=-1)
    return chosen.reshape(len(masks), *action.shape).astype(action.dtype)


def _flatten(action: Any, mask: Any) -> np.ndarray:
    """Concatenate a mask that is nested like the action, or flat already, to one array.

    A part that is missing or None allows everything; a Box can have no other mask.
    """
    if type(mask) is np.ndarray:
        return mask.reshape(-1)
    if mask is None:
        return np.ones(count_choices(action), np.bool_)
    if isinstance(action, dict) and isinstance(mask, dict):
        parts = [(action[key], mask.get(key)) for key in sorted(action)]
    elif _are_parallel(action, mask):
        parts = list(zip(action, mask, strict=True))
    else:  # also a tuple of masks for a MultiDiscrete, which is Gymnasium's format
        leaves = [np.asarray(leaf).reshape(-1) for _, leaf in leaves_of(mask)]
        return np.concatenate(leaves) if leaves else np.zeros(0, np.bool_)
    return np.concatenate([_flatten(*part) for part in parts])


def _are_parallel(action: Any, mask: Any) -> bool:
    """Whether both are sequences of the same length."""
    are_sequences = isinstance(action, (tuple, list)) and isinstance(mask, (tuple, list))
    return are_sequences and len(action) == len(mask)


def _find_choices(action: Any) -> tuple[Any, np.ndarray]:
    """The indices of a mask's values that are not bits, and where each choice begins in them."""
    is_choice: list[bool] = []
    sizes: list[int] = []
    for _, leaf in leaves_of(action):
        is_choice += leaf.num_choices * [not leaf.is_bits]
        sizes += [] if leaf.is_bits else leaf.num_categories
    starts = np.cumsum([0, *sizes])[:-1]
    return (slice(None) if all(is_choice) else np.flatnonzero(is_choice)), starts
