"""Groups of environments for processes that pass frames on at once: workers, and servers of others.

No torch is imported here: such a process starts soon and stays small.
"""

from typing import Any

from libtorchbeast.environments import Unstacked
from torchbeast.envs import Environments, EnvOptions, make_envs
from torchbeast.envs.seeding import seed_generators
from torchbeast.envs.sync import SyncEnvs


def make_group(num_envs: int, seed: int, **options: Any) -> Environments:
    """`make_envs` with plain arguments; frames of single environments are left `Unstacked`."""
    seed_generators(seed)
    envs = make_envs(EnvOptions(**options), num_envs, seed)
    if isinstance(envs, SyncEnvs):
        envs.join = Unstacked
    return envs
