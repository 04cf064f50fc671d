"""The addresses of one of several learners on a machine."""

from libtorchbeast.rpc.address import Address, server_address
from torchbeast.core.ranks import Place


def own_address(address: str, place: Place) -> str:
    """Where this learner listens: the next port or `<path>.<n>` for the next learner, and so on.

    Port 0, any that is free, is that for all of them.
    """
    if place.local_rank == 0 or _is_any_port(address):
        return address
    return server_address(address, place.local_rank)


def _is_any_port(address: str) -> bool:
    where = Address.parse(address)
    return not where.path and where.port == 0
