"""Ladder tuning: each step of the last part of a training also runs one random operating point.

The gates stand still meanwhile, and with them the cutting orders that the points are taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from cnmm import distributed
from cnmm.cost import CostTable
from cnmm.data import DataSet
from cnmm.evaluation.damage import measure_orders
from cnmm.evaluation.search import Candidate
from cnmm.lattice import OperatingPoint, Rule
from cnmm.mixture import Mixture
from cnmm.orders import load_orders, save_orders
from cnmm.prune import cutting_order
from cnmm.training.batches import Images
from cnmm.training.config import TrainConfig

FLOW_RULES: tuple[Rule, ...] = ("flow", "flow_per_mac")
"""Whose points are drawn: by flow alone, no point lies between those that lose a whole map in one cut."""


def tunes_ladder(model: Mixture, config: TrainConfig, part: float) -> bool:
    """Is it time for ladder tuning?"""
    return part >= config.ladder_start and model.config.mixing == "gates"


class Ladder:
    """The points that ladder tuning draws from: cutting orders and their costs, found once.

    Budgets lie between the first exit's macs and the full mixture's, evenly on a logarithmic scale. The point of a
    budget is the cheapest exit that can spend it all, cut to the budget by a random one of the rules. So hardly any
    point costs less than the exit before its own: an envelope has hardly any such points.
    """

    def __init__(self, model: Mixture, rules: Sequence[Rule] = FLOW_RULES) -> None:
        costs, exits = CostTable.of(model.config), model.config.exit_numbers
        self.full = {exit: costs.exit(exit).macs for exit in exits}
        self.rungs: list[Mapping[int, Sequence[Candidate]]] = [
            {
                exit: [Candidate(point, costs.point(point).macs) for point in cutting_order(model, exit, rule=rule)]
                for exit in exits
            }
            for rule in rules
        ]
        """By rule and exit, dearest first."""

    def draw(self, generator: torch.Generator) -> OperatingPoint:
        """A random point."""
        rungs = self.rungs[int(torch.randint(len(self.rungs), (), generator=generator))]
        first, last = min(self.full), max(self.full)
        least = self.full[first] if first < last else rungs[first][-1].macs
        budget = least * (self.full[last] / least) ** torch.rand((), generator=generator).item()
        exit = next(exit for exit, macs in self.full.items() if macs >= budget or exit == last)
        return next((rung for rung in rungs[exit] if rung.macs <= budget), rungs[exit][-1]).point


def start_ladder(
    model: Mixture,
    images: Images,
    data: DataSet,
    kept: np.ndarray,
    folder: Path,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Ladder:
    """The ladder of the gates as they are, of damage, or of both; damage is measured unless the run folder has orders.

    Process 0 measures and writes; all read, so that all draw the same points, also when the training goes on later.
    """
    if images.config.ladder_rule == "flow":
        return Ladder(model)
    if distributed.rank() == 0 and load_orders(folder, model.config) is None:
        with distributed.paused():
            batch = images.damage_batch(data.train, kept).to(images.dtype)
            save_orders(folder, measure_orders(model, batch, on_progress=on_progress))
    distributed.wait()
    model.orders = load_orders(folder, model.config)
    return Ladder(model, ["damage"] if images.config.ladder_rule == "damage" else [*FLOW_RULES, "damage"])
