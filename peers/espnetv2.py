"""ESPNetv2 (Mehta et al., CVPR 2019) for segmentation: pyramids of depthwise dilated convolutions.

EESP(k = 4): a grouped 1x1 to a quarter of the channels, four depthwise 3x3 of growing dilation on it whose outputs are
summed up from the least dilated on, concatenated, and a grouped 1x1; the input is added where the shape allows it. A
map is halved by average pooling beside a strided EESP, and the shrunken image is added to it. The decoder goes up from
the coarsest level: efficient pyramid pooling, upsampling, and the next finer level added to it.

Differences: maps are upsampled to the size of what they are added to, so that any image size works, and without aligned
corners, as everywhere in this project.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.network import Peer

BRANCHES = 4
REPEATS = (3, 7)
"""EESP units at an eighth and at a sixteenth of the resolution."""
REACH = (13, 11, 9, 7)
"""The largest kernel that a dilated 3x3 may stand for, by level."""
SCALES = (2.0, 1.5, 1.0, 0.5, 0.1)
"""Sizes of the maps in a pyramid of the decoder, relative to its input."""
SMALLEST = 5
"""Pixels of a side of such a map, at least."""
DECODER = (64, 48, 32)
"""Channels of the decoder, from the coarsest level on."""
MOST_PROJECTED = 16
"""Channels inside a pyramid, at most; else half of the classes."""


def upsample(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear, to the size of another tensor."""
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


def halve(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=2, padding=1)


class Conv(nn.Sequential):
    """Convolution without bias, BN, and PReLU unless told otherwise."""

    def __init__(self, c_in: int, c_out: int, kernel: int, *, stride: int = 1, groups: int = 1, act: bool = True):
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(c_out), *([nn.PReLU(c_out)] if act else []))


class EESP(nn.Module):
    """`reach`: the largest kernel that a dilated 3x3 may stand for; branches that would exceed it are not dilated."""

    def __init__(self, c_in: int, c_out: int, reach: int, *, stride: int = 1) -> None:
        super().__init__()
        width = c_out // BRANCHES
        self.stride = stride
        self.reduce = Conv(c_in, width, 1, groups=BRANCHES)
        kernels = sorted(size if size <= reach else 3 for size in range(3, 3 + 2 * BRANCHES, 2))
        self.branches = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride, dilation, dilation, groups=width, bias=False)
            for dilation in ((size - 1) // 2 for size in kernels)
        )
        self.merged = nn.Sequential(nn.BatchNorm2d(c_out), nn.PReLU(c_out))
        self.expand = Conv(c_out, c_out, 1, groups=BRANCHES, act=False)
        self.act = nn.PReLU(c_out) if stride == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(x)
        sums = [self.branches[0](y)]
        for branch in self.branches[1:]:
            sums.append(branch(y) + sums[-1])
        y = self.expand(self.merged(torch.cat(sums, 1)))
        y = y + x if y.shape == x.shape else y
        out: Tensor = self.act(y)
        return out


class Down(nn.Module):
    """Halves a map and adds what it can see of the image."""

    def __init__(self, c_in: int, c_out: int, reach: int, in_chans: int) -> None:
        super().__init__()
        self.eesp = EESP(c_in, c_out - c_in, reach, stride=2)
        self.image = nn.Sequential(Conv(in_chans, in_chans, 3), Conv(in_chans, c_out, 1, act=False))
        self.act = nn.PReLU(c_out)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """`image`: as small as the output."""
        out: Tensor = self.act(torch.cat([halve(x), self.eesp(x)], 1) + self.image(image))
        return out


class Pyramid(nn.Module):
    """Efficient pyramid pooling: few channels, a depthwise 3x3 at each of five sizes, merged channel by channel.

    `last`: it gives scores, with a bias and nothing after it.
    """

    def __init__(self, c_in: int, width: int, c_out: int, *, last: bool = False) -> None:
        super().__init__()
        num = len(SCALES)
        self.width = width
        self.project = Conv(c_in, width, 1)
        self.stages = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False) for _ in SCALES)
        self.norm = nn.Sequential(nn.BatchNorm2d(num * width), nn.PReLU(num * width))
        self.merge = Conv(num * width, width, 3, groups=width)
        self.expand = nn.Conv2d(width, c_out, 1) if last else Conv(width, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        parts, (height, width) = [], x.shape[2:]
        for scale, stage in zip(SCALES, self.stages, strict=True):
            size = max(math.ceil(height * scale), SMALLEST), max(math.ceil(width * scale), SMALLEST)
            if scale < 1:
                parts.append(upsample(stage(F.adaptive_avg_pool2d(x, size)), x))
            elif scale > 1:
                large = F.interpolate(x, size, mode="bilinear", align_corners=False)
                parts.append(F.adaptive_avg_pool2d(stage(large), (height, width)))
            else:
                parts.append(stage(x))
        shuffled = self.norm(torch.cat(parts, 1)).unflatten(1, (len(SCALES), self.width)).transpose(1, 2).flatten(1, 2)
        out: Tensor = self.expand(self.merge(shuffled))
        return out


class Lateral(nn.Module):
    """From the encoder to the decoder: a grouped 3x3, weighted by what the whole map says."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(c_in, c_out, bias=False)
        self.expand = Conv(c_in, c_out, 3, groups=math.gcd(c_in, c_out))
        self.norm = nn.Sequential(nn.BatchNorm2d(c_out), nn.PReLU(c_out))

    def forward(self, x: Tensor, coarser: Tensor) -> Tensor:
        y = self.expand(x) * self.weigh(x.mean((2, 3))).sigmoid()[:, :, None, None]
        out: Tensor = self.norm(y + upsample(coarser, y))
        return out


class ESPNetv2(Peer):
    """One exit, scores as large as the image. `scale` is the authors' s: 0.5, 1, 1.5 or 2."""

    nested = False

    def __init__(self, scale: float = 1.0, *, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        base = int(32 * scale)
        widths = (min(base, 32), 2 * base, 4 * base, 8 * base)
        self.first = Conv(in_chans, widths[0], 3, stride=2)
        self.downs = nn.ModuleList(
            Down(c_in, c_out, reach, in_chans) for c_in, c_out, reach in zip(widths, widths[1:], REACH, strict=False)
        )
        repeats = zip((0, *REPEATS), widths[1:], REACH[1:], strict=True)
        self.units = nn.ModuleList(
            nn.Sequential(*(EESP(width, width, reach) for _ in range(num))) for num, width, reach in repeats
        )
        inner = min(num_classes // 2, MOST_PROJECTED)
        sources = (widths[3], *DECODER)
        self.pyramids = nn.ModuleList(
            Pyramid(c_in, inner, c_out) for c_in, c_out in zip(sources, DECODER, strict=False)
        )
        self.pyramids.append(Pyramid(DECODER[-1], inner, num_classes, last=True))
        self.laterals = nn.ModuleList(Lateral(c_in, c_out) for c_in, c_out in zip(widths[2::-1], DECODER, strict=True))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        levels, image = [self.first(x)], halve(x)
        for down, units in zip(self.downs, self.units, strict=True):
            image = halve(image)
            levels.append(units(down(levels[-1], image)))
        y = self.pyramids[0](levels[3])
        for lateral, pyramid, level in zip(self.laterals, list(self.pyramids)[1:], levels[2::-1], strict=True):
            y = pyramid(lateral(level, y))
        yield upsample(y, x)
