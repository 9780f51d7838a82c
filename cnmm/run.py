"""A trained run with all that belongs to it: its mixture, its data, its frontier, the statistics of its points."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cnmm._errors import UserError
from cnmm.data import DataSet, hold_out, open_data
from cnmm.evaluation.statistics import load_statistics, reestimated, with_statistics
from cnmm.export.onnx_writer import Preprocessing
from cnmm.frontier import FRONTIER_FILE, Frontier, FrontierPoint
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.prune import named_point
from cnmm.run_folder import is_run, load, read_config
from cnmm.training.config import TrainConfig
from cnmm.training.loop import Images
from cnmm.training.recipes import recipe


class Run:
    """A run folder. Its parts are read when they are first asked for."""

    def __init__(self, folder: str | Path, *, data: str | None = None) -> None:
        """`data`: where the images are now, if not where the run says."""
        self.folder = Path(folder)
        if not is_run(folder):
            raise UserError(f"{folder}: no run folder; `cnmm train --out {folder} ...` makes one")
        self.about: dict[str, Any] = read_config(folder)
        self.spec: str | None = data or self.about.get("data", {}).get("spec")

    @cached_property
    def model(self) -> Mixture:
        return load(self.folder)

    @cached_property
    def config(self) -> TrainConfig:
        """How it was trained; of a run that was not trained here, what `quick` would do."""
        return TrainConfig(**self.about["train"]) if "train" in self.about else recipe("quick")

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """Classes, mean and deviation travel with the weights, whatever images they meet."""
        config, data = self.model.config, self.about.get("data", {})
        return Preprocessing(
            classes=tuple(data.get("classes", map(str, range(config.num_classes)))),
            mean=tuple(data.get("mean", (0.0,) * config.in_chans)),
            std=tuple(data.get("std", (1.0,) * config.in_chans)),
            size=config.input_size,
        )

    @cached_property
    def data(self) -> DataSet:
        if self.spec is None:
            raise UserError(f"{self.folder} does not say what it was trained on; use --data, for example cifar10:DIR")
        data = open_data(self.spec, size=self.model.config.input_size)
        if len(data.classes) != self.model.config.num_classes:
            raise UserError(
                f"{self.spec} has {len(data.classes)} classes, {self.folder} has {self.model.config.num_classes}"
            )
        about = self.preprocessing
        return dataclasses.replace(data, mean=about.mean, std=about.std)

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the images that it was trained on, and of those held out."""
        return hold_out(self.data.train.labels, self.config.val, self.config.seed)

    @cached_property
    def images(self) -> Images:
        return Images(self.data, self.config)

    @cached_property
    def frontier(self) -> Frontier:
        """Its measured points, with the statistics of the best of them."""
        path = self.folder / FRONTIER_FILE
        if not path.is_file():
            raise UserError(f"{self.folder}: its frontier is not measured yet; run: cnmm frontier {self.folder}")
        return dataclasses.replace(Frontier.load(path), buffers=load_statistics(self.folder))

    def find(self, *, budget: str | None = None, point: str | None = None) -> OperatingPoint:
        """An operating point by name, or the best within a budget; neither: nothing cut."""
        if budget is not None and point is not None:
            raise UserError(f"--budget {budget} and --point {point}: only one of them")
        if budget is not None:
            point = self.choose(budget).point
        last = self.model.config.exit_numbers[-1]
        return named_point(self.model, point or f"e{last}c0")

    def choose(self, budget: str) -> FrontierPoint:
        """The best measured point within a budget."""
        from cnmm.budget import parse_budget
        from cnmm.runtime.latency import p95

        latency = p95(self.folder) if parse_budget(budget).kind == "ms" else None
        return self.frontier.choose(budget, latency)

    def settled(self, point: OperatingPoint) -> Mixture:
        """The mixture with a point's own statistics: measured before, or estimated now on training images."""
        stored = load_statistics(self.folder).get(point.name)
        if stored:
            return with_statistics(self.model, stored)
        try:
            data, (kept, _) = self.data, self.parts
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder}: the statistics of {point.name} are not stored, and its images are not at hand "
                f"({error}); say where they are with --data, or choose a point of the frontier"
            ) from None
        return reestimated(self.model, self.images.statistics_batches(data.train, kept), point)

    def held_out(self, num: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Held-out images, uint8 [N, H, W, C], and their labels; at most `num` of them."""
        indices = self.parts[1]
        if not len(indices):
            raise UserError(f"{self.folder} was trained with --val 0: no images were held out")
        chosen = indices[:num]
        return self.data.train.read(chosen), self.data.train.labels[chosen]

    def training(self, num: int) -> np.ndarray:
        """Training images as they are, uint8 [N, H, W, C], always the same ones."""
        kept = self.parts[0]
        chosen = np.sort(np.random.default_rng(0).permutation(kept)[:num])
        return self.data.train.read(chosen)


def ladder_of_run(run: str | Path, folder: str | Path, points: int = 16) -> None:
    """A ladder of a run's frontier, for use at once; it needs no images."""
    from cnmm.export.ladder import export_ladder

    opened = Run(run)
    export_ladder(opened.model, opened.frontier, folder, points, about=opened.preprocessing)
