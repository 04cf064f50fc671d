"""Single environments, old Gym's or Gymnasium's, as a group: stepped one after the other."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from libtorchbeast.action_masks import ActionMasks, expect_no_mask, find_masks
from libtorchbeast.episode_info import InfoSums, add_info
from libtorchbeast.groups import HEARTBEAT, MAX_REBUILDS, Rebuilds, close_failed, no_check
from libtorchbeast.observations import FLOATS, REMEDY, FrameCheck, as_arrays, stack
from libtorchbeast.old_gym import OldGym, as_gymnasium
from libtorchbeast.rows import MAX_NUMBER, EpisodeLists, Row, Unstacked
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import (
    INT64,
    UnknownSpace,
    agents_action,
    count_actions,
    environments_action,
    observation_spec_of,
    spec_or,
    takes_as_given,
)
from libtorchbeast.tree import map_tree


class BadStep(ValueError):
    """An environment's `step` returns something that breaks the interface, whatever the action."""


def one_number(reward: Any) -> float:
    """A reward as a float, also if it is an array of one number; raises `BadStep` otherwise."""
    numbers = np.ravel(reward).tolist()
    if len(numbers) == 1 and isinstance(numbers[0], (int, float)):
        return float(numbers[0])
    text = f"{len(numbers)} numbers" if len(numbers) > 1 else repr(reward)
    raise BadStep(
        f"The reward must be one number, got {text}; wrap the environment so that it is one "
        "(--wrappers), and agents that act together as docs/environments.md says."
    )


class SyncEnvs:
    """`num_envs` single environments as one group (`Environments` in rows.py)."""

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_envs: int,
        seed: int | None = None,
        observe: Callable[[Any], Any] = as_arrays,
        knows_truncation: bool = True,
        rebuild: bool = True,
        masks: bool = False,
    ) -> None:
        """`observe` turns an environment's observation into a tree of arrays.

        Without `knows_truncation`, a time limit is an end like any other, and no environment is
        rebuilt, because rows without `truncated` cannot show that. Without `rebuild`, exceptions
        of environments are raised. In both cases, what environments return is not checked.
        With `masks`, frames have an `action_mask` if the environments offer one anywhere.
        """
        self.num_envs = num_envs
        self.observe = observe
        self._make_env = make_env
        self._seed = seed
        self._knows_truncation = knows_truncation
        self.is_checked = rebuild and knows_truncation  # whether `step` and `reset` check rows
        self._check: Callable[[Any], None] = no_check
        if self.is_checked:
            self._check = FrameCheck(lambda: self.observation_spec)
        self.join: Callable[[list[np.ndarray]], Any] = stack if self.is_checked else np.stack
        self.envs = _make_all(make_env, num_envs)
        first = self.envs[0]
        self._observation_spec = observation_spec_of(getattr(first, "observation_space", None))
        self.taken_action = spec_or(INT64, getattr(first, "action_space", None))
        self.action_spec: Any = agents_action(self.taken_action)
        self._takes_as_given = takes_as_given(self.taken_action)
        self._takes_numbers = count_actions(self.action_spec) > 0
        self._takes_masks = masks
        self._looks_for_masks = masks  # until the first reset has shown whether there are any
        self._masks: ActionMasks | None = None
        self._counter = EpisodeLists(num_envs, self.action_spec)
        self._hit_time_limit = [False] * num_envs
        self._info: InfoSums = {}
        self._num_steps = 0
        self._rebuilds = [Rebuilds(f"Environment {i}") for i in range(num_envs)]

    @property
    def observation_spec(self) -> Any:
        """The spec that the environments declare; after `reset` with their action masks."""
        spec = self._observation_spec
        return spec if self._masks is None else self._masks.spec(spec)

    def reset(self) -> Row:
        self._hit_time_limit = [False] * self.num_envs
        frames = []
        for i in range(self.num_envs):
            HEARTBEAT.get()()
            try:
                frame = self._reset(i, self._seed_of(i))
            except Exception as error:
                frame = self._rebuild(i, error)
            frames.append(frame)
        return self._counter.first_row(self._join(frames))

    def try_step(self) -> None:
        """After `reset`, step one environment; raise `BadStep` if its result is invalid.

        The action is random, so an exception of the environment is ignored, and the step is tried
        again. The last try's exception is raised: in a run such an environment would be `Broken`
        again and again, until its process is given up.
        """
        space = getattr(self.envs[0], "action_space", None)
        if space is None or self._masks is not None:  # a random action may not be allowed
            return
        for tries_left in reversed(range(MAX_REBUILDS + 1)):
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # there is no log for it yet
                    result = self.envs[0].step(space.sample())
                break
            except Exception:
                if not tries_left:
                    raise
                self._make_again(0)
                self._reset(0)
        if not isinstance(result, tuple) or len(result) != 5:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise BadStep(
                "`step` must return (observation, reward, terminated, truncated, info), got "
                f"{got}; wrap the environment so that it does (--wrappers)."
            )
        one_number(result[1])

    def step(self, actions: Any) -> Row:
        self._num_steps += 1
        frames = []
        reward = [0.0] * self.num_envs
        done = [False] * self.num_envs
        truncated = list(self._hit_time_limit)  # these rows are the extra ones
        # Not in a function for one environment: its call would take as long as some steps do.
        envs, observe, check, extra = self.envs, self.observe, self._check, self._hit_time_limit
        masks, is_first = self._masks, self._num_steps == 1
        for i, action in enumerate(self._split(actions)):
            try:
                if extra[i]:
                    frame, done[i], extra[i] = self._reset(i), True, False
                else:
                    frame, value, terminated, limit, info = envs[i].step(action)
                    is_number = isinstance(value, (float, int))
                    reward[i] = value = float(value) if is_number else one_number(value)
                    if self.is_checked and not -MAX_NUMBER <= value <= MAX_NUMBER:
                        complaint = FLOATS.complaint("The reward", np.array(value))
                        raise ValueError(complaint + REMEDY)
                    if (terminated or limit) and info:
                        add_info(self._info, info)  # before a reset, which may reuse the dict
                    if terminated or (limit and not self._knows_truncation):
                        frame, done[i] = self._reset(i), True
                    else:
                        extra[i] = bool(limit)
                        if masks is not None:
                            frame = masks.add(envs[i], frame, info, is_last=extra[i])
                        elif is_first and self._takes_masks:
                            expect_no_mask(info)
                        frame = observe(frame)
                        check(frame)
            except Exception as error:
                frame = self._rebuild(i, error)
                self._counter.forget(i)
                reward[i], done[i], truncated[i] = 0.0, True, True
            frames.append(frame)
        return self._counter.row(self._join(frames), reward, done, truncated, actions)

    def pass_on_at_once(self) -> None:
        """From now on return frames `Unstacked` and numbers in lists, to be copied at once."""
        self.join = Unstacked
        self._counter.keeps_lists = True

    def take_info(self) -> InfoSums:
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        info, self._info = self._info, {}
        return info

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also if one raises
            for env in self.envs:
                stack.callback(env.close)

    def _reset(self, i: int, seed: int | None = None) -> Any:
        """Reset environment i; return the first frame of its episode, with its mask."""
        env = self.envs[i]
        frame, info = env.reset(seed=seed)
        if self._looks_for_masks:
            self._masks = find_masks(env, frame, info, self.action_spec)
            self._looks_for_masks = False
        if self._masks is not None:
            frame = self._masks.add(env, frame, info)
        frame = self.observe(frame)
        self._check(frame)
        return frame

    def _rebuild(self, i: int, error: Exception) -> Any:
        """Replace environment i, which has failed; return the first frame of the new one."""
        if not self.is_checked or isinstance(error, UnknownSpace):  # a new one would not differ
            raise error
        rebuilds = self._rebuilds[i]
        self._hit_time_limit[i] = False

        def attempt() -> Any:
            self._make_again(i)
            return self._reset(i, self._seed_of(i, rebuilds.num_rebuilds))

        return rebuilds.retry(error, self._num_steps, attempt)

    def _make_again(self, i: int) -> None:
        close_failed(self.envs[i])
        self.envs[i] = as_gymnasium(self._make_env())

    def _seed_of(self, *path: int) -> int | None:
        return None if self._seed is None else derive_seed(self._seed, *path)

    def _split(self, actions: Any) -> list[Any]:
        """The list of the environments' actions, in the form that their own space has."""
        if not self._takes_as_given:
            actions = environments_action(self.taken_action, actions)
        if not self._takes_numbers:
            return [self._pick(actions, i) for i in range(self.num_envs)]
        if len(actions) != self.num_envs:
            raise ValueError(f"There must be {self.num_envs} actions, got {len(actions)}.")
        if isinstance(self.envs[0], OldGym):
            # As NumPy's integers, which environments written for TorchBeast's Server expect.
            return list(np.asarray(actions))
        if type(actions) is list:
            return actions
        return np.asarray(actions, np.int64).tolist()

    def _pick(self, actions: Any, i: int) -> Any:
        return map_tree(lambda _, array: array[i], self.action_spec, actions)

    def _join(self, frames: list[Any]) -> Any:
        """Join the environments' frames, trees of arrays, to one tree of arrays [num_envs, ...]."""
        if isinstance(frames[0], np.ndarray):
            return self.join(frames)
        return map_tree(lambda *arrays: self.join(list(arrays)), *frames)


_ONE_A_PROCESS = (
    "{made} could be made in this process, and this one beside could not. If a process may have "
    "one only: --envs_per_actor 1, and as many --num_servers as --num_actors "
    "(polybeast_env: --envs_per_server 1)."
)


def _make_all(make_env: Callable[[], Any], num_envs: int) -> list[Any]:
    with contextlib.ExitStack() as stack:
        envs = []
        for _ in range(num_envs):
            HEARTBEAT.get()()  # the watchdog's time limit is for making one, not all
            try:
                envs.append(as_gymnasium(make_env()))
            except Exception as error:
                if envs:
                    error.add_note(_ONE_A_PROCESS.format(made=len(envs)))
                raise
            stack.callback(close_failed, envs[-1])
        stack.pop_all()  # no failure: none is closed
    return envs
