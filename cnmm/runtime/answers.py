"""What becomes of the answers of networks: they are collected while images leave, and handed out as a `Prediction`.

Networks classify whole images in passes of several, or label the pixels of one image at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.data.images import resize_image
from cnmm.runtime.engines import Floats, Images, Indices
from cnmm.runtime.latency import percentile
from cnmm.runtime.pixels import Labels, image_confidence, label_map

FINISHING_REPEATS = 5


class NotFinite(UserError):
    """A network answers with numbers that are none: the ladder is broken, not what it was asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """What a session answers for N images."""

    probabilities: Floats
    """[N, classes]; of segmentation, the share of an image's pixels that each class has."""
    classes: tuple[str, ...]
    point: str
    """The operating point, or that of the cascade."""
    macs: float
    """Average per image; of a cascade, of the stages that ran."""
    exits: npt.NDArray[np.int64]
    """[N]: the exit that answered."""
    confidence: Floats
    """[N]: the probability of the best class; of segmentation, its mean over the pixels."""
    time_ms: float
    """Of the whole call."""
    labels: tuple[Labels, ...] = ()
    """Of segmentation: the class of every pixel, uint8 [H, W], each image at its own size."""
    deadline_ms: float | None = None
    """What was asked for, if it was a deadline."""

    @property
    def late(self) -> bool:
        """Was a deadline missed? Nobody but the machine can promise one."""
        return self.deadline_ms is not None and self.time_ms > self.deadline_ms

    def __post_init__(self) -> None:
        if not np.isfinite(self.confidence).all():
            raise NotFinite(
                f"point {self.point!r}: it answers with numbers that are not finite; export the ladder again"
            )

    def top(self, k: int = 1) -> tuple[tuple[tuple[str, float], ...], ...]:
        """For each image the k most probable classes with their probabilities, best first."""
        k = _fields.checked(k, "top", _fields.POSITIVE)
        best = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        return tuple(
            tuple((self.classes[index], float(row[index])) for index in indices)
            for row, indices in zip(self.probabilities, best.tolist(), strict=True)
        )


class Answers(Protocol):
    """The answers of one call, as far as they are there."""

    exits: npt.NDArray[np.int64]

    def passes(self) -> Iterator[tuple[Indices, Images]]:
        """Which images run together, and what networks take: [n, H, W, C]."""

    def confidence(self, answers: Floats) -> Floats:
        """How sure the answers of a pass are, [n]."""

    def take(self, rows: Indices, answers: Floats, exit: int, confidence: Floats) -> None:
        """These images leave here."""

    @property
    def work(self) -> Floats:
        """[N]: macs of an image, as a share of those of the ladder's own size."""

    @property
    def finishing_ms(self) -> float:
        """How long taking the answers of one image may take."""

    def prediction(self, *, point: str, macs: float, start: float) -> Prediction:
        """All answers; `start` (of perf_counter) is when the call began."""


class ClassAnswers:
    """Whole images are classified; `chunk` of them in a pass."""

    finishing_ms = 0.0

    def __init__(self, batch: Images, classes: tuple[str, ...], chunk: int) -> None:
        self._batch, self._classes, self._chunk = batch, classes, chunk
        self._probabilities = np.empty((len(batch), len(classes)), np.float32)
        self._confidence = np.empty(len(batch), np.float32)
        self.exits = np.empty(len(batch), np.int64)
        self.work = np.ones(len(batch), np.float32)

    def passes(self) -> Iterator[tuple[Indices, Images]]:
        num = len(self._batch)
        for first in range(0, num, self._chunk):
            yield np.arange(first, min(first + self._chunk, num)), self._batch[first : first + self._chunk]

    def confidence(self, answers: Floats) -> Floats:
        best: Floats = answers.max(axis=1)
        return best

    def take(self, rows: Indices, answers: Floats, exit: int, confidence: Floats) -> None:
        self._probabilities[rows], self.exits[rows], self._confidence[rows] = answers, exit, confidence

    def prediction(self, *, point: str, macs: float, start: float) -> Prediction:
        return Prediction(
            probabilities=self._probabilities,
            classes=self._classes,
            point=point,
            macs=macs,
            exits=self.exits,
            confidence=self._confidence,
            time_ms=1e3 * (time.perf_counter() - start),
        )


@dataclass(frozen=True)
class Finishing:
    """How long it takes to make a label map of scores, in milliseconds for each of its pixels (95th percentile)."""

    same_ms: float
    """At the size of the scores."""
    other_ms: float
    """At another size."""

    @classmethod
    def measured(cls, num_classes: int, size: tuple[int, int]) -> Finishing:
        """On this machine, now."""
        scores = np.random.default_rng(0).standard_normal((1, num_classes, *size), np.float32)
        other = (size[0] + 1, size[1] + 1)
        return cls(*(_time_finishing(scores, wanted) / math.prod(wanted) for wanted in (size, other)))


def _time_finishing(scores: Floats, size: tuple[int, int]) -> float:
    times = []
    for _ in range(FINISHING_REPEATS):
        start = time.perf_counter()
        image_confidence(scores[0])
        label_map(scores[0], size)
        times.append(1e3 * (time.perf_counter() - start))
    return percentile(times, 95)


class PixelAnswers:
    """The pixels of images are labelled, one image at a time: each image may have its own size.

    A network of one size takes images stretched to it. One of any size takes an image as it is, or reduced to as many
    pixels as the ladder's size has: no image costs more than was measured.
    """

    def __init__(
        self,
        pictures: Sequence[Images],
        classes: tuple[str, ...],
        size: tuple[int, int],
        *,
        any_size: bool,
        finishing: Finishing,
    ) -> None:
        self._pictures, self._classes, self._size = pictures, classes, size
        self._any_size, self._finishing = any_size, finishing
        num = len(pictures)
        self._labels: list[Labels] = [np.empty((0, 0), np.uint8)] * num
        self._confidence = np.empty(num, np.float32)
        self.exits = np.empty(num, np.int64)

    def passes(self) -> Iterator[tuple[Indices, Images]]:
        for row, picture in enumerate(self._pictures):
            yield np.array([row]), resize_image(picture, self._running_size(picture))[np.newaxis]

    def _running_size(self, picture: Images) -> tuple[int, int]:
        """Height and width with which an image runs."""
        if not self._any_size:
            return self._size
        height, width = picture.shape[:2]
        scale = min(1.0, math.sqrt(math.prod(self._size) / (height * width)))
        return max(1, int(scale * height)), max(1, int(scale * width))

    def confidence(self, answers: Floats) -> Floats:
        return np.array([image_confidence(scores) for scores in answers], np.float32)

    def take(self, rows: Indices, answers: Floats, exit: int, confidence: Floats) -> None:
        for row, scores, sure in zip(rows.tolist(), answers, confidence, strict=True):
            height, width = self._pictures[row].shape[:2]
            self._labels[row] = label_map(scores, (height, width))
            self.exits[row], self._confidence[row] = exit, sure

    @property
    def work(self) -> Floats:
        full = math.prod(self._size)
        return np.array([math.prod(self._running_size(picture)) / full for picture in self._pictures], np.float32)

    @property
    def finishing_ms(self) -> float:
        height, width = self._pictures[0].shape[:2]
        same = (height, width) == self._running_size(self._pictures[0])
        return (self._finishing.same_ms if same else self._finishing.other_ms) * math.prod((height, width))

    def prediction(self, *, point: str, macs: float, start: float) -> Prediction:
        num = len(self._classes)
        counts = [np.bincount(labels.ravel(), minlength=num) / labels.size for labels in self._labels]
        return Prediction(
            probabilities=np.array(counts, np.float32),
            classes=self._classes,
            point=point,
            macs=macs,
            exits=self.exits,
            confidence=self._confidence,
            labels=tuple(self._labels),
            time_ms=1e3 * (time.perf_counter() - start),
        )
