"""The verbs around budgets: `frontier` measures operating points, `choose` picks one of them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm.budget import parse_budget
from cnmm.cli.signals import stopping
from cnmm.cli.terminal import NO_HINT, Bar, Common, cells, percent, point_row, print_table, say
from cnmm.frontier import FRONTIER_FILE, Frontier, find_frontier, metric_words
from cnmm.pretrained import resolve
from cnmm.runtime.latency import RuntimeName, measured_p95

if TYPE_CHECKING:
    from cnmm.evaluation.measure import Progress

COUNTS = {
    "written": "macs and params are the mixture's, as in the paper; what `export` writes costs the written ones",
    "mixture": "macs and params are those of the ladder's files; the mixture's are what its run counts",
}
"""What the figures of a point are, by the name of the other count beside them."""
RuleName = Literal["flow", "flow_per_mac", "damage", "both", "all"]
MetricName = Literal["accuracy", "mean_class_accuracy", "miou", "pixel_accuracy"]


@dataclass(frozen=True, kw_only=True)
class MeasureFrontier:
    """Measure the operating points of a run and keep the best for every budget."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """A run folder; the frontier is written there: frontier.json, .csv, .svg, .png, orders.json and more."""
    data: Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")] = None
    """Where the images are."""
    rule: Annotated[RuleName, arg(help_behavior_hint="(default: all)")] = "all"
    """Cutting rule: least flow, least flow per mac saved, least measured damage per mac saved; both by flow, or all."""
    images: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all held-out images)")] = None
    """Measure on this many of the held-out images."""
    points: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all; 96 for a large mixture)")] = None
    """Measure at most N points, coarse to fine."""
    metric: Annotated[MetricName | None, arg(help_behavior_hint="(default: accuracy, or mIoU of pixels)")] = None
    """What quality means, for the frontier and for early exit; mean_class_accuracy is the paper's."""
    statistics: Annotated[Literal["re-estimated", "raw"], arg(help_behavior_hint="(default: re-estimated)")] = (
        "re-estimated"
    )
    """Batch statistics: re-estimated at every point, or raw, the run's own at every point as in the paper."""
    test: Annotated[bool, NO_HINT] = False
    """Also report test accuracy for the chosen points."""
    plot: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: only in the run folder)")] = None
    """Also write the plot to this file: .svg or .png."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        from cnmm.cli.loading import open_run

        with MeasuringBar() as bar, stopping("the same command goes on from there") as should_stop:
            run = open_run(self.run, self.data, picture=self.plot, on_wait=bar.wait)
            frontier = run.measure(
                rule=self.rule,
                images=self.images,
                points=self.points,
                metric=self.metric,
                statistics=self.statistics,
                test=self.test,
                on_progress=bar.update,
                should_stop=should_stop,
            )
        if self.plot is not None:
            run.plot(self.plot)
        files = [run.folder / FRONTIER_FILE, *(run.folder / f"frontier{end}" for end in (".csv", ".svg", ".png"))]
        files += [self.plot] if self.plot else []
        points = [point_row(point) for point in frontier.points]
        return {"run": str(self.run), **frontier.to_dict(), "points": points, "files": [str(file) for file in files]}

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
    """60M (macs), 25ms (p95 measured here), 40% (of the full mixture), acc:0.92 (at least that accurate)."""
    runtime: Annotated[RuntimeName, NO_HINT] = "onnx"
    """Inference engine whose milliseconds count, as for predict."""
    threads: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all usable cores)")] = None
    """Number of threads that they were measured with, as for predict."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        wanted = parse_budget(self.budget)
        folder = resolve(self.folder, ladder=True)
        frontier = find_frontier(folder)
        times = measured_p95(folder, runtime=self.runtime, threads=self.threads, needed=wanted.kind == "ms")
        point = frontier.choose(wanted, times)
        about = {"budget": wanted.text, "model": frontier.model, "latency_ms": times.get(point.name)}
        return point_row(point) | about

    def show(self, answer: dict[str, Any]) -> None:
        time = "" if answer["latency_ms"] is None else f"{answer['latency_ms']:.3g}"
        other = "mixture" if answer["mixture_macs"] is not None else "written"
        row = (*cells(answer, "name", "macs", "params", f"{other}_macs", f"{other}_params"), time)
        columns = ("point", "macs", "params", f"{other} macs", f"{other} params", "p95 ms")
        quality = f"{metric_words(answer['metric'])} %"
        print_table((*columns, quality), [(*row, percent(answer["quality"]))], left=("point",))
        say(COUNTS[other])


def show_envelope(frontier: Frontier) -> None:
    """The envelope as a table."""
    envelope = frontier.envelope()
    tested = any(point.test_quality is not None for point in envelope)
    written = all(point.written_macs is not None for point in envelope)
    rows = []
    for point in envelope:
        row = [point.name, f"{point.macs:,}", f"{point.macs / frontier.full_macs:.1%}", f"{point.params:,}"]
        row += [f"{point.written_macs:,}"] if written else []
        row += [percent(point.quality), f"{percent(point.low)} - {percent(point.high)}", percent(point.raw_quality)]
        rows.append(row + ([percent(point.test_quality)] if tested else []))
    quality = f"{metric_words(frontier.metric)} %"
    columns = ["point", "macs", "of full", "params", *(["written macs"] if written else [])]
    columns += [quality, "95 % interval", "raw %", *(["test %"] if tested else [])]
    print_table(columns, rows, left=("point",))


class MeasuringBar(Bar):
    """Progress on stderr, with the time left."""

    def update(self, progress: Progress) -> None:
        points = f", {progress.num_points} points" if progress.num_points else ""
        self.show(f"{progress.what}{points}", progress.done, progress.left_s)
