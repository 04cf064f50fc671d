"""Updates by several learners, and the same by one with all their rollouts in its batches.

`python -m tests.helpers.rank_cases FOLDER` is one of the learners, with torchrun's variables; what
it has at the end goes to FOLDER/<rank>.tar.
"""

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tests.helpers.batches import make_batch
from tests.helpers.specs import spec_for
from torchbeast.core.learner import Learner
from torchbeast.core.rank_stats import SharedStats
from torchbeast.core.ranks import ALONE
from torchbeast.core.rollout_batch import pick_columns
from torchbeast.models import make_model
from torchbeast.models.normalization import NormalizedObservations
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.signals import StopRequest
from torchbeast.runtime.distributed import join_ranks

T, A = 6, 4
IMAGE = (36, 36)
FLAGS = TrainingFlags(
    env="Catch",
    total_steps=100_000,
    unroll_length=T,
    entropy_cost=0.01,
    learning_rate=0.01,
    grad_norm_clipping=5.0,  # is reached: the norm must be that of the sum
)
PASSES = dataclasses.replace(
    FLAGS,
    num_passes=2,
    num_minibatches=3,
    clip_ratio=0.2,
    normalize_advantages=True,
    normalize_rewards=True,
    normalize_observations=True,
    optimizer="adam",
)
IMAGES = dataclasses.replace(FLAGS, normalize_images=True, learning_rate=0.001, epsilon=1.0)


def columns_of(rank):
    """Ranks have other numbers of rollouts, so that nothing fits by chance."""
    first = sum(2 + i for i in range(rank))
    return list(range(first, first + 2 + rank))


def global_batch(seed, size, use_lstm=False, images=False):
    """The rollouts of `size` ranks side by side, and the states of the agent."""
    generator = torch.Generator().manual_seed(seed)
    B = columns_of(size - 1)[-1] + 1

    def make_frame(num_rows, generator):
        if images:
            shape = (num_rows, B, *IMAGE)
            return torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return 3 * torch.randn(num_rows, B, 7, generator=generator) + 5

    batch = make_batch(generator, T, B, A, make_frame, source=torch.arange(B))
    state = ()
    if use_lstm:
        state = tuple(torch.randn(1, B, 256, generator=generator) for _ in range(2))
    return batch, state


class WithSpareParts(nn.Module):
    """An agent with batch normalisation, a layer that no loss depends on, and a loss of its own."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent
        self.norm = nn.BatchNorm1d(7)
        self.spare = nn.Linear(3, 3)
        self.own = nn.Linear(7, 1)

    def forward(self, inputs, state=()):
        with torch.no_grad():
            self.norm(inputs["frame"].flatten(0, 1))
        output, state = self.agent(inputs, state)
        own = self.own(inputs["frame"]).squeeze(-1) ** 2
        return {**output, "losses": {"own": 0.01 * own}}, state


def make_learner(ranks, flags, use_lstm, spare):
    torch.manual_seed(7 if ranks.rank == 0 else 8)  # the first rank's weights are everybody's
    spec = spec_for(IMAGE, A, "uint8") if flags.normalize_images else spec_for((7,), A)
    model = make_model("auto", spec, use_lstm, normalize_images=flags.normalize_images)
    if flags.normalize_observations:
        model = NormalizedObservations(model, spec.observation)
    if spare:
        model = WithSpareParts(model)
    stats = None if ranks.size == 1 else SharedStats()
    return Learner(model, flags, torch.device("cpu"), ranks=ranks, stats=stats)


@dataclasses.dataclass(frozen=True)
class Case:
    flags: TrainingFlags = FLAGS
    use_lstm: bool = False
    spare: bool = False
    num_updates: int = 4
    masks: bool = False
    bad_reward: float = 0.0  # of one rollout of the second rank
    idle: bool = False  # the last rank has no rollouts every other time


CASES = {
    "plain": Case(),
    "masks": Case(masks=True),
    "memory": Case(use_lstm=True),
    "memory, masks and passes": Case(PASSES, use_lstm=True, masks=True),
    "advantages in each pass": Case(dataclasses.replace(FLAGS, normalize_advantages=True)),
    "not finite": Case(bad_reward=float("nan")),
    "not finite in passes": Case(PASSES, use_lstm=True, bad_reward=float("inf")),
    "without rollouts": Case(idle=True),
    "without rollouts in passes": Case(PASSES, use_lstm=True, idle=True),
    "images": Case(IMAGES, masks=True, idle=True),
    "spare parts": Case(dataclasses.replace(FLAGS, optimizer="adamw"), spare=True, idle=True),
    "mixed steps": Case(PASSES, num_updates=200, idle=True, masks=True),
}
ONLY_ALIKE = ("mixed steps",)  # parts are other ones than those of one learner


def batch_of(case, i, size, ranks):
    """Of update i, for one of `size` ranks, or for one learner with all of it; None: nothing."""
    batch, state = global_batch(i, size, case.use_lstm, case.flags.normalize_images)
    if case.masks:
        batch["truncated"][4:, 1] = True
        batch["truncated"][:, columns_of(i % size)] |= i % 2 == 1  # all of one rank's
    if case.bad_reward and i == 1:
        batch["reward"][2, columns_of(1)[1]] = case.bad_reward
    is_idle = case.idle and i % 2 == 1
    working = [rank for rank in range(size) if not (is_idle and rank == size - 1)]
    if ranks.size == 1:
        columns = [column for rank in working for column in columns_of(rank)]
        return pick_columns((batch, state), columns)
    if ranks.rank not in working:
        return None, ()
    return pick_columns((batch, state), columns_of(ranks.rank))


def num_updates(name, size):
    """Many take long where more ranks than cores wait for each other."""
    return CASES[name].num_updates if size == 2 else min(10, CASES[name].num_updates)


def run_case(name, size, ranks=ALONE):
    """What a learner has after its updates."""
    case = CASES[name]
    learner = make_learner(ranks, case.flags, case.use_lstm, case.spare)
    for i in range(num_updates(name, size)):
        # In order, so that one learner's parts hold what those of several do.
        is_random = name in ONLY_ALIKE
        with nullcontext() if is_random else mock.patch("torch.randperm", torch.arange):
            learner.step(*batch_of(case, i, size, ranks))
    return {"state": learner.state_dict(), "figures": learner.stats.summary()}


def main(folder):
    torch.set_num_threads(1)
    with StopRequest() as stop, join_ranks(stop, torch.device("cpu")) as ranks:
        results = {name: run_case(name, ranks.size, ranks) for name in CASES}
        torch.save(results, Path(folder) / f"{ranks.rank}.tar")


if __name__ == "__main__":
    main(sys.argv[1])
