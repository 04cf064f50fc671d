"""Groups of environments that step together, and the policy for environments that fail.

The policy is the same wherever environments are stepped. An environment is closed and rebuilt with
a new seed if it raises, returns an observation of another shape or dtype, or returns a number that
is not finite, is beyond 1e9, or is none of its categories. The transition into the first row of
the new environment did not happen (`truncated`). An environment that fails more than
`MAX_REBUILDS` times in a row, each time within `HEALTHY_STEPS` steps, raises `Broken`. This ends
the process of a worker or client, which its supervisor may restart; in a server it ends the stream.

Every host steps a `Group`, which applies the policy to the group as a whole. `SyncEnvs`
(sync_envs.py) applies it to each of its environments, so that the others keep their episodes.
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

HEALTHY_STEPS = 20  # a failure after so many steps without one counts as the first in a row
MAX_REBUILDS = 3  # in a row


class Broken(Exception):
    """Environments have failed too often in a row; the cause is their last exception."""


def describe_failure(error: BaseException) -> str:
    """The traceback of the exception that ended a process that steps environments.

    For `Broken`, the traceback of the environments' exception, then the message of `Broken`.
    """
    if not isinstance(error, Broken) or error.__cause__ is None:
        return "".join(traceback.format_exception(error)).strip()
    return f"{''.join(traceback.format_exception(error.__cause__)).strip()}\n{error}"


class Rebuilds:
    """Counts an environment's failures and decides whether it is rebuilt again."""

    def __init__(self, name: str) -> None:
        """`name` is the environment's name in the log, such as "Environment 3"."""
        self.num_rebuilds = 0
        self._name = name
        self._in_a_row = 0
        self._steps_at_last = 0

    def allow(self, error: Exception, num_steps: int) -> None:
        """Log a failure in step `num_steps`; raise `Broken` if it is one too many in a row."""
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
        """Call `attempt` until it succeeds; return its result. Failures count as in `allow`."""
        while True:
            self.allow(error, num_steps)
            try:
                return attempt()
            except Broken:
                raise
            except Exception as another:
                error = another


HEARTBEAT: ContextVar[Callable[[], None]] = ContextVar("heartbeat", default=lambda: None)
"""Called before each environment is made, as the watchdog's time limit is for one, not a group."""


def make_environments(factory: str, num_envs: int, seed: int, **options: Any) -> Environments:
    """Make a group by calling the factory, `package.module:function`."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(num_envs=num_envs, seed=seed, **options)


def spec_of_group(envs: Environments, row: Row) -> Spec:
    """The spec of a group, from one of its rows and from what it declares."""
    observation = with_bounds(spec_of(row["frame"]), getattr(envs, "observation_spec", None))
    action = getattr(envs, "action_spec", INT64)
    return Spec(observation, action, getattr(envs, "taken_action", action))


class Group:
    """Environments that step together, rebuilt as a whole if they fail as a whole.

    `row` is the newest row. Used by every host, and by MonoBeast's actors.
    """

    def __init__(
        self, make: Callable[[int], Environments], seed: int, rebuild: bool = True
    ) -> None:
        """`make(seed)` makes the environments; its exceptions are raised here, not retried.

        Without `rebuild`, nothing is rebuilt: exceptions of the environments are raised.
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
        """Whether it has taken more steps than a group that fails from the start can take."""
        return self._num_steps > (MAX_REBUILDS + 1) * HEALTHY_STEPS

    @property
    def spec(self) -> Spec:
        return spec_of_group(self._envs, self.row)

    def start(self) -> Row:
        """The first row for a new link; environments that played before keep their episodes."""
        if self._has_played:
            self.row = as_first_row(self.row)
        self._has_played = True
        return self.row

    def step(self, actions: Any) -> Row:
        """Take one action in each environment; return their row, also after a rebuild."""
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
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        return self._take_info()

    def close(self) -> None:
        """Close the environments; log their exceptions."""
        try:
            self._envs.close()
        except Exception as error:
            logger.warning("An environment failed while it was closed.", exc_info=error)

    def _rebuild(self, error: Exception) -> Row:
        """Replace the environments, which have failed; return the first row of the new ones."""

        def attempt() -> Row:
            close_failed(self._envs)
            self._envs, row = self._build()
            return as_first_row(row, truncated=True)

        return self._rebuilds.retry(error, self._num_steps, attempt)

    def _build(self) -> tuple[Environments, Row]:
        # A new seed each time: with the same one, the same failure might come again.
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
    """Close an environment that has failed, and ignore further exceptions."""
    with contextlib.suppress(Exception):
        envs.close()


def no_check(unchecked: Any) -> None:
    """Check nothing: for rows and frames that are checked elsewhere, or not at all."""
