"""The agent: what a frame, the last reward and the last action lead to.

Called by actors on one row (T=1) and by the learner on whole rollouts, with the same result.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libtorchbeast.specs import ArraySpec
from torchbeast.models.encoders import ENCODERS, keep_scale
from torchbeast.models.frames import as_spec

AgentOutput = dict[str, Tensor]
AgentState = tuple[Tensor, ...]


def as_output(output: Any) -> dict[str, Any]:
    """What a model answered, by name; models written for TorchBeast answer with a tuple.

    Besides what `Agent` answers there may be `losses`, by name, to be added to the loss.
    """
    if isinstance(output, dict):
        return output
    return dict(zip(("action", "policy_logits", "baseline"), output, strict=True))


class Agent(nn.Module):
    """Encoder, optional LSTM, heads. T is time, B batch; all inputs are [T, B, ...]."""

    lstm_size = 256

    def __init__(
        self,
        frame: ArraySpec | tuple[int, ...],
        num_actions: int,
        use_lstm: bool = False,
        encoder: str = "shallow",
        sees_last_action: bool = True,
    ) -> None:
        """`frame` is the spec of one, or its shape if nothing else is known."""
        super().__init__()
        self.num_actions = num_actions
        self.use_lstm = use_lstm
        self.encoder = ENCODERS[encoder](as_spec(frame))
        # As in the paper, the image nets see what happened last; the MLP sees the frame alone,
        # so that without LSTM it has no memory whatever, not even its own last action.
        self._sees_reward = encoder != "mlp"
        self._sees_action = self._sees_reward and sees_last_action
        num_features = self.encoder.num_features
        num_features += self._sees_reward + num_actions * self._sees_action
        if use_lstm:
            self.lstm = nn.LSTM(num_features, self.lstm_size)
            num_features = self.lstm_size
        self.policy = nn.Linear(num_features, num_actions)
        self.baseline = nn.Linear(num_features, 1)
        keep_scale(self.policy, gain=0.01)  # every action is about as likely at first
        keep_scale(self.baseline, gain=1.0)

    def initial_state(self, batch_size: int = 1) -> AgentState:
        """The memory at the start of an episode: two tensors [1, B, lstm_size], or nothing."""
        if not self.use_lstm:
            return ()
        return tuple(torch.zeros(1, batch_size, self.lstm_size) for _ in range(2))

    def forward(
        self, inputs: dict[str, Any], core_state: AgentState = ()
    ) -> tuple[AgentOutput, AgentState]:
        """`policy_logits` [T, B, num_actions], `baseline` [T, B], `action` [T, B]; the new state.

        The action is drawn from the policy; in eval mode it is the most likely one.
        """
        frame = inputs["frame"]
        features = self.encoder(frame.flatten(0, 1)).float()  # [T*B, ...] -> [T*B, F]
        # Under autocast, too: memory and heads are small, and what they lose the advantages lose.
        with torch.autocast(features.device.type, enabled=False):
            return self._decide(features, inputs, core_state)

    def _decide(
        self, features: Tensor, inputs: dict[str, Any], core_state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """From what the encoder made of the frames to the agent's output."""
        T, B = inputs["done"].shape
        seen = [features]
        if self._sees_reward:
            seen.append(inputs["reward"].clamp(-1, 1).flatten().unsqueeze(1))
        if self._sees_action:
            # What environments say, from wherever they are, must not end a run.
            last_action = inputs["last_action"].flatten().long().clamp(0, self.num_actions - 1)
            action = F.one_hot(last_action, self.num_actions)
            seen.append(action.to(features.dtype))
        features = torch.cat(seen, dim=1)
        if self.use_lstm:
            features, core_state = unroll_lstm(
                self.lstm, features.view(T, B, -1), inputs["done"], core_state
            )
            features = features.flatten(0, 1)
        policy_logits = self.policy(features)
        if self.training:
            # Also for numbers that are not finite, which the learner finds out about.
            policy = F.softmax(policy_logits.detach().nan_to_num(), dim=1)
            action = torch.multinomial(policy, num_samples=1)
        else:
            action = policy_logits.argmax(dim=1)
        output = {
            "policy_logits": policy_logits.view(T, B, self.num_actions),
            "baseline": self.baseline(features).view(T, B),
            "action": action.view(T, B),
        }
        return output, core_state


def unroll_lstm(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: AgentState
) -> tuple[Tensor, AgentState]:
    """Run `lstm` over [T, B, F], with the memory zeroed at each row that starts an episode.

    Rows between two such rows of any column go through in one call.
    """
    T = len(features)
    done = done.bool()  # code for TorchBeast may have uint8
    starts = {0, *done.any(dim=1).nonzero().flatten().tolist()}
    bounds = [*sorted(starts), T]
    outputs = []
    for start, end in itertools.pairwise(bounds):
        begins = done[start].view(1, -1, 1)
        h, c = (s.masked_fill(begins, 0.0) for s in state)
        output, state = lstm(features[start:end], (h, c))
        outputs.append(output)
    return torch.cat(outputs), state
