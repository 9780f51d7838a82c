"""Measuring the frontier: the quality of many operating points, with statistics re-estimated at each of them.

Hundreds of points exist, and most of their work is common. What a map holds depends only on the images and on the
surviving edges among its ancestors; so do the batch statistics re-estimated there. Hence every batch meets all points
in turn, and a map is computed once for all points that agree on its ancestors (`Engine`). Which points are measured at
all, should they be too many, is decided from coarse to fine (`first_points`, `next_points`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm._progress import Clock
from cnmm.cost import CostTable
from cnmm.evaluation.batches import Batches, num_images
from cnmm.evaluation.calibrate import SHARES, measure_cascade
from cnmm.evaluation.engine import Engine, Tick
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.search import Curve, Rules, cutting_curves, first_points, next_points
from cnmm.evaluation.statistics import reestimated, with_statistics
from cnmm.evaluation.task import task_of
from cnmm.frontier import RAW, RE_ESTIMATED, Frontier, FrontierPoint
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture

ALL_AT_ONCE = 20
"""All points are measured if that costs no more than so many passes of the full mixture; else there is a search."""
NUM_POINTS = 96
"""Points that a search measures at most, unless told."""
USUAL = {"damage": 1.0, "statistics": 1.5, "evaluation": 1.2, "best points": 1.2, "cascade": 2.5}
"""How long a pass of the full mixture takes in each part of a measurement, relative to one another."""
BEST_SHARE, MOST_BEST = 0.5, 8.0
"""What the best points take, as a share of what all points take, and in passes: until it is known which they are."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What `measure` reports while it works."""

    done: float
    """Share of the work; an estimate, because the search may end early."""
    left_s: float
    """Estimated time to the end of everything."""
    num_points: int
    """Points measured so far, with those under way."""
    what: str = "measuring points"
    """What is being done."""


@torch.no_grad()
def measure(
    model: Mixture,
    validation: Batches[tuple[Tensor, Tensor]],
    *,
    statistics: Batches[Tensor] | None = None,
    test: Batches[tuple[Tensor, Tensor]] | None = None,
    points: Sequence[OperatingPoint] | None = None,
    rule: Rules = "all",
    num_points: int | None = None,
    raw: bool = True,
    cascade: bool = True,
    metric: str | None = None,
    split: str = "validation",
    kept: Kept | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Frontier:
    """Quality and macs of many operating points on batches of images and labels, in search of the upper envelope.

    `statistics` are batches of training images without labels (a few thousand images), on which the batch statistics
    are re-estimated at every point; without them the model's own are used, and the points say "raw". With `raw`, the
    envelope points get their raw quality too, and with `test` their quality on test images.

    `metric` is what quality means, for the frontier, its envelope and early exit: the task's first unless told.

    `rule`: whose cuts; all of them unless told, and damage among them if its orders were measured (`model.orders`).

    All points are measured if they have enough in common; a large mixture, or `num_points`, makes it a search from
    coarse to fine. `points`: exactly these are measured. A `cascade` is measured as well, if there are several exits.

    `kept`: where what was measured is kept meanwhile, so that a measurement that was killed goes on from there.
    `clock`: one that has seen what was done before.
    """
    _check(validation=validation, statistics=statistics, test=test)
    metric = task_of(model.config).check_metric(metric)
    several = len(model.config.exit_numbers) > 1 and model.config.mixing == "gates"
    meter = _Meter(clock or Clock(USUAL), on_progress, CostTable.of(model.config).exit().macs)
    run = _Measuring(model, validation, statistics, metric, split, kept or Kept(), meter)
    run.plan(again=raw, test=test, cascade=cascade and several)
    curves = [] if points is not None else cutting_curves(model, rule)
    if points is None and num_points is None:
        points = _all_at_once(model, curves)
    if points is not None:
        run.add(points, later=0)
    else:
        run.search(curves, NUM_POINTS if num_points is None else num_points)
    frontier = run.finish(raw=raw, test=test)
    return run.add_cascade(frontier) if cascade and several else frontier


class _Measuring:
    """One call of `measure`: what it has found so far."""

    def __init__(
        self,
        model: Mixture,
        validation: Batches[tuple[Tensor, Tensor]],
        statistics: Batches[Tensor] | None,
        metric: str,
        split: str,
        kept: Kept,
        meter: _Meter,
    ) -> None:
        self.model, self.validation, self.statistics, self.kept = model, validation, statistics, kept
        self.metric, self.split = metric, split
        self.engine, self.meter = Engine(model), meter
        self.num_statistics = 0 if statistics is None else num_images(statistics)
        self.num_validation = num_images(validation)
        self.num_best = 0
        """Images on which the best points are measured once more."""
        self.points: dict[str, OperatingPoint] = {}
        self.found: dict[str, FrontierPoint] = {}

    def plan(self, *, again: bool, test: Batches[tuple[Tensor, Tensor]] | None, cascade: bool) -> None:
        """What will follow the points: the best of them once more, and a cascade."""
        self.num_best = self.num_validation if again and self.statistics is not None else 0
        self.num_best += 0 if test is None else num_images(test)
        if cascade:
            self.meter.plan("cascade", sum(SHARES) * (self.num_statistics + self.num_validation))

    def add(self, points: Iterable[OperatingPoint], *, later: int) -> None:
        """Measures points; so many more may follow `later`."""
        chosen, meter = self.engine.ordered(points), self.meter
        self.points |= {point.name: point for point in chosen}
        own = self.engine.macs(chosen) / meter.full
        whole = own * (len(chosen) + later) / len(chosen)
        meter.num_points = len(self.points)
        meter.plan("statistics", whole * self.num_statistics)
        meter.plan("evaluation", whole * self.num_validation)
        meter.plan("best points", min(BEST_SHARE * whole, MOST_BEST) * self.num_best)
        if self.statistics is not None:
            tick = meter.begin("statistics", own * self.num_statistics / max(1, len(self.statistics)))
            self.engine.estimate(chosen, self.statistics, tick, self.kept)
        tick = meter.begin("evaluation", own * self.num_validation / max(1, len(self.validation)))
        qualities = self._qualities(chosen, self.validation, tick, raw=self.statistics is None)
        self.found |= {point.name: self._measured(point, qualities[point.name]) for point in chosen}

    def search(self, curves: Sequence[Curve], num: int) -> None:
        """Measures at most `num` points, from coarse to fine."""
        chosen = first_points(curves, num)
        while chosen:
            self.add(chosen, later=num - len(self.found) - len(chosen))
            quality = {name: point.quality for name, point in self.found.items()}
            chosen = next_points(curves, quality, num - len(self.found))

    def finish(self, *, raw: bool, test: Batches[tuple[Tensor, Tensor]] | None) -> Frontier:
        """The frontier; its envelope points with the figures that only they get."""
        engine, only_raw = self.engine, self.statistics is None
        frontier = self._frontier()
        best = engine.ordered(self.points[point.name] for point in frontier.envelope())
        own, meter = engine.macs(best) / self.meter.full, self.meter
        meter.plan("statistics", 0)
        meter.plan("evaluation", 0)
        meter.plan("best points", own * self.num_best)
        if raw:
            known = {name: point.quality for name, point in self.found.items()}
            if not only_raw:
                tick = meter.begin("best points", own * self.num_validation / max(1, len(self.validation)))
                again = self._qualities(best, self.validation, tick, raw=True)
                known = {name: quality.value for name, quality in again.items()}
            for name, value in known.items():
                self.found[name] = dataclasses.replace(self.found[name], raw_quality=value)
        if test is not None:
            tick = meter.begin("best points", own * num_images(test) / max(1, len(test)))
            for name, quality in self._qualities(best, test, tick, raw=only_raw).items():
                tested = dataclasses.replace(self.found[name], test_quality=quality.value, test_n=quality.n)
                self.found[name] = tested
        return self._frontier({} if only_raw else {point.name: engine.buffers(point) for point in best})

    def add_cascade(self, frontier: Frontier) -> Frontier:
        """The frontier with its cascade, whose statistics are re-estimated like those of the points."""
        self.meter.what = "measuring early exit"
        cascade, settled = measure_cascade(
            self.model,
            self.validation,
            self._settled,
            metric=self.metric,
            split=self.split,
            kept=self.kept,
            on_images=self._tick_cascade,
        )
        buffers = {} if self.statistics is None else {cascade.point: dict(settled.named_buffers())}
        return dataclasses.replace(frontier, cascade=cascade, buffers={**frontier.buffers, **buffers})

    def _tick_cascade(self, point: OperatingPoint, num: int) -> None:
        self.meter.tick("cascade", num * self.engine.costs.point(point).macs / self.meter.full)

    def _qualities(
        self, points: Sequence[OperatingPoint], batches: Batches[tuple[Tensor, Tensor]], tick: Tick, *, raw: bool
    ) -> dict[str, Quality]:
        return self.engine.evaluate(points, batches, tick, metric=self.metric, raw=raw, kept=self.kept)

    def _settled(self, point: OperatingPoint) -> Mixture:
        if self.statistics is None:
            return with_statistics(self.model, {})
        return reestimated(self.model, self.statistics, point, self.kept, lambda num: self._tick_cascade(point, num))

    def _frontier(self, buffers: Mapping[str, Mapping[str, Tensor]] | None = None) -> Frontier:
        costs = self.engine.costs
        points = tuple(self.found.values())
        name, full = costs.config.name, costs.exit().macs
        return Frontier(model=name, full_macs=full, points=points, buffers=buffers or {})

    def _measured(self, point: OperatingPoint, quality: Quality) -> FrontierPoint:
        cost = self.engine.costs.point(point)
        if point.rule is None or point.cuts is None:
            raise UserError(f"point {point.name!r}: it must come from cutting_order(model, exit=...)")
        return FrontierPoint(
            name=point.name,
            rule=point.rule,
            cuts=point.cuts,
            exit=point.exit,
            macs=cost.macs,
            params=cost.params,
            quality=quality.value,
            metric=self.metric,
            low=quality.low,
            high=quality.high,
            n=quality.n,
            split=self.split,
            statistics=RAW if self.statistics is None else RE_ESTIMATED,
            per_class=quality.per_class,
        )


class _Meter:
    """Share of the work and time left, in passes of the full mixture."""

    def __init__(self, clock: Clock, on_progress: Callable[[Progress], None], full: int) -> None:
        self.clock, self.on_progress, self.full = clock, on_progress, full
        self.num_points, self.done, self.what = 0, 0.0, "measuring points"
        self.clock.skip()

    def plan(self, kind: str, passes: float) -> None:
        self.clock.plan(kind, passes)

    def begin(self, kind: str, passes: float) -> Tick:
        """A sweep over batches begins, each of which takes so many passes."""
        self.clock.skip()

        def tick(part: float, *, fresh: bool = True) -> None:
            self.tick(kind, part * passes, fresh=fresh)

        return tick

    def tick(self, kind: str, passes: float, *, fresh: bool = True) -> None:
        """So much is done: just now, or by a process before this one."""
        self.clock.tick(kind, passes, fresh=fresh)
        self.done = max(self.done, self.clock.done)
        left_s = self.clock.left_s or 0.0
        self.on_progress(Progress(done=self.done, left_s=left_s, num_points=self.num_points, what=self.what))


def expected_passes(model: Mixture) -> float:
    """About how many passes of the full mixture an image will take, before cutting orders by damage are known."""
    curves = cutting_curves(model, "both")
    points, full = _all_at_once(model, curves), CostTable.of(model.config).exit().macs
    if points is None:
        return float(ALL_AT_ONCE)
    engine = Engine(model)
    return 1.3 * engine.macs(engine.ordered(points)) / full + sum(SHARES)


def _all_at_once(model: Mixture, curves: Sequence[Curve]) -> list[OperatingPoint] | None:
    """All points of all curves, if they have so much in common that measuring them is cheap."""
    engine = Engine(model)
    points = engine.ordered({candidate.point for curve in curves for candidate in curve})
    return points if engine.macs(points) <= ALL_AT_ONCE * engine.costs.exit().macs else None


def _check(**batches: Batches[object] | None) -> None:
    for name, each in batches.items():
        if each is not None and not hasattr(each, "__len__"):
            raise UserError(f"{name} is iterated more than once; pass a list of batches, not an iterator")
