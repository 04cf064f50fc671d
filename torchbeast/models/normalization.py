"""Normalises observations by their running mean and standard deviation, for any agent.

The statistics are buffers: they are in checkpoints, and are published with the weights, so that a
version of the weights has its statistics. The learner updates them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from libtorchbeast.specs import ACTION_MASK, ArraySpec, split_mask
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.agent_output import AgentState
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.running_moments import MAX_NORMALIZED, RunningMoments


class NormalizedObservations(nn.Module):
    """An agent whose frames are normalised; integers and action masks are left as they are."""

    def __init__(self, agent: nn.Module, observation: Any) -> None:
        """`observation` is the spec of one frame."""
        super().__init__()
        self.agent = agent
        self._tree = (_moments_for(observation),)  # in a tuple, or it would be registered twice
        self.moments = nn.ModuleList(m for _, m in leaves_of(self._tree) if m is not None)

    @property
    def sees_single_rows(self) -> bool:
        return getattr(self.agent, "sees_single_rows", False)

    def initial_state(self, batch_size: int = 1) -> AgentState:
        return self.agent.initial_state(batch_size=batch_size)  # type: ignore[operator]

    def forward(self, inputs: dict[str, Any], core_state: AgentState = ()) -> Any:
        frame = map_tree(_normalize, self._tree[0], inputs["frame"])
        return self.agent({**inputs, "frame": frame}, core_state)

    def observe_frames(
        self, frame: Any, mask: Tensor | None, ranks: Ranks = ALONE
    ) -> Tensor | float:
        """Update the statistics with frames [T+1, B, ...]: those of rows 0 to T-1 in `mask` [T, B].

        Only the learner calls it. Without a mask, this rank has no frames, and takes in those of
        other ranks. Returns how many numbers were clipped (`RunningMoments.reach`).
        """
        samples: dict[RunningMoments, Tensor] = {}

        def pick(moments: RunningMoments | None, x: Tensor) -> None:
            if moments is not None and mask is not None:
                samples[moments] = x[: len(mask)][mask]

        if mask is not None:
            map_tree(pick, self._tree[0], frame)
        num_outliers: Tensor | float = 0.0
        for moments in self._all_moments():
            none = moments.mean.new_zeros((0, *moments.mean.shape))
            num_outliers = num_outliers + moments.add(samples.get(moments, none), ranks)
        observe_more: Any = getattr(self.agent, "observe_frames", None)
        if observe_more is None:
            return num_outliers
        if mask is not None:
            frame = map_tree(_normalize, self._tree[0], frame)
        return num_outliers + observe_more(frame, mask, ranks)

    def _all_moments(self) -> Iterator[RunningMoments]:
        for moments in self.moments:
            assert isinstance(moments, RunningMoments)
            yield moments


def _normalize(moments: RunningMoments | None, x: Tensor) -> Tensor:
    if moments is None:
        return x
    x = (x.float() - moments.mean.float()) / moments.deviation.float()
    return x.clamp(-MAX_NORMALIZED, MAX_NORMALIZED)


def _moments_for(observation: Any) -> Any:
    """A tree like the observation's: statistics for floats, None for arrays left as they are."""

    def make(leaf: ArraySpec) -> RunningMoments | None:
        return RunningMoments(leaf.shape) if np.issubdtype(leaf.dtype, np.floating) else None

    moments = map_tree(make, observation)
    _, mask = split_mask(observation)
    return moments if mask is None else {**moments, ACTION_MASK: map_tree(lambda _: None, mask)}
