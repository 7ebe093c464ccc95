"""The ResNet of the CIFAR experiments (He et al. 2016, section 4.2): 6n + 2 layers, 16-32-64 channels."""

from typing import cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, *, stride: int, last_relu: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.n_padding = channels - channels_in
        self.last_relu = last_relu

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        # Shortcut without parameters (option A): subsample, and pad the new channels with zeros.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.n_padding // 2, self.n_padding - self.n_padding // 2))
        return F.relu(y + shortcut) if self.last_relu else y + shortcut


class CifarResNet(nn.Module):
    """Images to 64 numbers each."""

    num_features = 64

    def __init__(self, depth: int, *, last_relu: bool) -> None:
        super().__init__()
        n_blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[_Block] = []
        channels_in = 16
        for channels in (16, 32, 64):
            for i in range(n_blocks):
                stride = 2 if i == 0 and channels > 16 else 1
                blocks.append(_Block(channels_in, channels, stride=stride, last_relu=True))
                channels_in = channels
        blocks[-1].last_relu = last_relu
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        maps = self.blocks(F.relu(self.bn1(self.conv1(images))))
        return cast(Tensor, maps.mean(dim=(2, 3)))
