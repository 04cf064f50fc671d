"""Observations at a running mean of 0 and deviation of 1, for any agent.

The statistics are buffers: they are in checkpoints, and are published with the weights, so that
actors and learner see a frame with the statistics of their version. The learner updates them.
"""

from typing import Any

from torch import Tensor, nn

from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.output import AgentState
from torchbeast.core.running_moments import MAX_NORMALIZED, RunningMoments


class NormalizedObservations(nn.Module):
    """An agent whose frames are normalised; arrays of integers are left as they are."""

    def __init__(self, agent: nn.Module, frame_shape: Any) -> None:
        """`frame_shape` of one frame, or a tree of shapes, as for `make_model`."""
        super().__init__()
        self.agent = agent
        self._tree = (_moments_for(frame_shape),)  # in a tuple, or it would be registered twice
        self.moments = nn.ModuleList(moments for _, moments in leaves_of(self._tree))

    def initial_state(self, batch_size: int = 1) -> AgentState:
        return self.agent.initial_state(batch_size=batch_size)  # type: ignore[operator]

    def forward(self, inputs: dict[str, Any], core_state: AgentState = ()) -> Any:
        frame = map_tree(_normalize, self._tree[0], inputs["frame"])
        return self.agent({**inputs, "frame": frame}, core_state)

    def observe_frames(self, frame: Any, mask: Tensor) -> None:
        """Take in frames [T+1, B, ...], but for the last row's, where `mask` [T, B] says so.

        For the learner alone.
        """

        def add(moments: RunningMoments, x: Tensor) -> None:
            if x.is_floating_point():
                moments.add(x[: len(mask)][mask])

        map_tree(add, self._tree[0], frame)


def _normalize(moments: RunningMoments, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    x = (x.float() - moments.mean.float()) / moments.deviation.float()
    return x.clamp(-MAX_NORMALIZED, MAX_NORMALIZED)


def _moments_for(shape: Any) -> Any:
    """A tree of statistics like a tree of shapes."""
    if isinstance(shape, dict):
        return {key: _moments_for(part) for key, part in shape.items()}
    if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
        return RunningMoments(shape)
    return type(shape)(_moments_for(part) for part in shape)
