"""Ladder tuning: each step of the last part of a training also runs one random operating point.

The gates stand still meanwhile, and with them the cutting orders that the points are taken from.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cnmm.config import MixtureConfig
from cnmm.cost import CostTable
from cnmm.evaluation.search import Candidate
from cnmm.evaluation.task import task_of
from cnmm.lattice import OperatingPoint, Rule
from cnmm.mixture import Mixture
from cnmm.prune import cutting_order
from cnmm.training.config import TrainConfig
from cnmm.training.seeds import seeded
from cnmm.zoo import Plan

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
    task, point = task_of(model.config), ladder_point(model, config, at)
    score = model(x, point, update_statistics=False)
    hard = task.loss(score, labels, label_smoothing=config.label_smoothing)
    return 0.5 * hard + 0.5 * task.distil(score, teacher)


def ladder_point(model: Mixture, config: TrainConfig, at: tuple[int, int]) -> OperatingPoint:
    """The point of a random budget: the cheapest exit that can spend it all, cut to the budget by a random rule.

    Budgets lie between the first exit's macs and the full mixture's, evenly on a logarithmic scale. So hardly any point
    costs less than the exit before its own: an envelope has hardly any such points.
    """
    generator = seeded(config.seed, "ladder", *at)
    rule = LADDER_RULES[int(torch.randint(len(LADDER_RULES), (), generator=generator))]
    plan = Plan(model.config, tuple(model.chain.detach().logits))
    exits, full = model.config.exit_numbers, exit_macs(model.config)
    least = full[0] if len(full) > 1 else rungs(plan, exits[0], rule)[-1].macs
    budget = least * (full[-1] / least) ** torch.rand((), generator=generator).item()
    exit = next(exit for exit, macs in zip(exits, full, strict=True) if macs >= budget or exit == exits[-1])
    order = rungs(plan, exit, rule)
    return next((rung for rung in order if rung.macs <= budget), order[-1]).point


@lru_cache(maxsize=8)
def exit_macs(config: MixtureConfig) -> tuple[int, ...]:
    """Macs of the exits, nothing cut."""
    return tuple(CostTable.of(config).exit(exit).macs for exit in config.exit_numbers)


@lru_cache(maxsize=64)
def rungs(plan: Plan, exit: int, rule: Rule) -> tuple[Candidate, ...]:
    """The points of an exit, dearest first: found once while the gates stand still, anew when they have moved."""
    costs = CostTable.of(plan.config)
    return tuple(Candidate(point, costs.point(point).macs) for point in cutting_order(plan, exit, rule=rule))
