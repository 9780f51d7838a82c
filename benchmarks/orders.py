"""Do cutting orders know what to cut? Learned and measured orders against the untrained and random ones, on a run.

    python -m benchmarks.orders RUN [--data cifar10:DIR] [--shares 0.75 0.5 0.25] [--images 10000]

Every order cuts the last exit down to a share of its macs; statistics are re-estimated at each point, nothing is
trained. All answers are on the same test images, so two orders are compared image by image (exact one-sided McNemar
test): the best of the learned and measured orders, chosen on held-out images, against the full exit and against every
control. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch

from benchmarks.cascade import p_value
from cnmm._machine import keep_freed_memory, machine
from cnmm.cost import CostTable
from cnmm.data import Split
from cnmm.evaluation.damage import measure_orders
from cnmm.evaluation.statistics import reestimated
from cnmm.lattice import OperatingPoint
from cnmm.plan import Plan
from cnmm.prune import Survivors, cutting_order
from cnmm.run import Run

LEARNED = ("damage", "flow", "flow_per_mac")
RANDOM_SEEDS = (0, 1, 2)


def random_order(run: Run, seed: int) -> list[OperatingPoint]:
    """The points of the last exit when any edge that may be cut is as likely to be the next."""
    rng, exit = random.Random(seed), run.model.config.exit_numbers[-1]
    left = Survivors(run.model.lattice.exit_edges(exit))
    edges = [left.edges]
    while candidates := sorted(left.candidates()):
        left.cut(rng.choice(candidates))
        edges.append(left.edges)
    return [
        OperatingPoint(exit=exit, edges=each, name=f"random {seed}, {cuts}", cuts=cuts)
        for cuts, each in enumerate(edges)
    ]


def all_orders(run: Run) -> dict[str, list[OperatingPoint]]:
    """Every order of the last exit by name."""
    if run.model.orders is None:
        run.model.orders = measure_orders(run.model, run.images.damage())
    untrained = Plan(run.model.config)
    orders = {rule: cutting_order(run.model, rule=rule) for rule in LEARNED}
    orders |= {f"untrained {rule}": cutting_order(untrained, rule=rule) for rule in LEARNED[1:]}
    return orders | {f"random {seed}": random_order(run, seed) for seed in RANDOM_SEEDS}


class Answers:
    """Which images every point gets right, with statistics re-estimated there; each point is run once."""

    def __init__(self, run: Run, num: int) -> None:
        self.run = run
        self.held_out, self.test = run.images.split("validation"), run.images.split("test")
        self.test = self.test[0], self.test[1][:num]
        self.known: dict[frozenset[tuple[int, int]], tuple[np.ndarray, np.ndarray]] = {}

    @torch.no_grad()
    def of(self, point: OperatingPoint) -> tuple[np.ndarray, np.ndarray]:
        """On held-out and on test images."""
        if point.edges not in self.known:
            model = reestimated(self.run.model, self.run.images.statistics(), point)
            both = [self._right(model, point, *part) for part in (self.held_out, self.test)]
            self.known[point.edges] = both[0], both[1]
        return self.known[point.edges]

    def _right(self, model: torch.nn.Module, point: OperatingPoint, part: Split, chosen: np.ndarray) -> np.ndarray:
        batches = self.run.images.batches(part, chosen)
        return np.concatenate([(model(x, point).argmax(1) == labels).numpy() for x, labels in batches])


def compare(run: Run, share: float, answers: Answers) -> list[dict[str, object]]:
    """One row for every order at a share of the last exit's macs: the largest point within it."""
    costs = CostTable.of(run.model.config)
    limit = share * costs.exit().macs
    full = answers.of(cutting_order(run.model)[0])[1]
    rows, right = [], {}
    for name, order in all_orders(run).items():
        point = max((each for each in order if costs.point(each).macs <= limit), key=lambda p: costs.point(p).macs)
        held, right[name] = answers.of(point)
        worse, better = int((full & ~right[name]).sum()), int((right[name] & ~full).sum())
        rows.append(
            {
                "share": share,
                "order": name,
                "cuts": point.cuts,
                "macs": costs.point(point).macs,
                "held_out": float(held.mean()),
                "test": float(right[name].mean()),
                "lost": float(full.mean() - right[name].mean()),
                "p_worse_than_full": p_value(worse, better),
            }
        )
    best = max(rows[: len(LEARNED)], key=lambda row: row["held_out"])["order"]
    for row in rows:
        ours, theirs = right[best], right[row["order"]]
        row["best"] = row["order"] == best
        row["p_best_is_better"] = p_value(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.75, 0.5, 0.25))
    parser.add_argument("--images", type=int, default=10000, help="test images at most")
    arguments = parser.parse_args()
    keep_freed_memory()
    run = Run(arguments.run, data=arguments.data)
    answers = Answers(run, arguments.images)
    held, test = answers.of(cutting_order(run.model)[0])
    full = CostTable.of(run.model.config).exit().macs
    print(f"{machine()}, {run.folder.name}, last exit with {full:,} macs: ", end="")
    print(f"{held.mean():.2%} of {len(held):,} held-out images, {test.mean():.2%} of {len(test):,} test images")
    rows = []
    for share in arguments.shares:
        print(f"\n{share:.0%} of the macs       macs  held-out %   test %    lost   best is better, p")
        for row in compare(run, share, answers):
            mark = "  <- chosen on held-out images" if row["best"] else f"{row['p_best_is_better']:.1e}"
            figures = f"{100 * row['held_out']:10.2f} {100 * row['test']:9.2f} {100 * row['lost']:7.2f}"
            print(f"{row['order']:22} {row['macs']:>11,} {figures}   {mark}")
            rows.append(row)
    print(json.dumps({"full": float(test.mean()), "n": len(test), "rows": rows}))


if __name__ == "__main__":
    main()
