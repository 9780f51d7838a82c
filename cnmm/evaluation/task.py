"""What a mixture is trained for: its loss, its targets and what quality means. The one place that knows of accuracy.

Everything else says quality and metric: the frontier, budgets, calibration, plots, reports and exports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm._errors import UserError
from cnmm.config import MixtureConfig

_Z = 1.959964  # of a two-sided interval of 95 %


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured on n images: the value of one metric, between 0 and 1, with its 95 % interval."""

    metric: str
    value: float
    low: float
    high: float
    n: int
    all: Mapping[str, float]
    """Every metric of the task."""


class Meter(Protocol):
    """Collects answers and targets, batch by batch."""

    def add(self, scores: Tensor, target: Tensor) -> None:
        """Scores [N, classes, ...] of a batch, logits or probabilities, and what they should have been."""

    def quality(self, metric: str | None = None) -> Quality:
        """What has been collected so far, by a metric of the task (default its first)."""


class Task(Protocol):
    """Loss, target and metrics of one kind of problem."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What quality may mean; the first is the default."""

    def check_metric(self, metric: str | None) -> str:
        """The metric itself, or the default for None."""

    def loss(self, logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """What training minimises."""

    def distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """How far the answers are from a teacher's: KL(teacher || student), per image."""

    def meter(self, num_classes: int) -> Meter: ...

    def weights(self, target: Tensor, metric: str) -> Tensor:
        """What a right answer of each image counts, [N], one on average: their weighted mean is the metric."""


class Classification:
    """One label per image. Mean class accuracy, the mean over the classes of each one's accuracy, is the paper's."""

    metrics = ("accuracy", "mean_class_accuracy")

    def check_metric(self, metric: str | None) -> str:
        if metric is None:
            return self.metrics[0]
        if metric not in self.metrics:
            raise UserError(f"metric {metric!r}: must be one of {', '.join(self.metrics)}")
        return metric

    def loss(self, logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(logits.float(), target, label_smoothing=label_smoothing)

    def distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        wanted, found = teacher.float().log_softmax(1), logits.float().log_softmax(1)
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def meter(self, num_classes: int) -> Meter:
        return _Counts(num_classes)

    def weights(self, target: Tensor, metric: str) -> Tensor:
        if self.check_metric(metric) == "accuracy":
            return torch.ones(len(target), dtype=torch.float64)
        counts = torch.bincount(target)
        return len(target) / ((counts > 0).sum() * counts[target].double())


class _Counts:
    """Right answers and images of every class."""

    def __init__(self, num_classes: int) -> None:
        self.right = torch.zeros(num_classes, dtype=torch.int64)
        self.total = torch.zeros(num_classes, dtype=torch.int64)

    def add(self, scores: Tensor, target: Tensor) -> None:
        target = target.cpu()
        hits = target[scores.argmax(1).cpu() == target]
        self.total += torch.bincount(target, minlength=len(self.total))
        self.right += torch.bincount(hits, minlength=len(self.right))

    def quality(self, metric: str | None = None) -> Quality:
        metric = Classification().check_metric(metric)
        n = int(self.total.sum())
        if not n:
            raise UserError("no images to evaluate on")
        seen = self.total > 0  # a class that does not occur is left out of the mean
        shares = self.right[seen].double() / self.total[seen]
        values = {"accuracy": int(self.right.sum()) / n, "mean_class_accuracy": shares.mean().item()}
        if metric == "accuracy":
            low, high = wilson(values[metric], n)
        else:  # the variances of the classes' shares add up; a share of 0 or 1 has that of half an image more
            smooth = (self.right[seen] + 0.5) / (self.total[seen] + 1)
            half = _Z * math.sqrt((smooth * (1 - smooth) / self.total[seen]).sum().item()) / len(shares)
            low, high = max(0.0, values[metric] - half), min(1.0, values[metric] + half)
        return Quality(metric=metric, value=values[metric], low=low, high=high, n=n, all=values)


def task_of(config: MixtureConfig) -> Task:
    """The task of a model."""
    if config.task == "classification":
        return Classification()
    raise UserError(f"{config.name!r} labels pixels, which cannot be trained or measured yet; use a classifier")


def wilson(p: float, n: int, z: float = _Z) -> tuple[float, float]:
    """95 % interval of a share p of n images."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
