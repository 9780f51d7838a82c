"""Labelling pixels: a class for every pixel of an image, or void, which counts nowhere.

mIoU is the mean over the classes of intersection / union, from the counts of all images together, at the resolution of
the labels: logits are upsampled to it first, then the best class is taken. A class with an empty union is left out.
Intervals are bootstrapped over images, since pixels of one image are far from independent.

Shapes: N images, K classes, E exits. Counts of an image are [3, K]: pixels in the intersection, predicted and labelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm._errors import UserError
from cnmm.evaluation.quality import Choices, Floats, Meter, Quality, Stacked, checked_metric
from cnmm.palette import VOID
from cnmm.pixels import cross_entropy
from cnmm.rows import wide

RESAMPLES = 1000
"""Of the bootstrap."""
_AT_ONCE = 2**26  # numbers in the weights of a bootstrap, at most


class Segmentation:
    """One label per pixel."""

    metrics = ("miou", "pixel_accuracy")

    def __init__(self, class_weights: Tensor | None = None) -> None:
        """`class_weights`: what pixels of each class count in the loss of a training, [K]."""
        self.class_weights = class_weights

    def check_metric(self, metric: str | None = None) -> str:
        return checked_metric(metric, self.metrics)

    def target(self, target: Tensor) -> Tensor:
        if target.dim() != 3 or target.is_floating_point():
            raise UserError(f"targets of shape {tuple(target.shape)} and type {target.dtype}: must be masks [N, H, W]")
        return target

    def loss(self, logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, averaged over the pixels that have a class, by the weight of their class."""
        target, weights = self.target(target), self.class_weights
        table = torch.zeros(256, dtype=wide(logits), device=logits.device)  # void counts nothing
        table[: logits.shape[1]] = 1.0 if weights is None else weights
        if not label_smoothing:
            return cross_entropy(logits, target, table)
        weight, target = table[target.long()], target.long().masked_fill(target == VOID, 0)
        each = F.cross_entropy(logits.to(table.dtype), target, reduction="none", label_smoothing=label_smoothing)
        return (each * weight).sum() / weight.sum().clamp_min(1e-6)

    def distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Averaged over all pixels, void ones too: there is something to learn about them."""
        student, wanted = logits.float().log_softmax(1), teacher.float().log_softmax(1)
        return F.kl_div(student, wanted, reduction="sum", log_target=True) / (wanted.numel() // wanted.shape[1])

    def meter(self, num_classes: int, *, detailed: bool = False) -> Meter:
        return _Counts(self, num_classes)

    def choices(self, num_classes: int, metric: str) -> Choices:
        return _Choices(self, num_classes, self.check_metric(metric))

    def counts(self, answers: Tensor, target: Tensor, num_classes: int) -> Tensor:
        """[N, 3, K], from scores [N, K, h, w] of any size, or from predicted classes [N, H, W]."""
        target = self.target(target)
        if answers.is_floating_point():
            if answers.shape[2:] != target.shape[1:]:
                answers = F.interpolate(answers.float(), target.shape[1:], mode="bilinear", align_corners=False)
            answers = answers.argmax(1)
        if answers.shape != target.shape:
            raise UserError(f"predictions of shape {tuple(answers.shape)} for masks of shape {tuple(target.shape)}")
        known = target != VOID
        worst = int((target * known).max())
        if worst >= num_classes:
            raise UserError(
                f"a mask has the value {worst}: must be a class from 0 to {num_classes - 1}, or {VOID}, void"
            )
        images = torch.arange(len(target), device=target.device)[:, None, None] * num_classes
        found = []
        for classes, where in ((target, known & (answers == target)), (answers, known), (target, known)):
            place = (classes + images)[where]
            found.append(torch.bincount(place, minlength=len(target) * num_classes).view(-1, num_classes))
        return torch.stack(found, 1).cpu()


def metric_values(counts: Tensor) -> dict[str, Tensor]:
    """Every metric from counts [..., 3, K] of all images together, in float64."""
    both, _, labelled = counts.double().unbind(-2)
    return {"miou": _iou(counts).nanmean(-1).nan_to_num(0.0), "pixel_accuracy": both.sum(-1) / labelled.sum(-1)}


def _iou(counts: Tensor) -> Tensor:
    """IoU of every class, [..., K]; nan where there is no union."""
    both, predicted, labelled = counts.double().unbind(-2)
    return both / (predicted + labelled - both)


class _Counts(Stacked):
    """The counts of every image."""

    lists = ("counts",)

    def __init__(self, task: Segmentation, num_classes: int) -> None:
        self.task, self.num_classes = task, num_classes
        self.counts: list[Tensor] = []

    def add(self, answers: Tensor, target: Tensor) -> None:
        self.counts.append(self.task.counts(answers, target, self.num_classes))

    def quality(self, metric: str | None = None) -> Quality:
        metric = self.task.check_metric(metric)
        counts_N3K = torch.cat(self.counts) if self.counts else torch.zeros(0, 3, self.num_classes)
        if not counts_N3K[:, 2].sum():
            raise UserError("no images to evaluate on, or none with a labelled pixel")
        total = counts_N3K.sum(0)
        values = {name: value.item() for name, value in metric_values(total).items()}
        low, high = bootstrap(counts_N3K, metric)
        per_class = tuple(None if value != value else value for value in _iou(total).tolist())
        return Quality(
            metric=metric,
            value=values[metric],
            low=min(low, values[metric]),
            high=max(high, values[metric]),
            n=len(counts_N3K),
            all=values,
            per_class=per_class,
        )


def bootstrap(counts_N3K: Tensor, metric: str, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of a metric over samples of as many images with replacement, always the same ones."""
    rng, num = np.random.default_rng(0), len(counts_N3K)
    flat, values = counts_N3K.flatten(1).double(), []
    step = max(1, _AT_ONCE // num)
    for start in range(0, resamples, step):
        times = rng.multinomial(num, np.full(num, 1 / num), min(step, resamples - start))
        drawn = (torch.from_numpy(times).double() @ flat).view(-1, *counts_N3K.shape[1:])
        values.append(metric_values(drawn)[metric])
    low, high = np.nanquantile(torch.cat(values).numpy(), [0.025, 0.975]).tolist()
    return low, high


class _Choices(Stacked):
    """The mean over an image's pixels of the largest class probability, and the counts of every answer."""

    lists = ("sure", "counts")

    def __init__(self, task: Segmentation, num_classes: int, metric: str) -> None:
        self.task, self.num_classes, self.metric = task, num_classes, metric
        self.sure: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, answers: Sequence[Tensor], target: Tensor) -> None:
        self.sure.append(torch.stack([image_confidence(score) for score in answers], 1))
        self.counts.append(torch.stack([self.task.counts(score, target, self.num_classes) for score in answers], 1))

    @cached_property
    def confidence(self) -> Floats:
        return torch.cat(self.sure).cpu().numpy()

    @cached_property
    def counts_NE3K(self) -> Tensor:
        return torch.cat(self.counts).double()

    @cached_property
    def worth(self) -> Floats:
        total = self.counts_NE3K[:, -1].sum(0).requires_grad_()
        with torch.enable_grad():
            (slope_3K,) = torch.autograd.grad(metric_values(total)[self.metric], total)
        slope_3K = slope_3K.nan_to_num(0.0)  # of a class that is nowhere
        worth: Floats = ((self.counts_NE3K * slope_3K).sum((2, 3)) * len(self.counts_NE3K)).numpy()
        return worth

    def quality(self, leaves: npt.NDArray[np.intp]) -> float:
        total_3K = self.counts_NE3K.numpy()[np.arange(len(leaves)), leaves].sum(0)
        return metric_values(torch.from_numpy(total_3K))[self.metric].item()


def image_confidence(logits: Tensor) -> Tensor:
    """How sure answers [N, K, h, w] are of each image, [N]: the mean over its pixels of the largest probability."""
    return logits.float().softmax(1).amax(1).mean((1, 2))
