"""How good a mixture is on labelled images: accuracy and the paper's mean accuracy across classes, at any point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured on n images."""

    accuracy: float
    mean_class_accuracy: float
    """The mean over the classes of each class's accuracy: the paper's metric."""
    low: float
    high: float
    """95 % interval of the accuracy (Wilson's)."""
    n: int


def quality_of(predicted: Tensor, labels: Tensor, num_classes: int) -> Quality:
    """Quality of predicted classes [N]; a class that does not occur among the labels is left out of the mean."""
    right = predicted == labels
    per_class = torch.bincount(labels, minlength=num_classes)
    hits = torch.bincount(labels[right], minlength=num_classes)
    seen = per_class > 0
    n, accuracy = len(labels), right.double().mean().item()
    low, high = wilson(accuracy, n)
    return Quality(
        accuracy=accuracy,
        mean_class_accuracy=(hits[seen] / per_class[seen]).double().mean().item(),
        low=low,
        high=high,
        n=n,
    )


@torch.no_grad()
def evaluate_exits(
    model: Mixture,
    batches: Iterable[tuple[Tensor, Tensor]],
    point: OperatingPoint | None = None,
    *,
    monte_carlo: int = 0,
    generator: torch.Generator | None = None,
) -> dict[int, Quality]:
    """Quality of every exit that the point reaches, by expectation; or of its last exit by Monte-Carlo samples."""
    was_training = model.training
    model.eval()
    predicted: dict[int, list[Tensor]] = {}
    targets: list[Tensor] = []
    try:
        for images, labels in batches:
            if monte_carlo:
                last = point.exit if point else model.lattice.num_exits
                scores = {last: model.monte_carlo(images, monte_carlo, point, generator=generator)}
            else:
                scores = model.forward_exits(images, point)
            for exit, score in scores.items():
                predicted.setdefault(exit, []).append(score.argmax(1))
            targets.append(labels)
    finally:
        model.train(was_training)
    if not targets:
        raise UserError("no images to evaluate on")
    labels = torch.cat(targets)
    return {exit: quality_of(torch.cat(found), labels, model.config.num_classes) for exit, found in predicted.items()}


def batches_of(
    images: Tensor, labels: Tensor, prepare: Callable[[Tensor], Tensor], size: int = 500
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images [N, C, H, W] of type uint8 in batches, prepared for the network."""
    for start in range(0, len(images), size):
        yield prepare(images[start : start + size]), labels[start : start + size]


def wilson(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share p of n images."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
