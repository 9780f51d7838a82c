"""The stem from patch eigenvectors: it starts as the directions in which the images' 3x3 patches vary most.

A random stem hardly tells its own channels apart: most of what patches are is their mean brightness.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm import distributed
from cnmm.mixture import Mixture

STEM_PATCHES = 5_000_000
"""Patches that the stem starts from: 5,000 images of 32 pixels."""
_AT_ONCE = 2**18


@torch.no_grad()
def start_stem(model: Mixture, batches: Iterable[Tensor]) -> None:
    """Leading eigenvectors of the patches of normalised images; their negatives where there is room, the rest as it is.

    Every channel gets the norm that it has had on average.
    """
    size = model.stem[0].numel()
    sums = torch.zeros(size, size, dtype=torch.float64)
    for images in batches:
        for part in _parts(images):
            patches = F.unfold(part, 3).transpose(1, 2).reshape(-1, size).double()
            sums += patches.T @ patches
    kernels = torch.linalg.eigh(sums).eigenvectors.flip(1).T
    kernels = kernels * torch.where(kernels.sum(1, keepdim=True) < 0, -1.0, 1.0)  # they have no sign of their own
    kernels = torch.cat([kernels, -kernels])[: len(model.stem)]
    norm = model.stem.flatten(1).norm(dim=1).mean()
    model.stem[: len(kernels)] = kernels.view(-1, *model.stem.shape[1:]).to(model.stem) * norm
    same = distributed.total([model.stem if distributed.rank() == 0 else torch.zeros_like(model.stem)])
    model.stem.copy_(same[0])


def _parts(images: Tensor) -> list[Tensor]:
    """So few images at once that their patches fit into memory."""
    num = max(1, _AT_ONCE // images[0, 0].numel())
    return [images[start : start + num].cpu().float() for start in range(0, len(images), num)]


def stem_images(height: int, width: int) -> int:
    """How many images are needed for it."""
    return max(1, STEM_PATCHES // (height * width))
