"""What quality is, and what a task must be able to say: its loss, its targets and its metrics.

Everything else says quality and metric: training, the frontier, budgets, calibration, plots, reports and exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cnmm._errors import UserError

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured on n images: the value of one metric, between 0 and 1, with its 95 % interval."""

    metric: str
    value: float
    low: float
    high: float
    n: int
    all: Mapping[str, float]
    """The value of every metric of the task."""
    per_class: tuple[float | None, ...] = ()
    """Of pixels: the IoU of every class; None where a class occurs neither in labels nor in answers. Of images, where
    it was asked for: the accuracy of every class; None of a class without images."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """Of images, where it was asked for: how many of each class (rows) were taken for each class (columns)."""


class Resumable(Protocol):
    """What is found batch by batch, and can go on in another process."""

    def state(self) -> dict[str, Tensor]:
        """All that was added so far."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from there."""


class Stacked:
    """Keeps tensors of every batch, in lists that a class names in `lists`."""

    lists: tuple[str, ...]

    def state(self) -> dict[str, Tensor]:
        return {name: torch.cat(getattr(self, name)) for name in self.lists}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name in self.lists:
            setattr(self, name, [state[name]])


class Meter(Resumable, Protocol):
    """Compares answers with targets, batch by batch, and keeps counts only."""

    def add(self, answers: Tensor, target: Tensor) -> None:
        """A batch of answers: scores [N, classes, ...], logits or probabilities; or what they predict, [N, ...]."""

    def quality(self, metric: str | None = None) -> Quality:
        """Of everything added so far, by a metric of the task (default: its first)."""


class Choices(Resumable, Protocol):
    """Answers of several exits about the same images: an image leaves at one of them, and that answer counts."""

    def add(self, answers: Sequence[Tensor], target: Tensor) -> None:
        """Logits of every exit about a batch."""

    @property
    def confidence(self) -> Floats:
        """How sure each exit is of each image, [N, E], between 0 and 1: what thresholds are compared with."""

    @property
    def worth(self) -> Floats:
        """What an exit's answer about an image adds to the metric, [N, E]; of its mean over images, differences count.

        Of a metric that is no mean over images, to first order around the last exit's answers.
        """

    def quality(self, leaves: npt.NDArray[np.intp]) -> float:
        """The metric, if each image leaves at an exit of its own."""


class Task(Protocol):
    """Loss, targets and metrics of one kind of problem."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What quality may mean; the first is the default."""

    def check_metric(self, metric: str | None = None) -> str:
        """The metric, if the task has it; None is the default."""

    def target(self, target: Tensor) -> Tensor:
        """Targets as loss and meter need them; an error if they are of another task."""

    def loss(self, logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """What training minimises, averaged over the batch."""

    def distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """How far predictions are from those of a teacher, averaged over the batch: KL(teacher || student)."""

    def meter(self, num_classes: int, *, detailed: bool = False) -> Meter:
        """What compares answers with targets; `detailed`: class by class, where that takes more than a few counts."""

    def choices(self, num_classes: int, metric: str) -> Choices:
        """For early exit, measured by a metric."""


def checked_metric(metric: str | None, metrics: Sequence[str]) -> str:
    """The metric, if it is one of these; None is the first."""
    if metric is None:
        return metrics[0]
    if metric not in metrics:
        raise UserError(f"metric {metric!r}: must be one of {', '.join(metrics)}")
    return metric
