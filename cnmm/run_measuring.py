"""The frontier of a run folder: measured so that a killed measurement goes on, and replaced in one step.

`frontier.json` names the files that it belongs to, with their checksums. Statistics have a name of their own for every
measurement, so writing `frontier.json` is the moment at which a new measurement takes the place of the old one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import cnmm
from cnmm._files import checksum, sweep, write_atomically
from cnmm._lock import locked
from cnmm._progress import Clock
from cnmm.draw import save_picture
from cnmm.evaluation.damage import damage_passes, measure_orders
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.measure import USUAL, Progress, expected_passes, measure
from cnmm.evaluation.plot import plot_frontier
from cnmm.evaluation.search import Rules
from cnmm.evaluation.statistics import load_statistics, statistics_bytes
from cnmm.export.written import with_written_costs
from cnmm.frontier import FRONTIER_FILE, Frontier, load_frontier
from cnmm.mixture import Mixture
from cnmm.orders import ORDERS_FILE, save_orders
from cnmm.run_folder import CHECKPOINTS, WEIGHTS_FILE
from cnmm.run_images import CHOSEN_ON_TEST, RunImages

KEPT = "frontier"
"""Folder among the checkpoints for what was measured so far."""
_STATISTICS = "statistics"
WRITING_S = 1.0
"""About how long counting what would be written, drawing and writing take."""

logger = logging.getLogger("cnmm")


def read_frontier(folder: Path) -> Frontier:
    """The frontier of a run, with the statistics of the best of its points."""
    frontier = load_frontier(folder)
    name = next((name for name in frontier.checksums if name.startswith(_STATISTICS)), None)
    if name is None and not frontier.checksums:  # measured before statistics had names of their own
        name = f"{_STATISTICS}.safetensors"
    if name is None or not (folder / name).is_file():
        return frontier
    return replace(frontier, buffers=load_statistics(folder / name))


def measure_frontier(
    folder: Path,
    model: Mixture,
    images: RunImages,
    *,
    rule: Rules,
    num_images: int | None,
    num_points: int | None,
    test: bool,
    metric: str | None,
    raw: bool,
    latency: Mapping[str, float],
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> Frontier:
    """Measures the frontier of a run, or goes on doing so, and writes it. See `Run.measure`."""
    split, part, chosen = images.measured(num_images)
    if split == CHOSEN_ON_TEST:
        logger.warning("this run held no images out: points are chosen on test images, and labelled so")
    clock = Clock(USUAL)
    with locked(folder, "cnmm frontier"):
        sweep(folder)
        place, weights = folder / CHECKPOINTS / KEPT, checksum(folder / WEIGHTS_FILE)
        about = [cnmm.__version__, weights, images.identity()]
        if rule in ("damage", "all") and model.orders is None and model.config.mixing == "gates":
            logger.info("measuring which cuts do the least damage, on training images")
            kept, batch = Kept(place, of=[*about, "orders"], should_stop=should_stop), images.damage()
            following = len(chosen) + (0 if raw else images.statistics().num_images)
            report = _reporting_damage(clock, model, len(batch), following, on_progress)
            model.orders = measure_orders(model, batch, kept, report)
            save_orders(folder, model.orders)
        shown = hashlib.sha256(chosen.tobytes()).hexdigest()
        options = [rule, shown, split, num_points, test, metric, raw, sorted((model.orders or {}).items())]
        kept = Kept(place, of=[*about, options], should_stop=should_stop)
        frontier = measure(
            model,
            images.batches(part, chosen),
            statistics=None if raw else images.statistics(),
            test=images.batches(*images.split("test")) if test else None,
            rule=rule,
            num_points=num_points,
            metric=metric,
            split=split,
            kept=kept,
            clock=clock,
            on_progress=lambda progress: on_progress(replace(progress, left_s=progress.left_s + WRITING_S)),
        )
        frontier = _write(folder, with_written_costs(model, frontier), weights, latency)
        kept.clear()
    return frontier


def _reporting_damage(
    clock: Clock, model: Mixture, num: int, following: int, on_progress: Callable[[Progress], None]
) -> Callable[[float], None]:
    """For `measure_orders` on `num` images, before points are measured on `following` images."""
    passes, before = num * damage_passes(model.config), 0.0
    clock.plan("damage", passes)
    clock.plan("statistics", expected_passes(model) * following)
    clock.skip()

    def report(done: float) -> None:
        nonlocal before
        clock.tick("damage", passes * (done - before))
        before = done
        left_s, what = clock.left_s or 0.0, "measuring which cuts do the least damage"
        on_progress(Progress(done=clock.done, left_s=left_s, num_points=0, what=what))

    return report


def _write(folder: Path, frontier: Frontier, weights: str, latency: Mapping[str, float]) -> Frontier:
    """Everything about a frontier. Up to `frontier.json` the old measurement is in place, then the new one."""
    checksums = {WEIGHTS_FILE: weights}
    if (folder / ORDERS_FILE).is_file():
        checksums[ORDERS_FILE] = checksum(folder / ORDERS_FILE)
    if frontier.buffers:
        data = statistics_bytes(frontier.buffers)
        digest = hashlib.sha256(data).hexdigest()
        name = f"{_STATISTICS}-{digest[:12]}.safetensors"
        write_atomically(folder / name, data)
        checksums[name] = digest
    frontier = replace(frontier, checksums=checksums)
    figure = plot_frontier(frontier, latency)
    frontier.save(folder / FRONTIER_FILE)
    write_atomically(folder / "frontier.csv", frontier.to_csv().encode())
    for suffix in (".svg", ".png"):
        save_picture(figure, folder / f"frontier{suffix}")
    for old in folder.glob(f"{_STATISTICS}*.safetensors"):
        if old.name not in checksums:
            old.unlink(missing_ok=True)
    return frontier
