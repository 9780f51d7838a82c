"""MSDNet (Huang et al., ICLR 2018) for small images: dense layers on several scales, a classifier after every block.

Every layer adds channels to every scale that is left: half of them from the scale above it (strided), half from its
own; the finest one has no scale above. The layers are divided into as many stretches as there are scales. At the end of
a stretch the finest scale is dropped, and a 1x1 transition halves the channels of the others. Scale s has 1, 2, 4, ...
times the channels of the finest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from peers.network import Peer, convolution


@dataclass(frozen=True, kw_only=True)
class MSDNetConfig:
    """The defaults are the paper's for CIFAR."""

    blocks: int
    base: int
    """Layers of the first block."""
    step: int
    """Layers of each later block, or by how many more a block has than the one before."""
    growth_mode: Literal["even", "lin_grow"] = "even"
    scales: int = 3
    width: int = 16
    """Channels of the finest scale at first."""
    growth: int = 6
    """Channels that a layer adds to the finest scale."""
    stride: int = 1
    """Of the first convolution."""
    head: int = 128
    """Channels of a classifier."""

    @property
    def layers(self) -> list[int]:
        """Of every block."""
        later = range(1, self.blocks)
        return [self.base, *(self.step if self.growth_mode == "even" else self.step * k + 1 for k in later)]

    @property
    def interval(self) -> int:
        """Layers after which a scale is dropped."""
        return math.ceil(sum(self.layers) / self.scales)


def factor(scale: int) -> int:
    """Channels of a scale, and of its bottleneck, relative to the finest."""
    return int(2**scale)


def bottleneck(c_in: int, c_out: int, width: int, *, stride: int = 1) -> nn.Sequential:
    """1x1 to at most `width` times the output's channels, then 3x3."""
    inner = min(c_in, width * c_out)
    return nn.Sequential(convolution(c_in, inner, 1), convolution(inner, c_out, stride=stride))


class Layer(nn.Module):
    """One dense layer on the scales from `first` to the last; `above`: a finer one is there that ends with it."""

    def __init__(self, channels: int, config: MSDNetConfig, first: int, *, above: bool) -> None:
        super().__init__()
        self.above = above
        self.same, self.down = nn.ModuleList(), nn.ModuleList()
        for scale in range(first, config.scales):
            c_out, halved = config.growth * factor(scale), scale > first or above
            c_out = c_out // 2 if halved else c_out
            self.same.append(bottleneck(channels * factor(scale), c_out, factor(scale)))
            if halved:
                finer = scale - 1
                self.down.append(bottleneck(channels * factor(finer), c_out, factor(finer), stride=2))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        kept = maps[1:] if self.above else maps
        new = [[x, same(x)] for x, same in zip(kept, self.same, strict=True)]
        for parts, down, finer in zip(new[-len(self.down) :] if self.down else (), self.down, maps, strict=False):
            parts.insert(1, down(finer))
        return [torch.cat(parts, 1) for parts in new]


class Transition(nn.Module):
    """Halves the channels of every scale from `first` on."""

    def __init__(self, channels: int, config: MSDNetConfig, first: int) -> None:
        super().__init__()
        scales = range(first, config.scales)
        sizes = [(channels * factor(scale), channels // 2 * factor(scale)) for scale in scales]
        self.scales = nn.ModuleList(convolution(c_in, c_out, 1) for c_in, c_out in sizes)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [scale(x) for scale, x in zip(self.scales, maps, strict=True)]


class FirstLayer(nn.Module):
    """From the image to all scales, each from the one above."""

    def __init__(self, config: MSDNetConfig, in_chans: int) -> None:
        super().__init__()
        widths = [config.width * factor(scale) for scale in range(config.scales)]
        pairs = zip((in_chans, *widths), widths, strict=False)
        strides = (config.stride, *[2] * (config.scales - 1))
        self.scales = nn.ModuleList(
            convolution(c_in, c_out, stride=stride) for (c_in, c_out), stride in zip(pairs, strides, strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [x]
        for scale in self.scales:
            maps.append(scale(maps[-1]))
        return maps[1:]


class Classifier(nn.Module):
    """Two strided convolutions on the coarsest scale, mean, linear."""

    def __init__(self, c_in: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(convolution(c_in, width, stride=2), convolution(width, width, stride=2))
        self.linear = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.convolutions(x).mean((2, 3)))
        return scores


class MSDNet(Peer):
    """An exit after every block."""

    def __init__(self, config: MSDNetConfig, *, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        self.config = config
        self.first = FirstLayer(config, in_chans)
        self.blocks, self.classifiers = nn.ModuleList(), nn.ModuleList()
        channels, number = config.width, 0
        for layers in config.layers:
            block = nn.Sequential()
            for _ in range(layers):
                first = number // config.interval
                drops = number > 0 and first > (number - 1) // config.interval
                block.append(Layer(channels, config, first, above=drops))
                channels, number = channels + config.growth, number + 1
                if drops:
                    block.append(Transition(channels, config, first))
                    channels //= 2
            self.blocks.append(block)
            self.classifiers.append(Classifier(channels * factor(config.scales - 1), config.head, num_classes))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        maps = self.first(x)
        for block, classifier in zip(self.blocks, self.classifiers, strict=True):
            maps = block(maps)
            yield classifier(maps[-1])
