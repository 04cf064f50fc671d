"""Rollouts that actors elsewhere have played with a copy of the model: their layout, and the offer.

    RolloutSpec   what is in one environment's rollout: rows, outputs and the agent's state
    ModelOffer    what an actor must know to play some: plain data, no code

Nothing here is compiled, and nothing needs more than NumPy.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, from_json, to_json
from libtorchbeast.tree import leaves_of, map_tree

MODEL_FLAGS = (
    "use_lstm",
    "normalize_observations",
    "normalize_images",
    "squash_actions",
    "separate_nets",
)
"""What shapes a model, besides its name and the specs."""


@dataclass(frozen=True)
class RolloutSpec:
    """One environment's rollout, as a lane holds it (`Lane` knows it by `row` and `action`)."""

    environment: Spec
    unroll_length: int
    output: dict[str, Any]
    """Of one row: `action`, `policy_logits`, `baseline`, `version`, as the learner's queue has
    them; trees of `ArraySpec`."""
    state: tuple[ArraySpec, ...] = ()
    """Of the agent's memory, [L, ...] each."""

    @property
    def row(self) -> dict[str, Any]:
        """T+1 rows and outputs; output t led to row t."""

        def many(leaf: ArraySpec) -> ArraySpec:
            return ArraySpec(leaf.dtype, (self.unroll_length + 1, *leaf.shape))

        rows, outputs = map_tree(many, self.environment.row), map_tree(many, self.output)
        return {"rows": rows, "outputs": outputs, "state": self.state}

    @property
    def action(self) -> Any:
        """Nothing goes back."""
        return ()

    @property
    def num_params(self) -> int:
        return self.output["policy_logits"].shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for _, leaf in leaves_of(self.row))

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment.to_json(),
            "unroll_length": self.unroll_length,
            "output": to_json(self.output),
            "state": to_json(self.state),
        }

    @classmethod
    def from_json(cls, json: Any) -> "RolloutSpec":
        return cls(
            Spec.from_json(json["environment"]),
            int(json["unroll_length"]),
            from_json(json["output"]),
            from_json(json["state"]),
        )


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model, and where it lies in the learner's shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes."""
    is_parameter: bool
    """And may be sent with less precision."""

    @property
    def num_bytes(self) -> int:
        return ArraySpec(self.dtype, self.shape).num_bytes


@dataclass(frozen=True)
class ModelOffer:
    """What actors that carry the model get to know."""

    rollout: RolloutSpec
    model: dict[str, Any]
    """`name` and `MODEL_FLAGS`."""
    tensors: tuple[TensorSpec, ...]
    rollouts_ahead: int
    max_policy_lag: int | None
    weights_fd: int = -1
    """Shared memory: the version that was begun and the one that was finished, int64 each, and at
    the tensors' offsets their numbers (torchbeast/runtime/shared_weights.py)."""
    weights_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Without the descriptor, which travels by itself."""
        values = dataclasses.asdict(dataclasses.replace(self, weights_fd=-1))
        return {**values, "rollout": self.rollout.to_json()}

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> "ModelOffer":
        tensors = [TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in json["tensors"]]
        rollout = RolloutSpec.from_json(json["rollout"])
        return cls(**{**json, "tensors": tuple(tensors), "rollout": rollout})
