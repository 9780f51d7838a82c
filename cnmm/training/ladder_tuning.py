"""Ladder tuning: each step of the last part of a training also runs one random operating point.

The gates stand still meanwhile, and with them the cutting orders that the points are taken from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cnmm.cost import CostTable
from cnmm.lattice import OperatingPoint, Rule
from cnmm.mixture import Mixture
from cnmm.prune import cutting_order
from cnmm.training.config import TrainConfig
from cnmm.training.seeds import seeded

LADDER_RULES: tuple[Rule, ...] = ("flow", "flow_per_mac")
"""Whose points ladder tuning draws: by flow alone, no point lies between those that lose a whole map in one cut."""


def tunes_ladder(model: Mixture, config: TrainConfig, part: float) -> bool:
    """Is it time for ladder tuning?"""
    return part >= config.ladder_start and model.config.mixing == "gates"


def ladder_loss(
    model: Mixture, x: Tensor, labels: Tensor, teacher: Tensor, config: TrainConfig, at: tuple[int, int]
) -> Tensor:
    """Ladder tuning: the loss of one random operating point, taught by the label and by the full mixture.

    The pass normalises by its own batch, as a point with re-estimated statistics does, and leaves the full mixture's
    running statistics alone.
    """
    point = ladder_point(model, config, at)
    score = model(x, point, update_statistics=False).float()
    hard = F.cross_entropy(score, labels, label_smoothing=config.label_smoothing)
    soft = F.kl_div(score.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return 0.5 * hard + 0.5 * soft


def ladder_point(model: Mixture, config: TrainConfig, at: tuple[int, int]) -> OperatingPoint:
    """The point of a random budget: the cheapest exit that can spend it all, cut to the budget by a random rule.

    Budgets lie between the first exit's macs and the full mixture's, evenly on a logarithmic scale. So hardly any point
    costs less than the exit before its own: an envelope has hardly any such points.
    """
    generator = seeded(config.seed, "ladder", *at)
    rule = LADDER_RULES[int(torch.randint(len(LADDER_RULES), (), generator=generator))]
    costs, exits = CostTable.of(model.config), model.config.exit_numbers
    full = [costs.exit(exit).macs for exit in exits]
    least = full[0] if len(full) > 1 else costs.point(cutting_order(model, exits[0], rule=rule)[-1]).macs
    budget = least * (full[-1] / least) ** torch.rand((), generator=generator).item()
    exit = next(exit for exit, macs in zip(exits, full, strict=True) if macs >= budget or exit == exits[-1])
    order = cutting_order(model, exit, rule=rule)
    return next((point for point in order if costs.point(point).macs <= budget), order[-1])
