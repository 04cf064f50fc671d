"""Encoders: from frames [N, ...], which fit a spec, to features [N, num_features]."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from libtorchbeast.specs import ArraySpec
from libtorchbeast.tree import leaves_of
from torchbeast.core.ranks import Ranks
from torchbeast.models.frames import Images, JoinedNumbers, Numbers, find_layout


class ShallowConv(nn.Module):
    """The paper's shallow net: two convolutions and a linear layer (Mnih et al. 2013)."""

    num_features = 256

    def __init__(self, spec: ArraySpec, normalize: bool = False) -> None:
        super().__init__()
        self.images = Images(spec, normalize)
        self.convs = nn.Sequential(
            nn.Conv2d(self.images.num_channels, 16, kernel_size=8, stride=4),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            nn.ReLU(inplace=True),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.output = nn.Linear(self.images.count_outputs(self.convs), self.num_features)
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        x = self.convs(self.images(frame, self.output.weight.dtype))
        x = x.permute(0, 2, 3, 1).flatten(1)  # in the order of memory: nothing is copied
        return torch.relu_(self.output(x))


class DeepConv(nn.Module):
    """The paper's deep net: three sections of a convolution, a pooling and two residual blocks."""

    num_features = 256

    def __init__(self, spec: ArraySpec, normalize: bool = False) -> None:
        super().__init__()
        self.images = Images(spec, normalize)
        sections: list[nn.Module] = []
        num_inputs = self.images.num_channels
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
        self.linear = nn.Linear(self.images.count_outputs(self.convs), self.num_features)
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        x = self.convs(self.images(frame, self.linear.weight.dtype))
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

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self._numbers = Numbers(spec)
        self.layers = nn.Sequential(
            nn.Linear(self._numbers.num_outputs, self.num_features),
            nn.Tanh(),
            nn.Linear(self.num_features, self.num_features),
            nn.Tanh(),
        )
        self.apply(keep_scale)

    def forward(self, frame: Tensor) -> Tensor:
        return self.layers(self._numbers(frame))


class TreeEncoder(nn.Module):
    """An image net for each image in a tree of arrays, an MLP for all the rest, and a layer that
    joins their features."""

    def __init__(self, image_encoder: str, specs: Any, normalize: bool = False) -> None:
        super().__init__()
        leaves = dict(leaves_of(specs))
        is_image = {k: image_encoder != "mlp" and find_layout(s.shape) for k, s in leaves.items()}
        self._images = [k for k in leaves if is_image[k]]
        self._others = [k for k in leaves if not is_image[k]]
        self.images = nn.ModuleList(
            make_encoder(image_encoder, leaves[k], normalize) for k in self._images
        )
        self.num_features: int = sum(net.num_features for net in self.images)  # type: ignore
        if self._others:
            self.numbers = JoinedNumbers([leaves[k] for k in self._others])
            self.mlp = MLP(ArraySpec("float32", (self.numbers.num_outputs,)))
            self.num_features += self.mlp.num_features
        self._is_mixed = len(self.images) + bool(self._others) > 1
        if self._is_mixed:
            self.mix = nn.Linear(self.num_features, ShallowConv.num_features)
            self.num_features = ShallowConv.num_features
            keep_scale(self.mix)

    def forward(self, frame: Any) -> Tensor:
        leaves = dict(leaves_of(frame))
        nets = zip(self.images, self._images, strict=True)
        seen = [net(leaves[k]).float() for net, k in nets]  # some of them may be in bfloat16
        if self._others:
            seen.append(self.mlp(self.numbers([leaves[k] for k in self._others])))
        features = torch.cat(seen, dim=1)
        return torch.relu_(self.mix(features)) if self._is_mixed else features

    def observe(self, frame: Any, ranks: Ranks) -> None:
        """Update the running statistics of pixels with frames, a tree of [N, ...], or None."""
        leaves = None if frame is None else dict(leaves_of(frame))
        for net, k in zip(self.images, self._images, strict=True):
            assert isinstance(net, (ShallowConv, DeepConv))
            net.images.observe(None if leaves is None else leaves[k], ranks)


def make_encoder(
    name: str, frame: Any, normalize_images: bool = False
) -> ShallowConv | DeepConv | MLP | TreeEncoder:
    """Make the encoder with this name, for frames that are an array or a tree of arrays."""
    if not isinstance(frame, ArraySpec):
        return TreeEncoder(name, frame, normalize_images)
    return MLP(frame) if name == "mlp" else IMAGE_ENCODERS[name](frame, normalize_images)


def keep_in(dtype: torch.dtype, net: ShallowConv | DeepConv) -> None:
    """Convert an image net's weights to `dtype`; pixels are still normalised in float32."""
    for child in net.children():
        if child is not net.images:
            child.to(dtype)


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


IMAGE_ENCODERS: dict[str, type[ShallowConv] | type[DeepConv]] = {
    "shallow": ShallowConv,
    "deep": DeepConv,
}
ENCODERS = (*IMAGE_ENCODERS, "mlp")
