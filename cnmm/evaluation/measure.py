"""Measuring the frontier: the accuracy of many operating points, with statistics re-estimated at each of them.

Hundreds of points exist, and most of their work is common. What a map holds depends only on the images and on the
surviving edges among its ancestors; so do the batch statistics re-estimated there. Hence every batch meets all points
in turn, and a map is computed once for all points that agree on its ancestors (`_Engine`). Which points are measured at
all, should they be too many, is decided from coarse to fine (`first_points`, `next_points`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm._files import read_tensors, to_bytes, write_atomically
from cnmm.blocks import Statistics
from cnmm.cost import CostTable
from cnmm.evaluation.calibrate import SHARES, measure_cascade
from cnmm.evaluation.evaluate import Quality, quality_of, reestimated
from cnmm.frontier import RAW, RE_ESTIMATED, Frontier, FrontierPoint
from cnmm.lattice import Edge, OperatingPoint
from cnmm.mixture import Mixture, Parts
from cnmm.prune import Rule, cutting_order

STATISTICS_FILE = "statistics.safetensors"
ALL_AT_ONCE = 20
"""All points are measured if that costs no more than so many passes of the full mixture; else there is a search."""
NUM_POINTS = 96
"""Points that a search measures at most, unless told."""
MEMO_BYTES = 2**30
"""Memory for maps that later points of the same batch may need."""
COARSE = 0.1
"""Macs between the first points of a curve, as a share of the full mixture's."""
MATTERS = 0.002
"""The difference in accuracy that matters."""

Rules = Literal["flow", "flow_per_mac", "both"]
T_co = TypeVar("T_co", covariant=True)
_Tick = Callable[[float], None]


class Batches(Protocol[T_co]):
    """Batches that can be gone through several times: a list, or anything that reads them anew."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T_co]: ...


@dataclass(frozen=True)
class Reread(Generic[T_co]):
    """Batches that are made anew each time, for images that do not all fit into memory."""

    make: Callable[[], Iterable[T_co]]
    num: int

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.make())


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What `measure` reports while it works."""

    done: float
    """Share of the work, in macs; an estimate, because the search may end early."""
    left_s: float
    """Estimated time to the end."""
    num_points: int
    """Points measured so far, with those under way."""


@torch.no_grad()
def measure(
    model: Mixture,
    validation: Batches[tuple[Tensor, Tensor]],
    *,
    statistics: Batches[Tensor] | None = None,
    test: Batches[tuple[Tensor, Tensor]] | None = None,
    points: Sequence[OperatingPoint] | None = None,
    rule: Rules = "both",
    num_points: int | None = None,
    raw: bool = True,
    cascade: bool = True,
    split: str = "validation",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Frontier:
    """Accuracy and macs of many operating points on batches of images and labels, in search of the upper envelope.

    `statistics` are batches of training images without labels (a few thousand images), on which the batch statistics
    are re-estimated at every point; without them the model's own are used, and the points say "raw". With `raw`, the
    envelope points get their raw accuracy too, and with `test` their accuracy on test images.

    All points are measured if they have enough in common; a large mixture, or `num_points`, makes it a search from
    coarse to fine. `points`: exactly these are measured. A `cascade` is measured as well, if there are several exits.
    """
    _check(model, validation=validation, statistics=statistics, test=test)
    run = _Run(model, validation, statistics, split, on_progress)
    curves = [] if points is not None else cutting_curves(model, rule)
    if points is None and num_points is None:
        points = _all_at_once(model, curves)
    if points is not None:
        run.add(points, later=0)
    else:
        run.search(curves, NUM_POINTS if num_points is None else num_points)
    frontier = run.finish(raw=raw, test=test)
    several = len(model.config.exit_numbers) > 1 and model.config.mixing == "gates"
    return run.add_cascade(frontier) if cascade and several else frontier


def with_statistics(model: Mixture, buffers: Mapping[str, Tensor]) -> Mixture:
    """A copy in eval mode with re-estimated statistics of a point: `frontier.buffers[name]` or `load_statistics`."""
    result = copy.deepcopy(model).eval()
    own = dict(result.named_buffers())
    for name, tensor in buffers.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UserError(f"statistics {name!r} of shape {tuple(tensor.shape)} do not belong to this model")
        own[name].copy_(tensor)
    return result


def save_statistics(folder: str | Path, buffers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Writes the re-estimated statistics of points into a run folder, in one step."""
    tensors = {f"{point}/{name}": tensor.clone() for point, named in buffers.items() for name, tensor in named.items()}
    write_atomically(Path(folder) / STATISTICS_FILE, to_bytes(tensors))


def load_statistics(folder: str | Path) -> dict[str, dict[str, Tensor]]:
    """The re-estimated statistics in a run folder, by point and by name in the mixture's state; none without a file."""
    path = Path(folder) / STATISTICS_FILE
    buffers: dict[str, dict[str, Tensor]] = {}
    if not path.exists():
        return buffers
    for key, tensor in read_tensors(path, "pt").items():
        point, slash, name = key.partition("/")
        if not slash:
            raise UserError(f"{path}: a tensor is named {key!r}, where POINT/NAME is needed")
        buffers.setdefault(point, {})[name] = tensor
    return buffers


# Which points to measure


@dataclass(frozen=True)
class Candidate:
    """An operating point that may be measured."""

    point: OperatingPoint
    macs: int


Curve = list[Candidate]
"""The points of one exit by one rule, cheapest first."""


def cutting_curves(model: Mixture, rule: Rules = "both") -> list[Curve]:
    """Every point of every exit. Where both rules keep the same edges, both curves hold the same point."""
    if rule not in get_args(Rules):
        raise UserError(f"rule={rule!r}: allowed are {', '.join(get_args(Rules))}")
    rules: tuple[Rule, ...] = ("flow", "flow_per_mac") if rule == "both" else (rule,)
    costs = CostTable.of(model.config)
    same: dict[tuple[int, frozenset[Edge]], Candidate] = {}
    curves: list[Curve] = []
    for each, exit in itertools.product(rules, model.config.exit_numbers):
        curve = []
        for point in cutting_order(model, exit, rule=each):
            candidate = Candidate(point, costs.point(point).macs)
            curve.append(same.setdefault((exit, point.edges), candidate))
        curves.append(curve[::-1])
    return curves


def first_points(curves: Sequence[Curve], num: int) -> list[OperatingPoint]:
    """Both ends of every curve and points between them, spread evenly over macs; at most about half of `num`."""
    if num < 1:
        raise UserError(f"num_points={num}: at least 1 is needed")
    full = max(curve[-1].macs for curve in curves)
    step = COARSE * full
    while True:
        chosen = {candidate.point.name: candidate for curve in curves for candidate in _spread(curve, step)}
        if len(chosen) <= max(num / 2, 1) or step > full:
            break
        step *= 1.25
    by_macs = sorted(chosen.values(), key=lambda candidate: (-candidate.macs, candidate.point.name))
    if len(by_macs) > num:  # hardly any are wanted: the dearest, the cheapest, some between
        by_macs = [by_macs[round(k * (len(by_macs) - 1) / max(num - 1, 1))] for k in range(num)]
    return [candidate.point for candidate in by_macs]


def _spread(curve: Curve, step: float) -> Iterator[Candidate]:
    yield curve[0]
    yield curve[-1]
    for k in range(1, int((curve[-1].macs - curve[0].macs) / step)):
        yield _nearest(curve, curve[-1].macs - k * step)


def _nearest(curve: Sequence[Candidate], macs: float) -> Candidate:
    return min(curve, key=lambda candidate: abs(candidate.macs - macs))


def next_points(curves: Sequence[Curve], accuracy: Mapping[str, float], num: int) -> list[OperatingPoint]:
    """The middle of every stretch between two measured points of a curve where a better point could hide.

    A point is hardly better than both neighbours on its curve; by how much it may be, the points measured so far tell.
    So a stretch is left alone if cheaper points beat both of its ends by more. At most `num`, the most promising.
    """
    macs = {candidate.point.name: candidate.macs for curve in curves for candidate in curve}
    known = [(macs[name], value) for name, value in accuracy.items() if name in macs]
    slack = max([MATTERS, *(bump for curve in curves for bump in _bumps(curve, accuracy))])
    promise: dict[str, tuple[float, OperatingPoint]] = {}
    for curve in curves:
        marks = [index for index, candidate in enumerate(curve) if candidate.point.name in accuracy]
        for left, right in itertools.pairwise(marks):
            if right - left < 2:
                continue
            middle = _nearest(curve[left + 1 : right], (curve[left].macs + curve[right].macs) / 2)
            level = max(value for cost, value in known if cost <= middle.macs)
            gain = max(accuracy[curve[end].point.name] for end in (left, right)) - level
            if gain > -slack:
                promise[middle.point.name] = gain, middle.point
    best = sorted(promise.values(), key=lambda item: (-item[0], item[1].name))
    return [point for _, point in best[: max(num, 0)]]


def _bumps(curve: Curve, accuracy: Mapping[str, float]) -> Iterator[float]:
    """By how much measured points are better than both neighbours on their curve."""
    values = [accuracy[candidate.point.name] for candidate in curve if candidate.point.name in accuracy]
    for left, middle, right in zip(values, values[1:], values[2:], strict=False):
        yield middle - max(left, right)


def _all_at_once(model: Mixture, curves: Sequence[Curve]) -> list[OperatingPoint] | None:
    """All points of all curves, if they have so much in common that measuring them is cheap."""
    engine = _Engine(model)
    points = engine.ordered({candidate.point for curve in curves for candidate in curve})
    return points if engine.macs(points) <= ALL_AT_ONCE * engine.costs.exit().macs else None


# Measuring them


class _Run:
    """One call of `measure`: what it has found so far."""

    def __init__(
        self,
        model: Mixture,
        validation: Batches[tuple[Tensor, Tensor]],
        statistics: Batches[Tensor] | None,
        split: str,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.model, self.validation, self.statistics, self.split = model, validation, statistics, split
        self.engine, self.meter = _Engine(model), _Meter(on_progress)
        self.points: dict[str, OperatingPoint] = {}
        self.found: dict[str, FrontierPoint] = {}

    def add(self, points: Iterable[OperatingPoint], *, later: int) -> None:
        """Measures points; so many more may follow `later`."""
        chosen = self.engine.ordered(points)
        self.points |= {point.name: point for point in chosen}
        share = len(chosen) / (len(chosen) + later)
        self.meter.begin(len(self.points), self.engine.macs(chosen), [self.statistics, self.validation], share)
        if self.statistics is not None:
            self.engine.estimate(chosen, self.statistics, self.meter.tick)
        qualities = self.engine.evaluate(chosen, self.validation, self.meter.tick, raw=self.statistics is None)
        self.found |= {point.name: self._measured(point, qualities[point.name]) for point in chosen}

    def search(self, curves: Sequence[Curve], num: int) -> None:
        """Measures at most `num` points, from coarse to fine."""
        chosen = first_points(curves, num)
        while chosen:
            self.add(chosen, later=num - len(self.found) - len(chosen))
            accuracy = {name: point.accuracy for name, point in self.found.items()}
            chosen = next_points(curves, accuracy, num - len(self.found))

    def finish(self, *, raw: bool, test: Batches[tuple[Tensor, Tensor]] | None) -> Frontier:
        """The frontier; its envelope points with the figures that only they get."""
        engine, only_raw = self.engine, self.statistics is None
        frontier = self._frontier()
        best = engine.ordered(self.points[point.point] for point in frontier.envelope())
        again = self.validation if raw and not only_raw else None
        self.meter.begin(len(self.points), engine.macs(best), [again, test])
        if raw:
            known = {name: point.accuracy for name, point in self.found.items()}
            if again is not None:
                found = engine.evaluate(best, again, self.meter.tick, raw=True)
                known = {name: quality.accuracy for name, quality in found.items()}
            for name, accuracy in known.items():
                self.found[name] = dataclasses.replace(self.found[name], raw_accuracy=accuracy)
        if test is not None:
            for name, quality in engine.evaluate(best, test, self.meter.tick, raw=only_raw).items():
                tested = dataclasses.replace(self.found[name], test_accuracy=quality.accuracy, test_n=quality.n)
                self.found[name] = tested
        return self._frontier({} if only_raw else {point.name: engine.buffers(point) for point in best})

    def add_cascade(self, frontier: Frontier) -> Frontier:
        """The frontier with its cascade, whose statistics are re-estimated like those of the points."""
        macs = round(sum(SHARES) * frontier.full_macs)
        batches = [self.statistics, self.validation]
        self.meter.begin(len(self.points), macs, batches)
        num = sum(len(each) for each in batches if each is not None)
        cascade, settled = measure_cascade(
            self.model,
            self.validation,
            self._settled,
            split=self.split,
            on_progress=lambda _, total: self.meter.tick(num / total),
        )
        buffers = {} if self.statistics is None else {cascade.point: dict(settled.named_buffers())}
        return dataclasses.replace(frontier, cascade=cascade, buffers={**frontier.buffers, **buffers})

    def _settled(self, point: OperatingPoint) -> Mixture:
        if self.statistics is None:
            return with_statistics(self.model, {})
        return reestimated(self.model, self.statistics, point)

    def _frontier(self, buffers: Mapping[str, Mapping[str, Tensor]] | None = None) -> Frontier:
        costs = self.engine.costs
        points = tuple(self.found.values())
        name, full = costs.config.name, costs.exit().macs
        return Frontier(model=name, full_macs=full, points=points, buffers=buffers or {})

    def _measured(self, point: OperatingPoint, quality: Quality) -> FrontierPoint:
        cost = self.engine.costs.point(point)
        match = re.fullmatch(r"e\d+[a-z](\d+)", point.name)
        if not match:
            raise UserError(f"point {point.name!r}: a name like e5c37 is needed; take points from cutting_order(...)")
        return FrontierPoint(
            point=point.name,
            exit=point.exit,
            cuts=int(match[1]),
            macs=cost.macs,
            params=cost.params,
            accuracy=quality.accuracy,
            low=quality.low,
            high=quality.high,
            n=quality.n,
            split=self.split,
            statistics=RAW if self.statistics is None else RE_ESTIMATED,
        )


class _Meter:
    """Share of the work and time left, from the macs that were evaluated."""

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self.on_progress = on_progress
        self.start = time.monotonic()
        self.num_points = 0
        self.macs = 0.0
        self.total = 0.0
        self.done = 0.0

    def begin(self, num_points: int, macs: int, batches: Sequence[Batches[object] | None], share: float = 1.0) -> None:
        """A round begins that evaluates `macs` per image; it is a `share` of all that is left."""
        self.num_points = num_points
        self.unit = macs
        self.total = self.macs + macs * sum(len(each) for each in batches if each is not None) / share

    def tick(self, part: float) -> None:
        """A part of a batch is done."""
        self.macs += part * self.unit
        self.done = max(self.done, min(self.macs / self.total, 1.0))
        left_s = (time.monotonic() - self.start) * (1 - self.done) / max(self.done, 1e-9)
        self.on_progress(Progress(done=self.done, left_s=left_s, num_points=self.num_points))


@dataclass(frozen=True)
class _Node:
    """A node with certain surviving ancestors, the same in all points that have it."""

    node: int
    into: tuple[Edge, ...]
    buffers: tuple[str, ...]
    """Names of its statistics in the mixture's state."""
    readers: set[Edge]
    """The edges that read it, in any point so far."""


class _Engine:
    """Evaluates many points on the same batches, and computes once what they have in common.

    It owns a copy of the model, into which the statistics of a node are put just before the node is computed. Keys are
    numbers of nodes with their surviving ancestors.
    """

    def __init__(self, model: Mixture, memo_bytes: int = MEMO_BYTES) -> None:
        self.model = copy.deepcopy(model).eval()
        self.costs = CostTable.of(model.config)
        self.memo_bytes = memo_bytes
        self.evaluated_macs = 0
        """Macs so far, over all images."""
        self.nodes: dict[int, _Node] = {}
        self.keys: dict[OperatingPoint, dict[int, int]] = {}
        """By point and node."""
        self.known: dict[int, dict[str, Tensor]] = {}
        """Re-estimated statistics by key."""
        self._numbers: dict[tuple[int, ...], int] = {}
        self._live = dict(self.model.named_buffers())
        self._own = {name: buffer.clone() for name, buffer in self._live.items()}
        self._statistics = [module for module in self.model.modules() if isinstance(module, Statistics)]

    def ordered(self, points: Iterable[OperatingPoint]) -> list[OperatingPoint]:
        """Takes points in; returns them so that neighbours have much in common: full exits, then exit by exit."""
        points = list(points)
        for point in points:
            if point not in self.keys:
                self.keys[point] = self._take_in(point)
        full = {exit: self.model.lattice.exit_edges(exit) for exit in self.model.config.exit_numbers}
        return sorted(points, key=lambda p: (p.edges != full[p.exit], p.exit, -len(p.edges), p.name))

    def macs(self, points: Iterable[OperatingPoint]) -> int:
        """Macs of evaluating all these points on one image, where what they have in common counts once."""
        return sum(map(self._macs, {key for point in points for key in self.keys[point].values()}))

    def estimate(self, points: Sequence[OperatingPoint], batches: Iterable[Tensor], tick: _Tick) -> None:
        """Re-estimates the statistics of the points exactly as `cnmm.evaluation.evaluate.reestimated` does for one."""
        known: dict[int, dict[str, Tensor]] = {}
        count = 0
        self.model.train()
        for count, images in enumerate(batches, start=1):
            for module in self._statistics:
                module.momentum = 1 / count  # a plain average
            for _ in self._sweep(points, images, known):
                tick(1 / len(points))
        self.model.eval()
        if not count:
            raise UserError("no images to estimate statistics on")
        self.known |= known

    def evaluate(
        self, points: Sequence[OperatingPoint], batches: Iterable[tuple[Tensor, Tensor]], tick: _Tick, *, raw: bool
    ) -> dict[str, Quality]:
        """Quality of the points by name, with their re-estimated or the model's own statistics."""
        predicted: dict[str, list[Tensor]] = {point.name: [] for point in points}
        targets: list[Tensor] = []
        for images, labels in batches:
            for point, logits in self._sweep(points, images, {} if raw else self.known):
                predicted[point.name].append(logits.argmax(1))
                tick(1 / len(points))
            targets.append(labels)
        if not targets:
            raise UserError("no images to evaluate on")
        labels, num_classes = torch.cat(targets), self.model.config.num_classes
        return {name: quality_of(torch.cat(found), labels, num_classes) for name, found in predicted.items()}

    def buffers(self, point: OperatingPoint) -> dict[str, Tensor]:
        """The re-estimated statistics of a point."""
        return {name: tensor for key in self.keys[point].values() for name, tensor in self.known[key].items()}

    def _take_in(self, point: OperatingPoint) -> dict[int, int]:
        """Keys of the nodes of a point."""
        edges = sorted(self.model.live_edges(point), key=lambda edge: edge[::-1])
        keys = {0: self._number(0, (), 0, {})}
        for node, into in itertools.groupby(edges, key=lambda edge: edge[1]):
            sources = tuple(i for i, _ in into)
            exit = point.exit if node == self.model.lattice.output else 0  # exits have classifiers of their own
            keys[node] = self._number(node, sources, exit, keys)
        for i, j in edges:
            self.nodes[keys[i]].readers.add((i, j))
        return keys

    def _number(self, node: int, sources: tuple[int, ...], exit: int, keys: Mapping[int, int]) -> int:
        key = self._numbers.setdefault((node, exit, *(keys[i] for i in sources)), len(self._numbers))
        if key not in self.nodes:
            prefixes: tuple[str, ...] = ("stem_statistics.",) if node == 0 else (f"maps.{node}.",)
            if exit:
                prefixes = "outputs.", f"classifiers.{exit}."
            buffers = tuple(name for name in self._own if name.startswith(prefixes))
            into = tuple((i, node) for i in sources)
            self.nodes[key] = _Node(node=node, into=into, buffers=buffers, readers=set())
        return key

    def _macs(self, key: int) -> int:
        node, costs = self.nodes[key], self.costs
        macs = sum(costs.edges[edge].macs for edge in node.into)
        if node.node == self.model.lattice.output:
            return macs + costs.classifier.macs
        return macs + (costs.shared[node.node].macs if any(map(costs.reads_shared, node.readers)) else 0)

    def _sweep(
        self, points: Sequence[OperatingPoint], images: Tensor, known: dict[int, dict[str, Tensor]]
    ) -> Iterator[tuple[OperatingPoint, Tensor]]:
        """Logits of all points on one batch. In training mode, what the batch tells goes into `known`."""
        memo = _Memo(self.memo_bytes, (key for point in points for key in self.keys[point].values()))
        learned: set[int] = set()

        def compute(key: int, function: Callable[[], Parts]) -> Parts:
            """A node with its own statistics; computed anew when the memory was short, it learns nothing twice."""
            names = self.nodes[key].buffers
            source = known.get(key, self._own)
            for name in names:
                self._live[name].copy_(source[name])
            parts = function()
            self.evaluated_macs += self._macs(key) * len(images)
            if self.model.training and key not in learned:
                known[key] = {name: self._live[name].clone() for name in names}
                learned.add(key)
            return parts

        for point in points:
            keys = self.keys[point]
            also = frozenset(edge for key in keys.values() for edge in self.nodes[key].readers)
            visit = partial(_visit, memo, keys, compute)
            yield point, self.model.forward_visited(images, point, visit, also)


def _visit(
    memo: _Memo,
    keys: Mapping[int, int],
    compute: Callable[[int, Callable[[], Parts]], Parts],
    node: int,
    function: Callable[[], Parts],
) -> Parts:
    return memo.get(keys[node], partial(compute, keys[node], function))


class _Memo:
    """Parts of nodes within a number of bytes. What is needed again last is forgotten first."""

    def __init__(self, limit: int, uses: Iterable[int]) -> None:
        self.limit, self.size = limit, 0
        self.parts: dict[int, Parts] = {}
        self.uses: dict[int, list[int]] = {}
        """Positions among all uses to come, the next one last."""
        for position, key in reversed(list(enumerate(uses))):
            self.uses.setdefault(key, []).append(position)

    def get(self, key: int, compute: Callable[[], Parts]) -> Parts:
        """The parts of a key, the next of the uses; computed if they are not here."""
        parts = self.parts.pop(key, None)
        if parts is None:
            parts = compute()
        else:
            self.size -= _num_bytes(parts)
        self.uses[key].pop()
        if self.uses[key]:
            self.parts[key] = parts
            self.size += _num_bytes(parts)
        while self.size > self.limit:
            last = max(self.parts, key=lambda key: self.uses[key][-1])
            self.size -= _num_bytes(self.parts.pop(last))
        return parts


def _num_bytes(parts: Parts) -> int:
    return sum(part.nbytes if isinstance(part, Tensor) else part.z.nbytes for part in parts.values())


def _check(model: Mixture, **batches: Batches[object] | None) -> None:
    if model.config.task != "classification":
        raise UserError(f"{model.config.name!r} labels pixels; only the accuracy of classifiers can be measured")
    for name, each in batches.items():
        if each is not None and not hasattr(each, "__len__"):
            raise UserError(f"{name} is gone through several times; pass a list of batches, not an iterator")
