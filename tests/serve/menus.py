"""Menus made up for tests: points alone, or with a cascade."""

from __future__ import annotations

from cnmm.cascade import Cascade, Threshold
from cnmm.frontier import Frontier, FrontierPoint
from cnmm.serve.menu import make_menu

POINTS = (("e1c0", 1, 1.0, 0.6), ("e2c3", 2, 2.5, 0.8), ("e3c0", 4, 6.0, 0.9), ("e4c0", 9, 10.0, 0.92))


def frontier(points=POINTS, cascade=None):
    return Frontier(
        model="made_up",
        full_macs=10_000,
        points=tuple(
            FrontierPoint(
                name=name,
                rule="flow",
                cuts=0,
                exit=exit,
                macs=int(1000 * ms),
                params=1,
                quality=quality,
                metric="accuracy",
                low=0.0,
                high=1.0,
                n=100,
                split="validation",
                statistics="raw",
            )
            for name, exit, ms, quality in points
        ),
        cascade=cascade,
    )


def point_menu(points=POINTS, factor=1.0):
    """Rows that are operating points: every request takes exactly what its row says."""
    return make_menu(frontier(points), {name: ms * factor for name, _, ms, _ in points})


def cascade_menu(factor=1.0):
    """With a cascade of three stages of 1, 3 and 6 ms that is better than the points between its ends."""
    table = (
        (0.0, (1.0, 0.0, 0.0), 0.6),
        (0.5, (0.6, 0.3, 0.1), 0.84),
        (0.7, (0.4, 0.4, 0.2), 0.88),
        (0.9, (0.2, 0.4, 0.4), 0.91),
        (1.1, (0.0, 0.0, 1.0), 0.92),
    )
    stages = (1.0, 3.0, 6.0)
    thresholds = tuple(
        Threshold(
            confidence=(level, level),
            average_macs=1000 * sum(part * sum(stages[: n + 1]) for n, part in enumerate(leaves)),
            quality=quality,
            exits=leaves,
        )
        for level, leaves, quality in table
    )
    cascade = Cascade(
        point="e4a0",
        exits=(1, 2, 4),
        macs=(1000, 3000, 6000),
        asking=(0, 0),
        thresholds=thresholds,
        metric="accuracy",
        n=100,
        split="validation",
    )
    times = {name: ms * factor for name, _, ms, _ in POINTS}
    return make_menu(frontier(cascade=cascade), times, [ms * factor for ms in stages])
