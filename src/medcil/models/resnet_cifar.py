"""The ResNet of the CIFAR experiments (He et al. 2016, section 4.2): 6n + 2 layers, 16-32-64 channels."""

import torch.nn.functional as F
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
    """Images to 64 numbers each. Its three stages end before their last ReLU."""

    num_features = 64

    def __init__(self, depth: int) -> None:
        super().__init__()
        n_blocks = (depth - 2) // 6
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layers = nn.ModuleList()
        channels_in = 16
        for channels in (16, 32, 64):
            blocks: list[_Block] = []
            for i in range(n_blocks):
                stride = 2 if i == 0 and channels > 16 else 1
                blocks.append(_Block(channels_in, channels, stride=stride, last_relu=i < n_blocks - 1))
                channels_in = channels
            self.layers.append(nn.Sequential(*blocks))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def stages(self) -> list[nn.Module]:
        first, *rest = self.layers
        return [nn.Sequential(self.stem, first), *rest]
