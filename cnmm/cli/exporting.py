"""The verbs that make something of a run for others: `slim`, `export` and `report`. Torch is imported when they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm.cli.terminal import NO_HINT, Bar, Common, print_table, say
from cnmm.zoo import require_torch

if TYPE_CHECKING:
    from cnmm.run import Run

RunFolder = Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
BudgetText = Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint="(default: nothing cut)")]
PointName = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
DataPlace = Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")]
CALIBRATION_IMAGES = 512
"""Training images from which int8 learns the range of every tensor."""


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
    """Where the images are, should the point's statistics be estimated anew."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        run = open_run(self.run, self.data)
        from cnmm._files import written_aside
        from cnmm.export.slim import save_slim, slim

        point = run.find(budget=self.budget, point=self.point)
        network = slim(run.settled(point), point)
        about = run.preprocessing
        with written_aside(self.out) as aside:
            save_slim(network, aside, preprocessing={"classes": about.classes, **about.to_dict()})
        size = (self.out / "model.safetensors").stat().st_size
        return {"folder": str(self.out), "point": point.name, **vars_of(network.cost), "bytes": size}

    def show(self, answer: dict[str, Any]) -> None:
        print_table(("point", "macs", "params", "bytes"), [cells(answer, "point", "macs", "params", "bytes")])
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
    """Write a ladder of N points of the frontier, and its cascade."""
    precision: Annotated[Literal["float32", "int8"], NO_HINT] = "float32"
    """float32, or int8: weights and activations of 8 bits, calibrated on training images."""
    data: DataPlace = None
    """Where the images are: int8 needs them, and so does a point whose statistics are not stored."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        if self.ladder is not None and (self.budget or self.point):
            raise UserError("--ladder takes its points from the frontier; leave --budget and --point out")
        if self.ladder is None and self.out.suffix != ".onnx":
            raise UserError(f"{self.out}: one network goes into a file that ends in .onnx; a folder needs --ladder 8")
        run = open_run(self.run, self.data)
        return self._one(run) if self.ladder is None else self._ladder(run, self.ladder)

    def _one(self, run: Run) -> dict[str, Any]:
        from cnmm._files import write_atomically
        from cnmm.export.ladder import accuracy_of, check_new_file, onnx_bytes
        from cnmm.export.slim import slim

        check_new_file(self.out)
        point = run.find(budget=self.budget, point=self.point)
        network = slim(run.settled(point), point)
        plain = onnx_bytes(network, run.preprocessing)
        answer: dict[str, Any] = {"file": str(self.out), "point": point.name, **vars_of(network.cost)}
        data = plain
        if self.precision == "int8":
            say("calibrating int8 on training images, then measuring it on held-out ones")
            calibration = run.training(CALIBRATION_IMAGES)
            data = onnx_bytes(network, run.preprocessing, precision="int8", calibration=calibration)
            held_out = run.held_out()
            before, after = (accuracy_of(file, batched(*held_out)) for file in (plain, data))
            answer |= {"float32_accuracy": before, "accuracy": after, "n": len(held_out[1]), "split": "validation"}
        write_atomically(self.out, data)
        return {**answer, "precision": self.precision, "bytes": len(data)}

    def _ladder(self, run: Run, num: int) -> dict[str, Any]:
        from cnmm.export.ladder import export_ladder
        from cnmm.ladder import read_ladder

        images = run.training(CALIBRATION_IMAGES) if self.precision == "int8" else None
        validation = run.held_out() if self.precision == "int8" else None
        with Bar() as bar:
            export_ladder(
                run.model,
                run.frontier,
                self.out,
                num,
                about=run.preprocessing,
                precision=self.precision,
                calibration=images,
                validation=None if validation is None else lambda: batched(*validation),
                on_progress=lambda done, total: bar.show("exporting", done / total, more=f"{done} of {total}"),
            )
        ladder = read_ladder(self.out)
        points = [
            {"point": point.point, "macs": point.macs, "params": point.params, "accuracy": point.accuracy}
            for point in ladder.frontier.points
        ]
        stages = len(ladder.cascade.stages) if ladder.cascade else 0
        size = sum(file.stat().st_size for file in self.out.iterdir())
        return {"folder": str(self.out), "precision": self.precision, "points": points, "stages": stages, "bytes": size}

    def show(self, answer: dict[str, Any]) -> None:
        if "points" in answer:
            columns, found = ("point", "macs", "params"), answer["points"]
            rows = [(*cells(row, *columns), f"{100 * row['accuracy']:.2f}") for row in found]
            print_table((*columns, "accuracy %"), rows)
            words = f"{len(rows)} points and a cascade of {answer['stages']} stages, {answer['bytes']:,} bytes"
            say(f"written: {answer['folder']}: {words}; try: cnmm predict {answer['folder']} IMAGE --budget 40%")
            return
        names = ("point", "macs", "params", "precision", "bytes")
        print_table(names, [cells(answer, *names)])
        if "accuracy" in answer:
            before, after = 100 * answer["float32_accuracy"], 100 * answer["accuracy"]
            say(f"accuracy: {before:.2f} % in float32, {after:.2f} % in int8, {answer['n']:,} held-out images")
        say(f"written: {answer['file']}")


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
        run = open_run(self.run, self.data)
        from cnmm._files import write_atomically
        from cnmm.evaluation.report import report

        path = self.out or self.run / "report.html"
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it first")
        page = report(run, on_problem=say).encode()
        write_atomically(path, page)
        return {"file": str(path), "bytes": len(page)}

    def show(self, answer: dict[str, Any]) -> None:
        print_table(("file", "bytes"), [cells(answer, "file", "bytes")], left=("file",))


def open_run(folder: Path, data: str | None) -> Run:
    require_torch()
    from cnmm.run import Run

    return Run(folder, data=data)


def vars_of(cost: Any) -> dict[str, int]:
    return {"macs": cost.macs, "params": cost.params}


def cells(row: dict[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in names)


def batched(images: Any, labels: Any, size: int = 100) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(labels), size):
        yield images[start : start + size], labels[start : start + size]
