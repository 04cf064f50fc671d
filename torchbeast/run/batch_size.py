"""How large batches must be to keep policy lag within --target_policy_lag.

A rollout's policy lag is the number of updates between its first action and its own update. With L
learner threads, batches of B, a queue of Q and N environments it is at most
(2FN - 2 + Q) // B + 2L - 1, where F is 1, or more with actors that carry the model
(`Groups.in_flight`); `needed_batch` is the smallest B that keeps it within the target.
docs/architecture.md has the proof, MonoBeast's bound, and the cases of several clients and of
environments that come and go.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchbeast.errors import UsageError
from torchbeast.run.flags import TrainingFlags

logger = logging.getLogger("torchbeast")

PACE = 2  # rollouts that another environment ends, at most, while one is played
MAX_BATCH_SIZE = 1024  # rollouts to which batches grow at most
MANY_UPDATES = 32  # policy lag beyond which V-trace corrects badly
SETTLE_S = 2.0  # without a change until a new size is logged, since groups come one by one
OWN_CLIENT = 0  # the ActorPool's client number of this program's own environments


def needed_batch(target: int, num_ahead: int, queue_size: int, num_learner_threads: int) -> int:
    """The smallest batch that keeps policy lag within the target.

    Before a rollout there are `num_ahead` others, and a queue of `queue_size` rollouts, or of one
    batch if that is larger.
    """
    most = target - (2 * num_learner_threads - 1)  # batches before a rollout, with the queue's
    batch_size = num_ahead // most + 1
    if batch_size >= queue_size:
        return batch_size
    return (num_ahead + queue_size) // (most + 1) + 1


@dataclass(frozen=True)
class Groups:
    """The environments that take part at present."""

    clients: Sequence[int]
    """Number of environments of each client; this program's own count as one client."""
    largest: int = 1
    """Environments in the largest group."""
    smallest: int = 1
    """Environments in the smallest group."""
    in_flight: int = 1
    """Rollouts of one environment that exist at once: 1, or more if actors carry the model
    (`ModelOffers.in_flight`)."""

    @property
    def num_envs(self) -> int:
        return sum(self.clients)


class HasBatches(Protocol):
    """The flags that determine how large batches are."""

    @property
    def batch_size(self) -> int: ...
    @property
    def hold_actors(self) -> bool: ...
    @property
    def target_policy_lag(self) -> int | None: ...
    @property
    def num_learner_threads(self) -> int: ...


def check_target(flags: HasBatches) -> None:
    """UsageError if --target_policy_lag cannot be reached with any batch size."""
    target, threads = flags.target_policy_lag, flags.num_learner_threads
    if target is not None and target < 2 * threads and not flags.hold_actors:
        raise UsageError(
            f"target_policy_lag must be at least {2 * threads}, twice --num_learner_threads, got "
            f"{target}; raise it, or give --hold_actors for no lag at all."
        )


def grow_batch(flags: HasBatches, num_envs: int, num_ahead: int, queue_size: int) -> int:
    """The effective batch size: --batch_size, or more if --target_policy_lag or --hold_actors need
    it; `num_ahead` and `queue_size` as in `needed_batch`."""
    target = flags.target_policy_lag
    if target is None:
        return flags.batch_size
    if flags.hold_actors:
        needed = num_envs
    else:
        needed = needed_batch(target, num_ahead, queue_size, flags.num_learner_threads)
    return max(flags.batch_size, needed)


def choose_batch_size(flags: HasBatches, groups: Groups, queue_size: int = 0) -> int:
    """PolyBeast's effective batch size; `queue_size` counts if the queue holds more than a batch.

    Clients have equal shares of a batch. So the share of the largest client must be what its batch
    would be if it were alone; a client with fewer environments than that brings one rollout of
    each.
    """
    target = flags.target_policy_lag
    pace = PACE * groups.in_flight
    ahead = pace * groups.num_envs + groups.largest - groups.smallest - 2
    batch_size = grow_batch(flags, groups.num_envs, ahead, queue_size)
    if target is None or flags.hold_actors:
        return batch_size
    share = pace * max(groups.clients) / (target - 2 * flags.num_learner_threads + 1)
    needed = math.ceil(sum(min(num_envs, share) for num_envs in groups.clients))
    return max(batch_size, needed)


class LagNotice:
    """Warns if there are so many environments that rollouts are old, and again if they double.

    While a rollout is played, there is an update for each `batch_size` other environments.
    """

    def __init__(self, flags: HasBatches) -> None:
        many = max(MANY_UPDATES, flags.target_policy_lag or 0)
        self._most_per_place = 1 if flags.hold_actors else many
        self._said_at = 0

    def poll(self, num_envs: int, batch_size: int, in_flight: int = 1) -> None:
        num_ahead = in_flight * num_envs
        if num_ahead <= max(batch_size * self._most_per_place, self._said_at):
            return
        self._said_at = 2 * num_ahead
        logger.warning(
            "With %d environments and batches of %d, rollouts are about %d updates old when they "
            "are learnt from; a larger --batch_size or fewer environments learn better.",
            num_envs, batch_size, math.ceil(num_ahead / batch_size),
        )  # fmt: skip


def describe_size(
    flags: TrainingFlags, batch_size: int, num_envs: int, is_enough: bool = True
) -> str:
    """A sentence for the log: the effective batch size, and why it is not --batch_size."""
    target = 0 if flags.hold_actors else flags.target_policy_lag
    flag = "--hold_actors" if flags.hold_actors else "--target_policy_lag"
    why = (
        f"so that policy lag stays within {target} ({flag})"
        if is_enough
        else f"the most that batches grow to, by their memory or at all; policy lag may exceed "
        f"{target} ({flag})"
    )
    return (
        f"Updates learn from {batch_size} rollouts at a time with {num_envs} environments, {why}; "
        f"--learning_rate stays {flags.learning_rate:g}. A given --batch_size would be kept."
    )


def report_batch_size(flags: Any, batch_size: int, num_envs: int) -> None:
    """Log the effective batch size of a run with a fixed number of environments."""
    if batch_size != flags.batch_size:
        logger.info("%s", describe_size(flags, batch_size, num_envs))
    LagNotice(flags).poll(num_envs, batch_size)


class BatchSize:
    """Adapts the learner's batch and queue to environments that come and go, and logs changes.

    For the main thread. Make the queue with `batch_size` and `queue_size`.
    """

    def __init__(self, flags: Any, num_expected: int, most: int = MAX_BATCH_SIZE) -> None:
        """`flags` are PolyBeast's; `num_expected` environments of its own are about to come.
        Batches grow to `most` rollouts at most."""
        self._flags = flags
        self._num_expected = num_expected
        self._most = max(flags.batch_size, min(most, MAX_BATCH_SIZE))
        self._is_enough = True
        self._notice = LagNotice(flags)
        self._num_envs = num_expected
        group = getattr(flags, "envs_per_actor", 1)
        self._resize(self._choose(Groups([num_expected], group, group)))
        self._said = flags.batch_size
        self._changed_at = -math.inf

    @property
    def _room(self) -> int:
        """--max_learner_queue_size, or 0."""
        return self._flags.max_learner_queue_size or 0

    def _choose(self, groups: Groups) -> int:
        wanted = choose_batch_size(self._flags, groups, self._room)
        self._is_enough = wanted <= self._most
        return min(wanted, self._most)

    def _resize(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.queue_size = 0 if self._flags.queue_size == 0 else max(self._room, batch_size)

    def poll(self, queue: Any, in_flight: int = 1) -> None:
        """Resize the queue if environments have come or gone; called a few times a second.

        `in_flight` is `Groups.in_flight`.
        """
        groups = self._find_groups(queue.members(), in_flight)
        if groups.num_envs:
            self._num_envs = groups.num_envs
            self._follow(queue, self._choose(groups))
        self._report()
        self._notice.poll(self._num_envs, self.batch_size, in_flight)

    def _find_groups(self, members: Sequence[tuple[int, int]], in_flight: int) -> Groups:
        clients: Counter[int] = Counter()
        for client, num_envs in members:
            clients[client] += num_envs
        if clients[OWN_CLIENT] >= self._num_expected:
            self._num_expected = 0  # all have come: from now on only those present count
        clients[OWN_CLIENT] = max(clients[OWN_CLIENT], self._num_expected)
        sizes = [num_envs for _, num_envs in members] or [1]
        return Groups(list(clients.values()), max(sizes), min(sizes), in_flight)

    def _follow(self, queue: Any, wanted: int) -> None:
        """Grow the batch at once; shrink it only to the number of rollouts that wait in the queue,
        since smaller batches would mean more updates before the last of them."""
        batch_size = max(wanted, min(self.batch_size, queue.size()))
        if batch_size == self.batch_size:
            return
        self._resize(batch_size)
        queue.resize(batch_size, batch_size, self.queue_size)
        self._changed_at = time.monotonic()

    def _report(self) -> None:
        """Log a change of more than a tenth, or from or to --batch_size, once it has settled."""
        size, smallest = self.batch_size, self._flags.batch_size
        differs = abs(size - self._said) > self._said / 10 or smallest in (size, self._said)
        if size == self._said or not differs or time.monotonic() < self._changed_at + SETTLE_S:
            return
        self._said = size
        level = logging.INFO if self._is_enough else logging.WARNING
        text = describe_size(self._flags, size, self._num_envs, self._is_enough)
        logger.log(level, "%s", text)
