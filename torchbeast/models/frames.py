"""Prepares frames for nets: scaled numbers, one-hot categories, images with channels first.

A frame's spec decides what is done: its shape, its bounds, and whether integers are categories.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from libtorchbeast.specs import ArraySpec
from libtorchbeast.tree import leaves_of
from torchbeast.core.distributions import MAX_BOUND
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.running_moments import RunningMoments
from torchbeast.errors import UsageError

MIN_IMAGE_SIDE = 32  # smaller boards are left to the MLP
USUAL_FLOATS = (1.0, 32.0)  # floats whose bound is between these are left as they are
MAX_ONE_HOT = 1024  # categories that are one-hot; with more, each has a learned embedding
MAX_ONE_HOTS = 1 << 14  # one-hot inputs of one array
CODE_SIZE = 16
CHUNK = 8  # frames that stay in a core's cache from one operation to the next
MIN_PIXEL_DEVIATION = 0.01  # part of the range: less is noise, or a pixel that has not changed yet
MAX_PIXEL = 5.0  # deviations to which pixels are clipped: rare objects have huge ones


def as_spec(frame: Any) -> Any:
    """A tree of specs; from a shape of which nothing else is known, a spec without bounds."""
    is_shape = isinstance(frame, tuple) and all(isinstance(n, int) for n in frame)
    return ArraySpec("float32", frame) if is_shape else frame


class Scale(NamedTuple):
    """(x - shift) * factor; numbers, or arrays where elements differ."""

    shift: Any
    factor: Any


def scale_of(spec: ArraySpec) -> Scale | None:
    """The scale that brings elements with bounds to [-1, 1] or [0, 1]; None if there are none.

    0 stays 0 if it is within the bounds, as it often means that something is absent. Floats around
    0 with bounds of a usual size stay as they are: such bounds are often limits that are hardly
    ever reached (velocities, say), so that most values would become too small.
    """
    if spec.low is None or spec.high is None:
        return None
    low, high = (np.clip(bound, -2 * MAX_BOUND, 2 * MAX_BOUND) for bound in spec.bounds)
    bounded = (low >= -MAX_BOUND) & (high <= MAX_BOUND) & (low < high)
    has_zero = (low <= 0) & (high >= 0)
    shift = np.where(bounded & ~has_zero, low, 0.0)
    size = np.where(has_zero, np.maximum(-low, high), high - low)
    if "float" in spec.dtype:
        bounded &= ~(has_zero & (USUAL_FLOATS[0] <= size) & (size <= USUAL_FLOATS[1]))
    factor = 1 / np.where(bounded, size, 1.0)
    if not isinstance(spec.low, tuple) and not isinstance(spec.high, tuple):
        return Scale(float(shift.flat[0]), float(factor.flat[0]))
    return Scale(shift, factor)


class Codes(nn.Module):
    """Learned embeddings of categories, however many there are.

    A category is a number of two digits, to a base of about the root of the number of categories,
    and each digit has an embedding: a million categories take two tables of a thousand rows. All
    elements of an array share them.
    """

    def __init__(self, num_categories: int) -> None:
        super().__init__()
        self._base = math.isqrt(num_categories - 1) + 1
        self.high = nn.Embedding(self._base, CODE_SIZE)
        self.low = nn.Embedding(self._base, CODE_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Integers [N, elements] to [N, elements * 2 * CODE_SIZE]."""
        parts = self.high(x // self._base), self.low(x % self._base)
        return torch.cat(parts, dim=-1).flatten(1)


class Numbers(nn.Module):
    """Turns frames [N, ...] into vectors [N, num_outputs]: numbers are scaled by their bounds,
    categories are one-hot, or `Codes` if there are many.

    Numbers without bounds stay as they are, except bytes, which are divided by 255.
    """

    shift: Tensor
    factor: Tensor
    first: Tensor
    last: Tensor
    place: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self._counts = spec.num_categories
        low = spec.bounds[0]
        most = max(self._counts, default=0)
        self.codes: Codes | None = None
        if most > 2:
            self.num_outputs = sum(self._counts)
            first = low.ravel()
            last = first + np.array(self._counts) - 1
            place = np.cumsum([0, *self._counts[:-1]]) - first  # x + place: index in the vector
            for name, values in (("first", first), ("last", last), ("place", place)):
                integers = torch.from_numpy(values.astype(np.int64))
                self.register_buffer(name, integers, persistent=False)  # follows from the spec
            if most > MAX_ONE_HOT or (most > 2 * CODE_SIZE and self.num_outputs > MAX_ONE_HOTS):
                self.codes = Codes(most)
                self.num_outputs = 2 * CODE_SIZE * len(self._counts)
            return
        self._counts = ()  # 0 and 1 are as good as one-hot
        self.num_outputs = int(np.prod(spec.shape))
        scale = scale_of(spec)
        self._knows_scale = scale is not None
        shift, factor = scale or (0.0, 1.0)
        self._is_scaled = bool(np.any(shift) or np.any(np.not_equal(factor, 1.0)))
        for name, value in (("shift", shift), ("factor", factor)):
            # Not in checkpoints: it follows from the spec.
            value = torch.as_tensor(value, dtype=torch.float32).flatten()
            self.register_buffer(name, value, persistent=False)

    def forward(self, frame: Tensor) -> Tensor:
        x = frame.reshape(len(frame), -1)
        if self._counts:
            return self._name(x.long())
        if not self._knows_scale and x.dtype == torch.uint8:
            return x.float().mul_(1 / 255)
        x = x.float()
        return (x - self.shift) * self.factor if self._is_scaled else x

    def _name(self, x: Tensor) -> Tensor:
        # Clamped, since wrong numbers from environments elsewhere must not end a run.
        x = x.clamp(self.first, self.last)
        if self.codes is not None:
            return self.codes(x - self.first)
        zeros = torch.zeros(len(x), self.num_outputs, device=x.device)
        return zeros.scatter_(1, x + self.place, 1.0)


class JoinedNumbers(nn.Module):
    """Turns a tree of arrays [N, ...] into one vector [N, num_outputs]."""

    def __init__(self, specs: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Numbers(spec) for _, spec in leaves_of(specs))
        self.num_outputs = sum(part.num_outputs for part in self.parts)  # type: ignore[misc]

    def forward(self, tree: Any) -> Tensor:
        leaves = (leaf for _, leaf in leaves_of(tree))
        return torch.cat([part(x) for part, x in zip(self.parts, leaves, strict=True)], dim=1)


# ------------------------------------------------------------------------------------------ images


class Layout(NamedTuple):
    """How frames become images [N, channels, height, width]: permuted, then reshaped."""

    order: tuple[int, ...]  # of a frame's dimensions
    shape: tuple[int, int, int]  # channels, height, width


def find_layout(shape: tuple[int, ...]) -> Layout | None:
    """The layout of an image, or of a stack of images; None if the shape is neither, or ambiguous.

    Height and width are the large dimensions, next to each other; channels come before or after,
    and the dimension of a stack comes first.
    """
    layouts: dict[int, list[tuple[tuple[int, ...], tuple[int, int]]]] = {
        2: [((0, 1), (0, 1))],
        3: [((0, 1, 2), (1, 2)), ((2, 0, 1), (0, 1))],
        4: [((0, 1, 2, 3), (2, 3)), ((0, 3, 1, 2), (1, 2))],
    }
    fitting = []
    for order, sides in layouts.get(len(shape), []):
        height, width = (shape[i] for i in sides)
        channels = [shape[i] for i in order if i not in sides]
        smaller = max(channels, default=1) < min(height, width)
        if smaller and min(height, width) >= MIN_IMAGE_SIDE:
            fitting.append(Layout(order, (int(np.prod(channels)), height, width)))
    return fitting[0] if len(fitting) == 1 else None


def _plain_layout(shape: tuple[int, ...]) -> Layout | None:
    """The layout of a small frame, such as a board, if the user asks for an image net."""
    if len(shape) == 2:
        return Layout((0, 1), (1, *shape))
    if len(shape) != 3:
        return None
    first, second, third = shape
    if third < min(first, second):
        return Layout((2, 0, 1), (third, first, second))
    return Layout((0, 1, 2), (first, second, third))


class _State(NamedTuple):
    """Identifies the moments that a cached result was made from, as many passes use the same."""

    mean: Tensor
    variance: Tensor
    changes: int
    num_frames: float  # `changes` does not count writes to `.data`
    dtype: torch.dtype

    def is_same(self, other: "_State") -> bool:
        same = self.mean is other.mean and self.variance is other.variance
        return same and self[2:] == other[2:]


class Images(nn.Module):
    """Prepares frames for convolutions: channels first in shape, last in memory, centred.

    Bytes are converted only here. With `normalize`, each pixel is normalised by its running mean
    and standard deviation, which removes what always looks the same, but not a ball of two pixels.
    Else each frame's mean is subtracted if pixels have bounds: most of a game's screen is an even
    background, whose brightness would enter every gradient, so that the first layer's filters drift
    the same way until most are 0 everywhere.
    """

    def __init__(self, spec: ArraySpec, normalize: bool = False) -> None:
        super().__init__()
        layout = find_layout(spec.shape) or _plain_layout(spec.shape)
        if layout is None:
            raise UsageError(
                f"Image models take frames of two or three dimensions, or stacks of them, got "
                f"{list(spec.shape)}; use --model mlp."
            )
        self.num_channels = layout.shape[0]
        self._shape = layout.shape
        self._order = tuple(1 + i for i in layout.order)
        low, high = float(spec.bounds[0].min()), float(spec.bounds[1].max())
        is_bounded = max(-low, high) <= MAX_BOUND
        self._scale = scale_of(ArraySpec(spec.dtype, (), low, high)) if is_bounded else None
        self._moments = RunningMoments(self._shape) if normalize else None
        self._last_normal: tuple[_State, tuple[Tensor, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Not the cache: a copy's tensors have change counters of their own.
        return {**super().__getstate__(), "_last_normal": None}

    def forward(self, frame: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Prepare frames [N, ...] for convolutions in `dtype`, or on a CPU in that of autocast.

        Frames in bfloat16, which no environment has, are those that `prepare` has returned.
        """
        channels, *sides = self._shape
        if frame.dtype == torch.bfloat16 and [*frame.shape[1:]] == [*sides, channels]:
            return frame.permute(0, 3, 1, 2)
        frame = self._arrange(frame)
        x = torch.empty_like(frame, dtype=torch.float32, memory_format=torch.channels_last)
        normal = self._find_normal(frame.dtype)
        if frame.device.type != "cpu" or torch.compiler.is_compiling():
            return self._center(frame, x, normal).to(dtype)
        # In chunks that stay in the CPU's cache until they are converted to the final dtype.
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        if dtype == torch.float32:
            for some, source in zip(x.split(CHUNK), frame.split(CHUNK), strict=True):
                self._center(source, some, normal)
            return x
        images = torch.empty_like(x, dtype=dtype)
        for some, source in zip(images.split(CHUNK), frame.split(CHUNK), strict=True):
            some.copy_(self._center(source, x[: len(source)], normal))
        return images

    def prepare(self, frame: Tensor) -> Tensor:
        """The result of `forward` in bfloat16, as [N, H, W, channels], to be passed to `forward`.

        For frames that are used several times with the same statistics.
        """
        return self.forward(frame, torch.bfloat16).permute(0, 2, 3, 1).contiguous()

    @torch.no_grad()
    def observe(self, frame: Tensor | None, ranks: Ranks = ALONE) -> None:
        """Update the running statistics of pixels with frames [N, ...]; None: this rank has none,
        and takes in those of other ranks."""
        if self._moments is None:
            return
        if frame is None:
            images = self._moments.mean.new_zeros((0, *self._shape))
        else:
            images = self._arrange(frame).float()
            scale = self._scale_for(frame.dtype)
            images = images if scale is None else images * scale.factor
        self._moments.add_bounded(images, ranks)

    def _arrange(self, frame: Tensor) -> Tensor:
        return frame.permute(0, *self._order).reshape(len(frame), *self._shape)

    def _scale_for(self, dtype: torch.dtype) -> Scale | None:
        if self._scale is None and dtype == torch.uint8:
            return Scale(0.0, 1 / 255)
        return self._scale

    def _find_normal(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The factor of each pixel, and what is added then, [1, channels, H, W] each; cached."""
        if self._moments is None:
            return None
        mean, variance = self._moments.mean, self._moments.variance
        is_on_cpu = mean.device.type == "cpu"  # elsewhere it takes no time; reading `count` would
        if not is_on_cpu or torch.compiler.is_compiling() or mean.is_inference():
            return self._make_normal(dtype)
        state = _State(mean, variance, mean._version, float(self._moments.count), dtype)
        if self._last_normal is None or not state.is_same(self._last_normal[0]):
            with torch.inference_mode(False), torch.no_grad():  # the learner may use it, too
                self._last_normal = state, self._make_normal(dtype)
        return self._last_normal[1]

    def _make_normal(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self._moments is not None
        scale = self._scale_for(dtype)
        factor = (self._moments.variance + MIN_PIXEL_DEVIATION**2).rsqrt()
        shift = -self._moments.mean * factor
        if scale is not None:
            factor = factor * scale.factor
        last = torch.channels_last
        return (
            factor.float().unsqueeze(0).contiguous(memory_format=last),
            shift.float().unsqueeze(0).contiguous(memory_format=last),
        )

    def _center(self, frame: Tensor, x: Tensor, normal: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write frames to `x`, normalised or centred."""
        for channel in range(self.num_channels):  # one strided copy of all takes twice as long
            x[:, channel] = frame[:, channel]
        if normal is not None:
            factor, shift = normal
            return torch.addcmul(shift, x, factor, out=x).clamp_(-MAX_PIXEL, MAX_PIXEL)
        scale = self._scale_for(frame.dtype)
        if scale is not None:  # without its shift, which goes with the mean
            x.mul_(scale.factor)
            x.sub_(x.mean(dim=(1, 2, 3), keepdim=True))
        return x

    def count_outputs(self, convs: nn.Module) -> int:
        """The number of outputs of `convs`; UsageError if the images are too small for them."""
        try:
            with torch.no_grad():
                return convs(torch.zeros(1, *self._shape)).numel()
        except RuntimeError as error:
            channels, height, width = self._shape
            raise UsageError(
                f"This image model takes larger images than {height} x {width} with {channels} "
                "channels; use --model mlp."
            ) from error
