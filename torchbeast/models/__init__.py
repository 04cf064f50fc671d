"""Models: an encoder of the frame, an optional LSTM, heads for policy and baseline."""

from torchbeast.core.agent_output import AgentOutput, AgentState, as_output
from torchbeast.models.agent import Agent, unroll_lstm
from torchbeast.models.factory import build_distribution, build_model, check_model, make_model
from torchbeast.models.normalization import NormalizedObservations

__all__ = [
    "Agent",
    "AgentOutput",
    "AgentState",
    "NormalizedObservations",
    "as_output",
    "build_distribution",
    "build_model",
    "check_model",
    "make_model",
    "unroll_lstm",
]
