"""Labelling images: one class per image."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm._errors import UserError
from cnmm.evaluation.quality import Choices, Floats, Meter, Quality, Stacked, checked_metric

TOP = 5
"""An answer is counted as among the best if the right class is one of so many."""
Z_95 = 1.959964
"""Standard deviations on either side of a mean that 95 % of a normal distribution lie within."""


class Classification:
    """One label per image. The paper's metric is the mean over the classes of each one's accuracy."""

    metrics = ("accuracy", "mean_class_accuracy")

    def __init__(self, class_weights: Tensor | None = None) -> None:
        """`class_weights`: what images of each class count in the loss of a training, [K]."""
        self.class_weights = class_weights

    def check_metric(self, metric: str | None = None) -> str:
        return checked_metric(metric, self.metrics)

    def target(self, target: Tensor) -> Tensor:
        if target.dim() != 1 or target.is_floating_point():
            raise UserError(f"targets of shape {tuple(target.shape)} and type {target.dtype}: must be integers [N]")
        return target.long()

    def loss(self, logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, averaged over the images by the weight of their class."""
        target, weights = self.target(target), self.class_weights
        return F.cross_entropy(logits.float(), target, weights, label_smoothing=label_smoothing)

    def distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        student, wanted = logits.float().log_softmax(1), teacher.float().log_softmax(1)
        return F.kl_div(student, wanted, reduction="batchmean", log_target=True)

    def meter(self, num_classes: int, *, detailed: bool = False) -> Meter:
        return _Confusion(self, num_classes) if detailed else _Counts(self, num_classes)

    def choices(self, num_classes: int, metric: str) -> Choices:
        return _Choices(self, self.check_metric(metric))

    def weights(self, target: Tensor, metric: str) -> Tensor:
        """What a right answer counts for each image, one on average: the weighted share of right ones is the metric."""
        target = self.target(target)
        if self.check_metric(metric) == "accuracy":
            return torch.ones(len(target), dtype=torch.float64, device=target.device)
        total = torch.bincount(target)
        return len(target) / ((total > 0).sum() * total[target].double())


class _Choices(Stacked):
    """The largest class probability of each answer, and whether it is right."""

    lists = ("sure", "right", "target")

    def __init__(self, task: Classification, metric: str) -> None:
        self.task, self.metric = task, metric
        self.sure: list[Tensor] = []
        self.right: list[Tensor] = []
        self.target: list[Tensor] = []

    def add(self, answers: Sequence[Tensor], target: Tensor) -> None:
        best = torch.stack([score.float().softmax(1) for score in answers], 1).max(2)
        self.sure.append(best.values)
        self.right.append(best.indices == target[:, None])
        self.target.append(target)

    @cached_property
    def confidence(self) -> Floats:
        return torch.cat(self.sure).cpu().numpy()

    @cached_property
    def worth(self) -> Floats:
        weight_N = self.task.weights(torch.cat(self.target), self.metric)
        worth: Floats = (torch.cat(self.right) * weight_N[:, None]).cpu().numpy()
        return worth

    def quality(self, leaves: npt.NDArray[np.intp]) -> float:
        return float(self.worth[np.arange(len(leaves)), leaves].mean())


class _Counts:
    """Images and right answers of every class; a class without images is left out of the mean over classes."""

    def __init__(self, task: Classification, num_classes: int) -> None:
        self.task = task
        self.total = torch.zeros(num_classes, dtype=torch.int64)
        self.right = torch.zeros(num_classes, dtype=torch.int64)

    def add(self, answers: Tensor, target: Tensor) -> None:
        target, num_classes = self.task.target(target), len(self.total)
        predicted = answers.argmax(1) if answers.is_floating_point() else answers
        self.total += torch.bincount(target, minlength=num_classes).cpu()
        self.right += torch.bincount(target[predicted == target], minlength=num_classes).cpu()

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "right": self.right}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.total, self.right = state["total"], state["right"]

    def quality(self, metric: str | None = None) -> Quality:
        metric = self.task.check_metric(metric)
        n = int(self.total.sum())
        if not n:
            raise UserError("no images to evaluate on")
        seen = self.total > 0
        right, total = self.right[seen].double(), self.total[seen].double()
        values = {"accuracy": int(self.right.sum()) / n, "mean_class_accuracy": (right / total).mean().item()}
        interval = wilson(values[metric], n) if metric == "accuracy" else mean_interval(right, total)
        return Quality(metric=metric, value=values[metric], low=interval[0], high=interval[1], n=n, all=values)


class _Confusion(_Counts):
    """Which class was taken for which, and how often the right one is among the best five, where there are more."""

    def __init__(self, task: Classification, num_classes: int) -> None:
        super().__init__(task, num_classes)
        self.confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64)
        self.among_best = torch.zeros(1, dtype=torch.int64)

    def add(self, answers: Tensor, target: Tensor) -> None:
        super().add(answers, target)
        num, target = len(self.total), self.task.target(target)
        predicted = answers.argmax(1) if answers.is_floating_point() else answers
        self.confusion += torch.bincount(target * num + predicted, minlength=num * num).cpu()
        if answers.is_floating_point() and num > TOP:
            self.among_best += (answers.topk(TOP, 1).indices == target[:, None]).any(1).sum().cpu()

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "confusion": self.confusion, "among_best": self.among_best}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.confusion, self.among_best = state["confusion"], state["among_best"]

    def quality(self, metric: str | None = None) -> Quality:
        found, num = super().quality(metric), len(self.total)
        more = {f"top{TOP}_accuracy": self.among_best.item() / found.n} if num > TOP else {}
        pairs = zip(self.right.tolist(), self.total.tolist(), strict=True)
        return dataclasses.replace(
            found,
            all={**found.all, **more},
            per_class=tuple(right / total if total else None for right, total in pairs),
            confusion=tuple(map(tuple, self.confusion.view(num, num).tolist())),
        )


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n images."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(right_K: Tensor, total_K: Tensor) -> tuple[float, float]:
    """95 % interval of the mean over classes of right / total: the binomial variances of the classes add up.

    Their shares are taken with half a right and half a wrong answer more: a class without an error is not certain.
    """
    mean = (right_K / total_K).mean().item()
    share_K = (right_K + 0.5) / (total_K + 1)
    half = Z_95 * math.sqrt((share_K * (1 - share_K) / total_K).sum().item()) / len(total_K)
    return max(0.0, mean - half), min(1.0, mean + half)
