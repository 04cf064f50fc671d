"""Agents: an encoder of the frame, an optional LSTM, heads for policy and baseline."""

from torchbeast.models.agent import Agent, AgentOutput, AgentState, as_output
from torchbeast.models.factory import build_model, check_model, make_model
from torchbeast.models.normalization import NormalizedObservations

__all__ = [
    "Agent",
    "AgentOutput",
    "AgentState",
    "NormalizedObservations",
    "as_output",
    "build_model",
    "check_model",
    "make_model",
]
