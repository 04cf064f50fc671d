"""Data for actors on other machines that carry a copy of the model and send whole rollouts.

    RolloutSpec   the layout of one environment's rollout: rows, outputs and the agent's state
    ModelOffer    what such an actor needs from the learner: plain data, no code

Pure Python; needs only NumPy.
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
"""The flags that determine the structure of a model, besides its name and the specs."""


@dataclass(frozen=True)
class RolloutSpec:
    """The layout of one environment's rollout in a lane. `Lane` uses its `row` and `action`."""

    environment: Spec
    unroll_length: int
    output: dict[str, Any]
    """The agent's output for one row: `action`, `policy_logits`, `baseline`, `version`, as in the
    learner's queue; trees of `ArraySpec`."""
    state: tuple[ArraySpec, ...] = ()
    """The agent's recurrent state, [L, ...] each."""

    @property
    def row(self) -> dict[str, Any]:
        """T+1 rows and T+1 outputs, where output t led to row t, and the state before row 0."""

        def many(leaf: ArraySpec) -> ArraySpec:
            return ArraySpec(leaf.dtype, (self.unroll_length + 1, *leaf.shape))

        rows, outputs = map_tree(many, self.environment.row), map_tree(many, self.output)
        return {"rows": rows, "outputs": outputs, "state": self.state}

    @property
    def action(self) -> Any:
        """Empty: these actors get no actions."""
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
    """Parameters, unlike buffers, may be sent with less precision."""

    @property
    def num_bytes(self) -> int:
        return ArraySpec(self.dtype, self.shape).num_bytes


@dataclass(frozen=True)
class ModelOffer:
    """What actors that carry the model get from the learner."""

    rollout: RolloutSpec
    model: dict[str, Any]
    """The model's `name` and the values of `MODEL_FLAGS`."""
    tensors: tuple[TensorSpec, ...]
    rollouts_ahead: int
    max_policy_lag: int | None
    weights_fd: int = -1
    """Shared memory with the weights: the version that was begun and the version that was finished,
    int64 each, and each tensor at its offset (torchbeast/runtime/shared_weights.py)."""
    weights_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """All but `weights_fd`: a descriptor is sent separately."""
        values = dataclasses.asdict(dataclasses.replace(self, weights_fd=-1))
        return {**values, "rollout": self.rollout.to_json()}

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> "ModelOffer":
        tensors = [TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in json["tensors"]]
        rollout = RolloutSpec.from_json(json["rollout"])
        return cls(**{**json, "tensors": tuple(tensors), "rollout": rollout})
