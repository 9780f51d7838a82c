"""Measuring cascades: which one is best, and which confidences at its exits spend which average budget.

A price of macs, in right answers, makes the two comparable. Given a price and what later exits ask for, it is known of
every held-out image whether going on pays; an exit's confidence is the one that lets those go on for which it does, as
well as one threshold can tell. Prices from high to low give all average budgets.

Thresholds fit the images that they are found on. So they are found on all but a fifth of them, five times over: their
averages are the thresholds, smoother than any of the five, and each fifth says what the thresholds found without it are
worth. Where spending more is worth less, and clearly so, the dearer thresholds are left out.

Where asking an exit costs something, thresholds are found for every choice of at most `MOST_ASKED` exits to ask, and
those are kept that are better than all cheaper ones: never worse than to leave at the same exit always.

Shapes: N images, E exits, the last of which takes all that come; R rows of thresholds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cnmm.cascade import NEVER, Cascade, Threshold, asking_macs, passed, stage_macs
from cnmm.cost import CostTable
from cnmm.evaluation.batches import Batches
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.quality import Choices, Floats
from cnmm.evaluation.task import task_of
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.prune import cutting_order

Exits = npt.NDArray[np.intp]
"""At which exit each image leaves."""
PRICES = (*np.geomspace(100, 1e-3, 51).tolist(), 0.0)
"""Of all stages' macs, in right answers per image."""
LEVELS = 100
"""An exit's confidence is one of about so many of those of the images that reach it."""
SWEEPS = 3
GAP = 0.01
"""Average macs between two rows at most, as a part of all stages'."""
MOST_ASKED = 2
"""Exits that are asked on the way, where asking costs something."""
PRECISION = 16
"""Halvings of a path until a place on it is found."""
FOLDS = 5
CLEARLY = 1.0
"""Standard errors by which cheaper thresholds must be better than dearer ones to replace them."""
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Macs of the cascades that are tried, as parts of the full mixture's."""
BUDGETS = tuple(k / 20 for k in range(3, 19))
"""Average macs at which cascades are compared, as parts of the full mixture's: 15 to 90 %."""


def measure_cascade(
    model: Mixture,
    validation: Batches[tuple[Tensor, Tensor]],
    settle: Callable[[OperatingPoint], Mixture],
    *,
    metric: str,
    split: str = "validation",
    kept: Kept | None = None,
    on_images: Callable[[OperatingPoint, int], None] = lambda point, num: None,
) -> tuple[Cascade, Mixture]:
    """The best of several cascades of a mixture, and the mixture with its statistics.

    They are cut by the flow averaged over the exits, to several sizes; the best has the highest mean quality over
    average budgets from 15 to 90 % of the full macs. `settle` gives the mixture with a point's own statistics.
    `on_images` is told how many images have passed at a point, batch by batch.
    """
    table = CostTable.of(model.config)
    full = table.exit().macs
    order = cutting_order(model, rule="mean_flow")
    candidates = []
    for share in SHARES:
        point = next((point for point in order if table.point(point).macs <= share * full), order[-1])
        if point not in candidates:
            candidates.append(point)
    best: tuple[float, Cascade, Mixture] | None = None
    for point in candidates:
        settled = settle(point)
        found = _measured(settled, point, validation, metric, split, kept or Kept(), on_images)
        score = sum(found.quality_at(part * full) for part in BUDGETS) / len(BUDGETS)
        if best is None or score > best[0]:
            best = score, found, settled
    assert best is not None
    return best[1], best[2]


def _measured(
    model: Mixture,
    point: OperatingPoint,
    batches: Batches[tuple[Tensor, Tensor]],
    metric: str,
    split: str,
    kept: Kept,
    on_images: Callable[[OperatingPoint, int], None],
) -> Cascade:
    choices = task_of(model.config).choices(model.config.num_classes, metric)
    with torch.no_grad():
        for _, (images, target) in kept.sweep(batches, choices.state, choices.restore):
            choices.add(list(model.forward_exits(images, point).values()), target)
            on_images(point, len(images))
    macs = stage_macs(model.config, point)
    asking = (asking_macs(model.config),) * (len(macs) - 1)
    return Cascade(
        point=point.name,
        exits=tuple(macs),
        macs=tuple(macs.values()),
        asking=asking,
        thresholds=calibrated(choices, tuple(macs.values()), asking),
        metric=metric,
        n=len(choices.confidence),
        split=split,
    )


def calibrated(choices: Choices, macs: Sequence[int], asking: Sequence[int]) -> tuple[Threshold, ...]:
    """Thresholds by what exits answered."""
    return calibrate(choices.confidence, choices.worth, macs, choices.quality, asking)


def calibrate(
    confidence_NE: Floats,
    worth_NE: Floats,
    macs: Sequence[int],
    quality: Callable[[Exits], float] | None = None,
    asking: Sequence[int] = (),
) -> tuple[Threshold, ...]:
    """Thresholds from "leave at once" on, with what they spend on these images, cheapest first: more is never worse.

    `worth_NE` is what answers are worth; `macs` and `asking` are those of a cascade; `quality` measures where images
    leave, by the mean worth of the answers they leave with unless told. The quality of a row is that of images on which
    its thresholds were not found. Unless asking costs something, no exit asks for less where more may be spent.
    """
    last, asking = len(macs) - 1, asking or (0,) * (len(macs) - 1)
    worth_NE = worth_NE.astype(np.float64)

    def worth(row: _Row) -> Floats:
        found: Floats = worth_NE[np.arange(len(worth_NE)), row.leaves]
        return found

    def measured(row: _Row) -> float:
        return quality(row.leaves) if quality else float(worth(row).mean())

    rows = []
    for asked in _choices_of(last) if any(asking) else [tuple(range(last))]:
        columns = [*asked, last]
        costs = passed(macs, asking, [0.0 if exit in asked else NEVER for exit in range(last)])
        count = _Count(confidence_NE[:, columns], worth_NE[:, columns], np.array(costs)[columns])
        rows += _rows(count, np.array(columns), len(macs), by_macs=any(asking))
    if any(asking):
        rows = _better_and_better([row.spending(macs, asking) for row in rows], measured)
    kept = [rows[number] for number in _worthwhile(np.stack([worth(row) for row in rows]))]
    values = _rising([measured(row) for row in kept])
    return tuple(replace(row.threshold, quality=value) for row, value in zip(kept, values, strict=True))


def _choices_of(exits: int) -> list[tuple[int, ...]]:
    """The exits that may be asked."""
    return [asked for num in range(MOST_ASKED + 1) for asked in itertools.combinations(range(exits), num)]


@dataclass(frozen=True)
class _Row:
    threshold: Threshold
    leaves: Exits
    """Where images leave by thresholds that were found without them."""

    @property
    def macs(self) -> float:
        return self.threshold.average_macs

    def spending(self, macs: Sequence[int], asking: Sequence[int]) -> _Row:
        """The same, and exits that no image can leave are not paid for."""
        costs = passed(macs, asking, self.threshold.confidence)
        return _Row(replace(self.threshold, average_macs=float(np.dot(self.threshold.exits, costs))), self.leaves)


def _rows(count: _Count, exits: Exits, num_exits: int, *, by_macs: bool) -> list[_Row]:
    """Thresholds of some exits of a cascade, cheapest first, their quality still to be measured.

    `by_macs`: thresholds that are found without an image are those that spend as much, instead of those at the same
    place of their path. Where rows of several choices compete, what spends more than it says must not win.
    """
    num = len(count.confidence_NE)
    folds = _folds(num)
    paths = [count.only(~fold).path() if len(folds) > 1 else count.path() for fold in folds]
    parts = [(count.only(fold), count.only(~fold) if len(folds) > 1 else count) for fold in folds]
    path = np.mean(paths, 0)
    rows = []
    for place in count.places(path):
        leaves, spends = np.empty(num, np.intp), count.spends(_at(path, place))
        for fold, (part, others), own in zip(folds, parts, paths, strict=True):
            leaves[fold] = exits[part.leaves(_at(own, others.place(own, spends) if by_macs else place))]
        confidence = np.full(num_exits, NEVER)
        confidence[exits[:-1]] = _at(path, place)
        spread = np.bincount(exits[count.leaves(_at(path, place))], minlength=num_exits) / num
        threshold = Threshold(
            confidence=tuple(confidence[:-1].tolist()),
            average_macs=count.spends(_at(path, place)),
            quality=0.0,
            exits=tuple(spread.tolist()),
        )
        rows.append(_Row(threshold, leaves))
    return rows


def _better_and_better(rows: list[_Row], quality: Callable[[_Row], float]) -> list[_Row]:
    """The rows that are better than all cheaper ones, cheapest first, up to the first one: all images go to the end."""
    end = rows[0]
    kept, best = [], -np.inf
    for row in sorted((row for row in rows if row.macs < end.macs), key=lambda row: row.macs):
        if (found := quality(row)) > best:
            best = found
            kept.append(row)
    return [*kept, end]


def _folds(num: int) -> list[npt.NDArray[np.bool_]]:
    """Images in parts of equal size, at random, always the same: which images are in each."""
    parts = min(FOLDS, num)
    drawn = np.random.default_rng(0).permutation(num) % parts
    return [drawn == part for part in range(parts)]


def _at(path: Floats, place: float) -> Floats:
    """The confidences at a place of a path, between its corners."""
    corner = min(int(place), len(path) - 2)
    found: Floats = path[corner] + (place - corner) * (path[corner + 1] - path[corner])
    return found


def _worthwhile(worth_RN: Floats) -> list[int]:
    """The rows, cheapest first, that are not clearly worse than the best of the cheaper ones, image by image."""
    kept, best = [0], 0
    for row in range(1, len(worth_RN)):
        loss_N = worth_RN[best] - worth_RN[row]
        if loss_N.sum() > CLEARLY * np.sqrt((loss_N**2).sum()):
            continue
        kept.append(row)
        if loss_N.sum() <= 0:
            best = row
    return kept


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall: where they do, neighbours share their mean (what falls is not clear)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, num = value, 1
        while blocks and blocks[-1][0] >= mean:
            before, more = blocks.pop()
            mean, num = (before * more + mean * num) / (more + num), more + num
        blocks.append((mean, num))
    return [mean for mean, num in blocks for _ in range(num)]


class _Count:
    """What confidences spend and give.

    `worth_NE`: what answers are worth; `passed`: macs of an image that leaves at each exit.
    """

    def __init__(
        self,
        confidence_NE: Floats,
        worth_NE: Floats,
        passed: Floats,
    ) -> None:
        self.confidence_NE, self.worth_NE, self.passed = confidence_NE, worth_NE, passed
        self.order_NE = np.argsort(confidence_NE, 0, kind="stable")

    def only(self, chosen: npt.NDArray[np.bool_]) -> _Count:
        """The same for some of the images."""
        return _Count(self.confidence_NE[chosen], self.worth_NE[chosen], self.passed)

    def spends(self, confidence: Floats) -> float:
        """Average macs."""
        return float(self.passed[self.leaves(confidence)].mean())

    def leaves(self, confidence: Floats) -> Exits:
        """The exit at which each image leaves."""
        sure = self.confidence_NE[:, :-1] >= confidence
        found: Exits = np.concatenate([sure, np.ones((len(sure), 1), bool)], 1).argmax(1)
        return found

    def path(self) -> Floats:
        """The confidences at every price, from "leave at once" to "never early"; none of them ever falls."""
        early = self.confidence_NE.shape[1] - 1
        corners = [np.zeros(early)]
        for price in PRICES:
            corners.append(np.maximum(corners[-1], self.best(price)))
        return np.array([*corners, np.full(early, NEVER)])

    def best(self, price: float) -> Floats:
        """The confidence of every early exit that pays most at a price: from the last exit to the first, some times."""
        exits = self.worth_NE.shape[1]
        worth_NE = self.worth_NE - price * self.passed / self.passed[-1]
        confidence = np.full(exits - 1, NEVER)
        for sweep in range(SWEEPS):
            goes_on = worth_NE[:, -1]
            for exit in reversed(range(exits - 1)):
                sure, order = self.confidence_NE[:, exit], self.order_NE[:, exit]
                if sweep:  # of the images that come so far; at first, the earlier exits have no confidence yet
                    order = order[(self.confidence_NE[order, :exit] < confidence[:exit]).all(1)]
                if len(order):
                    confidence[exit] = _best_level(sure[order], (goes_on - worth_NE[:, exit])[order])
                goes_on = np.where(sure >= confidence[exit], worth_NE[:, exit], goes_on)
        return confidence

    def place(self, path: Floats, macs: float) -> float:
        """The place of a path, up to a little, before which it spends so many macs on average or less."""
        low, high = 0.0, len(path) - 1.0
        if self.spends(path[-1]) <= macs:
            return high
        for _ in range(PRECISION):
            middle = (low + high) / 2
            low, high = (middle, high) if self.spends(_at(path, middle)) <= macs else (low, middle)
        return low

    def places(self, path: Floats) -> list[float]:
        """Places of a path, as corner and part of the way to the next, whose average macs rise in small steps."""
        spends = [self.spends(corner) for corner in path]
        places = [0.0]
        for corner, (low, high) in enumerate(itertools.pairwise(spends)):
            places += self._between(path, (corner, low), (corner + 1, high))
        places[-1] = len(path) - 1.0  # of those that let all images pass, the one that always will
        return places

    def _between(
        self, path: Floats, low: tuple[float, float], high: tuple[float, float], depth: int = 16
    ) -> list[float]:
        """The places after `low` up to `high`, each given with its average macs."""
        distance = high[1] - low[1]
        if distance <= GAP * self.passed[-1] or not depth:
            return [high[0]] if distance > 0 else []
        place = (low[0] + high[0]) / 2
        middle = place, self.spends(_at(path, place))
        return self._between(path, low, middle, depth - 1) + self._between(path, middle, high, depth - 1)


def _best_level(confidence: Floats, gain: Floats) -> float:
    """The level below which going on gains most in all; `gain` is what each image gains by it, both by confidence."""
    last = len(confidence) - 1
    levels = np.concatenate([[0.0], confidence[: last + 1 : max(1, last // LEVELS)], confidence[last:], [NEVER]])
    below = np.concatenate([[0.0], np.cumsum(gain)])
    return float(levels[below[np.searchsorted(confidence, levels)].argmax()])
