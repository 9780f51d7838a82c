"""What written networks cost. The mixture's own count, which the paper prints, includes much that is folded away.

A run's frontier counts the mixture and names the written cost beside it; a ladder counts its files and names the
mixture's.
"""

from __future__ import annotations

from dataclasses import replace

from cnmm.cost import Cost
from cnmm.evaluation.statistics import check_known
from cnmm.export.graph import point_graph
from cnmm.export.slim import find_point
from cnmm.frontier import RAW, Frontier, FrontierPoint
from cnmm.mixture import Mixture


def written_cost(model: Mixture, point: FrontierPoint | None = None) -> Cost:
    """Of the network that is written for a point; None: of the full mixture."""
    return point_graph(model.config, find_point(model, point)).cost


def with_written_costs(model: Mixture, frontier: Frontier) -> Frontier:
    """A run's frontier whose points name the cost of their written networks."""
    costs = {point.name: written_cost(model, point) for point in frontier.points}
    points = (
        replace(point, written_macs=costs[point.name].macs, written_params=costs[point.name].params)
        for point in frontier.points
    )
    return replace(frontier, points=tuple(points))


def written_frontier(model: Mixture, frontier: Frontier) -> Frontier:
    """The points whose statistics are known, by the cost of their written networks; without a cascade."""
    for point in frontier.envelope():
        check_known(frontier, point.name)
    points = []
    for point in frontier.points:
        if point.statistics == RAW or point.name in frontier.buffers:
            cost = written_cost(model, point)
            counted = replace(point, macs=cost.macs, params=cost.params, written_macs=None, written_params=None)
            points.append(replace(counted, mixture_macs=point.macs, mixture_params=point.params))
    return Frontier(model=frontier.model, full_macs=written_cost(model).macs, points=tuple(points))
