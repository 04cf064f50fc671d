"""The built-in agent: from frame, last reward and last action to policy, baseline and action.

Called by actors on one row (T=1) and by the learner on whole rollouts, with the same result.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libtorchbeast.specs import ArraySpec, discrete, split_mask
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.agent_output import AgentOutput, AgentState
from torchbeast.core.distributions import make_distribution
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.models.encoders import (
    MLP,
    DeepConv,
    ShallowConv,
    TreeEncoder,
    keep_in,
    keep_scale,
    make_encoder,
)
from torchbeast.models.frames import JoinedNumbers, as_spec

MAX_PREPARED_BYTES = 1 << 29  # of a batch's prepared frames; the default for Atari has 117 MB
MAX_OBSERVED = 64  # frames of a batch that enter the running statistics of pixels


class Agent(nn.Module):
    """Encoder, optional LSTM, heads. T is time, B batch; all inputs are [T, B, ...]."""

    lstm_size = 256
    _constant: Tensor

    def __init__(
        self,
        frame: Any,
        action: Any,
        use_lstm: bool = False,
        encoder: str = "shallow",
        sees_last_action: bool = True,
        squash: bool = False,
        separate_nets: bool = False,
        normalize_images: bool = False,
    ) -> None:
        """`frame` is its spec, or its shape if nothing else is known; `action` its spec, or the
        number of actions; `squash` is for actions that are floats (see `make_distribution`)."""
        super().__init__()
        action = discrete(action) if isinstance(action, int) else action
        frame, mask = split_mask(as_spec(frame))
        self.use_lstm = use_lstm
        self.distribution = make_distribution(action, squash)
        self._has_mask = mask is not None
        self._normalizes_images = normalize_images and encoder != "mlp"
        self.encoder = make_encoder(encoder, frame, normalize_images)
        # Features that help the baseline may harm the policy, and small nets are cheap.
        is_shared = not separate_nets or encoder != "mlp" or use_lstm
        self.baseline_encoder = None if is_shared else make_encoder(encoder, frame)
        # As in the paper, the image nets see what happened last; the MLP sees the frame alone,
        # so that without LSTM it has no memory whatever, not even its own last action.
        self._sees_reward = encoder != "mlp"
        self._sees_action = self._sees_reward and sees_last_action
        num_features = self.encoder.num_features
        num_features += self._sees_reward
        if self._sees_action:
            self.last_action = JoinedNumbers(action)
            num_features += self.last_action.num_outputs
        if use_lstm:
            self.lstm = nn.LSTM(num_features, self.lstm_size)
            num_features = self.lstm_size
        self.policy = nn.Linear(num_features, self.distribution.num_params)
        self.baseline = nn.Linear(num_features, 1)
        constant = self.distribution.constant_params.unsqueeze(1) & separate_nets  # [num_params, 1]
        self._has_constants = (
            separate_nets and self.distribution.num_choices < self.distribution.num_params
        )
        self.register_buffer("_constant", constant, persistent=False)
        keep_scale(self.policy, gain=0.01)  # every action is about as likely at first
        keep_scale(self.baseline, gain=1.0)

    @property
    def sees_single_rows(self) -> bool:
        """Whether a row's output depends on that row alone, so that the learner may mix steps.

        A derived class may have a memory of its own, so it must define this itself.
        """
        return type(self) is Agent and not self.use_lstm

    def initial_state(self, batch_size: int = 1) -> AgentState:
        """The state at the start of an episode: two tensors [1, B, lstm_size], () without LSTM."""
        if not self.use_lstm:
            return ()
        return tuple(torch.zeros(1, batch_size, self.lstm_size) for _ in range(2))

    def observe_frames(
        self, frame: Any, mask: Tensor | None, ranks: Ranks = ALONE
    ) -> Tensor | float:
        """Update the running statistics of pixels with frames [T+1, B, ...] in `mask` [T, B].

        If there are more than MAX_OBSERVED, with a random choice of them. Only the learner calls
        it; without a mask, this rank has no frames, and takes in those of other ranks. Returns how
        many numbers were clipped: none, in images.
        """
        if not self._normalizes_images:
            return 0.0
        assert not isinstance(self.encoder, MLP)
        some = None
        if mask is not None:
            frame = split_mask(frame)[0] if self._has_mask else frame
            rows, columns = mask.nonzero(as_tuple=True)
            chosen = torch.randperm(len(rows)).to(rows.device)[:MAX_OBSERVED]
            some = map_tree(lambda x: x[rows[chosen], columns[chosen]], frame)
        encoder = self.encoder
        (encoder if isinstance(encoder, TreeEncoder) else encoder.images).observe(some, ranks)
        return 0.0

    def prepare_frames(self, frame: Any) -> Any:
        """Prepare frames [T, B, ...] for image nets in bfloat16, once for all passes over a batch.

        Other frames are returned unchanged, as are those of a derived class, which may use them
        itself.
        """
        encoder = self.encoder
        if type(self) is not Agent or not isinstance(encoder, (ShallowConv, DeepConv)):
            return frame
        if self._has_mask or 2 * frame.numel() > MAX_PREPARED_BYTES:
            return frame
        return encoder.images.prepare(frame.flatten(0, 1)).unflatten(0, frame.shape[:2])

    def keep_images_in(self, dtype: torch.dtype) -> None:
        """Keep the weights of image nets in `dtype`; memory and heads stay in float32.

        A derived class is left unchanged, as it may use features itself.
        """
        for module in self.encoder.modules() if type(self) is Agent else ():
            if isinstance(module, (ShallowConv, DeepConv)):
                keep_in(dtype, module)

    def forward(
        self, inputs: dict[str, Any], core_state: AgentState = ()
    ) -> tuple[AgentOutput, AgentState]:
        """The agent's output (see `AgentOutput`) and its new state.

        The action is sampled from the policy; in eval mode it is the most likely one.
        """
        frame, mask = split_mask(inputs["frame"]) if self._has_mask else (inputs["frame"], None)
        frame = map_tree(lambda x: x.flatten(0, 1), frame)  # [T, B, ...] -> [T*B, ...]
        features = self.encoder(frame).float()  # [T*B, F]
        separate = self.baseline_encoder
        baseline_features = None if separate is None else separate(frame).float()
        device_type = features.device.type
        if not torch.is_autocast_enabled(device_type):
            return self._decide(features, baseline_features, mask, inputs, core_state)
        # Memory and heads stay in float32: they are small, and their errors enter the advantages.
        with torch.autocast(device_type, enabled=False):
            return self._decide(features, baseline_features, mask, inputs, core_state)

    def _decide(
        self,
        features: Tensor,
        baseline_features: Tensor | None,
        mask: Any,
        inputs: dict[str, Any],
        core_state: AgentState,
    ) -> tuple[AgentOutput, AgentState]:
        """From the encoders' features to the agent's output and new state."""
        T, B = inputs["done"].shape
        seen = [features]
        if self._sees_reward:
            seen.append(inputs["reward"].clamp(-1, 1).flatten().unsqueeze(1))
        if self._sees_action:
            last_action = map_tree(lambda x: x.flatten(0, 1), inputs["last_action"])
            seen.append(self.last_action(last_action))
        features = torch.cat(seen, dim=1)
        if self.use_lstm:
            features, core_state = unroll_lstm(
                self.lstm, features.view(T, B, -1), inputs["done"], core_state
            )
            features = features.flatten(0, 1)
        weight = self.policy.weight
        if self._has_constants:
            weight = weight.masked_fill(self._constant, 0.0)
        policy_logits = F.linear(features, weight, self.policy.bias).view(T, B, -1)
        if mask is not None:
            # An array of bools, or a tree of them in environments elsewhere.
            allowed = torch.cat([leaf.flatten(2) for _, leaf in leaves_of(mask)], dim=-1)
            policy_logits = self.distribution.mask(policy_logits, allowed)
        act = self.distribution.sample if self.training else self.distribution.mode
        output = {
            "policy_logits": policy_logits,
            "baseline": self.baseline(
                features if baseline_features is None else baseline_features
            ).view(T, B),
            "action": act(policy_logits),
        }
        return output, core_state


class Net(nn.Module):
    """The paper's deep net with the interface that code written for TorchBeast uses.

    For 4x84x84 frames; sees the frame and the clipped last reward, not the last action.
    """

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


def unroll_lstm(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: AgentState
) -> tuple[Tensor, AgentState]:
    """Run `lstm` over [T, B, F], with the state zeroed at each row that starts an episode.

    Successive rows in which no episode starts go through in one call. Under autocast it runs in
    float32, as errors would add up from row to row.
    """
    device_type = features.device.type
    if torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            return unroll_lstm(lstm, features.float(), done, tuple(s.float() for s in state))
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
