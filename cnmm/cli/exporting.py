"""The verbs that make something of a run for others: `slim`, `export` and `report`. Torch is imported when they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm.cli.terminal import NO_HINT, Bar, Common, cells, percent, point_row, print_table, say
from cnmm.frontier import metric_words
from cnmm.plan import require_torch

COSTS = ("macs", "params", "mixture_macs", "mixture_params")
"""Of a written network, and of the mixture at the same point."""
COST_WORDS = ("macs", "params", "mixture's macs", "mixture's params")
RunFolder = Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
BudgetText = Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint="(default: nothing cut)")]
PointName = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Overwrite = Annotated[bool, NO_HINT]
DataPlace = Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")]


@dataclass(frozen=True, kw_only=True)
class Slim:
    """Write an operating point as a plain network: no gates, no batch normalisation, nothing dead."""

    run: RunFolder
    """A run folder."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="DIR")]
    """The folder to write: config.json and model.safetensors."""
    budget: BudgetText = None
    """60M, 40%, 25ms or acc:0.92: the best measured point within it."""
    point: PointName = None
    """An operating point such as e5c37, instead of a budget."""
    data: DataPlace = None
    """Where the images are, in case the point's statistics must be re-estimated."""
    overwrite: Overwrite = False
    """Replace the slim network in --out."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.export.slim import costs
        from cnmm.run import Run

        with Bar() as bar:
            network = Run(self.run, data=self.data, on_wait=bar.wait).slim(
                budget=self.budget, point=self.point, out=self.out, overwrite=self.overwrite
            )
        size = (self.out / "model.safetensors").stat().st_size
        return {"folder": str(self.out), "point": network.point.name, **costs(network), "bytes": size}

    def show(self, answer: dict[str, Any]) -> None:
        show_network(answer, "bytes")
        say(f"written: {answer['folder']} (cnmm.load_slim reads it)")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write an operating point as one ONNX file, or a ladder folder of several points and a cascade."""

    run: RunFolder
    """A run folder."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="FILE|DIR")]
    """The file to write (.onnx), or with --ladder the folder."""
    budget: BudgetText = None
    """60M, 40%, 25ms or acc:0.92: the best measured point within it."""
    point: PointName = None
    """An operating point such as e5c37, instead of a budget."""
    ladder: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one file)")] = None
    """Write a ladder: N points of the frontier, and the cascade."""
    precision: Annotated[Literal["float32", "int8"], NO_HINT] = "float32"
    """float32, or int8: 8-bit weights and activations, calibrated on training images."""
    any_size: Annotated[bool, NO_HINT] = False
    """Networks for images of any height and width, instead of the model's own. For segmentation."""
    data: DataPlace = None
    """Where the images are: int8 needs them, and so does a point whose statistics are not stored."""
    overwrite: Overwrite = False
    """Replace the file or ladder in --out."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        if self.ladder is not None and (self.budget or self.point):
            raise UserError("--ladder takes its points from the frontier; remove --budget and --point")
        require_torch()
        return self._file() if self.ladder is None else self._ladder(self.ladder)

    def _file(self) -> dict[str, Any]:
        from cnmm.run import Run

        with Bar() as bar:
            made = Run(self.run, data=self.data, on_wait=bar.wait).export(
                self.out,
                budget=self.budget,
                point=self.point,
                precision=self.precision,
                any_size=self.any_size,
                overwrite=self.overwrite,
            )
        names = ("point", *COSTS, "precision")
        answer = {"file": str(made.file), **{name: getattr(made, name) for name in names}, "bytes": made.num_bytes}
        if made.quality and made.float32_quality:
            metric, before = made.quality.metric, made.float32_quality.value
            answer |= {"metric": metric, "quality": made.quality.value, metric: made.quality.value}
            answer |= {"float32_quality": before, "n": made.quality.n, "split": "validation"}
        return answer

    def _ladder(self, num: int) -> dict[str, Any]:
        from cnmm.run import Run

        with Bar() as bar:
            ladder = Run(self.run, data=self.data, on_wait=bar.wait).export_ladder(
                self.out,
                num,
                overwrite=self.overwrite,
                precision=self.precision,
                any_size=self.any_size,
                on_progress=lambda done, total: bar.show("exporting", done / total, more=f"{done} of {total}"),
            )
        points = [point_row(point) for point in ladder.frontier.points]
        size = sum(file.stat().st_size for file in self.out.iterdir())
        about = {"precision": self.precision, "metric": ladder.frontier.metric, "stages": len(ladder.stages)}
        return {"folder": str(self.out), **about, "points": points, "bytes": size}

    def show(self, answer: dict[str, Any]) -> None:
        if "points" in answer:
            self._show_ladder(answer)
            return
        show_network(answer, "precision", "bytes")
        if "quality" in answer:
            before, after = percent(answer["float32_quality"]), percent(answer["quality"])
            words = f"{before} % in float32, {after} % in int8, {answer['n']:,} held-out images"
            say(f"{metric_words(answer['metric'])}: {words}")
        say(f"written: {answer['file']}")

    def _show_ladder(self, answer: dict[str, Any]) -> None:
        points, words = answer["points"], f"{metric_words(answer['metric'])} %"
        shown = {"quality": words}
        if any(row["float32_quality"] is not None for row in points):
            shown = {"float32_quality": f"float32 {words}", "quality": f"int8 {words}"}
        rows = [(*cells(row, "name", *COSTS), *(percent(row[name]) for name in shown)) for row in points]
        print_table(("point", *COST_WORDS, *shown.values()), rows)
        number = "1 point" if len(rows) == 1 else f"{len(rows)} points"
        if self.ladder is not None and len(rows) < self.ladder:
            say(f"{number}, not {self.ladder}: no other measured point is better than every cheaper one")
        say("macs and params are those of the files, and budgets go by them; the run counts the mixture's")
        size = f"{number} and a cascade of {answer['stages']} stages, {answer['bytes']:,} bytes"
        say(f"written: {answer['folder']}: {size}; try: cnmm predict {answer['folder']} IMAGE --budget 40%")


def show_network(answer: dict[str, Any], *more: str) -> None:
    """A written network as a table of one row."""
    print_table(("point", *COST_WORDS, *more), [cells(answer, "point", *COSTS, *more)])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about a run: frontier, exits, lattice drawings, examples."""

    run: RunFolder
    """A run folder whose frontier is measured."""
    out: Annotated[
        Path | None, arg(aliases=["-o"], metavar="FILE", help_behavior_hint="(default: RUN/report.html)")
    ] = None
    """The page to write."""
    data: DataPlace = None
    """Where the images of the examples are."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.run import Run

        with Bar() as bar:
            path = Run(self.run, data=self.data, on_wait=bar.wait).report(self.out)
        return {"file": str(path), "bytes": path.stat().st_size}

    def show(self, answer: dict[str, Any]) -> None:
        print_table(("file", "bytes"), [cells(answer, "file", "bytes")], left=("file",))
