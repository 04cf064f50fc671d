"""A net for MinAtar's images of 10 x 10, for peers whose own nets need larger ones."""

import torch
from torch import Tensor, nn


class SmallConv(nn.Module):
    """The net of the MinAtar paper: one convolution and a linear layer."""

    num_features = 128

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width, num_channels = shape
        self.conv = nn.Conv2d(num_channels, 16, kernel_size=3)
        self.linear = nn.Linear(16 * (height - 2) * (width - 2), self.num_features)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x.permute(0, 3, 1, 2)))
        return torch.relu(self.linear(x.flatten(1)))
