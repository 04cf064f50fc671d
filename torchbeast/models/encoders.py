"""Encoders: a batch of frames [N, ...] to features [N, num_features]."""

import math

import torch
from torch import Tensor, nn

from torchbeast.errors import UsageError


class ShallowConv(nn.Module):
    """The paper's shallow net: two convolutions and a linear layer (Mnih et al. 2013)."""

    num_features = 256

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._images = Images(frame_shape)
        self.convs = nn.Sequential(
            nn.Conv2d(self._images.num_channels, 16, kernel_size=8, stride=4),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            nn.ReLU(inplace=True),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = nn.Linear(self._images.count_outputs(self.convs), self.num_features)
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        x = self.convs(self._images(frame))
        return torch.relu_(self.linear(x.flatten(1)))


class DeepConv(nn.Module):
    """The paper's deep net: three sections of a convolution, a pooling and two residual blocks."""

    num_features = 256

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._images = Images(frame_shape)
        sections: list[nn.Module] = []
        num_inputs = self._images.num_channels
        for num_channels in (16, 32, 32):
            sections += [
                nn.Conv2d(num_inputs, num_channels, kernel_size=3, padding=1),
                nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                ResidualBlock(num_channels),
                ResidualBlock(num_channels),
            ]
            num_inputs = num_channels
        self.convs = nn.Sequential(*sections, nn.ReLU(inplace=True)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        )
        self.linear = nn.Linear(self._images.count_outputs(self.convs), self.num_features)
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        x = self.convs(self._images(frame))
        return torch.relu_(self.linear(x.flatten(1)))


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), all with as many channels as x."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.conv1(torch.relu(x))))


class MLP(nn.Module):
    """Two hidden layers over the flattened frame."""

    num_features = 128

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(math.prod(frame_shape), self.num_features),
            nn.Tanh(),
            nn.Linear(self.num_features, self.num_features),
            nn.Tanh(),
        )
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        x = frame.flatten(1)
        return self.layers(x.float().mul_(1 / 255) if x.dtype == torch.uint8 else x.float())


def keep_scale(module: nn.Module, gain: float = math.sqrt(2)) -> None:
    """Orthogonal weights, zero biases: signals keep their size from layer to layer.

    With PyTorch's own initial weights four in ten of the shallow net's features are 0 for every
    frame of Pong, and the rest hardly vary: such nets learn nothing for millions of steps.
    """
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        weight = nn.init.orthogonal_(torch.empty(module.weight.shape), gain)
        with torch.no_grad():
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()


class Images(nn.Module):
    """Frames as the convolutions want them: channels first in shape, last in memory, centred.

    Bytes stay bytes until here. Each frame's mean is taken off: most of a game's screen is one even
    background, and its brightness is in every gradient, so that the first layer's filters drift the
    same way until most are 0 everywhere.
    """

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(frame_shape) != 3:
            raise UsageError(
                f"Image models take frames of three dimensions, got {frame_shape}; use --model mlp."
            )
        self._channels_at_end = frame_shape[2] < min(frame_shape[:2])
        if self._channels_at_end:
            frame_shape = (frame_shape[2], *frame_shape[:2])
        self.num_channels = frame_shape[0]
        self._shape = frame_shape

    def forward(self, frame: Tensor) -> Tensor:
        if self._channels_at_end:
            frame = frame.permute(0, 3, 1, 2)
        x = torch.empty_like(frame, dtype=torch.float32, memory_format=torch.channels_last)
        in_pieces = frame.device.type == "cpu" and not torch.compiler.is_compiling()
        size = CHUNK if in_pieces else len(frame)
        for some, source in zip(x.split(size), frame.split(size), strict=True):
            for channel in range(self.num_channels):  # one strided copy of all takes twice as long
                some[:, channel] = source[:, channel]
            if frame.dtype == torch.uint8:
                some.mul_(1 / 255)
                some.sub_(some.mean(dim=(1, 2, 3), keepdim=True))
        return x

    def count_outputs(self, convs: nn.Module) -> int:
        with torch.no_grad():
            return convs(torch.zeros(1, *self._shape)).numel()


CHUNK = 8  # frames that stay in a core's cache from one operation to the next

ENCODERS: dict[str, type[ShallowConv] | type[DeepConv] | type[MLP]] = {
    "shallow": ShallowConv,
    "deep": DeepConv,
    "mlp": MLP,
}
