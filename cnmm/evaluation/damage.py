"""Cutting by measured damage: greedily the edge whose removal changes the full mixture's answers least per mac saved.

Flow says how many networks of the mixture use an edge; this measures what the edge is worth. Damage is the divergence
KL(full || cut) of the answers on a few hundred training images, without labels, normalised by the statistics of the
batch. Two things make it fast: maps that do not descend from the cut are those of the current point, and a candidate is
measured anew only when what was last known of it would make it the next cut.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm.config import MixtureConfig
from cnmm.cost import CostTable
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.task import task_of
from cnmm.lattice import Edge, OperatingPoint, Orders, build_lattice
from cnmm.mixture import Mixture, Parts
from cnmm.prune import Survivors, check_classifier, order_points

DAMAGE_IMAGES, DAMAGE_PHOTOS = 256, 64
"""Training images that damage is measured on: small ones, and large ones."""
PASSES_PER_CUT = 1.2
"""What a cut takes, in passes of its exit with nothing cut: candidates are many, and most of their maps are known."""


def measure_orders(
    model: Mixture,
    images: Tensor,
    kept: Kept | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Orders:
    """The orders of all exits by damage, for `model.orders`; `images`: normalised training images, one batch.

    `on_progress` is told the share of the work that is done.
    """
    found: dict[str, Tensor] = {}
    work = _work(model.config)
    for _, exit in (kept or Kept()).sweep(model.config.exit_numbers, lambda: found, found.update):
        before = sum(own for other, own in work.items() if other < exit)

        def report(done: float, before: float = before, own: float = work[exit]) -> None:
            on_progress((before + done * own) / sum(work.values()))

        found[str(exit)] = torch.tensor(damage_cuts(model, images, exit, report), dtype=torch.int64).view(-1, 2)
    return {int(exit): tuple((i, j) for i, j in cuts.tolist()) for exit, cuts in found.items()}


def damage_passes(config: MixtureConfig) -> float:
    """About how many passes of the full mixture `measure_orders` takes."""
    return sum(_work(config).values()) / CostTable.of(config).exit().macs


def _work(config: MixtureConfig) -> dict[int, float]:
    """About how many macs an image takes, by exit."""
    costs, lattice = CostTable.of(config), build_lattice(config)
    return {
        exit: PASSES_PER_CUT * len(lattice.exit_edges(exit)) * costs.exit(exit).macs for exit in config.exit_numbers
    }


def damage_order(model: Mixture, images: Tensor, exit: int | None = None) -> list[OperatingPoint]:
    """All operating points of an exit by measured damage: the k-th has k cuts, the last is a single network."""
    exit = check_classifier(model.config, model.lattice, exit)
    return order_points(model.config, exit, damage_cuts(model, images, exit))


@torch.no_grad()
def damage_cuts(
    model: Mixture, images: Tensor, exit: int, on_progress: Callable[[float], None] = lambda done: None
) -> tuple[Edge, ...]:
    """The edges of an exit in the order in which they are cut, until one network is left."""
    if model.config.mixing == "sum":
        raise UserError("mixing='sum' has no gates, so nothing can be cut")
    gauge, costs = _Gauge(model, images, exit), CostTable.of(model.config)
    left = Survivors(model.lattice.exit_edges(exit))
    num = len(left.edges)
    now = gauge.settle(left.edges)
    known: dict[Edge, float] = {}
    """What a cut would add to the damage, as last measured."""
    cuts: list[Edge] = []
    while candidates := left.candidates():
        saved = {edge: left.macs_saved(edge, costs) for edge in candidates}

        def score(edge: Edge, saved: dict[Edge, int] = saved) -> tuple[float, Edge]:
            return known.get(edge, -math.inf) / saved[edge], (-edge[1], -edge[0])

        fresh: set[Edge] = set()
        while (best := min(candidates, key=score)) not in fresh:
            known[best] = gauge.damage(left.edges - left.vanishing(best), best[1]) - now
            fresh.add(best)
        left.cut(best)
        cuts.append(best)
        now = gauge.settle(left.edges)
        on_progress(1 - (len(left.edges) / num) ** 2)  # what is left becomes cheaper cut by cut
    return tuple(cuts)


class _Gauge:
    """Measures how far the answers of a set of edges are from the full exit's; keeps the maps of the current one."""

    def __init__(self, model: Mixture, images: Tensor, exit: int) -> None:
        self.model, self.images, self.exit = copy.deepcopy(model).train(), images, exit
        self.model.check_images(images)
        self.gates = self.model.gate_values(len(images))
        self.task = task_of(model.config)
        self.parts: dict[int, Parts] = {}
        self.edges: frozenset[Edge] = frozenset()
        self.full = self._run(model.lattice.exit_edges(exit), {})[0]

    def settle(self, edges: frozenset[Edge]) -> float:
        """Makes these edges the current ones; their damage."""
        logits, self.parts = self._run(edges, {})
        self.edges = edges
        return float(self.task.distil(logits, self.full))

    def damage(self, edges: frozenset[Edge], target: int) -> float:
        """The damage of the current edges with one more cut, of an edge into the map `target`."""
        changed = {target}
        for i, j in sorted(self.edges):
            if i in changed:
                changed.add(j)
        same = {node: parts for node, parts in self.parts.items() if node not in changed}
        return float(self.task.distil(self._run(edges, same)[0], self.full))

    def _run(self, edges: frozenset[Edge], known: dict[int, Parts]) -> tuple[Tensor, dict[int, Parts]]:
        """Logits of the exit, and the parts of all maps, some of which are known."""
        model, parts = self.model, dict(known)
        weights = model.mixing_weights(edges, self.gates)
        if 0 not in parts:
            parts[0] = model.run_stem(self.images, update=False)
        for node in sorted({j for _, j in edges if j != model.lattice.output} - parts.keys()):
            readers = [edge for edge in edges if edge[0] == node]
            parts[node] = model.run_map(node, parts, weights, readers, update=False)
        size = (self.images.shape[2], self.images.shape[3])
        return model.run_exit(self.exit, parts, edges, self.gates, size, update=False).logits, parts
