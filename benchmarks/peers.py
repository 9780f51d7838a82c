"""Mixtures and their peers in one picture and one table: test images, macs per image, fixed exits and early exit.

    python -m benchmarks.peers RUN|PEER ... --out curves.svg [--budgets 3M 4M 6.5M 12.5M] [--data cifar10:DIR]
    python -m benchmarks.peers runs/b4s3_* runs/msdnet_* --out docs/images/peers.svg

A RUN is a run folder with a frontier that has test figures (`cnmm frontier RUN --test`), a PEER a folder that
`python -m peers.train` has finished. Folders with the same network and recipe are seeds of one curve. Points and
thresholds are chosen on held-out images within a budget, everything shown is on test images; the table has the mean
over the seeds. The curves go to a .json beside the picture. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cnmm._errors import UserError
from cnmm._files import write_json
from cnmm.budget import parse_budget
from cnmm.draw import FAINT, GREY, INK, PALE, STYLE, require_matplotlib, save_picture
from cnmm.evaluation.task import task_of
from cnmm.frontier import metric_words
from cnmm.prune import named_point
from cnmm.run import Run
from peers.evaluate import spent
from peers.published import EARLY_EXIT, MANY_NETWORKS, ONE_NETWORK
from peers.train import RESULTS_FILE

BUDGETS = ("3M", "4M", "5M", "6.5M", "8M", "10M", "12.5M")
_COLOURS = ("#22303c", "#c05621", "#3182ce", "#38a3a5", "#b83280", "#b7791f", "#5b4b8a", "#4d7c0f", "#6b7782")
_SHOWN = 12
"""Markers of an early-exit curve."""


@dataclass(frozen=True)
class Point:
    """What is spent and got: macs decide whether it fits a budget, the held-out images whether it is chosen."""

    macs: float
    validation: float
    test: float
    test_macs: float
    """On test images: the same, but for early exit."""


@dataclass(frozen=True)
class Curve:
    """One trained network."""

    label: str
    seed: int
    metric: str
    n: int
    """Test images."""
    fixed: list[Point]
    early: list[Point]


def read(folder: Path, data: str | None) -> Curve:
    """The curve of a run folder or of a peer's."""
    return read_peer(folder) if (folder / RESULTS_FILE).is_file() else read_run(folder, data)


def read_peer(folder: Path) -> Curve:
    results = json.loads((folder / RESULTS_FILE).read_text("utf-8"))
    metric, exits = results["metric"], results["exits"]
    fixed = [Point(row["macs"], row["validation"][metric], row["test"][metric], row["macs"]) for row in exits]
    early = [
        Point(row["validation"]["macs"], row["validation"]["quality"], row["test"]["quality"], row["test"]["macs"])
        for row in results.get("early_exit", ())
    ]
    train = results["train"]
    label = f"{results['peer']}, {train['recipe']}{' + teacher' if train['teacher'] else ''}"
    return Curve(label, train["seed"], metric, exits[0]["test"]["n"], fixed, early)


def read_run(folder: Path, data: str | None) -> Curve:
    run = Run(folder, data=data)
    frontier, train = run.frontier, run.config
    tested = [point for point in frontier.envelope() if point.test_quality is not None]
    if not tested:
        raise UserError(f"{folder}: its frontier has no test figures; run: cnmm frontier {folder} --test")
    fixed = [Point(point.macs, point.quality, point.test_quality or 0.0, point.macs) for point in tested]
    label = f"{frontier.model}, {train.recipe}{' + teacher' if train.teacher else ''}"
    return Curve(label, train.seed, frontier.metric, tested[0].test_n or 0, fixed, early_exit(run))


@torch.no_grad()
def early_exit(run: Run) -> list[Point]:
    """What the thresholds of a run's cascade spend and get on its test images."""
    cascade, config = run.frontier.cascade, run.model.config
    if cascade is None:
        return []
    point = named_point(run.model, cascade.point)
    model = run.settled(point).eval()
    choices = task_of(config).choices(config.num_classes, cascade.metric)
    for images, target in run.images.batches(*run.images.split("test")):
        choices.add(list(model.forward_exits(images, point).values()), target)
    tested = [(row, spent(row, cascade.macs, cascade.asking, choices)) for row in cascade.thresholds]
    return [Point(row.average_macs, row.quality, found["quality"], found["macs"]) for row, found in tested]


def within(points: Sequence[Point], budget: float) -> Point | None:
    """The best on held-out images of those that fit a budget."""
    fitting = [point for point in points if point.macs <= budget]
    return max(fitting, key=lambda point: (point.validation, -point.macs), default=None)


def compare(curves: Sequence[Curve], budgets: Sequence[float]) -> list[dict[str, Any]]:
    """For every network and way to run it: the mean over its seeds at every budget, None where one does not fit."""
    rows = []
    ways: dict[str, Callable[[Curve], list[Point]]] = {
        "fixed": lambda curve: curve.fixed,
        "early exit": lambda curve: curve.early,
    }
    for label in dict.fromkeys(curve.label for curve in curves):
        mine = [curve for curve in curves if curve.label == label]
        for way, points in ways.items():
            if not any(points(curve) for curve in mine):
                continue
            means: list[float | None] = []
            for budget in budgets:
                chosen = [within(points(curve), budget) for curve in mine]
                values = [point.test for point in chosen if point is not None]
                means.append(statistics.mean(values) if len(values) == len(mine) else None)
            rows.append({"network": label, "way": way, "seeds": [curve.seed for curve in mine], "test": means})
    return rows


def draw(curves: Sequence[Curve], published: str | None = None) -> Any:
    """All curves: circles and solid lines for fixed points, triangles and dashes for early exit."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.8, 5.6), dpi=160, facecolor="white", layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE)
        axes.tick_params(colors=GREY, labelsize=9)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        labels = list(dict.fromkeys(curve.label for curve in curves))
        seen: set[str] = set()
        for curve in curves:
            colour = _COLOURS[labels.index(curve.label) % len(_COLOURS)]
            for points, mark, line, words in (
                (curve.fixed, "o", "-", curve.label),
                (_some(curve.early), "^", "--", f"{curve.label}, early exit"),
            ):
                x, y = [point.test_macs / 1e6 for point in points], [100 * point.test for point in points]
                label = words if points and words not in seen else None
                seen.add(words)
                axes.plot(x, y, line, marker=mark, markersize=4, linewidth=1.3, color=colour, label=label)
        _draw_published(axes, published)
        axes.set_xlabel("macs per image (millions); of early exit, on average", color=GREY)
        axes.set_ylabel(f"{metric_words(curves[0].metric)} (%), {curves[0].n:,} test images", color=GREY)
        axes.set_xlim(0, None)
        axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _draw_published(axes: Any, data: str | None) -> None:
    """Others' figures for a data set, in grey: filled where one network serves a curve, hollow where each is one."""
    for table, style in ((ONE_NETWORK, "s-"), (EARLY_EXIT, "^--"), (MANY_NETWORKS, "D")):
        for name, points in table.get(data or "", {}).items():
            words = f"{name}, early exit" if table is EARLY_EXIT else name
            fill = "none" if table is MANY_NETWORKS else GREY
            x, y = zip(*points, strict=True)
            axes.plot(x, y, style, color=GREY, markerfacecolor=fill, markersize=4, linewidth=1.0, label=words)


def _some(points: Sequence[Point]) -> list[Point]:
    """Points spread over a long curve."""
    places = np.unique(np.linspace(0, len(points) - 1, _SHOWN).round().astype(int)) if points else []
    return [points[place] for place in places]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg|FILE.png")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="MACS")
    parser.add_argument("--data", help="where the runs' images are now")
    parser.add_argument("--published", choices=sorted(ONE_NETWORK), help="also draw what others published")
    given = parser.parse_args(arguments)
    try:
        budgets = [parse_budget(text).value for text in given.budgets]
        curves = [read(folder, given.data) for folder in given.folders]
        save_picture(draw(curves, given.published), given.out)
        rows = compare(curves, budgets)
        write_json(given.out.with_suffix(".json"), {"curves": [dataclasses.asdict(curve) for curve in curves]})
    except UserError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    print("| network | | seeds | " + " | ".join(given.budgets) + " |")
    print("|---|---|---|" + "---|" * len(budgets))
    for row in rows:
        cells = ["-" if value is None else f"{100 * value:.1f}" for value in row["test"]]
        print(f"| {row['network']} | {row['way']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    print(json.dumps({"budgets": budgets, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
