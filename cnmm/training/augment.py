"""Random crops and flips of whole batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm.training.config import TrainConfig


def augment(images: Tensor, config: TrainConfig, generator: torch.Generator, places: slice | None = None) -> Tensor:
    """Pad and crop, and flip, the whole batch in one gather: uint8 [N, H, W, C].

    `places`: which images of a larger batch these are (default: all of it).
    """
    num, height, width, _ = images.shape
    pad, whole = config.crop, num if places is None else config.batch_size
    draws = torch.randint(2 * pad + 1, (whole, 2), generator=generator)[places or slice(None)]
    down, right = draws[:, :1], draws[:, 1:]
    rows, columns = down + torch.arange(height), torch.arange(width).expand(num, -1)
    if config.flip:
        mirrored = (torch.rand(whole, 1, generator=generator) < 0.5)[places or slice(None)]
        columns = torch.where(mirrored, width - 1 - columns, columns)
    padded = F.pad(images, (0, 0, pad, pad, pad, pad))
    which = torch.arange(num)[:, None, None]
    return padded[which, rows[:, :, None], (right + columns)[:, None, :]]
