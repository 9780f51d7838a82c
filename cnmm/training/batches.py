"""Images on their way to the network: which ones, in which order, read, augmented, normalised, and on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cnmm import distributed
from cnmm._errors import UserError
from cnmm.data import DataSet, Split, Workers, num_workers
from cnmm.data.folder import SMALL_SIDE
from cnmm.evaluation.damage import DAMAGE_IMAGES, DAMAGE_PHOTOS
from cnmm.training.augment import alternating, draw_views, show
from cnmm.training.config import TrainConfig
from cnmm.training.photos import PhotoView, draw_photo_view, recolour, show_parts
from cnmm.training.seeds import seeded

STATISTICS_IMAGES = 4000
"""Training images on which the statistics for inference are estimated."""
FEWEST_STEPS = 8
"""Of an epoch, where the batch size is chosen: a few dozen steps in all would teach next to nothing."""
BYTES_PER_MAC, MEMORY_SHARE = 0.35, 0.5
"""What a step keeps of an image, by macs of the full mixture, as measured on small and large images; and what part of
the memory that may take."""
EVALUATION_BATCH = 125
"""Images of a batch where nothing is learned, at most. More are slower per image: their maps leave the cache."""


class Batch(NamedTuple):
    """What a step of the training learns from."""

    step: int
    images: Tensor
    labels: Tensor
    answers: Tensor | None
    """A teacher's logits, of each image as it is shown."""


class Images:
    """Prepares uint8 images for the network: augmentation, normalisation, and its device.

    Steps of the training may be in bfloat16; statistics and figures never are, for what is exported is float32.
    """

    num_after_epoch = 500
    """Training images on which the statistics are estimated for the figures after an epoch."""
    num_for_statistics = STATISTICS_IMAGES

    def __init__(
        self, data: DataSet, config: TrainConfig, *, device: torch.device | str = "cpu", workers: Workers | None = None
    ) -> None:
        self.config = config
        self.num_for_damage = self._num_for_damage(data.size)
        self.mean = torch.tensor(data.mean).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(data.std).view(1, -1, 1, 1) * 255
        self.device = torch.device(device)
        self.workers = workers or Workers()
        self.answers: Tensor | None = None
        """A teacher's logits for all training images, as they are and mirrored."""
        self.dtype = torch.bfloat16 if use_bfloat16(config.precision, self.device) else torch.float32

    def _num_for_damage(self, size: tuple[int, int]) -> int:
        """Training images that damage is measured on: of photos, fewer: each has far more pixels."""
        return DAMAGE_IMAGES if min(size) <= SMALL_SIDE else DAMAGE_PHOTOS

    def training_batches(self, split: Split, kept: np.ndarray, epoch: int, *, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `first` on: this process's part of each.

        What is drawn for an image depends on its place in the whole batch.
        """
        seed, (places, parts) = self.config.seed, training_parts(self.config, kept, epoch, first)
        for step, (chosen, pixels) in enumerate(self._read(split, parts), start=first):
            mirrored = alternating(chosen, seed, epoch) if self.config.flips == "alternating" else None
            generator = seeded(seed, "augment", epoch, step)
            shown, mirrored = self._viewed(pixels, chosen, epoch, generator, places, mirrored)
            x = self.prepare(shown.permute(0, 3, 1, 2)).to(self.dtype)
            yield Batch(step, x, self._labels(split, chosen), self._answers(chosen, mirrored))

    def _viewed(
        self,
        pixels: Tensor,
        chosen: np.ndarray,
        epoch: int | str,
        generator: torch.Generator,
        places: slice | None = None,
        mirrored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training images in random views, and which of them are mirrored; `mirrored` says so, if it is not drawn.

        Parts and colours depend on seed, epoch and image, padded crops on the place in the batch.
        """
        config = self.config
        views: list[PhotoView] = []
        if config.area[0] < 1 or config.colour:
            sides: list[bool | None] = [None] * len(chosen) if mirrored is None else mirrored.tolist()
            views = [
                draw_photo_view((config.seed, "photo", epoch, int(index)), config, side)
                for index, side in zip(chosen, sides, strict=True)
            ]
        if config.area[0] < 1:
            shown, mirrored = show_parts(pixels, views), torch.tensor([view.mirrored for view in views])
        else:
            crops = draw_views(len(pixels), config, generator, places, mirrored)
            shown, mirrored = show(pixels, config, crops), crops.mirrored
        return recolour(shown, views) if config.colour else shown, mirrored

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] to normalised floats on the device."""
        return ((images.float() - self.mean) / self.std).to(self.device)

    def batches(self, split: Split, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Images as they are, for evaluation."""
        for chosen, images in self.read(split, indices):
            yield self.prepare(images.permute(0, 3, 1, 2)), self._labels(split, chosen)

    def num_batches(self, split: Split, indices: np.ndarray) -> int:
        """How many batches `batches` makes."""
        return -(-len(indices) // EVALUATION_BATCH)

    def some(self, split: Split, kept: np.ndarray, num: int, purpose: str) -> Iterator[Tensor]:
        """Batches of at most `num` training images as they are, drawn for a purpose."""
        for images, _ in self.batches(split, self.chosen(kept, num, purpose)):
            yield images

    def chosen(self, kept: np.ndarray, num: int, purpose: str) -> np.ndarray:
        """Which training images are drawn for a purpose, sorted."""
        drawn = torch.randperm(len(kept), generator=seeded(self.config.seed, purpose))[:num]
        return np.sort(kept[drawn.numpy()])

    def damage_batch(self, split: Split, kept: np.ndarray) -> Tensor:
        """The training images that damage is measured on, one batch."""
        return torch.cat(list(self.some(split, kept, self.num_for_damage, "damage")))

    def statistics_batches(self, split: Split, kept: np.ndarray, num: int | None = None) -> Iterator[Tensor]:
        """A few thousand training images, or `num`, augmented as in training: borders belong to what was learned."""
        seed, chosen = self.config.seed, self.chosen(kept, STATISTICS_IMAGES if num is None else num, "statistics")
        for number, (part, images) in enumerate(self.read(split, chosen)):
            if len(images) > 1:
                generator = seeded(seed, "statistics", number * EVALUATION_BATCH)
                shown, _ = self._viewed(images, part, "statistics", generator)
                yield self.prepare(shown.permute(0, 3, 1, 2))

    def num_statistics(self, split: Split, kept: np.ndarray) -> int:
        """How many batches `statistics_batches` makes."""
        return -(-min(STATISTICS_IMAGES, len(kept)) // EVALUATION_BATCH)

    def read(self, split: Split, indices: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Images as they are, uint8 [N, H, W, C], in batches, with their indices."""
        yield from self._read(split, chunks(indices))

    def _read(self, split: Split, parts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Each part with its images, uint8 [N, H, W, C]."""
        for chosen, pixels in zip(parts, self.workers.read(split, parts), strict=True):
            yield chosen, torch.from_numpy(pixels)

    def _answers(self, chosen: np.ndarray, mirrored: Tensor) -> Tensor | None:
        if self.answers is None:
            return None
        return self.answers[torch.from_numpy(chosen), mirrored.long()].float().to(self.device)

    def _labels(self, split: Split, chosen: np.ndarray) -> Tensor:
        return torch.from_numpy(split.labels[chosen]).to(self.device)


def training_parts(config: TrainConfig, kept: np.ndarray, epoch: int, first: int = 0) -> tuple[slice, list[np.ndarray]]:
    """Which images an epoch's batches have from step `first` on: this process's places in each, and their indices."""
    size = config.batch_size
    num = size // distributed.world_size()
    places = slice(num * distributed.rank(), num * (distributed.rank() + 1))
    order = torch.randperm(len(kept), generator=seeded(config.seed, "order", epoch)).numpy()
    steps = range(first, len(kept) // size)
    return places, [np.sort(kept[order[step * size : (step + 1) * size]])[places] for step in steps]


def chunks(indices: np.ndarray) -> list[np.ndarray]:
    """Indices in batches for evaluation, of equal size: each counts the same where statistics are averaged."""
    num = -(-len(indices) // EVALUATION_BATCH)
    return np.array_split(indices, num) if num else []


def fitting_batch(num: int, most: int) -> int:
    """The largest power of two, at most `most`, with which an epoch of `num` images has enough steps; at least 2."""
    size = 2
    while 2 * size <= min(most, num // FEWEST_STEPS):
        size *= 2
    return max(size, distributed.world_size())


def affordable_batch(macs: int, size: int, memory: int) -> int:
    """A batch of at most `size` images, of so many macs each, whose training fits into a part of so much memory."""
    while size > 2 and size * macs * BYTES_PER_MAC > MEMORY_SHARE * memory:
        size //= 2
    return max(size, distributed.world_size())


def steps_per_epoch(config: TrainConfig, num: int) -> int:
    """Whole batches in `num` images."""
    if config.batch_size % distributed.world_size():
        raise UserError(
            f"batch_size={config.batch_size}: must be a multiple of the {distributed.world_size()} processes"
        )
    if num < config.batch_size:
        raise UserError(f"batch_size={config.batch_size}: there are only {num} training images; use a smaller batch")
    return num // config.batch_size


def start_workers(data: DataSet, config: TrainConfig) -> Workers:
    """The processes that decode image files for this one."""
    return Workers(num_workers(config.workers, data.train, distributed.local_size()))


def use_bfloat16(precision: str, device: torch.device | str = "cpu") -> bool:
    """ "auto" takes bfloat16 where the device has instructions for it."""
    if precision == "auto":
        if torch.device(device).type == "cuda":
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return precision == "bfloat16"
