"""Scenes on their way to the network: crops for training, whole images for everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cnmm.data import DataSet, Split
from cnmm.data.scenes import Scene, SceneSplit, class_shares, same_sizes
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.quality import Task
from cnmm.evaluation.segmentation import Segmentation
from cnmm.evaluation.task import task_of
from cnmm.mixture import Mixture
from cnmm.training.batches import Batch, Images, training_parts
from cnmm.training.config import TrainConfig
from cnmm.training.views import View, draw_view, show

EVALUATION_PIXELS = 1_500_000
"""Of the images in a batch where nothing is learned, at most, unless one image alone has more."""
STATISTICS_SCENES = 100
"""Whole training images on which the statistics for inference are estimated."""
DAMAGE_SCENES = 8
"""Crops that damage is measured on."""


class SceneImages(Images):
    """Prepares scenes for the network. Whole images are shown as they are, those of one size together."""

    num_after_epoch = 20
    num_for_statistics = STATISTICS_SCENES

    def _num_for_damage(self, size: tuple[int, int]) -> int:
        return DAMAGE_SCENES

    def training_batches(self, split: Split, kept: np.ndarray, epoch: int, *, first: int = 0) -> Iterator[Batch]:
        config, size = self.config, crop_size(self.config, epoch)
        _, parts = training_parts(config, kept, epoch, first)
        for step, (chosen, scenes) in enumerate(self._scenes(split, parts), start=first):
            views = [
                draw_view(
                    (config.seed, "view", epoch, int(index)),
                    size,
                    zoom=config.zoom,
                    colour=config.colour,
                    flip=config.flip,
                )
                for index in chosen
            ]
            images, masks = self._shown(scenes, views)
            yield Batch(step, images.to(self.dtype), masks, None)

    def batches(self, split: Split, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for _, scenes in self._scenes(split, _same_sizes(split, indices)):
            yield self._stacked(scenes)

    def num_batches(self, split: Split, indices: np.ndarray) -> int:
        return len(_same_sizes(split, indices))

    def statistics_batches(self, split: Split, kept: np.ndarray, num: int | None = None) -> Iterator[Tensor]:
        """Some training images, whole, as inference sees them."""
        yield from self.some(split, kept, STATISTICS_SCENES if num is None else num, "statistics")

    def num_statistics(self, split: Split, kept: np.ndarray) -> int:
        return self.num_batches(split, self.chosen(kept, STATISTICS_SCENES, "statistics"))

    def damage_batch(self, split: Split, kept: np.ndarray) -> Tensor:
        """Some crops of training images, as large as they are at the end of the training."""
        config, size = self.config, crop_size(self.config, self.config.epochs - 1)
        chosen = self.chosen(kept, DAMAGE_SCENES, "damage")
        views = [draw_view((config.seed, "damage", int(index)), size) for index in chosen]
        ((_, scenes),) = self._scenes(split, [chosen])
        return self._shown(scenes, views)[0]

    def _scenes(self, split: Split, parts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, list[Scene]]]:
        """Each part with its scenes."""
        yield from zip(parts, self.workers.scenes(cast(SceneSplit, split), parts), strict=True)

    def _shown(self, scenes: Sequence[Scene], views: Sequence[View]) -> tuple[Tensor, Tensor]:
        fill = self.mean.flatten().round().byte().numpy()
        return self._stacked([show(scene, view, fill) for scene, view in zip(scenes, views, strict=True)])

    def _stacked(self, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(np.stack([scene.image for scene in scenes]))
        masks = torch.from_numpy(np.stack([scene.mask for scene in scenes]))
        return self.prepare(images.permute(0, 3, 1, 2)), masks.to(self.device)


def _same_sizes(split: Split, indices: np.ndarray) -> list[np.ndarray]:
    return list(same_sizes(cast(SceneSplit, split), indices, EVALUATION_PIXELS))


def crop_size(config: TrainConfig, epoch: int) -> tuple[int, int]:
    """Height and width of the crops of an epoch, counted from 0."""
    last = config.final_crop is not None and epoch >= config.epochs - config.final_epochs
    return config.final_crop if last and config.final_crop else config.scene_crop


def make_images(data: DataSet, config: TrainConfig, **options: Any) -> Images:
    """What prepares the images of a data set; `options` are those of `Images`."""
    return (SceneImages if data.palette else Images)(data, config, **options)


def training_task(model: Mixture, data: DataSet, kept: np.ndarray, config: TrainConfig) -> Task:
    """The model's task with the class weights of its training."""
    weights = class_weights(data, kept, config)
    if weights is None:
        return task_of(model.config)
    return (Segmentation if data.palette else Classification)(weights.to(model.stem.device))


def class_weights(data: DataSet, kept: np.ndarray, config: TrainConfig) -> Tensor | None:
    """What images, or pixels, of each class count in the loss; None if all count the same.

    inverse_log is 1 / ln(1.10 + share), as in ENet; balanced is 1 / (classes * share): all classes count the same.
    """
    if config.class_weights == "equal":
        return None
    if data.palette:
        shares = class_shares(cast(SceneSplit, data.train), kept, len(data.classes))
    else:
        shares = np.bincount(data.train.labels[kept], minlength=len(data.classes)) / len(kept)
    if config.class_weights == "inverse_log":
        return torch.from_numpy(1 / np.log(1.10 + shares)).float()
    there = shares > 0  # of a class that is nowhere, nothing is learned
    return torch.from_numpy(np.where(there, 1 / (there.sum() * np.where(there, shares, 1.0)), 0.0)).float()
