"""Groups of environments, and what happens to one that fails: it is rebuilt, its neighbours go on.

    SyncEnvs   single environments, old Gym's or Gymnasium's, stepped one after the other
    Group      any group, with the policy for those that fail as a whole; what every host steps

The policy is the same wherever environments are stepped. An environment that raises, returns
observations of another shape or dtype, or sends numbers that are not finite, beyond 1e9 or none of
its categories is closed and rebuilt with a new seed; the transition into its first row did not
happen (`truncated`). One that fails more than `MAX_REBUILDS` times in a row, each time within
`HEALTHY_STEPS`, raises `Broken`: its worker or client ends, and the supervisor decides; a server
ends its stream.
"""

import contextlib
import importlib
import inspect
import io
import logging
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from libtorchbeast.action_masks import ActionMasks, expect_no_mask, find_masks
from libtorchbeast.episode_info import InfoSums, add_info
from libtorchbeast.observations import FLOATS, REMEDY, FrameCheck, RowCheck, as_arrays, stack
from libtorchbeast.rows import (
    MAX_NUMBER,
    Environments,
    EpisodeLists,
    Row,
    Spec,
    Unstacked,
    as_first_row,
)
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import (
    INT64,
    UnknownSpace,
    agents_action,
    count_actions,
    describe,
    environments_action,
    observation_spec_of,
    spec_of,
    spec_or,
    takes_as_given,
    with_bounds,
)
from libtorchbeast.tree import map_tree

logger = logging.getLogger("torchbeast")

HEALTHY_STEPS = 20  # after so many, a failure counts as the first one
MAX_REBUILDS = 3  # in a row, each within so many steps


class Broken(Exception):
    """Environments that fail again and again; the cause is their last exception."""


def describe_failure(error: BaseException) -> str:
    """The traceback of what ended a process that steps environments; one sentence if it is known.

    Of environments that fail again and again, their own traceback, and then that sentence.
    """
    if not isinstance(error, Broken) or error.__cause__ is None:
        return "".join(traceback.format_exception(error)).strip()
    return f"{''.join(traceback.format_exception(error.__cause__)).strip()}\n{error}"


class Rebuilds:
    """Counts the failures of an environment, and says when another rebuild is useless."""

    def __init__(self, name: str) -> None:
        """`name` is for the log: Environment 3."""
        self.num_rebuilds = 0
        self._name = name
        self._in_a_row = 0
        self._steps_at_last = 0

    def allow(self, error: Exception, num_steps: int) -> None:
        """Log what happened in step `num_steps`; `Broken` if it keeps happening."""
        healthy = num_steps - self._steps_at_last >= HEALTHY_STEPS
        self._in_a_row = 1 if healthy else self._in_a_row + 1
        self._steps_at_last = num_steps
        if self._in_a_row > MAX_REBUILDS:
            raise Broken(
                f"{self._name} failed {self._in_a_row} times in a row, each time within "
                f"{HEALTHY_STEPS} steps; the last time with {type(error).__name__}: {error}"
            ) from error
        self.num_rebuilds += 1
        logger.warning("%s failed and is rebuilt with a new seed.", self._name, exc_info=error)

    def retry(self, error: Exception, num_steps: int, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns at last. A failure on the way there is one more in a row."""
        while True:
            self.allow(error, num_steps)
            try:
                return attempt()
            except Broken:
                raise
            except Exception as another:
                error = another


# ------------------------------------------------------------------------------------------ groups


HEARTBEAT: ContextVar[Callable[[], None]] = ContextVar("heartbeat", default=lambda: None)
"""Of the process that makes environments: the watchdog's time is that of one, not of a group."""


def make_environments(factory: str, num_envs: int, seed: int, **options: Any) -> Environments:
    """Call `package.module:function`."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(num_envs=num_envs, seed=seed, **options)


def spec_of_group(envs: Environments, row: Row) -> Spec:
    """What environments that give such rows are like."""
    observation = with_bounds(spec_of(row["frame"]), getattr(envs, "observation_spec", None))
    action = getattr(envs, "action_spec", INT64)
    return Spec(observation, action, getattr(envs, "taken_action", action))


class Group:
    """Environments that step together, rebuilt as a whole if they fail as a whole.

    `row` is the newest one. Used by every host of environments, and by MonoBeast's actors.
    """

    def __init__(
        self, make: Callable[[int], Environments], seed: int, rebuild: bool = True
    ) -> None:
        """`make(seed)` makes the environments; what it raises at first is raised here.

        Without `rebuild`, what the environments raise is raised.
        """
        self._make = make
        self._seed = seed
        self._may_rebuild = rebuild
        self._rebuilds = Rebuilds("A group of environments")
        self._num_builds = 0
        self._num_steps = 0
        self._observation: Any = None
        self._has_played = False
        self._envs, self.row = self._build()

    @property
    def num_envs(self) -> int:
        return self._envs.num_envs

    @property
    def has_worked(self) -> bool:
        """Whether it took more steps than one that is `Broken` from its start."""
        return self._num_steps > (MAX_REBUILDS + 1) * HEALTHY_STEPS

    @property
    def spec(self) -> Spec:
        return spec_of_group(self._envs, self.row)

    def start(self) -> Row:
        """The first row of a stream; environments that played before keep their episodes."""
        if self._has_played:
            self.row = as_first_row(self.row)
        self._has_played = True
        return self.row

    def step(self, actions: Any) -> Row:
        """Take one action in each."""
        self._num_steps += 1
        try:
            row = self._envs.step(actions)
            self._check(row)
        except Exception as error:
            if isinstance(error, Broken) or not self._may_rebuild:
                raise
            row = self._rebuild(error)
        self.row = row
        return row

    def take_info(self) -> InfoSums:
        """Sums over the episodes that ended since the last call, of the numbers in their `info`."""
        return self._take_info()

    def close(self) -> None:
        """Close the environments; what that raises is logged."""
        try:
            self._envs.close()
        except Exception as error:
            logger.warning("An environment failed while it was closed.", exc_info=error)

    def _rebuild(self, error: Exception) -> Row:
        """The first row of new environments."""

        def attempt() -> Row:
            close_failed(self._envs)
            self._envs, row = self._build()
            return as_first_row(row, truncated=True)

        return self._rebuilds.retry(error, self._num_steps, attempt)

    def _build(self) -> tuple[Environments, Row]:
        # A new seed each time, or the same bad luck would come again.
        seed = derive_seed(self._seed, self._num_builds)
        self._num_builds += 1
        envs = self._make(seed)
        try:
            row = envs.reset()
            observation = spec_of(row["frame"])
            if self._observation not in (None, observation):
                raise ValueError(
                    f"The observation must be {describe(self._observation)} as before, "
                    f"got {describe(observation)}."
                )
            self._check: Callable[[Row], None] = _pass
            if not (isinstance(envs, SyncEnvs) and envs.is_checked):  # which checks each of them
                self._check = RowCheck(spec_of_group(envs, row).observation)
            self._check(row)
        except BaseException:
            close_failed(envs)
            raise
        self._observation = observation
        self._take_info: Callable[[], InfoSums] = getattr(envs, "take_info", dict)
        return envs, row


def close_failed(envs: Any) -> None:
    """Close what failed before, so that another failure is no news."""
    with contextlib.suppress(Exception):
        envs.close()


# ------------------------------------------------------------------------------ single environments


class BadStep(ValueError):
    """An environment's `step` returns what no step of an environment is, whatever the action."""


def one_number(reward: Any) -> float:
    """A reward as a float; some packages have it in an array."""
    numbers = np.ravel(reward).tolist()
    if len(numbers) == 1 and isinstance(numbers[0], (int, float)):
        return float(numbers[0])
    text = f"{len(numbers)} numbers" if len(numbers) > 1 else repr(reward)
    raise BadStep(
        f"The reward must be one number, got {text}; wrap the environment so that it is one "
        "(--wrappers), and agents that act together as docs/environments.md says."
    )


class SyncEnvs:
    """`num_envs` single environments behind the protocol of groups."""

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

        Without `knows_truncation`, a time limit is an end like any other. A learner that does not
        know `truncated` cannot be shown that an environment was rebuilt, so that none is.
        Without `rebuild`, what an environment raises is raised, and what it returns is unchecked.
        With `masks`, frames have an `action_mask` if the environments offer one anywhere.
        """
        self.num_envs = num_envs
        self.observe = observe
        self._make_env = make_env
        self._seed = seed
        self._knows_truncation = knows_truncation
        self.is_checked = rebuild and knows_truncation  # each environment, before it is in a row
        self._check: Callable[[Any], None] = _pass
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
        """What the environments declare; after `reset` with their masks."""
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
        """Step one environment, after `reset`; BadStep if what it returns is no step.

        What it raises is no news, as the action is a random one, unless no first step ever works:
        such an environment would be given up as `Broken`, after all the restarts of its process.
        """
        space = getattr(self.envs[0], "action_space", None)
        if space is None or self._masks is not None:  # not all actions are allowed
            return
        for tries_left in reversed(range(MAX_REBUILDS + 1)):
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # it belongs to no run yet
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
        # Without a function for one environment: calling it would take as long as some steps do.
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
                        add_info(self._info, info)  # before a reset, which may use the dict again
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
        """Leave frames `Unstacked`, and numbers in lists, for who copies them on."""
        self.join = Unstacked
        self._counter.keeps_lists = True

    def take_info(self) -> InfoSums:
        """Of the episodes that ended since the last call."""
        info, self._info = self._info, {}
        return info

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also if one raises
            for env in self.envs:
                stack.callback(env.close)

    def _reset(self, i: int, seed: int | None = None) -> Any:
        """The first frame of an episode."""
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
        """The first frame of a new environment in the place of one that failed."""
        if not self.is_checked or isinstance(error, UnknownSpace):  # it will never be another
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
        """The action of each environment, as its own space has them."""
        if not self._takes_as_given:
            actions = environments_action(self.taken_action, actions)
        if not self._takes_numbers:
            return [self._pick(actions, i) for i in range(self.num_envs)]
        if len(actions) != self.num_envs:
            raise ValueError(f"There must be {self.num_envs} actions, got {len(actions)}.")
        if isinstance(self.envs[0], _OldGym):
            # As they are: NumPy's integers, which environments for TorchBeast's Server know.
            return list(np.asarray(actions))
        if type(actions) is list:
            return actions
        return np.asarray(actions, np.int64).tolist()

    def _pick(self, actions: Any, i: int) -> Any:
        return map_tree(lambda _, array: array[i], self.action_spec, actions)

    def _join(self, frames: list[Any]) -> Any:
        """The environments' trees of arrays to one tree with num_envs as first dimension."""
        if isinstance(frames[0], np.ndarray):
            return self.join(frames)
        return map_tree(lambda *arrays: self.join(list(arrays)), *frames)


def _pass(unchecked: Any) -> None:
    """The check of what is not checked here."""


_ONE_A_PROCESS = (
    "{made} could be made in this process, and this one beside could not. If a process may have "
    "one only: --envs_per_actor 1, and as many --num_servers as --num_actors "
    "(polybeast_env: --envs_per_server 1)."
)


def _make_all(make_env: Callable[[], Any], num_envs: int) -> list[Any]:
    with contextlib.ExitStack() as stack:
        envs = []
        for _ in range(num_envs):
            HEARTBEAT.get()()  # all of them may take longer than one is given
            try:
                envs.append(as_gymnasium(make_env()))
            except Exception as error:
                if envs:
                    error.add_note(_ONE_A_PROCESS.format(made=len(envs)))
                raise
            stack.callback(close_failed, envs[-1])
        stack.pop_all()  # all could be made: none is closed
    return envs


# ---------------------------------------------------------------------------------------- old Gym


class _OldGym:
    """Gives an old-style environment (reset -> frame, step -> 4 values) the Gymnasium interface.

    Also for environments of the new style that are not Gymnasium's.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._takes_seed = takes_keyword(env.reset, "seed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def unwrapped(self) -> Any:
        return getattr(self._env, "unwrapped", self._env)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        options = {}
        if seed is not None:
            if _takes(getattr(self._env, "seed", None), seed):
                self._env.seed(seed)
            elif self._takes_seed:  # as in the last versions of Gym
                options["seed"] = seed
        result = self._env.reset(**options)
        # A pair with a dict is Gymnasium's (observation, info).
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, ...]:
        result = self._env.step(action)
        if len(result) != 4:
            return result
        frame, reward, done, info = result
        limit = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated"))
        return frame, reward, bool(done) and not limit, limit, info

    def close(self) -> None:
        if callable(getattr(self._env, "close", None)):
            self._env.close()


def _takes(function: Any, argument: Any) -> bool:
    """Whether it can be called so; those whose signature is not known are said to."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(argument)
    except TypeError:  # procgen's has no argument: what it plays is given when it is made
        return False
    except ValueError:
        return True
    return True


def takes_keyword(function: Any, name: str) -> bool:
    """Whether it can be called with `name=...`, as far as its signature says."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def as_gymnasium(env: Any) -> Any:
    """`env` if it is a Gymnasium environment, else a thin adapter around it."""
    gymnasium = sys.modules.get("gymnasium")  # who has one of its environments has imported it
    is_gymnasium = gymnasium is not None and isinstance(env, gymnasium.Env)
    return env if is_gymnasium else _OldGym(env)
