"""Gymnasium's vector environments, with their action masks, as `Environments`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from libtorchbeast.action_masks import METHOD, ActionMasks, find_masks, first_allowed, with_mask
from libtorchbeast.episode_info import InfoSums, add_info, info_of
from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import (
    ACTION_MASK,
    ArraySpec,
    agents_action,
    environments_action,
    observation_spec_of,
    spec_of_space,
)
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.envs.spaces import observe
from torchbeast.errors import UsageError


class VectorEnvs:
    """Steps a `VectorEnv` in any of Gymnasium's three reset modes.

    DISABLED   rows are those of single environments: those that ended are reset here.
    NEXT_STEP  each end has an extra row: the row that ends the episode shows its last observation,
               the next one (`truncated`: nothing is learnt from it) the first of the new episode.
    SAME_STEP  after a time limit the first step of the new episode is the extra row, since the
               environment takes it while the last observation is shown; it is not learnt from.
    """

    def __init__(self, env: VectorEnv, seed: int | None = None) -> None:
        try:
            self._mode = AutoresetMode(env.metadata.get("autoreset_mode"))
        except ValueError:
            raise UsageError(
                f"{type(env).__name__} must say when it resets; set "
                'metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP if it resets at the step '
                "after an end, SAME_STEP if at the end, DISABLED if reset(options={'reset_mask': "
                f"...}}) does it, got {env.metadata.get('autoreset_mode')}."
            ) from None
        self.num_envs = env.num_envs
        self._observation_spec = observation_spec_of(env.single_observation_space)
        self.taken_action = spec_of_space(env.single_action_space)
        self.action_spec: Any = agents_action(self.taken_action)
        self._env = env
        self._seed = seed
        self._counter = EpisodeCounter(env.num_envs, self.action_spec)
        self._extra = np.zeros(env.num_envs, np.bool_)  # whose next row is an extra one
        self._masks: VectorMasks | None = None
        self._info: InfoSums = {}

    @property
    def observation_spec(self) -> Any:
        """The spec of an observation; from `reset` on with its action mask, if there is one."""
        spec = self._observation_spec
        return spec if self._masks is None else self._masks.spec(spec)

    def reset(self) -> Row:
        # Gymnasium gives environment i the seed plus i: derive one whose successors are not in use.
        seed = None if self._seed is None else derive_seed(self._seed, 0)
        frame, info = self._env.reset(seed=seed)
        self._extra[:] = False
        self._masks = VectorMasks.find(self._env, frame, info, self.action_spec)
        if self._masks is not None:
            masks = self._masks.read(frame, info)
            frame = self._masks.add(frame, masks, is_last=self._extra)
        return self._counter.first_row(_copy(frame))

    def step(self, actions: Any) -> Row:
        extra, taken = self._extra, actions
        if self._mode is AutoresetMode.DISABLED and extra.any():
            # An environment that has ended must be reset to be stepped; it is reset again below.
            _, masks = self._reset(extra)
            if self._masks is not None:
                taken = self._masks.make_possible(actions, masks, extra)
        moves = environments_action(self.taken_action, taken)
        frame, reward, terminated, limit, info = self._env.step(moves)
        masks, frame = self._split(frame, info)
        frame = _copy(frame)
        reward = np.where(extra, 0.0, reward)
        ended = terminated & ~extra
        limit = limit & ~terminated & ~extra
        for i in np.flatnonzero(ended | limit):
            add_info(self._info, info_of(info, int(i)))
        if self._mode is AutoresetMode.DISABLED and (ended | extra).any():
            first, first_masks = self._reset(ended | extra)
            _put(frame, map_tree(lambda array: array[ended | extra], first), ended | extra)
            if masks is not None:
                masks = np.where((ended | extra)[:, None], first_masks, masks)
        elif self._mode is AutoresetMode.SAME_STEP:
            for i in np.flatnonzero(limit):
                _put(frame, observe(info["final_obs"][i]), i)
        row = self._counter.row(frame, reward, ended | extra, extra, actions)
        is_next_step = self._mode is AutoresetMode.NEXT_STEP
        self._extra = limit | ended if is_next_step else limit
        if self._masks is not None:
            # In SAME_STEP the mask is that of the new episode, as is the next action.
            is_last = self._extra & (self._mode is not AutoresetMode.SAME_STEP)
            row["frame"] = self._masks.add(frame, masks, is_last)
        return row

    def take_info(self) -> InfoSums:
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        info, self._info = self._info, {}
        return info

    def close(self) -> None:
        self._env.close()

    def _reset(self, which: np.ndarray) -> tuple[Any, Any]:
        """Reset the environments that `which` marks; returns their first observations and masks."""
        frame, info = self._env.reset(options={"reset_mask": which.copy()})
        masks, frame = self._split(frame, info)
        return observe(frame), masks

    def _split(self, frame: Any, info: Any) -> tuple[Any, Any]:
        """The masks [num_envs, num_choices], None without any, and the frame without them."""
        if self._masks is None:
            return None, frame
        return self._masks.read(frame, info), without_mask(frame)


def _copy(frame: Any) -> Any:
    """A copy of a frame, since the environment may use its memory again."""
    return map_tree(np.array, observe(frame))


def _put(frame: Any, values: Any, where: Any) -> None:
    """Write values to the environments `where` in a tree of arrays [K, ...]."""

    def put(array: np.ndarray, value: Any) -> None:
        array[where] = value

    map_tree(put, frame, values)


# ------------------------------------------------------------------------------------ action masks


class VectorMasks:
    """The action masks of a vector, [num_envs, num_choices].

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
        """Find where a vector has its masks, at its first reset; None if it has none."""
        masks = find_masks(_Whole(env), frame, info, action)
        return None if masks is None else cls(env, masks, action)

    def read(self, frame: Any, info: Any) -> np.ndarray:
        """The masks as the environments give them, not checked yet."""
        mask = self._masks.find(self._env, frame, info)
        arrays = [np.asarray(leaf) for _, leaf in leaves_of(mask)]
        return np.concatenate([array.reshape(self._num_envs, -1) for array in arrays], axis=1)

    def add(self, frame: Any, masks: np.ndarray, is_last: np.ndarray) -> Any:
        """A frame with its masks, checked. `is_last`: environments in which no action follows."""
        return with_mask(frame, self._masks.check(masks, is_last))

    def spec(self, observation: Any) -> Any:
        return self._masks.spec(observation)

    def make_possible(self, moves: Any, masks: np.ndarray, where: np.ndarray) -> Any:
        """`moves` [num_envs, ...], replaced by possible actions in the environments `where`."""
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
    """Has a method `action_masks()` -> [num_envs, ...] if a vector or its environments have one."""

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
    """A frame without its action mask."""
    if not isinstance(frame, dict):
        return frame
    return {key: part for key, part in frame.items() if key != ACTION_MASK}
