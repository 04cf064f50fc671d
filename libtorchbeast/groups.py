"""Groups of environments, and what happens to those that fail: they are rebuilt, others go on.

The policy is the same wherever environments are stepped. An environment that raises, returns
observations of another shape or dtype, or sends numbers that are not finite, beyond 1e9 or none of
its categories is closed and rebuilt with a new seed; the transition into its first row did not
happen (`truncated`). One that fails more than `MAX_REBUILDS` times in a row, each time within
`HEALTHY_STEPS`, raises `Broken`: its worker or client ends, and the supervisor decides; a server
ends its stream. `Group` applies it to any group as a whole, which is what every host steps;
`SyncEnvs` (sync_envs.py) to each of its environments, whose neighbours go on.
"""

import contextlib
import importlib
import logging
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from libtorchbeast.episode_info import InfoSums
from libtorchbeast.observations import RowCheck
from libtorchbeast.rows import Environments, Row, Spec, as_first_row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import INT64, describe, spec_of, with_bounds

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
            self._check: Callable[[Row], None] = no_check
            if not getattr(envs, "is_checked", False):  # `SyncEnvs` checks each environment
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


def no_check(unchecked: Any) -> None:
    """The check of what is not checked here."""
