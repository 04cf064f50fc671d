"""A model's output and state, as learner and actors use them."""

from typing import Any

from torch import Tensor

AgentOutput = dict[str, Any]
"""`policy_logits` [T, B, num_params], `baseline` [T, B], and `action` [T, B, ...], a tree if the
action space is one; there may be `losses`, by name, to be added to the loss."""

AgentState = tuple[Tensor, ...]
"""The agent's memory: tensors [L, B, ...]; none without memory."""


def as_output(output: Any) -> AgentOutput:
    """A model's output as a dict; models written for TorchBeast return a tuple."""
    if isinstance(output, dict):
        return output
    return dict(zip(("action", "policy_logits", "baseline"), output, strict=True))
