"""Helpers for tests of actors that carry the model: a learner that publishes, and an actor."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from libtorchbeast.groups import Group
from libtorchbeast.rpc.actor_client import ActorLink
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.tree import map_tree
from tests.helpers.default_flags import default_flags
from tests.helpers.remote import Learner
from tests.helpers.threads import run_in_threads
from torchbeast import polybeast_learner
from torchbeast.envs import EnvOptions, look_at, make_envs
from torchbeast.run.remote_actor import Actor
from torchbeast.run.remote_actor_offer import ModelOffers
from torchbeast.run.training import build_learner

UNROLL_LENGTH = 6


class Publisher:
    """A learner's model and its offer; `publish` takes the place of an update."""

    def __init__(self, env: str = "Catch", queue_size: int = 8, **flags: Any) -> None:
        default = default_flags(polybeast_learner.Flags, env)
        self.flags = dataclasses.replace(default, unroll_length=UNROLL_LENGTH, **flags)
        self.spec = look_at(EnvOptions(env))
        torch.manual_seed(3)
        self.learner = build_learner(self.flags, self.spec, torch.device("cpu"))
        self.offers = ModelOffers(self.flags, self.learner, self.spec, queue_size)
        self.models = {0: self._copy()}  # by version

    def publish(self, version: int) -> None:
        """Other weights than before."""
        with self.learner.lock, torch.no_grad():
            for parameter in self.learner.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            self.learner.stats.updates = version
            self.models[version] = self._copy()
            self.offers.publish(self.learner.model, version)

    def _copy(self) -> Any:
        model = build_learner(self.flags, self.spec, torch.device("cpu")).model
        model.load_state_dict(self.learner.model.state_dict())
        return model

    @contextlib.contextmanager
    def learning(self, **options: Any) -> Iterator[Learner]:
        """A learner that keeps what it gets, and takes actors."""
        state = self.learner.model.initial_state(batch_size=1)
        learner = Learner(
            UNROLL_LENGTH,
            offer_model=self.offers.make,
            initial_state=state,
            listen=["127.0.0.1:0"],
            **options,
        )
        try:
            yield learner
        finally:
            learner.close()


def make_group(num_envs: int, env: str = "Catch") -> Group:
    return Group(lambda seed: make_envs(EnvOptions(env), num_envs, seed), seed=5)


@contextlib.contextmanager
def acting(address: str, num_envs: int = 2, group: Any = None, **options: Any) -> Iterator[Any]:
    """An actor in a thread of this process: its link, and the actor itself."""
    dtype = options.pop("weights_dtype", "float32")
    group = group or make_group(num_envs)
    hello = Hello("actor", group.num_envs, group.spec, has_model=True)
    link = ActorLink(hello, address, weights_dtype=dtype)
    actor = Actor(group, **options)
    with run_in_threads(lambda: actor.run(link)):
        try:
            yield link, actor
        finally:
            link.stop()
            link.join()
    group.close()
    assert not any(thread.name == "learner-link" for thread in threading.enumerate())


def recompute(model: Any, rollout: Any) -> tuple[np.ndarray, Any]:
    """Logits [T, 1, ...] and the state after row T-1, as the learner computes them."""
    rows, _, state = rollout
    inputs = map_tree(lambda x: torch.from_numpy(x[:-1]), rows)
    with torch.inference_mode():
        output, state = model(inputs, tuple(torch.from_numpy(part) for part in state))
    return output["policy_logits"].numpy(), [part.numpy() for part in state]
