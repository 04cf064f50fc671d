"""From flags and what environments are like to a learner, for both beasts."""

import torch

from libtorchbeast.rows import Spec
from torchbeast.core.learner import Learner
from torchbeast.core.rank_stats import SharedStats
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.stats import RunningStats
from torchbeast.models import build_distribution, build_model
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.model_trial import try_model


def build_learner(
    flags: TrainingFlags, spec: Spec, device: torch.device, ranks: Ranks = ALONE
) -> Learner:
    """A learner with a new model that was tried; UsageError if there is none that fits."""
    distribution = build_distribution(flags, spec)
    model = build_model(flags, spec)
    try_model(model, spec, distribution.num_params)
    stats = RunningStats() if ranks.size == 1 else SharedStats()
    return Learner(model, flags, device, ranks=ranks, stats=stats, distribution=distribution)
