"""The verbs around budgets: `frontier` measures operating points, `choose` picks one of them without torch."""

from __future__ import annotations

import csv
import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm._files import write_atomically
from cnmm.budget import parse_budget
from cnmm.cli.terminal import NO_HINT, Bar, Common, print_table, say
from cnmm.draw import check_suffix, require_matplotlib, save_picture
from cnmm.evaluation.plot import plot_frontier
from cnmm.frontier import FRONTIER_FILE, LADDER_FILE, Frontier, FrontierPoint, find_frontier
from cnmm.runtime import latency
from cnmm.zoo import require_torch

if TYPE_CHECKING:
    import numpy as np

    from cnmm.data import Split
    from cnmm.evaluation.measure import Progress
    from cnmm.run import Run

CHOSEN_ON_TEST = "test (chosen on test)"
"""The split of a run that held no images out."""


@dataclass(frozen=True, kw_only=True)
class MeasureFrontier:
    """Measure the operating points of a run and keep the best for every budget."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """A run folder; the frontier is written there: frontier.json, .csv, .svg, .png, statistics.safetensors."""
    data: Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")] = None
    """Where the images are."""
    rule: Annotated[Literal["flow", "flow_per_mac", "both"], arg(help_behavior_hint="(default: both)")] = "both"
    """Which edge is cut next: of least flow, of least flow per mac that it saves, or both orders."""
    images: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all that were held out)")] = None
    """Measure on this many of the held-out images."""
    points: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all, of a large mixture 96)")] = None
    """Measure at most this many points, from coarse to fine."""
    test: Annotated[bool, NO_HINT] = False
    """Add test figures to the chosen points."""
    plot: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: in the run folder only)")] = None
    """Another picture to write: .svg or .png."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        require_matplotlib()
        if self.plot is not None:
            check_suffix(self.plot)
        from cnmm.run import Run
        from cnmm.training.loop import keep_freed_memory

        keep_freed_memory()
        with MeasuringBar() as bar:
            frontier = measure_run(
                Run(self.run, data=self.data),
                bar,
                rule=self.rule,
                num_images=self.images,
                num_points=self.points,
                test=self.test,
            )
        files = write_frontier(self.run, frontier)
        if self.plot is not None:
            save_picture(plot_frontier(frontier, latency_of(self.run)), self.plot)
            files.append(str(self.plot))
        return {"run": str(self.run), **frontier.to_dict(), "files": files}

    def show(self, answer: dict[str, Any]) -> None:
        frontier = Frontier.from_dict(answer)
        show_envelope(frontier)
        first, num = frontier.points[0], len(frontier.points)
        say(f"{num} points measured on {first.n:,} {first.split} images, {first.statistics} statistics")
        if frontier.cascade:
            say(f"cascade {frontier.cascade.point}: {len(frontier.cascade.exits)} exits")
        say(f"written: {', '.join(answer['files'])}")


@dataclass(frozen=True, kw_only=True)
class Choose:
    """Choose the best measured point within a budget."""

    folder: Annotated[Positional[Path], arg(metavar="RUN|LADDER", help_behavior_hint="")]
    """A run folder with its frontier, or a ladder folder."""
    budget: Annotated[str, arg(metavar="BUDGET", help_behavior_hint="")]
    """60M (macs), 25ms (p95 measured here), 40% (of the full mixture), acc:0.92 (the cheapest that good)."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        wanted = parse_budget(self.budget)
        frontier = find_frontier(self.folder)
        times = latency_of(self.folder, needed=wanted.kind == "ms")
        point = frontier.choose(wanted, times)
        about = {"budget": wanted.text, "model": frontier.model, "latency_ms": times.get(point.point)}
        return {**dataclasses.asdict(point), **about}

    def show(self, answer: dict[str, Any]) -> None:
        time = "" if answer["latency_ms"] is None else f"{answer['latency_ms']:.3g}"
        row = (answer["point"], f"{answer['macs']:,}", f"{answer['params']:,}", time, f"{100 * answer['accuracy']:.2f}")
        print_table(("point", "macs", "params", "p95 ms", "accuracy %"), [row], left=("point",))


def latency_of(folder: Path, *, needed: bool = False) -> dict[str, float]:
    """p95 milliseconds by point, as measured on this machine; if nothing is needed, nothing has to be there."""
    precision = "float32"
    if (folder / LADDER_FILE).is_file():
        from cnmm.ladder import read_ladder

        precision = read_ladder(folder).precision
    try:
        return latency.p95(folder, precision=precision)
    except ValueError:
        if needed:
            raise
        return {}


def measure_run(
    run: Run, bar: MeasuringBar, *, rule: str, num_images: int | None, num_points: int | None, test: bool
) -> Frontier:
    """The frontier of a run on the images that it held out, and its cascade."""
    from cnmm.evaluation.batches import Reread
    from cnmm.evaluation.measure import measure
    from cnmm.training.loop import EVALUATION_BATCH, STATISTICS_IMAGES

    split, part, chosen = measured_images(run, num_images, test)
    kept = run.parts[0]
    training, images = run.data.train, run.images
    num_batches = -(-min(STATISTICS_IMAGES, len(kept)) // EVALUATION_BATCH)
    statistics = Reread(lambda: images.statistics_batches(training, kept), num_batches)
    return measure(
        run.model,
        batches(run, part, chosen),
        statistics=statistics,
        test=batches(run, run.data.test) if test and run.data.test is not None else None,
        rule=rule,  # type: ignore[arg-type]  # the parser allows no other
        num_points=num_points,
        split=split,
        on_progress=bar.update,
    )


def measured_images(run: Run, num: int | None, test: bool) -> tuple[str, Split, np.ndarray]:
    """The name of the split, its images, and which of them."""
    import numpy as np

    from cnmm.data import hold_out

    if num is not None and num < 1:
        raise UserError(f"--images {num}: at least 1 is needed")
    if test and run.data.test is None:
        raise UserError(f"--test: {run.spec} has no test images; leave --test out")
    split, part, chosen = "validation", run.data.train, run.parts[1]
    if not len(chosen):
        if run.data.test is None:
            raise UserError(f"{run.folder} held no images out (--val 0), and {run.spec} has no test images")
        split, part, chosen = CHOSEN_ON_TEST, run.data.test, np.arange(len(run.data.test))
        say("this run held no images out: points are measured and chosen on test images, and say so")
    if num is not None and num < len(chosen):  # the same share of every class
        chosen = chosen[hold_out(part.labels[chosen], num, run.config.seed)[1]]
    return split, part, chosen


def batches(run: Run, part: Split, chosen: np.ndarray | None = None) -> Any:
    """Batches of images and labels, read anew each time."""
    import numpy as np

    from cnmm.evaluation.batches import Reread
    from cnmm.training.loop import EVALUATION_BATCH

    indices = np.arange(len(part)) if chosen is None else chosen
    return Reread(lambda: run.images.batches(part, indices), -(-len(indices) // EVALUATION_BATCH))


def write_frontier(folder: Path, frontier: Frontier) -> list[str]:
    """Writes all about a frontier into a run folder; frontier.json last, as it speaks of what must be there."""
    from cnmm.evaluation.statistics import save_statistics

    figure = plot_frontier(frontier, latency_of(folder))
    save_statistics(folder, frontier.buffers)
    files = [folder / FRONTIER_FILE, *(folder / f"frontier{suffix}" for suffix in (".csv", ".svg", ".png"))]
    write_atomically(files[1], to_csv(frontier).encode())
    save_picture(figure, files[2])
    save_picture(figure, files[3])
    frontier.save(files[0])
    return [str(file) for file in files]


def to_csv(frontier: Frontier) -> str:
    """One line per measured point, cheapest first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(FrontierPoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(point) for point in frontier.points)
    return text.getvalue()


def show_envelope(frontier: Frontier) -> None:
    """The envelope as a table."""
    envelope = frontier.envelope()
    tested = any(point.test_accuracy is not None for point in envelope)
    rows = []
    for point in envelope:
        row = [point.point, f"{point.macs:,}", f"{point.macs / frontier.full_macs:.1%}", f"{point.params:,}"]
        row += [percent(point.accuracy), f"{percent(point.low)} - {percent(point.high)}", percent(point.raw_accuracy)]
        rows.append(row + ([percent(point.test_accuracy)] if tested else []))
    columns = ("point", "macs", "of full", "params", "accuracy %", "95 % interval", "raw %")
    print_table((*columns, "test %") if tested else columns, rows, left=("point",))


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


class MeasuringBar(Bar):
    """Progress on stderr, with the time left."""

    def update(self, progress: Progress) -> None:
        self.show(f"{progress.num_points} points", progress.done, progress.left_s)
