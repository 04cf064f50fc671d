"""What a model answers, as the learner and the actors know it."""

from typing import Any

from torch import Tensor

AgentOutput = dict[str, Any]
"""`policy_logits` [T, B, num_params], `baseline` [T, B], and `action` [T, B, ...], a tree if the
action space is one; there may be `losses`, by name, to be added to the loss."""

AgentState = tuple[Tensor, ...]
"""What the agent remembers, [L, B, ...] each."""


def as_output(output: Any) -> AgentOutput:
    """What a model answered, by name; models written for TorchBeast answer with a tuple."""
    if isinstance(output, dict):
        return output
    return dict(zip(("action", "policy_logits", "baseline"), output, strict=True))
