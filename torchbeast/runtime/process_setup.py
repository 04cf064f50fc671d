"""Set up a process that runs PyTorch: its seeds and its device."""

import torch

from libtorchbeast.seeding import seed_generators
from torchbeast.core.ranks import Place
from torchbeast.errors import UsageError


def seed_everything(seed: int) -> None:
    """Seed all generators that environments or models may use: a fork inherits their state."""
    seed_generators(seed)
    torch.manual_seed(seed)


def own_device(use_cuda: bool) -> torch.device:
    """A GPU if there is one, a different one for each learner on this machine; else the CPU."""
    if not use_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    place = Place.find()
    if place.is_alone:
        return torch.device("cuda")
    if place.local_size > torch.cuda.device_count():
        raise UsageError(
            f"{place.local_size} learners on this machine need a GPU each, and there are "
            f"{torch.cuda.device_count()}; lower --nproc_per_node, or give --disable_cuda."
        )
    return torch.device("cuda", place.local_rank)
