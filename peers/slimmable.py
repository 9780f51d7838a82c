"""A slimmable network (Yu et al., ICLR 2019): the plain network at four widths that share their weights.

Narrower networks use the first channels of every layer. Every width has batch normalisations of its own, since the
statistics of its maps are its own. An exit is a width; all of them learn in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.network import Peer
from peers.plain import SCALE, whiten

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the channels."""


class SlimConv(nn.Conv2d):
    """3x3 from as many channels as come, to as many as are asked for."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, 3, padding=1, bias=False)

    def narrow(self, x: Tensor, c_out: int) -> Tensor:
        return F.conv2d(x, self.weight[:c_out, : x.shape[1]], padding=1)


class SlimGroup(nn.Module):
    """Conv-pool-BN-GELU, Conv-BN-GELU at every width."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.widths = [int(share * c_out) for share in SHARES]
        self.a, self.b = SlimConv(c_in, c_out), SlimConv(c_out, c_out)
        self.na, self.nb = (nn.ModuleList(nn.BatchNorm2d(width) for width in self.widths) for _ in "ab")

    def forward(self, x: Tensor, number: int) -> Tensor:
        width = self.widths[number]
        x = F.gelu(self.na[number](F.max_pool2d(self.a.narrow(x, width), 2)))
        return F.gelu(self.nb[number](self.b.narrow(x, width)))


class Slimmable(Peer):
    """Four widths, the narrowest first. `widths`: channels of the three groups at full width."""

    nested = False

    def __init__(self, widths: tuple[int, int, int], *, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        patch = 4 * in_chans
        self.white = nn.Conv2d(in_chans, 2 * patch, 2)
        self.white.weight.requires_grad_(False)
        pairs = zip((2 * patch, *widths[:-1]), widths, strict=True)
        self.groups = nn.ModuleList(SlimGroup(c_in, c_out) for c_in, c_out in pairs)
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def narrow(self, x: Tensor, number: int) -> Tensor:
        """Scores of one width."""
        x = F.gelu(self.white(x))
        for group in self.groups:
            x = group(x, number)
        x = x.amax((2, 3))
        return F.linear(x, self.head.weight[:, : x.shape[1]]) * SCALE

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for number in range(len(SHARES)):
            yield self.narrow(x, number)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x, len(SHARES) - 1)

    def start(self, batches: Iterable[Tensor]) -> None:
        whiten(self.white, torch.cat(list(batches)))
