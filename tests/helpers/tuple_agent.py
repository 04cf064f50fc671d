"""A model that answers as TorchBeast's do: with a tuple."""

from torchbeast.models import Agent


class TupleAgent(Agent):
    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        return (output["action"], output["policy_logits"], output["baseline"]), core_state
