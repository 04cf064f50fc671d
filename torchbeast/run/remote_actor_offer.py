"""What a learner offers to actors that carry the model: its description, and new weights.

Created when the first such actor connects, so that other runs pay nothing for it.
"""

import copy

import torch
from torch import nn

from libtorchbeast.rollout_layout import MODEL_FLAGS, ModelOffer, RolloutSpec, TensorSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.handshake import DTYPES, Refused
from libtorchbeast.specs import ArraySpec
from libtorchbeast.tree import map_tree
from torchbeast.core.agent_output import as_output
from torchbeast.core.learner import Learner
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.inference_model import prepare_to_act
from torchbeast.runtime.shared_weights import SharedWeights

# Rollouts that an actor may have sent before the learner takes them. With one, the link is idle for
# a round trip after each, and TCP begins slowly again: a third of the speed at 100 ms and
# 100 Mbit/s (benchmarks/links.py).
ROLLOUTS_AHEAD = 2
LOCK_S = 60.0  # to wait for the lock: more than an update takes


class ModelOffers:
    """Makes offers for actors, and publishes the weights in shared memory."""

    def __init__(self, flags: TrainingFlags, learner: Learner, spec: Spec, queue_size: int) -> None:
        """`queue_size` is the learner's queue's: with 0, actors wait for the learner."""
        self._flags = flags
        self._learner = learner
        self._spec = spec
        self._rollouts_ahead = ROLLOUTS_AHEAD if queue_size > 0 else 0
        self.in_flight = self._rollouts_ahead + 2 if queue_size > 0 else 1
        """Rollouts of one environment that exist at once: those sent and not yet taken, the one
        that is played, and one more, since its weights were requested when the rollout before was
        begun. An actor that waits for the learner has one, played with the newest weights."""
        self._weights: SharedWeights | None = None

    def make(self) -> ModelOffer:
        """The offer for an actor; `Refused` if none can be made. For the main thread."""
        learner, flags = self._learner, self._flags
        if not learner.lock.acquire(timeout=LOCK_S):
            raise Refused("UNAVAILABLE", "The learner is busy with an update; try again.")
        try:
            model = learner.model
            weights = SharedWeights(model)
            weights.publish(model, learner.version)
            rollout = self._rollout_spec(model)
            tensors = tensors_in(model, weights.offsets(model))
            self._weights = weights  # from now on each version is published
        finally:
            learner.lock.release()
        return ModelOffer(
            rollout=rollout,
            model={"name": flags.model, **{name: getattr(flags, name) for name in MODEL_FLAGS}},
            tensors=tensors,
            rollouts_ahead=self._rollouts_ahead,
            max_policy_lag=flags.max_policy_lag,
            weights_fd=weights.fd,
            weights_bytes=weights.num_bytes,
        )

    def publish(self, model: nn.Module, version: int) -> None:
        """Publish a version of the weights; called after each update, under the learner's lock."""
        if self._weights is not None:
            self._weights.publish(model, version)

    @torch.no_grad()
    def _rollout_spec(self, model: nn.Module) -> RolloutSpec:
        """The spec of a rollout, found by running the model on one row of zeros."""
        acting = prepare_to_act(copy.deepcopy(model)).cpu()
        state = acting.initial_state(batch_size=1)  # type: ignore[operator]
        row = map_tree(
            lambda leaf: torch.zeros((1, 1, *leaf.shape), dtype=getattr(torch, leaf.dtype)),
            self._spec.row,
        )
        random_state = torch.get_rng_state()
        try:
            output, _ = acting(row, tuple(state))
        finally:
            torch.set_rng_state(random_state)
        output = as_output(output)
        said = {name: output[name] for name in ("action", "policy_logits", "baseline")}
        specs = map_tree(lambda t: ArraySpec(_dtype_of(t), tuple(t.shape[2:])), said)
        states = tuple(ArraySpec(_dtype_of(t), (t.shape[0], *t.shape[2:])) for t in state)
        specs["version"] = ArraySpec("int64")
        return RolloutSpec(self._spec, self._flags.unroll_length, specs, states)


def tensors_in(model: nn.Module, offsets: list[int]) -> tuple[TensorSpec, ...]:
    """The model's tensors with their places in memory, in the order of `tensors_of(model)`."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    places = zip([*parameters, *buffers], offsets, strict=True)
    return tuple(
        TensorSpec(name, _dtype_of(tensor), tuple(tensor.shape), offset, i < len(parameters))
        for i, ((name, tensor), offset) in enumerate(places)
    )


def _dtype_of(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise Refused(
            "FAILED_PRECONDITION",
            f"The learner's model has tensors of dtype {name}, which cannot be sent to actors; "
            "dial in with polybeast_env.",
        )
    return name
