"""The images of a run: which it was trained on, which were held out to choose points, and which it is tested on."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._progress import OnWait, no_wait, reading
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.data import DataSet, Split, divide, hold_out, open_data
from cnmm.data.classes import in_order
from cnmm.data.dataset import Images as Pixels
from cnmm.data.dataset import Labels
from cnmm.data.images import resize_image
from cnmm.data.masks import Mask
from cnmm.data.scenes import Scene, SceneSplit
from cnmm.evaluation.batches import Batches, Reread
from cnmm.run_held_out import HeldOut, load_held_out
from cnmm.training.batches import Images
from cnmm.training.config import TrainConfig
from cnmm.training.scene_batches import make_images

CHOSEN_ON_TEST = "test (chosen on test)"
"""The split of a run that held no images out."""

MOST_SCENES = 64
"""Scenes that stand for training images as they are: each has as many pixels as hundreds of small images."""

logger = logging.getLogger("cnmm")


class RunImages:
    """The images of one run. They are opened when they are first asked for."""

    def __init__(
        self,
        folder: Path,
        spec: str | None,
        model: MixtureConfig,
        preprocessing: Preprocessing,
        config: TrainConfig,
        *,
        given: bool = False,
        skip_bad: bool = False,
        on_wait: OnWait = no_wait,
    ) -> None:
        """`spec`: where they are; `given`: now, by the user. `skip_bad`: without those that cannot be read.

        `on_wait` is told how far they are read.
        """
        self.folder, self.spec, self.model, self.preprocessing, self.config = folder, spec, model, preprocessing, config
        self.given, self.skip_bad, self.on_wait = given, skip_bad, on_wait

    @cached_property
    def data(self) -> DataSet:
        """The data set, with the run's own mean and standard deviation."""
        if self.spec is None:
            raise UserError(f"{self.folder} does not say what it was trained on; use --data, for example cifar10:DIR")
        remembered = None if self._held_out is None else self._held_out.test_names
        try:
            data = open_data(
                self.spec,
                size=self.model.input_size,
                skip_bad=self.skip_bad,
                test=remembered,
                progress=reading(self.on_wait),
            )
        except (OSError, UserError) as error:
            if self.given:
                raise
            kind = self.spec.partition(":")[0] if ":" in self.spec else "folder"
            hint = f"{self.folder} was trained on {self.spec!r}; where its images are now, say with --data {kind}:DIR"
            raise UserError(f"{' '.join(str(error).split())} ({hint})") from None
        data = in_order(data, self.preprocessing.classes, str(self.folder))
        return dataclasses.replace(data, mean=self.preprocessing.mean, std=self.preprocessing.std)

    @cached_property
    def prepared(self) -> Images:
        """What makes batches for the network of them."""
        return make_images(self.data, self.config)

    @cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        if self._held_out is None:  # of a run from before it was remembered
            return divide(self.data, self.config.val, self.config.seed)
        held = self._held_out.validation_of(self.data)
        return np.setdiff1d(np.arange(len(self.data.train)), held, assume_unique=True), held

    @cached_property
    def _held_out(self) -> HeldOut | None:
        return load_held_out(self.folder)

    @property
    def num_held_out(self) -> int:
        return len(self._parts[1])

    def identity(self) -> str:
        """Tells other images from these, and other ones held out."""
        held = hashlib.sha256(self._parts[1].tobytes()).hexdigest()
        return f"{self.data.fingerprint} {held}"

    def split(self, name: str) -> tuple[Split, np.ndarray]:
        """The images of "validation" or "test", and which of them."""
        if name == "validation":
            if not self.num_held_out:
                raise UserError("split 'validation': no images were held out (val=0); use --split test")
            return self.data.train, self._parts[1]
        if name == "test" and self.data.test is not None:
            return self.data.test, self._tested
        raise UserError(f"split {name!r}: must be test (if {self.spec} has one) or validation")

    @cached_property
    def _tested(self) -> np.ndarray:
        assert self.data.test is not None
        if self._held_out is None:
            return np.arange(len(self.data.test))
        return self._held_out.test_of(self.data, self.data.test)

    def measured(self, num: int | None = None) -> tuple[str, Split, np.ndarray]:
        """What points are chosen on: the name of the split, its images, and which of them, at most `num`."""
        num = _fields.checked(num, "images", _fields.or_null(_fields.POSITIVE))
        if self.num_held_out:
            name, (part, chosen) = "validation", self.split("validation")
        elif self.data.test is not None:
            name, (part, chosen) = CHOSEN_ON_TEST, self.split("test")
        else:
            raise UserError(f"{self.folder} held no images out (--val 0), and {self.spec} has no test images")
        return name, part, self._stratified(part, chosen, num)

    def _stratified(self, part: Split, chosen: np.ndarray, num: int | None) -> np.ndarray:
        """At most `num` of the chosen images, the same share of every class."""
        if num is None or num >= len(chosen):
            return chosen
        return chosen[hold_out(part.labels[chosen], num, self.config.seed)[1]]

    def measured_on(self, num: int | None) -> tuple[str, int]:
        """The split that `num` images were measured on, and how many there are."""
        name, _, chosen = self.measured(num)
        return name, len(chosen)

    def some_measured(
        self, num_measured: int | None, num: int | None, size: int = 100
    ) -> Iterator[tuple[Pixels, Labels | Mask]]:
        """Batches of at most `num` of the images that points were measured on, with their labels.

        Scenes come one by one, as large as the model's images.
        """
        _, part, measured = self.measured(num_measured)
        chosen = self._stratified(part, measured, num)
        for start in range(0, len(chosen), 1 if self.data.palette else size):
            batch = chosen[start : start + size]
            if self.data.palette:
                ((image, mask),) = cast(SceneSplit, part).scenes(batch[:1])
                yield resize_image(image, self.model.input_size)[np.newaxis], mask[np.newaxis]
            else:
                yield part.read(batch), part.labels[batch]

    def batches(self, part: Split, chosen: np.ndarray) -> Batches[tuple[Tensor, Tensor]]:
        """Batches of prepared images and their labels, read anew each time."""
        prepared = self.prepared
        return Reread(lambda: prepared.batches(part, chosen), prepared.num_batches(part, chosen), len(chosen))

    def statistics(self) -> Reread[Tensor]:
        """Batches of training images, augmented as in training, or whole scenes: for estimating batch statistics."""
        train, kept, prepared = self.data.train, self._parts[0], self.prepared
        return Reread(
            lambda: prepared.statistics_batches(train, kept),
            prepared.num_statistics(train, kept),
            min(prepared.num_for_statistics, len(kept)),
        )

    def damage(self) -> Tensor:
        """The training images that damage is measured on, one batch."""
        return self.prepared.damage_batch(self.data.train, self._parts[0])

    def held_out(self, num: int | None = None) -> tuple[Pixels, Labels]:
        """Held-out images, uint8 [N, H, W, C], and their labels; at most `num` of them."""
        self._check_held_out()
        chosen = self._parts[1][:num]
        return self.data.train.read(chosen), self.data.train.labels[chosen]

    def scenes(self, num: int | None = None) -> list[Scene]:
        """Held-out scenes, at most `num` of them."""
        self._check_held_out()
        return cast(SceneSplit, self.data.train).scenes(self._parts[1][:num])

    def _check_held_out(self) -> None:
        if not self.num_held_out:
            raise UserError(f"{self.folder} was trained with --val 0: no images were held out")

    def training(self, num: int) -> Pixels:
        """Training images as they are, uint8 [N, H, W, C], always the same ones; scenes as large as the model's."""
        num = min(num, MOST_SCENES) if self.data.palette else num
        chosen = np.sort(np.random.default_rng(0).permutation(self._parts[0])[:num])
        if not self.data.palette:
            return self.data.train.read(chosen)
        scenes = cast(SceneSplit, self.data.train).scenes(chosen)
        return np.stack([resize_image(scene.image, self.model.input_size) for scene in scenes])
