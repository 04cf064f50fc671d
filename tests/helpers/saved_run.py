"""Runs on disk that were never trained, for tests of who goes on with them."""

import torch

from torchbeast import monobeast
from torchbeast.core.learner import Learner
from torchbeast.envs import look_at
from torchbeast.models import build_distribution, build_model
from torchbeast.run import checkpoint


def save_run(savedir, with_spec=True, **values):
    """A run that was saved before its first update."""
    torch.manual_seed(0)
    flags = monobeast.Flags(savedir=savedir, xpid="run", **values)
    spec = look_at(flags.env_options)
    distribution = build_distribution(flags, spec)
    model = build_model(flags, spec)
    learner = Learner(model, flags, torch.device("cpu"), distribution=distribution)
    flags.rundir.mkdir(parents=True, exist_ok=True)
    path = flags.rundir / checkpoint.FILE_NAME
    checkpoint.save(path, learner, flags, spec if with_spec else None)
    return flags, model
