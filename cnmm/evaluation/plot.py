"""The frontier as a picture, in the paper's form: quality against macs, one curve per exit, the envelope on top.

Early exit, where macs are an average, is a curve of its own. Needs matplotlib, which is imported only when something is
drawn. The same frontier gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cnmm.cascade import Cascade
from cnmm.cost import short_count
from cnmm.draw import FAINT, GREY, INK, PALE, STYLE, require_matplotlib
from cnmm.frontier import Frontier, FrontierPoint, metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXIT_COLOURS = ("#38a3a5", "#3182ce", "#5b4b8a", "#b83280", "#c05621", "#b7791f", "#4d7c0f", "#6b7782")
_EARLY_COLOUR = "#e53e3e"
_DASHES: dict[str, Any] = {"flow": "solid", "flow_per_mac": (0, (4, 2))}

Cost = Callable[[FrontierPoint], float]


def plot_frontier(frontier: Frontier, latency: Mapping[str, float] | None = None) -> Figure:
    """Measured points by exit and their envelope; with p95 milliseconds by point, a second panel against latency."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    timed = [point for point in frontier.points if point.name in (latency or {})]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.2 if timed else 8.4, 5.4), dpi=160, facecolor="white", layout="constrained")
        panels = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0]
        _draw_panel(panels[0], frontier.points, lambda point: point.macs / 1e6)
        panels[0].set_xlabel("macs per image (millions)", color=GREY)
        first = frontier.points[0]
        panels[0].set_ylabel(f"{metric_words(first.metric)} (%), {first.n:,} {first.split} images", color=GREY)
        _show_share(panels[0], frontier.full_macs / 1e6)
        if frontier.cascade:
            _draw_cascade(panels[0], frontier.cascade)
        if timed and latency:
            _draw_panel(panels[1], timed, lambda point: latency[point.name])
            panels[1].set_xlabel("latency on this machine (ms), 95th percentile, batch 1", color=GREY)
        columns = 1 if len(panels[0].lines) < 16 else 2
        panels[0].legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK, ncols=columns)
        panels[0].set_title(_title(frontier), loc="left", color=INK, size=12, weight="bold", pad=12)
    return figure


def _title(frontier: Frontier) -> str:
    num = len(frontier.envelope())
    return f"{frontier.model}: {len(frontier.points)} measured points, {num} on the envelope"


def _draw_panel(axes: Axes, points: Sequence[FrontierPoint], cost: Cost) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=GREY, labelsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    best = _envelope(points, cost)
    _draw_envelope(axes, best, cost, end=max(map(cost, points)))
    _draw_exits(axes, points, cost)
    low, high = 100 * min(point.low for point in best), 100 * max(point.high for point in best)
    axes.set_ylim(max(low - 0.25 * (high - low), 0.0), high + 0.05 * (high - low))  # points far below matter to nobody
    axes.set_xlim(0, None)


def _draw_exits(axes: Axes, points: Sequence[FrontierPoint], cost: Cost) -> None:
    """One curve per exit, and per cutting rule if there are two."""
    exits = sorted({point.exit for point in points})
    rules: list[str] = sorted({point.rule for point in points if point.cuts}) or [points[0].rule]
    for exit in exits:
        colour = _EXIT_COLOURS[(exit - 1) % len(_EXIT_COLOURS)]
        for rule in rules:
            # Nothing cut belongs to all rules.
            mine = sorted((p for p in points if p.exit == exit and (p.rule == rule or not p.cuts)), key=cost)
            words = f"exit {exit}" + (f", {rule.replace('_', ' ')}" if len(rules) > 1 else "")
            x, y = [cost(p) for p in mine], [100 * p.quality for p in mine]
            style: dict[str, Any] = {
                "color": colour,
                "linewidth": 1.1,
                "linestyle": _DASHES.get(rule, "solid"),
                "zorder": 2,
            }
            axes.plot(x, y, marker="o", markersize=3.4, markeredgewidth=0, label=words, **style)


def _envelope(points: Sequence[FrontierPoint], cost: Cost) -> list[FrontierPoint]:
    """The points that are better than every cheaper one, at any cost."""
    best: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (cost(point), -point.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def _draw_envelope(axes: Axes, best: Sequence[FrontierPoint], cost: Cost, end: float) -> None:
    """What a budget buys: the best point within it, hence stairs, with the 95 % interval of each."""
    x = [*(cost(point) for point in best), end]
    y, low, high = (
        [100 * value for value in (*column, column[-1])] for column in zip(*map(_values, best), strict=True)
    )
    axes.plot(x, y, color=INK, linewidth=2.0, drawstyle="steps-post", zorder=3, label="best within a budget")
    band: dict[str, Any] = {"color": INK, "alpha": 0.1, "linewidth": 0, "zorder": 1}
    axes.fill_between(x, low, high, step="post", label="its 95 % interval", **band)
    axes.plot(
        x[:-1], y[:-1], color=INK, marker="o", markersize=5.5, linestyle="none", markeredgecolor="white", zorder=4
    )


def _draw_cascade(axes: Axes, cascade: Cascade) -> None:
    """What an average budget buys with early exit."""
    x = [row.average_macs / 1e6 for row in cascade.thresholds]
    y = [100 * row.quality for row in cascade.thresholds]
    axes.plot(x, y, color=_EARLY_COLOUR, linewidth=2.0, zorder=3, label="early exit, macs on average")


def _values(point: FrontierPoint) -> tuple[float, float, float]:
    return point.quality, point.low, point.high


def _show_share(axes: Axes, full: float) -> None:
    """A second scale on top: percent of the full mixture."""
    scale: Any = (lambda macs: 100 * macs / full, lambda share: share * full / 100)
    top = axes.secondary_xaxis("top", functions=scale)
    top.set_xlabel(f"% of the full mixture ({short_count(round(full * 1e6))} macs)", color=GREY, size=9)
    top.tick_params(colors=GREY, labelsize=8)
    top.spines["top"].set_visible(False)
