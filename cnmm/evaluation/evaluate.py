"""How good a mixture is on labelled images, exit by exit, at any operating point."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm.evaluation.quality import Meter, Quality
from cnmm.evaluation.task import task_of
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture


@torch.no_grad()
def evaluate_exits(
    model: Mixture,
    batches: Iterable[tuple[Tensor, Tensor]],
    point: OperatingPoint | None = None,
    *,
    metric: str | None = None,
    detailed: bool = False,
    monte_carlo: int = 0,
    hard: bool = False,
    temperature: float = 2.0,
    generator: torch.Generator | None = None,
    on_images: Callable[[int], None] = lambda num: None,
) -> dict[int, Quality]:
    """Quality of every exit that the point reaches, by expectation; or of its last exit by Monte-Carlo samples.

    `detailed`: class by class. `hard` samples are single networks of the mixture; relaxed ones have a `temperature`.
    `on_images` is told after every batch how many images it had.
    """
    task = task_of(model.config)
    metric = task.check_metric(metric)
    last = point.exit if point else model.lattice.num_exits
    meters: dict[int, Meter] = {}
    was_training = model.training
    model.eval()
    try:
        for images, target in batches:
            if monte_carlo:
                sampled = model.monte_carlo(
                    images, monte_carlo, point, hard=hard, temperature=temperature, generator=generator
                )
                scores = {last: sampled}
            else:
                scores = model.forward_exits(images, point)
            for exit, score in scores.items():
                meters.setdefault(exit, task.meter(model.config.num_classes, detailed=detailed)).add(score, target)
            on_images(len(images))
    finally:
        model.train(was_training)
    if not meters:
        raise UserError("no images to evaluate on")
    return {exit: meter.quality(metric) for exit, meter in meters.items()}
