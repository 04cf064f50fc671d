"""The flags of several learners: flags of the run come from rank 0, the others from each rank."""

import dataclasses
import logging
import socket

from libtorchbeast.seeding import derive_seed
from torchbeast.core.file_writer import new_xpid
from torchbeast.core.ranks import Ranks
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint
from torchbeast.run.flags import FlagsT, TrainingFlags
from torchbeast.run.saved_run import OF_THE_RUN

logger = logging.getLogger("torchbeast")

SEEDS = 1_000_033  # for `derive_seed`: a number that no worker has


def for_rank(flags: FlagsT, ranks: Ranks) -> FlagsT:
    """This rank's flags, with a name for the run if it has none.

    Ranks other than 0 write no checkpoint, and keep their files, such as what environments print,
    in a folder inside the run's. Their environments and actions have other seeds.
    """
    flags = dataclasses.replace(flags, xpid=flags.xpid or new_xpid())
    own = flags.as_plain_dict()
    of_the_run = {name: own[name] for name in (*sorted(OF_THE_RUN), "xpid")}
    shared = ranks.share({**of_the_run, "sources": dict(flags.sources)})
    sources = shared.pop("sources")  # a recipe that is applied later must act alike on all ranks
    check_place_of_checkpoint(dataclasses.replace(flags, xpid=shared["xpid"]), ranks)
    if ranks.rank == 0:
        return flags
    if other := [name for name, value in shared.items() if own[name] != value]:
        said = ", ".join(f"{name} {shared[name]}" for name in other)
        logger.warning("All learners use the flags of learner 0, which differ here: %s.", said)
    xpid = shared.pop("xpid")
    shared["seed"] = derive_seed(shared["seed"], SEEDS, ranks.rank)
    mine = {name: source for name, source in flags.sources.items() if name not in OF_THE_RUN}
    theirs = {name: source for name, source in sources.items() if name in OF_THE_RUN}
    return dataclasses.replace(
        flags,
        **shared,
        sources={**mine, **theirs},
        savedir=flags.savedir / xpid,
        xpid=f"rank-{ranks.rank}",
        disable_checkpoint=True,
    )


def check_place_of_checkpoint(flags: TrainingFlags, ranks: Ranks) -> None:
    """UsageError if rank 0, which resumes, lacks the run's checkpoint and another rank has it.

    Without a shared folder, a run would otherwise start from scratch if machines swap ranks.
    """
    has_one = bool(checkpoint.find(flags.rundir / flags.checkpoint))
    here = {"has_one": has_one, "host": socket.gethostname(), "folder": str(flags.savedir)}
    places = ranks.exchange(here)
    owner = next((rank for rank, place in enumerate(places) if place["has_one"]), 0)
    if owner == 0 or flags.disable_checkpoint:
        return
    raise UsageError(
        f"Learner 0 on {places[0]['host']} has no checkpoint of {flags.xpid}, but learner {owner} "
        f"on {places[owner]['host']} has one in {places[owner]['folder']}; let that machine be the "
        "first (--node_rank 0), share the folder, or give another --xpid for a new run."
    )
