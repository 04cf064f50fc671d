"""Models of users: unusual ones, and one with a common mistake."""

import torch
from torch import nn

from torchbeast.models import Agent

STATE_DTYPES = (torch.int64, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.bool)


class TupleAgent(Agent):
    """Answers as TorchBeast's do: with a tuple."""

    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        return (output["action"], output["policy_logits"], output["baseline"]), core_state


class OddAgent(Agent):
    """Has actions and a memory of unusual dtypes.

    Answers with a tuple, with int32 (or, with `--use_lstm`, float32) actions.
    """

    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm=False, encoder="mlp")
        self.action_dtype = torch.float32 if use_lstm else torch.int32

    def initial_state(self, batch_size=1):
        return tuple(torch.zeros(1, batch_size, 2, dtype=dtype) for dtype in STATE_DTYPES)

    def forward(self, inputs, core_state=()):
        assert [part.dtype for part in core_state] == list(STATE_DTYPES)
        assert inputs["done"].dtype == torch.bool
        output, _ = super().forward(inputs)
        action = output["action"].to(self.action_dtype)
        core_state = tuple((part.float() + 1).remainder(2).to(part.dtype) for part in core_state)
        return (action, output["policy_logits"], output["baseline"]), core_state


class LossAgent(Agent):
    """Has a loss of its own, which any update makes smaller."""

    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        error = (self.level - 1).expand(inputs["reward"].shape)
        return {**output, "losses": {"level_error": 0.5 * error**2}}, core_state


class ColumnAgent(Agent):
    """The mistake: its baseline is a column."""

    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        return {**output, "baseline": output["baseline"][..., None]}, core_state
