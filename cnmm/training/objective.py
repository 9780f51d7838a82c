"""What a training step minimises, Eq. (9): the weighted losses of all exits under one draw of the gates.

Later in a training, the loss of a random operating point is added (`ladder_tuning`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import EllipsisType

import torch
from torch import Tensor

from cnmm import distributed
from cnmm.config import Gates
from cnmm.evaluation.quality import Task
from cnmm.evaluation.task import task_of
from cnmm.mixture import Mixture
from cnmm.training.batches import Batch
from cnmm.training.config import TrainConfig
from cnmm.training.ladder_tuning import Ladder
from cnmm.training.seeds import seeded


def batch_loss(
    model: Mixture, batch: Batch, config: TrainConfig, *, epoch: int, ladder: Ladder | None, task: Task
) -> Tensor:
    """The loss of a step of the training."""
    x, labels, at = batch.images, batch.labels, (epoch, batch.step)
    return training_loss(model, x, labels, config, at=at, ladder=ladder, answers=batch.answers, task=task)


def training_loss(
    model: Mixture,
    x: Tensor,
    labels: Tensor,
    config: TrainConfig,
    *,
    at: tuple[int, int],
    ladder: Ladder | None = None,
    answers: Tensor | None = None,
    task: Task | None = None,
) -> Tensor:
    """Eq. (9), the weighted losses of all exits from one sample of the gates; with a ladder, also a point of it.

    The pass of the point normalises by its own batch, as a point with re-estimated statistics does, and leaves the full
    mixture's running statistics alone. `answers`: a teacher's logits for the images; `task`: the model's unless told.
    """
    gates, group = draw_gates(model, config, at, len(x))
    weights, grid = drawn_exits(model.config.exit_numbers, config, at), pixel_grid(config, at)
    logits = model.forward_exits(x, gates=gates, group=group, exits=weights)
    if labels.dim() == 3:  # pixels
        labels, logits = labels[grid], {exit: score[grid] for exit, score in logits.items()}
    last = max(logits)
    lesson = Lesson(task or task_of(model.config), config, labels, logits[last].detach(), answers)
    total = torch.zeros((), device=x.device)
    for exit, score in logits.items():
        distilled = config.exit_distill if ladder and exit < last else 0.0
        total = total + weights[exit] * lesson.loss(score, distilled)
    if ladder:
        point = ladder.draw(seeded(config.seed, "ladder", *at))
        score = model(x, point, update_statistics=False)
        score = score[grid] if labels.dim() == 3 else score
        total = total + config.ladder_weight * lesson.loss(score, 1 - config.ladder_labels)
    return total


def pixel_grid(config: TrainConfig, at: tuple[int, int]) -> tuple[EllipsisType, slice, slice]:
    """Which rows and columns of pixels a step learns from: every `loss_stride`-th, from a random one on."""
    stride = config.loss_stride
    first = torch.randint(stride, (2,), generator=seeded(config.seed, "pixels", *at)).tolist()
    return ..., slice(first[0], None, stride), slice(first[1], None, stride)


class Lesson:
    """What there is to learn about the images of a step: labels, a teacher's answers, and those of the last exit."""

    def __init__(
        self, task: Task, config: TrainConfig, labels: Tensor, best: Tensor, answers: Tensor | None = None
    ) -> None:
        self.task, self.config, self.labels, self.best, self.answers = task, config, labels, best, answers

    def loss(self, score: Tensor, distilled: float) -> Tensor:
        """Of an exit's or a point's answers: a share is distillation from the last exit."""
        if distilled == 0:
            return self._taught(score)
        soft = self.task.distil(score, self.best)
        return soft if distilled == 1 else (1 - distilled) * self._taught(score) + distilled * soft

    def _taught(self, score: Tensor) -> Tensor:
        """By the labels, and by the teacher if there is one."""
        hard = self.task.loss(score, self.labels, label_smoothing=self.config.label_smoothing)
        if self.answers is None:
            return hard
        share, t = self.config.teacher_weight, self.config.teacher_temperature
        soft = t * t * self.task.distil(score.float() / t, self.answers / t)  # gradients as large at any temperature
        return (1 - share) * hard + share * soft


def draw_gates(model: Mixture, config: TrainConfig, at: tuple[int, int], num: int) -> tuple[Gates | Tensor, int | None]:
    """The gates of a step: drawn for the whole batch, of which this process has `num` images."""
    if config.gates == "expectation" or model.config.mixing == "sum":
        return "expectation", None
    world, generator = distributed.world_size(), seeded(config.seed, "gates", *at)
    group = min(config.group or num * world, num * world)
    draws = -(-num * world // group)
    if config.gates == "relaxed":
        values = model.chain.rsample((draws,), temperature=config.temperature, generator=generator)
    else:
        values = model.chain.sample((draws,), generator=generator)
    if draws == 1:
        return values, None
    if world == 1:
        return values, group
    images = torch.arange(num, device=values.device) + num * distributed.rank()
    return values[images // group], 1


def drawn_exits(exits: Sequence[int], config: TrainConfig, at: tuple[int, int]) -> dict[int, float]:
    """The exits that a step learns from, with the weights of their losses: on average, as if it were all of them."""
    weights, (*early, last) = exit_weights(exits, config), exits
    num = len(exits) - 1 if config.exits_per_step is None else config.exits_per_step - 1
    if num >= len(early):
        return weights
    order = torch.randperm(len(early), generator=seeded(config.seed, "exits", *at))[:num].tolist()
    drawn = sorted(early[k] for k in order)
    return {**{exit: weights[exit] * len(early) / num for exit in drawn}, last: weights[last]}


def exit_weights(exits: Iterable[int], config: TrainConfig) -> dict[int, float]:
    """Loss weights of the exits, in proportion to their number (the paper) or equal; their sum is one."""
    raw = {exit: float(exit) if config.exit_weights == "linear" else 1.0 for exit in exits}
    return {exit: weight / sum(raw.values()) for exit, weight in raw.items()}
