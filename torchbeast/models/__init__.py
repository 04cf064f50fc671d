"""Agents: an encoder of the frame, an optional LSTM, heads for policy and baseline."""

from torchbeast.models.agent import Agent, AgentOutput, AgentState
from torchbeast.models.factory import check_model, make_model

__all__ = ["Agent", "AgentOutput", "AgentState", "check_model", "make_model"]
