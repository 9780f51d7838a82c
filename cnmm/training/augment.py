"""Random crops and flips of whole batches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm.training.config import TrainConfig


class Views(NamedTuple):
    """How each image of a batch is shown."""

    shifts: Tensor
    """[N, 2]: where a crop begins, in rows and columns of the padded image."""
    mirrored: Tensor
    """[N]: is it flipped?"""


def augment(images: Tensor, config: TrainConfig, generator: torch.Generator, places: slice | None = None) -> Tensor:
    """Pad and crop, and flip at random, the whole batch: uint8 [N, H, W, C].

    `places`: which images of a larger batch these are (default: all of it).
    """
    return show(images, config, draw_views(len(images), config, generator, places))


def draw_views(
    num: int,
    config: TrainConfig,
    generator: torch.Generator,
    places: slice | None = None,
    mirrored: Tensor | None = None,
) -> Views:
    """A random view for each of `num` images; `mirrored` says which are flipped (default: it is drawn)."""
    whole, part = (num, slice(None)) if places is None else (config.batch_size, places)
    shifts = torch.randint(2 * config.crop + 1, (whole, 2), generator=generator)[part]
    if not config.flip:
        mirrored = torch.zeros(num, dtype=torch.bool)
    elif mirrored is None:
        mirrored = (torch.rand(whole, generator=generator) < 0.5)[part]
    return Views(shifts, mirrored)


def show(images: Tensor, config: TrainConfig, views: Views) -> Tensor:
    """The images in their views, in one gather."""
    num, height, width, _ = images.shape
    pad, columns = config.crop, torch.arange(width).expand(num, -1)
    rows = views.shifts[:, :1] + torch.arange(height)
    columns = views.shifts[:, 1:] + torch.where(views.mirrored[:, None], width - 1 - columns, columns)
    if config.padding == "reflect":
        rows, columns = _reflected(rows - pad, height), _reflected(columns - pad, width)
    else:
        images = F.pad(images, (0, 0, pad, pad, pad, pad))
    return images[torch.arange(num)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places beyond the border, mirrored into the image; the border itself is not repeated."""
    period = 2 * max(size - 1, 1)
    return (size - 1 - (places.remainder(period) - (size - 1)).abs()).clamp_min(0)


def alternating(chosen: np.ndarray, seed: int, epoch: int) -> Tensor:
    """Which of these images are flipped in an epoch: each in every second one, half of all in the first.

    A hash of seed and image decides, whatever else is in the batch.
    """
    start = np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (chosen.astype(np.uint64) + start) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed >> np.uint64(63)).astype(np.int64) + epoch) % 2 == 1)
