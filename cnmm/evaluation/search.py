"""Which operating points a frontier measures, should they be too many: from coarse to fine along the cutting curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.cost import CostTable
from cnmm.lattice import Edge, OperatingPoint, Rule
from cnmm.prune import Mixable, cutting_order

COARSE = 0.1
"""Macs between the first points of a curve, as a share of the full mixture's."""
MATTERS = 0.002
"""The difference in quality that matters."""

Rules = Literal["flow", "flow_per_mac", "damage", "both", "all"]
"""One cutting rule; both by flow; or all three, where damage counts if the model has measured orders."""


@dataclass(frozen=True)
class Candidate:
    """An operating point that may be measured."""

    point: OperatingPoint
    macs: int


Curve = list[Candidate]
"""The points of one exit by one rule, cheapest first."""


def cutting_curves(model: Mixable, rule: Rules = "all") -> list[Curve]:
    """Every point of every exit. Where two rules keep the same edges, both curves hold the same point."""
    if rule not in get_args(Rules):
        raise UserError(f"rule={rule!r}: must be one of {', '.join(get_args(Rules))}")
    by_flow: tuple[Rule, ...] = ("flow", "flow_per_mac")
    if rule == "all":
        rules = (*by_flow, *(("damage",) if model.orders else ()))
    else:
        rules = by_flow if rule == "both" else (rule,)
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
    num = _fields.checked(num, "num_points", _fields.POSITIVE)
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


def next_points(curves: Sequence[Curve], quality: Mapping[str, float], num: int) -> list[OperatingPoint]:
    """The middle of every stretch between two measured points of a curve where a better point could hide.

    A point is hardly better than both neighbours on its curve; by how much it may be, the points measured so far tell.
    So a stretch is left alone if cheaper points beat both of its ends by more. At most `num`, the most promising.
    """
    macs = {candidate.point.name: candidate.macs for curve in curves for candidate in curve}
    known = [(macs[name], value) for name, value in quality.items() if name in macs]
    slack = max([MATTERS, *(bump for curve in curves for bump in _bumps(curve, quality))])
    promise: dict[str, tuple[float, OperatingPoint]] = {}
    for curve in curves:
        marks = [index for index, candidate in enumerate(curve) if candidate.point.name in quality]
        for left, right in itertools.pairwise(marks):
            if right - left < 2:
                continue
            middle = _nearest(curve[left + 1 : right], (curve[left].macs + curve[right].macs) / 2)
            level = max(value for cost, value in known if cost <= middle.macs)
            gain = max(quality[curve[end].point.name] for end in (left, right)) - level
            if gain > -slack:
                promise[middle.point.name] = gain, middle.point
    best = sorted(promise.values(), key=lambda item: (-item[0], item[1].name))
    return [point for _, point in best[: max(num, 0)]]


def _bumps(curve: Curve, quality: Mapping[str, float]) -> Iterator[float]:
    """By how much measured points are better than both neighbours on their curve."""
    values = [quality[candidate.point.name] for candidate in curve if candidate.point.name in quality]
    for left, middle, right in zip(values, values[1:], values[2:], strict=False):
        yield middle - max(left, right)
