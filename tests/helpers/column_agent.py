"""A model with a common mistake: its baseline is a column."""

from torchbeast.models import Agent


class ColumnAgent(Agent):
    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        return {**output, "baseline": output["baseline"][..., None]}, core_state
