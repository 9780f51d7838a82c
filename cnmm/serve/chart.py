"""Charts over time as SVG, written by hand: no library, and the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from cnmm._errors import UserError
from cnmm._files import write_atomically
from cnmm.serve.menu import Floats
from cnmm.serve.trial import Trial

BINS = 200
WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 900, 130, 90, 20, 34, 34
COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over the same time, with a scale of their own."""

    title: str
    lines: Sequence[tuple[str, Floats]]
    """Name and values, one per moment; not a number where there is none."""
    limit: float | None = None
    """A horizontal line, such as the target."""
    from_zero: bool = True


def check_chart(path: Path) -> None:
    """Refuses what is not drawn here."""
    if path.suffix != ".svg":
        raise UserError(f"{path}: charts are written as .svg")


def draw_trial(path: Path, title: str, trial: Trial, capacity_per_ms: float) -> None:
    """Load, budget, latency and quality of a trial over time. `capacity_per_ms`: arrivals that are a load of 1."""
    check_chart(path)
    end = float(trial.arrived_ms[-1]) or 1.0
    place = np.minimum((trial.arrived_ms / end * BINS).astype(int), BINS - 1)
    order = np.argsort(place, kind="stable")
    parts = np.split(order, np.searchsorted(place[order], np.arange(1, BINS)))

    def binned(values: Floats, percent: float | None = None) -> Floats:
        cells = [values[part][~np.isnan(values[part])] for part in parts]
        return np.array(
            [math.nan if not len(c) else c.mean() if percent is None else np.percentile(c, percent) for c in cells]
        )

    load = np.array([len(part) for part in parts]) / (end / BINS) / capacity_per_ms
    quality = binned(np.where(trial.in_time, trial.quality, 0.0))
    panels = (
        Panel(title="load (1 = full mixture)", lines=[("", load)], limit=1.0),
        Panel(title="budget, ms per image", lines=[("", binned(trial.budget_ms))]),
        Panel(
            title="latency, ms",
            lines=[("median", binned(trial.latency_ms, 50)), ("99 %", binned(trial.latency_ms, 99))],
            limit=trial.target_ms,
        ),
        Panel(title="accuracy in time", lines=[("", quality)], from_zero=False),
    )
    moments = (np.arange(BINS) + 0.5) * end / BINS / 1e3
    write_atomically(path, chart(title, moments, panels).encode())


def chart(title: str, moments: Floats, panels: Sequence[Panel]) -> str:
    """Panels below each other; `moments` are in seconds."""
    height = TOP + len(panels) * (HEIGHT + GAP) + 14
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui,sans-serif" font-size="13" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#111">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, moments, TOP + number * (HEIGHT + GAP) + GAP / 2)
    bottom = TOP + len(panels) * (HEIGHT + GAP)
    for tick in _ticks(0.0, float(moments[-1])):
        x = LEFT + WIDTH * tick / float(moments[-1])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 6:.1f}" text-anchor="middle">{tick:g} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, moments: Floats, top: float) -> list[str]:
    values = np.concatenate([line for _, line in panel.lines])
    values = values[~np.isnan(values)]
    most = max([*values.tolist(), panel.limit or 0.0], default=1.0)
    least = 0.0 if panel.from_zero or not len(values) else float(values.min())
    if most <= least:
        least, most = min(0.0, least), most or 1.0

    def y(value: float) -> float:
        return top + HEIGHT - HEIGHT * (value - least) / (most - least)

    parts = [f'<text x="{LEFT}" y="{top - 5:.1f}">{escape(panel.title)}</text>']
    for tick in _ticks(least, most):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    if panel.limit is not None:
        parts.append(f'<path d="M{LEFT} {y(panel.limit):.1f}h{WIDTH}" stroke="#b00" stroke-dasharray="5 4"/>')
    for number, (name, line) in enumerate(panel.lines):
        colour = COLOURS[number]
        path, pen = [], "M"
        for moment, value in zip(moments.tolist(), line.tolist(), strict=True):
            if math.isnan(value):
                pen = "M"
                continue
            path.append(f"{pen}{LEFT + WIDTH * moment / float(moments[-1]):.1f} {y(value):.1f}")
            pen = "L"
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if name:
            x = LEFT + WIDTH - 90 * (len(panel.lines) - number)
            parts.append(f'<text x="{x}" y="{top - 5:.1f}" fill="{colour}">{escape(name)}</text>')
    return parts


def _ticks(least: float, most: float) -> list[float]:
    """Some round numbers."""
    step = 10 ** math.floor(math.log10(max(most - least, 1e-9)))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if (most - least) / (step * factor) <= 5.5)
    first = math.ceil(least / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(most / step + 1e-9) + 1)]
