"""The flags of one of several learners: those of the run are rank 0's, the rest is its own."""

import dataclasses
import logging

from libtorchbeast.seeding import derive_seed
from torchbeast.core.file_writer import new_xpid
from torchbeast.core.ranks import Ranks
from torchbeast.run.flags import FlagsT
from torchbeast.run.saved_run import OF_THE_RUN

logger = logging.getLogger("torchbeast")

SEEDS = 1_000_033  # the path of other ranks' seeds, which no worker has


def for_rank(flags: FlagsT, ranks: Ranks) -> FlagsT:
    """With a name for the run if it has none.

    Other ranks than 0 write no checkpoint, and keep their files, such as what environments print,
    in a folder of their own inside the run's. Their environments and actions have other seeds.
    """
    flags = dataclasses.replace(flags, xpid=flags.xpid or new_xpid())
    own = flags.as_plain_dict()
    shared = ranks.share({name: own[name] for name in (*sorted(OF_THE_RUN), "xpid")})
    if ranks.rank == 0:
        return flags
    if other := [name for name, value in shared.items() if own[name] != value]:
        said = ", ".join(f"{name} {shared[name]}" for name in other)
        logger.warning("Learner 0 has other flags, which hold for all: %s.", said)
    xpid = shared.pop("xpid")
    shared["seed"] = derive_seed(shared["seed"], SEEDS, ranks.rank)
    return dataclasses.replace(
        flags,
        **shared,
        savedir=flags.savedir / xpid,
        xpid=f"rank-{ranks.rank}",
        disable_checkpoint=True,
    )
