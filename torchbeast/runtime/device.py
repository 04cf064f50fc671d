"""The device of a learner."""

import torch

from torchbeast.core.ranks import Place


def own_device(use_cuda: bool) -> torch.device:
    """A GPU if there is one; of several learners on a machine, each has one of its own."""
    if not use_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    place = Place.find()
    if place.is_alone:
        return torch.device("cuda")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())
