"""Masks of the actions of Gymnasium's vector environments; see `libtorchbeast/action_masks.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from libtorchbeast.action_masks import METHOD, ActionMasks, find_masks, first_allowed, with_mask
from libtorchbeast.specs import ACTION_MASK, ArraySpec
from libtorchbeast.tree import leaves_of, map_tree


class VectorMasks:
    """All masks of a vector at once, [num_envs, num_choices].

    They come from the same places as those of single environments. A method `action_masks()` is the
    vector's own, or that of the single environments in a `SyncVectorEnv`.
    """

    def __init__(self, env: Any, masks: ActionMasks, action: Any) -> None:
        self._env = _Whole(env)
        self._num_envs = env.num_envs
        self._masks = masks
        self._action = action

    @classmethod
    def find(cls, env: Any, frame: Any, info: Any, action: Any) -> "VectorMasks | None":
        """By what the vector says at its first reset."""
        masks = find_masks(_Whole(env), frame, info, action)
        return None if masks is None else cls(env, masks, action)

    def read(self, frame: Any, info: Any) -> np.ndarray:
        """What the environments say, which is still to be checked."""
        mask = self._masks.find(self._env, frame, info)
        arrays = [np.asarray(leaf) for _, leaf in leaves_of(mask)]
        return np.concatenate([array.reshape(self._num_envs, -1) for array in arrays], axis=1)

    def add(self, frame: Any, masks: np.ndarray, is_last: np.ndarray) -> Any:
        """A frame with its masks. `is_last`: no action is taken in this one."""
        return with_mask(frame, self._masks.check(masks, is_last))

    def spec(self, observation: Any) -> Any:
        return self._masks.spec(observation)

    def make_possible(self, moves: Any, masks: np.ndarray, where: np.ndarray) -> Any:
        """`moves` [num_envs, ...], but for what a mask allows in some of the environments."""
        masks = self._masks.check(masks[where])
        start = 0

        def change(leaf: ArraySpec, move: Any) -> Any:
            nonlocal start
            size = leaf.num_choices
            if size:
                move = np.array(move)
                move[where] = first_allowed(leaf, masks[:, start : start + size])
                start += size
            return move

        return map_tree(change, self._action, moves)


class _Whole:
    """A vector whose method `action_masks()`, if it has one, gives [num_envs, ...]."""

    def __init__(self, env: Any) -> None:
        method = getattr(env, METHOD, None) or _of_parts(env)
        if method is not None:
            self.action_masks = method


def _of_parts(env: Any) -> Callable[[], Any] | None:
    parts = getattr(env.unwrapped, "envs", None)
    if not parts or not parts[0].has_wrapper_attr(METHOD):
        return None
    return lambda: np.stack(env.unwrapped.call(METHOD))


def without_mask(frame: Any) -> Any:
    """A frame of which the mask is kept apart."""
    if not isinstance(frame, dict):
        return frame
    return {key: part for key, part in frame.items() if key != ACTION_MASK}
