"""What a training step minimises, Eq. (9): the weighted losses of all exits under one draw of the gates.

Later in a training, the loss of a random operating point is added (`ladder_tuning`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cnmm import distributed
from cnmm.config import Gates
from cnmm.evaluation.task import task_of
from cnmm.mixture import Mixture
from cnmm.training.config import TrainConfig
from cnmm.training.ladder_tuning import ladder_loss, tunes_ladder
from cnmm.training.seeds import seeded


def training_loss(
    model: Mixture, x: Tensor, labels: Tensor, config: TrainConfig, *, part: float, at: tuple[int, int]
) -> Tensor:
    """Eq. (9), the weighted losses of all exits from one sample of the gates; later in training with a ladder point."""
    gates, group = draw_gates(model, config, at, len(x))
    logits = model.forward_exits(x, gates=gates, group=group)
    task, weights = task_of(model.config), exit_weights(list(logits), config)
    total = torch.zeros((), device=x.device)
    for exit, score in logits.items():
        total = total + weights[exit] * task.loss(score, labels, label_smoothing=config.label_smoothing)
    if tunes_ladder(model, config, part):
        teacher = logits[max(logits)].detach()
        total = total + config.ladder_weight * ladder_loss(model, x, labels, teacher, config, at)
    return total


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


def exit_weights(exits: list[int], config: TrainConfig) -> dict[int, float]:
    """Loss weights of the exits, in proportion to their number (the paper) or equal; their sum is one."""
    raw = {exit: float(exit) if config.exit_weights == "linear" else 1.0 for exit in exits}
    return {exit: weight / sum(raw.values()) for exit, weight in raw.items()}
