"""What is measured on a trained network: one function for each kind, from a `Trained` to a JSON-able answer.

A point of a curve is {exit, rule, cuts, macs, held_out, test, raw, n, answers}: quality on held-out images, by which
points are chosen, and on test images, with statistics re-estimated at the point and with the full mixture's (`raw`).
`answers` says what became of every test image (`store.pack`), so that two points can be compared image by image.
"""

from __future__ import annotations

import base64
import io
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import latency as timing
from benchmarks import orders as cutting
from benchmarks.claims.store import JSON, pack
from benchmarks.claims.trained import Trained
from benchmarks.claims.trainings import Scale
from benchmarks.claims.uncertainty import measure_uncertainty
from cnmm.cascade import stage_macs
from cnmm.chain import Chain, initial_logits
from cnmm.cost import CostTable
from cnmm.evaluation.calibrate import calibrate
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.engine import Engine
from cnmm.evaluation.quality import Choices
from cnmm.evaluation.search import cutting_curves, first_points
from cnmm.evaluation.segmentation import Segmentation, metric_values
from cnmm.evaluation.statistics import reestimated
from cnmm.evaluation.task import task_of
from cnmm.frontier import FRONTIER_FILE, FrontierPoint
from cnmm.lattice import OperatingPoint, full_dag
from cnmm.mixture import Mixture
from cnmm.pictures import Panel, caption, strip, to_png
from cnmm.prune import cutting_order
from cnmm.training.seeds import seeded
from cnmm.zoo import model_plan, num_networks

SHARES = (0.75, 0.5, 0.35, 0.25)
"""Of the last exit's macs: its curve has the largest point within each."""
ORDERED = 5000
"""Test images on which orders are compared, at most: they differ by whole points, and there are two dozen."""
AVERAGES = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Average macs of early exit, as shares."""


def no_tick(part: float, *, fresh: bool = True) -> None:
    """Nobody wants to know."""


@torch.no_grad()
def curves(trained: Trained, scale: Scale) -> JSON:
    """All exits under cutting, by the paper's rule; by all rules where the ladder was tuned along them."""
    run = trained.run
    points = [trained.point] if trained.point else curve_points(run.model, run.config.recipe, scale.points)
    engine, task = Engine(run.model), task_of(run.model.config)
    metric = task.check_metric()
    ordered = engine.ordered(points)
    engine.estimate(ordered, run.images.statistics(), no_tick)
    held = engine.evaluate(
        ordered, run.images.batches(*run.images.split("validation")), no_tick, metric=metric, raw=False
    )
    part, chosen = run.images.split("test")
    batches = run.images.batches(part, chosen[: scale.images])
    tested = {raw: _answers(engine, ordered, batches, raw=raw) for raw in (False, True)}
    costs = CostTable.of(run.model.config)
    rows = [
        {
            "exit": point.exit,
            "rule": point.rule or "flow",
            "cuts": point.cuts or 0,
            "macs": costs.point(point).macs,
            "held_out": held[point.name].value,
            "test": _quality(tested[False][point.name]),
            "raw": _quality(tested[True][point.name]),
            "answers": pack(tested[False][point.name]),
        }
        for point in sorted(points, key=lambda point: costs.point(point).macs)
    ]
    n = len(next(iter(tested[False].values())))
    about = {
        "data": run.about["data"]["name"],
        "epochs": run.config.epochs,
        "metric": metric,
        "n": n,
        "held_out_n": next(iter(held.values())).n,
        "full_macs": costs.exit().macs,
    }
    return {**about, "split": "test", "points": rows}


def curve_points(model: Mixture, recipe: str, num: int) -> list[OperatingPoint]:
    """Points of every exit: nothing cut, one network, some between; and of the last exit those within `SHARES`.

    `num` is for each rule, so that a curve has as many points whether or not others are drawn beside it.
    """
    ours = recipe in ("quick", "long", "street") and model.config.mixing == "gates"
    costs, last = CostTable.of(model.config), cutting_order(model)
    full = costs.point(last[0]).macs
    chosen = [cutting_order(model, exit)[0] for exit in model.config.exit_numbers]
    if model.config.mixing == "gates":
        chosen += [
            next(point for point in last if costs.point(point).macs <= share * full) for share in _within(last, costs)
        ]
        curves = cutting_curves(model, "all" if ours else "flow")
        num_rules = len(curves) // len(model.config.exit_numbers)
        chosen += first_points(curves, 2 * num * num_rules)  # it takes half of them
    different = {(point.exit, point.edges): point for point in reversed(chosen)}
    return list(different.values())


def _within(order: Sequence[OperatingPoint], costs: CostTable) -> list[float]:
    """The shares that an order reaches."""
    least = costs.point(order[-1]).macs / costs.point(order[0]).macs
    return [share for share in SHARES if share >= least]


def _answers(engine: Engine, points: Sequence[OperatingPoint], batches: Any, *, raw: bool) -> dict[str, np.ndarray]:
    """By point: which images are right, [N]; of scenes, their counts, [N, 3, K]."""
    config = engine.model.config
    found: dict[str, list[np.ndarray]] = {point.name: [] for point in points}
    for images, target in batches:
        for point, logits in engine.answers(points, images, raw=raw):
            found[point.name].append(answer(logits, target, config.num_classes))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def answer(logits: Tensor, target: Tensor, num_classes: int) -> np.ndarray:
    """What became of every image."""
    if target.dim() == 3:
        return Segmentation().counts(logits, target, num_classes).numpy()
    return (logits.argmax(1) == target).numpy()


def _quality(found: np.ndarray) -> float:
    if found.ndim == 1:
        return float(found.mean())
    return metric_values(torch.from_numpy(found).sum(0))["miou"].item()


def frontier(trained: Trained, scale: Scale) -> JSON:
    """What the repository's own measurement says of a model: no image is needed."""
    if not (trained.folder / FRONTIER_FILE).is_file():
        trained.run.measure(test=True, points=scale.points)
    measured = trained.run.frontier
    rows = [_row(point) for point in measured.points]
    first = measured.points[0]
    about = {
        "data": trained.run.about["data"]["name"],
        "epochs": trained.run.config.epochs,
        "metric": first.metric,
        "n": first.n,
        "held_out_n": first.n,
        "full_macs": measured.full_macs,
    }
    return {**about, "split": "held out", "points": rows}


def _row(point: FrontierPoint) -> JSON:
    """Test figures are those of the best points; held-out ones are all points'."""
    names = ("exit", "rule", "cuts", "macs", "low", "high", "test_n")
    quality = {"held_out": point.quality, "test": point.test_quality, "raw": point.raw_quality}
    return {**{name: getattr(point, name) for name in names}, **quality}


@torch.no_grad()
def orders(trained: Trained, scale: Scale) -> JSON:
    """The last exit cut by learned, measured, untrained and random orders (`benchmarks.orders`)."""
    run, costs = trained.run, CostTable.of(trained.run.model.config)
    part, chosen = run.images.split("test")
    batches = run.images.batches(part, chosen[: min(scale.images, ORDERED)])
    found, rows, known = cutting.all_orders(run), [], {}
    for share in (0.75, 0.5, 0.25):
        for name, order in found.items():
            fitting = [point for point in order if costs.point(point).macs <= share * costs.exit().macs]
            point = max(fitting, key=lambda point: costs.point(point).macs, default=order[-1])
            if point.edges not in known:
                model = reestimated(run.model, run.images.statistics(), point)
                known[point.edges] = np.concatenate([answer(model(x, point), labels, 0) for x, labels in batches])
            right, macs = known[point.edges], costs.point(point).macs
            quality = {"test": float(right.mean()), "answers": pack(right)}
            rows.append({"share": share, "order": name, "cuts": point.cuts, "macs": macs, **quality})
    return {"n": len(right), "split": "test", "full_macs": costs.exit().macs, "rows": rows}


@torch.no_grad()
def monte_carlo(trained: Trained, scale: Scale) -> JSON:
    """The paper's table 1: the expectation against averages over samples of the mixture, relaxed and hard."""
    run, most = trained.run, max(scale.samples)
    model, config = run.model.eval(), run.config
    part, chosen = run.images.split("test")
    right: dict[tuple[str, int], list[np.ndarray]] = {}
    generator = seeded(config.seed, "monte-carlo")
    for images, target in run.images.batches(part, chosen[: scale.images]):
        right.setdefault(("expectation", 1), []).append((model(images).argmax(1) == target).numpy())
        for gates in ("relaxed", "hard"):
            total = torch.zeros(())
            for number in range(1, most + 1):
                options: dict[str, Any] = {"temperature": config.temperature, "generator": generator}
                total = total + model(images, gates=gates, group=1, **options).softmax(1)
                if number in scale.samples:
                    right.setdefault((gates, number), []).append((total.argmax(1) == target).numpy())
    macs = CostTable.of(model.config).exit().macs
    rows = []
    for (gates, number), parts in right.items():
        found = np.concatenate(parts)
        row = {
            "gates": gates,
            "samples": number,
            "macs": macs * number,
            "test": float(found.mean()),
            "answers": pack(found),
        }
        rows.append(row)
    return {"n": len(found), "split": "test", "statistics": config.statistics, "rows": rows}


@torch.no_grad()
def early_exit(trained: Trained, scale: Scale) -> JSON:
    """Nothing cut, images leave when an exit is sure: a threshold for every exit, or one for all, or a fixed exit.

    Thresholds and the fixed exit are chosen on held-out images; the one threshold spends as much on the test images.
    """
    run, config = trained.run, trained.run.model.config
    point = cutting_order(run.model)[0]
    model = reestimated(run.model, run.images.statistics(), point)
    stages, costs = tuple(stage_macs(config, point).values()), CostTable.of(config)
    held, test = (_ask(model, run, split, scale.images) for split in ("validation", "test"))
    exit_macs, passed = np.array([costs.exit(exit).macs for exit in config.exit_numbers]), np.cumsum(stages)
    table, rows = calibrate(held.confidence, held.worth, stages, held.quality), []
    for share in AVERAGES:
        fitting = [row for row in table if row.average_macs <= share * costs.exit().macs]
        if not fitting:
            continue
        best = max(fitting, key=lambda row: row.quality)
        leaves = leave(test.confidence, np.array(best.confidence))
        macs = float(passed[leaves].mean())
        one = one_threshold(test.confidence, passed, macs)
        alone = np.where(exit_macs <= macs, held.worth.mean(0), -1.0).argmax()
        ways = {"each": leaves, "one_threshold": one, "fixed": np.full(len(leaves), alone)}
        right = {name: test.worth[np.arange(len(leaves)), exits] > 0 for name, exits in ways.items()}
        rows.append({"share": share, "macs": macs, **{name: pack(found) for name, found in right.items()}})
    return {"n": len(test.confidence), "split": "test", "rows": rows}


def leave(confidence_NE: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """At which exit each image leaves: the first that is sure enough, or the last."""
    sure = confidence_NE[:, :-1] >= thresholds
    return np.concatenate([sure, np.ones((len(sure), 1), bool)], 1).argmax(1)


def one_threshold(confidence_NE: np.ndarray, passed: np.ndarray, macs: float) -> np.ndarray:
    """Where images leave if all exits ask for the same, the most that does not spend more on average."""
    low, high = 0.0, 1.000001
    for _ in range(40):
        middle = (low + high) / 2
        spends = passed[leave(confidence_NE, np.array(middle))].mean()
        low, high = (middle, high) if spends <= macs else (low, middle)
    return leave(confidence_NE, np.array(low))


def _ask(model: Mixture, run: Any, split: str, num: int) -> Choices:
    """What all exits say about some images."""
    part, chosen = run.images.split(split)
    choices = Classification().choices(model.config.num_classes, "accuracy")
    for images, target in run.images.batches(part, chosen[:num]):
        choices.add(list(model.forward_exits(images).values()), target)
    return choices


def wall_time(trained: Trained, scale: Scale) -> JSON:
    """Milliseconds of slim networks against their macs (`benchmarks.latency`), batch 1, one thread."""
    model = trained.run.model
    options = Namespace(points=4 if scale.name == "smoke" else 16, rounds=scale.rounds, seconds=0.02 * scale.rounds)
    quiet = redirect_stdout(io.StringIO())  # it speaks to whoever calls it from the command line
    with tempfile.TemporaryDirectory() as folder, quiet:
        fits = {runtime: timing.fit(model, 1, runtime, Path(folder), options) for runtime in timing.RUNTIMES}
    return {"n": options.points, "split": "noise", "fits": fits}


@torch.no_grad()
def pictures(trained: Trained, scale: Scale) -> JSON:
    """One held-out scene, labelled at several budgets by one set of weights: every exit, or some of them.

    Labels only: the photographs of a data set are not ours to pass on.
    """
    run, about = trained.run, trained.run.preprocessing
    costs, numbers = CostTable.of(run.model.config), run.model.config.exit_numbers
    scene = run.images.scenes(1)[0]
    x = run.images.prepared.prepare(torch.from_numpy(scene.image.copy()).permute(2, 0, 1)[None]).float()
    panels, rows = [], []
    for exit in sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]}):
        point = cutting_order(run.model, exit)[0]
        model = reestimated(run.model, run.images.statistics(), point)
        logits = F.interpolate(model(x, point).float(), scene.mask.shape, mode="bilinear", align_corners=False)
        macs = costs.point(point).macs
        panels.append(Panel(logits.argmax(1)[0].byte().numpy(), caption(point.name, macs, None)))
        rows.append({"point": point.name, "macs": macs})
    for row, panel in zip(rows, panels, strict=True):
        row["agrees"] = float((panel.labels == panels[-1].labels).mean())
    png = base64.b64encode(to_png(strip(None, panels, about.classes, about.palette))).decode()
    return {"n": 1, "split": "held out", "points": rows, "png": png}


def peer(trained: Trained, scale: Scale) -> JSON:
    """What the trainer of a peer found: exits, or widths, on held-out and test images."""
    results = trained.peer
    metric = results["metric"]
    rows = []
    for row in results["exits"]:
        test = row["test"]
        quality = {
            "held_out": row["validation"][metric],
            "test": test[metric],
            "low": test["low"],
            "high": test["high"],
        }
        rows.append({"exit": row["exit"], "macs": row["macs"], **quality})
    n = results["exits"][0]["test"]["n"]
    held = results["exits"][0]["validation"]["n"]
    about = {"metric": metric, "n": n, "held_out_n": held, "split": "test", "params": results["params"]}
    return {**about, "points": rows}


def structure(trained: Trained, scale: Scale) -> JSON:
    """Counted, not trained: networks of the full graph, shared parameters, and the macs of one pass."""
    graphs = []
    for depth in range(1, 11):
        dag = full_dag(depth)
        graphs.append(
            {"T": depth, "networks": Chain(dag, initial_logits(dag, "half")).count(), "functions": len(dag.edges)}
        )
    plan = model_plan("cnmm_b6s3")
    dense = model_plan("cnmm_b6s3", mixing="sum")
    costs = CostTable.of(plan.config)
    counted = {
        "networks": num_networks(plan),
        "params": costs.exit().params,
        "macs": costs.exit().macs,
        "dense_macs": CostTable.of(dense.config).exit().macs,
        "dense_params": CostTable.of(dense.config).exit().params,
    }
    return {"n": len(graphs), "split": "counted", "graphs": graphs, "model": counted}


KINDS: dict[str, Callable[[Trained, Scale], JSON]] = {
    "curves": curves,
    "frontier": frontier,
    "orders": orders,
    "monte_carlo": monte_carlo,
    "early_exit": early_exit,
    "uncertainty": measure_uncertainty,
    "wall_time": wall_time,
    "pictures": pictures,
    "peer": peer,
    "structure": structure,
}
VERSIONS = dict.fromkeys(KINDS, 1) | {"curves": 2, "pictures": 2}
"""Raised where a kind measures something else than before: what was measured is then stale."""
FREE = ("frontier", "peer", "structure")
"""Kinds that only read what is there."""
