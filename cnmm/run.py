"""A run folder and everything that is done with it: what the verbs of the command line do, in Python.

run = cnmm.train(data="cifar10:DIR", out="runs/a")
run.measure()  # operating points; the best for every budget
run.choose("40%")
run.export_ladder("ladder/", points=8)
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from cnmm._errors import UserError
from cnmm._files import inside, scratch_folder, write_atomically, written_aside
from cnmm._progress import Clock, OnWait, no_wait
from cnmm.budget import Budget, parse_budget
from cnmm.config import Device, Preprocessing
from cnmm.cost import CostTable
from cnmm.distributed import pick_device
from cnmm.draw import save_picture
from cnmm.evaluation.batches import num_images
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.measure import Progress as MeasuringProgress
from cnmm.evaluation.plot import plot_frontier
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.report import NUM_EXAMPLES, Examples, PixelExamples, report_page, shown_points
from cnmm.evaluation.search import Rules
from cnmm.evaluation.statistics import reestimated, with_statistics
from cnmm.evaluation.strips import NUM_STRIPS, scene_strip
from cnmm.export.ladder import export_ladder
from cnmm.export.network import ExportPrecision, Validation
from cnmm.export.slim import SlimNetwork, save_slim, slim
from cnmm.frontier import FRONTIER_FILE, RAW, RE_ESTIMATED, Frontier, FrontierPoint
from cnmm.ladder import Ladder, read_ladder
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.pretrained import resolve
from cnmm.prune import named_point
from cnmm.run_exporting import CALIBRATION_IMAGES, CHECKED_IMAGES, Exported, check_path, checking, write_network
from cnmm.run_folder import CONFIG_FILE, is_run, is_slim, load, load_preprocessing, read_config
from cnmm.run_images import RunImages
from cnmm.run_measuring import measure_frontier, read_frontier
from cnmm.runtime.latency import RuntimeName, measured_p95
from cnmm.runtime.session import Session
from cnmm.training.batches import start_workers
from cnmm.training.card import card
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import recipe
from cnmm.training.scene_batches import make_images
from cnmm.training.seeds import seeded

_USUAL = {"statistics": 1.5, "evaluation": 1.2}
"""How long an image takes, relative to one another."""
_LADDER_POINTS = 16
"""Of a ladder that is made for use at once."""

logger = logging.getLogger("cnmm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `Run.evaluate` measured."""

    point: OperatingPoint
    macs: int
    """For one image; of a Monte-Carlo estimate, of all its samples."""
    split: str
    statistics: str
    exits: dict[int, Quality]
    """Of every exit that the point reaches."""
    exit_macs: dict[int, int | None]
    """Of an exit with nothing cut; None where it has no cost of its own."""
    classes: tuple[str, ...] = ()

    @property
    def quality(self) -> Quality:
        """Of the last exit."""
        return self.exits[max(self.exits)]


class Run:
    """A run folder. Its parts are read when they are first asked for."""

    def __init__(self, folder: str | Path, *, data: str | None = None, on_wait: OnWait = no_wait) -> None:
        """`folder`: or the name of a trained model. `data`: where the images are now, if not where the run says.

        `on_wait` is told what takes a while, such as reading images, how far it is, and how long it will take.
        """
        self.folder = resolve(folder)
        if not is_run(folder):
            raise UserError(f"{folder}: not a run folder; make one with: cnmm train --out {folder} ...")
        self.about: dict[str, Any] = read_config(folder)
        self.evaluation: Evaluation | None = None
        """What a training has measured at its end."""
        self._data, self._on_wait = data, on_wait

    # What it has

    @cached_property
    def model(self) -> Mixture:
        return load(self.folder)

    @cached_property
    def config(self) -> TrainConfig:
        """How it was trained; of a run that was not trained here, what `quick` would do."""
        if "train" not in self.about:
            return recipe("quick")
        with inside(self.folder / CONFIG_FILE):
            return TrainConfig.from_dict(self.about["train"], "train.")

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """Classes, mean and standard deviation travel with the weights, whatever images they meet."""
        about = load_preprocessing(self.folder)
        if about is None:
            raise UserError(f"{self.folder}: config.json has no 'data', so its classes, mean and std are not known")
        return about

    @cached_property
    def images(self) -> RunImages:
        """The images that it was trained on, held out, and is tested on."""
        about = self.about.get("data", {})
        return RunImages(
            self.folder,
            self._data or about.get("spec"),
            self.model.config,
            self.preprocessing,
            self.config,
            given=self._data is not None,
            skip_bad=bool(about.get("skip_bad")),
            on_wait=self._on_wait,
        )

    @cached_property
    def frontier(self) -> Frontier:
        """Its measured points, with the statistics of the best of them."""
        return read_frontier(self.folder)

    def latency(self) -> dict[str, float]:
        """p95 milliseconds by point as measured on this machine, with all usable cores; nothing if nothing was."""
        return measured_p95(self.folder)

    def settled(self, point: OperatingPoint) -> Mixture:
        """The mixture with the statistics that a point is measured with: stored, or estimated now on training images.

        Where the frontier was measured raw, those are the run's own.
        """
        if self._measured_raw():
            return with_statistics(self.model, {})
        if self._is_measured() and point.name in self.frontier.buffers:
            return with_statistics(self.model, self.frontier.buffers[point.name])
        try:
            batches = self.images.statistics()
        except (OSError, UserError) as error:
            raise UserError(
                f"{self.folder}: the statistics of {point.name} are not stored, and its images cannot be read "
                f"({error}); give the images with --data, or choose a point of the frontier"
            ) from None
        clock = Clock(_USUAL, {"statistics": num_images(batches)})
        watch = clock.watching("statistics", f"estimating the statistics of {point.name}", self._on_wait)
        return reestimated(self.model, batches, point, on_images=watch)

    def _measured_raw(self) -> bool:
        return self._is_measured() and self.frontier.points[0].statistics == RAW

    def _is_measured(self) -> bool:
        return (self.folder / FRONTIER_FILE).is_file()

    # What is done with it

    def find(self, *, budget: str | Budget | None = None, point: str | None = None) -> OperatingPoint:
        """An operating point by name, or the best within a budget; neither: nothing cut."""
        if budget is not None and point is not None:
            raise UserError(f"budget {parse_budget(budget).text!r} and point {point!r}: give only one of them")
        if budget is not None:
            point = self.choose(budget).name
        last = self.model.config.exit_numbers[-1]
        return named_point(self.model, point or f"e{last}c0")

    def choose(
        self, budget: str | float | Budget, *, runtime: RuntimeName = "onnx", threads: int | None = None
    ) -> FrontierPoint:
        """The best measured point within a budget; milliseconds are those of a runtime with so many threads (all)."""
        needed = parse_budget(budget).kind == "ms"
        latency = measured_p95(self.folder, runtime=runtime, threads=threads, needed=True) if needed else None
        return self.frontier.choose(budget, latency)

    def evaluate(
        self,
        *,
        split: str = "test",
        budget: str | Budget | None = None,
        point: str | None = None,
        metric: str | None = None,
        raw: bool = False,
        monte_carlo: int = 0,
        hard: bool = False,
        device: Device = "auto",
        workers: int | None = None,
    ) -> Evaluation:
        """Quality of every exit that a point (default: nothing cut) reaches, on test or held-out images.

        `raw` keeps the full mixture's statistics at a cut point. `monte_carlo` averages the probabilities of so many
        samples of the gates, `hard` ones or relaxed at the run's temperature; they cost as many passes.
        """
        chosen = self.find(budget=budget, point=point) if budget or point else None
        config = dataclasses.replace(self.config, device=device, workers=workers)
        place = pick_device(device)
        part, indices = self.images.split(split)
        with start_workers(self.images.data, config) as running:
            images = make_images(self.images.data, config, device=place, workers=running)
            model = self.settled(chosen) if chosen and not raw else self.model
            clock = Clock(_USUAL, {"evaluation": len(indices)})
            exits = evaluate_exits(
                model.to(place),
                images.batches(part, indices),
                chosen,
                metric=metric,
                detailed=True,
                monte_carlo=monte_carlo,
                hard=hard,
                temperature=config.temperature,
                generator=seeded(config.seed, "monte-carlo"),
                on_images=clock.watching("evaluation", f"evaluating on {split} images", self._on_wait),
            )
        return self._evaluation(chosen, split, raw, monte_carlo, exits)

    def _evaluation(
        self, chosen: OperatingPoint | None, split: str, raw: bool, monte_carlo: int, exits: dict[int, Quality]
    ) -> Evaluation:
        costs, last = CostTable.of(self.model.config), max(exits)
        macs = (costs.point(chosen) if chosen else costs.exit(last)).macs * max(1, monte_carlo)
        cut_raw = chosen is not None and (raw or self._measured_raw())
        before = {exit: None if chosen else costs.exit(exit).macs for exit in exits}
        return Evaluation(
            point=chosen or named_point(self.model, f"e{last}c0"),
            macs=macs,
            split=split,
            statistics=(RAW if cut_raw else RE_ESTIMATED) if chosen else self.config.statistics,
            exits=exits,
            exit_macs={**before, last: macs},
            classes=self.preprocessing.classes,
        )

    def measure(
        self,
        *,
        rule: Rules = "all",
        images: int | None = None,
        points: int | None = None,
        test: bool = False,
        metric: str | None = None,
        statistics: Literal["re-estimated", "raw"] = "re-estimated",
        on_progress: Callable[[MeasuringProgress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Frontier:
        """Measures operating points on held-out images and writes the frontier into the run folder.

        `images` and `points` limit how many; `test` adds test figures to the best points. With `statistics="raw"`
        every point keeps the run's own statistics, as in the paper: nothing is re-estimated. Cutting orders by damage
        are measured if the rule needs them and the run has none yet.

        What was measured is kept: after a kill, or when `should_stop` says so, the same call goes on from there, to the
        same frontier. Until the new one is complete, the run has its old one.
        """
        self.__dict__["frontier"] = measure_frontier(
            self.folder,
            self.model,
            self.images,
            rule=rule,
            num_images=images,
            num_points=points,
            test=test,
            metric=metric,
            raw=statistics == RAW,
            latency=self.latency(),
            on_progress=on_progress,
            should_stop=should_stop,
        )
        return self.frontier

    def plot(self, path: str | Path) -> None:
        """Draws the frontier: .svg or .png."""
        save_picture(plot_frontier(self.frontier, self.latency()), path)

    def slim(
        self,
        *,
        budget: str | Budget | None = None,
        point: str | None = None,
        out: str | Path | None = None,
        overwrite: bool = False,
    ) -> SlimNetwork:
        """An operating point as a plain network, with its own statistics.

        `out`: a folder to write it to; `overwrite` replaces a slim network there.
        """
        chosen = self.find(budget=budget, point=point)
        network = slim(self.settled(chosen), chosen)
        if out is not None:
            about = self.preprocessing
            with written_aside(out, overwrite=is_slim if overwrite else None) as aside:
                save_slim(network, aside, preprocessing={"classes": about.classes, **about.to_dict()})
        return network

    def export(
        self,
        out: str | Path,
        *,
        budget: str | Budget | None = None,
        point: str | None = None,
        precision: ExportPrecision = "float32",
        any_size: bool = False,
        overwrite: bool = False,
    ) -> Exported:
        """An operating point as one ONNX file, checked on images that the point was measured on, if they are at hand.

        int8 is calibrated on training images and measured on held-out ones. `any_size`: one file for images of any
        height and width, for segmentation. `overwrite` replaces a file.
        """
        path = check_path(out, overwrite=overwrite)
        network = self.slim(budget=budget, point=point)
        measured = self._measured_point(network.point.name)
        narrow = precision == "int8"
        return write_network(
            path,
            network,
            self.preprocessing,
            any_size=any_size,
            precision=precision,
            calibration=self.images.training(CALIBRATION_IMAGES) if narrow else None,
            validation=self._checking(measured, narrow) if measured or narrow else None,
            measured=measured,
        )

    def _measured_point(self, name: str) -> FrontierPoint | None:
        points = self.frontier.points if self._is_measured() else ()
        return next((point for point in points if point.name == name), None)

    def _checking(self, measured: FrontierPoint | None, narrow: bool) -> Validation | None:
        """Images that written networks are checked on: int8, whose quality is new, is measured on all of them."""
        if self.model.config.task == "segmentation" and not narrow:
            return None
        return checking(self.images, measured.n if measured else None, None if narrow else CHECKED_IMAGES)

    def export_ladder(
        self,
        out: str | Path,
        points: int = 8,
        *,
        precision: ExportPrecision = "float32",
        any_size: bool = False,
        check: bool = True,
        overwrite: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Ladder:
        """A ladder folder: so many points of the frontier, and its cascade, as ONNX files with a manifest.

        Every network is checked on some of the images that its point was measured on, if they are at hand and unless
        `check` is false. int8 is calibrated on training images; its points and cascade are measured on held-out ones.
        `any_size`: networks for images of any height and width, for segmentation. `overwrite` replaces a ladder.
        """
        narrow = precision == "int8"
        export_ladder(
            self.model,
            self.frontier,
            out,
            points,
            preprocessing=self.preprocessing,
            precision=precision,
            any_size=any_size,
            calibration=self.images.training(CALIBRATION_IMAGES) if narrow else None,
            validation=self._checking(self.frontier.points[0], narrow) if check or narrow else None,
            overwrite=overwrite,
            on_progress=on_progress,
        )
        return read_ladder(out)

    def session(self, points: int = _LADDER_POINTS, **options: Any) -> Session:
        """A session of its frontier's points, for use at once; `options` are those of `Session`."""
        with self.as_ladder(points) as folder:
            return Session(folder, latency=self.folder, **options)

    @contextmanager
    def as_ladder(self, points: int = _LADDER_POINTS) -> Iterator[Path]:
        """A ladder folder of its frontier's points that is gone afterwards."""
        with scratch_folder() as place:
            self.export_ladder(place / "ladder", points, check=False)
            yield place / "ladder"

    def report(self, out: str | Path | None = None) -> Path:
        """One HTML page about all of it (default RUN/report.html); without images at hand it has no examples."""
        path = Path(out) if out else self.folder / "report.html"
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; create it first")
        frontier, examples = self.frontier, None
        try:
            examples = self._examples()
        except (OSError, UserError) as error:
            logger.warning("no examples in the report: %s", " ".join(str(error).split()))
        name = self.about.get("data", {}).get("name") or "no data named"
        found = self.evaluate(split="validation") if isinstance(examples, Examples) else None
        page = report_page(
            self.model,
            frontier,
            data=name,
            latency=self.latency(),
            examples=examples,
            quality=found.quality if found else None,
        )
        write_atomically(path, page.encode())
        return path

    def _examples(self) -> Examples | PixelExamples:
        shown = {point: self.settled(named_point(self.model, point.name)) for point in shown_points(self.frontier)}
        return self._strips(shown) if self.model.config.task == "segmentation" else self._classified(shown)

    def _strips(self, shown: dict[FrontierPoint, Mixture]) -> PixelExamples:
        """Held-out scenes at the shown points, cheapest first."""
        about, points = self.preprocessing, dict(reversed(shown.items()))
        strips = []
        for scene in self.images.scenes(NUM_STRIPS):
            x = self.images.prepared.prepare(torch.from_numpy(scene.image.copy()).permute(2, 0, 1)[None]).float()
            strips.append(scene_strip(scene, x, points, about.classes, about.palette, self.latency()))
        return PixelExamples(strips=strips, classes=about.classes, palette=about.palette)

    @torch.no_grad()
    def _classified(self, shown: dict[FrontierPoint, Mixture]) -> Examples:
        images, labels = self.images.held_out(NUM_EXAMPLES)
        x = self.images.prepared.prepare(torch.from_numpy(images).permute(0, 3, 1, 2)).float()
        answers = {}
        for point, model in shown.items():
            best = model(x, named_point(model, point.name)).softmax(1).max(1)
            answers[point.name] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Examples(images=images, labels=labels.tolist(), classes=self.preprocessing.classes, answers=answers)

    def card(self, evaluation: Evaluation | None = None) -> str:
        """The model card, with the quality of every exit: measured now unless it is given."""
        if evaluation is None:
            evaluation = self.evaluate(split="test" if self.images.data.test is not None else "validation")
        about = self.about["data"]
        return card(self.model.config, about, self.preprocessing, self.config, evaluation.exits, evaluation.split)
