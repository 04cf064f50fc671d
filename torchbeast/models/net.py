"""`Net`: the paper's deep net with the interface that code written for TorchBeast knows."""

from typing import Any

from torch import Tensor, nn

from libtorchbeast.specs import ArraySpec
from torchbeast.core.agent_output import AgentState
from torchbeast.models.agent import Agent


class Net(nn.Module):
    """For 4x84x84 frames; sees the frame and the clipped last reward, not the last action."""

    def __init__(self, num_actions: int, use_lstm: bool = False) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.use_lstm = use_lstm
        frame = ArraySpec("uint8", (4, 84, 84), 0, 255)
        self.agent = Agent(frame, num_actions, use_lstm, "deep", sees_last_action=False)

    def initial_state(self, batch_size: int = 1) -> AgentState:
        """An empty tuple, or two tensors [1, B, 256]."""
        return self.agent.initial_state(batch_size)

    def forward(
        self, inputs: dict[str, Any], core_state: AgentState = ()
    ) -> tuple[tuple[Tensor, Tensor, Tensor], AgentState]:
        """`((action, policy_logits, baseline), core_state)`, all [T, B, ...]."""
        output, core_state = self.agent(inputs, core_state)
        return (output["action"], output["policy_logits"], output["baseline"]), core_state
