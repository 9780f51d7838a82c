"""A plain VGG-like network: the strong baseline that learns fastest on a CPU, and our teacher.

A fixed whitened 2x2 convolution, then three groups of two 3x3 convolutions with batch normalisation and GELU. The first
convolution of a group is pooled by two; the maximum over the last map is classified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.network import Peer

WHITENING_EPS = 5e-4
SCALE = 1 / 3
"""Of the scores, so that the softmax starts soft."""


class Group(nn.Module):
    """Conv-pool-BN-GELU, Conv-BN-GELU."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(c, c_out, 3, padding=1, bias=False) for c in (c_in, c_out))
        self.na, self.nb = nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.na(F.max_pool2d(self.a(x), 2)))
        return F.gelu(self.nb(self.b(x)))


class Plain(Peer):
    """One exit. `widths`: channels of the three groups."""

    nested = False

    def __init__(self, widths: tuple[int, int, int], *, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        patch = 4 * in_chans
        self.white = nn.Conv2d(in_chans, 2 * patch, 2)
        self.white.weight.requires_grad_(False)
        pairs = zip((2 * patch, *widths[:-1]), widths, strict=True)
        self.groups = nn.Sequential(*(Group(c_in, c_out) for c_in, c_out in pairs))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        maps = self.groups(F.gelu(self.white(x)))
        yield self.head(maps.amax((2, 3))) * SCALE

    def start(self, batches: Iterable[Tensor]) -> None:
        whiten(self.white, torch.cat(list(batches)))


@torch.no_grad()
def whiten(convolution: nn.Conv2d, images: Tensor) -> None:
    """A 2x2 convolution that whitens patches: their scaled eigenvectors, and these with the other sign."""
    in_chans = images.shape[1]
    patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, 4 * in_chans)
    values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    rows = (vectors / (values + WHITENING_EPS).sqrt()).T.float().view(-1, in_chans, 2, 2)
    convolution.weight.copy_(torch.cat([rows, -rows]))
    nn.init.zeros_(cast(nn.Parameter, convolution.bias))
