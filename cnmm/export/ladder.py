"""Writing ladder folders: envelope points of a frontier and its cascade as ONNX files, with their manifest.

A ladder counts what its files run: macs and params are those of the written networks, and so are its budgets. It is
written aside, read back, and renamed when it is complete. `cnmm.ladder` has the format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cnmm._files import written_aside
from cnmm.cascade import Cascade
from cnmm.config import Preprocessing
from cnmm.data.dataset import Images
from cnmm.evaluation.statistics import settled
from cnmm.export.network import (
    ExportPrecision,
    Validation,
    calibrating,
    check_any_size,
    check_quality,
    onnx_bytes,
    preprocessing_of,
    quality_of_file,
)
from cnmm.export.slim import slim, slim_cascade
from cnmm.export.stages import StageBytes, measured_again, stage_files, written_stage_macs
from cnmm.export.written import written_frontier
from cnmm.frontier import Frontier, FrontierPoint
from cnmm.ladder import Ladder, LadderLattice, NetworkFile, answer_of, is_ladder, read_ladder
from cnmm.lattice import build_lattice
from cnmm.mixture import Mixture
from cnmm.prune import named_point

logger = logging.getLogger("cnmm")


def export_ladder(
    model: Mixture,
    frontier: Frontier,
    folder: str | Path,
    points: int = 8,
    *,
    preprocessing: Preprocessing | None = None,
    precision: ExportPrecision = "float32",
    any_size: bool = False,
    calibration: Images | None = None,
    validation: Validation | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """A ladder folder: envelope points of a frontier, its cascade, and the manifest `ladder.json`.

    Points have the statistics that the frontier measured them with, and cost what their files run. `preprocessing`: the
    model's own unless told. `any_size`: one set of files for images of any height and width, for segmentation.
    `validation` gives batches of uint8 images and labels, those that the frontier was measured on or some of them: a
    network that is far from its measured quality is refused, and int8 networks and their cascade are measured anew.
    Without it an int8 ladder has no cascade. `overwrite` replaces a ladder.
    """
    about = preprocessing_of(model, preprocessing)
    check_any_size(model.config, any_size)
    maker = _Maker(model, frontier, about, precision, any_size, calibration, validation)
    written = written_frontier(model, frontier)
    chosen, cascade = list(written.ladder(points)), maker.cascade()
    total = len(chosen) + (1 if cascade else 0)
    answers = (answer_of(model.config.task),)
    networks: dict[str, NetworkFile] = {}
    stages: tuple[NetworkFile, ...] = ()
    with written_aside(folder, overwrite=is_ladder if overwrite else None) as aside:
        for number, point in enumerate(chosen):
            chosen[number], data = maker.network(point)
            networks[point.name] = NetworkFile.write(aside / f"{point.name}.onnx", data, outputs=answers)
            on_progress(number + 1, total)
        if cascade:
            cascade, files = maker.stages(cascade)
            stages = tuple(_write(aside, file) for file in files)
            on_progress(total, total)
        Ladder(
            folder=aside,
            task=model.config.task,
            frontier=replace(written, points=tuple(chosen), cascade=cascade),
            networks=networks,
            stages=stages,
            preprocessing=about,
            precision=precision,
            any_size=any_size,
            lattice=_lattice(model, chosen, cascade),
        ).save()
        for file in read_ladder(aside).files():
            file.read()


class _Maker:
    """Makes the files of one ladder."""

    def __init__(
        self,
        model: Mixture,
        frontier: Frontier,
        about: Preprocessing,
        precision: ExportPrecision,
        any_size: bool,
        calibration: Images | None,
        validation: Validation | None,
    ) -> None:
        self.model, self.frontier, self.about = model, frontier, about
        self.precision, self.any_size = precision, any_size
        self.calibration = calibrating(calibration) if precision == "int8" else None
        self.validation = validation

    def network(self, point: FrontierPoint) -> tuple[FrontierPoint, bytes]:
        """A point's network, checked on images where there are any; of int8, the point with its new quality."""
        network = slim(settled(self.model, self.frontier, point.name), point.name)
        plain = onnx_bytes(network, self.about, any_size=self.any_size)
        if self.validation is not None:
            found = quality_of_file(plain, self.validation(), self.model.config, point.metric)
            if self.model.config.task == "classification":  # scenes are measured as large as they are, not as the file
                check_quality(point, found)
        if self.precision == "float32":
            return point, plain
        calibration = self.calibration
        data = onnx_bytes(network, self.about, precision="int8", calibration=calibration, any_size=self.any_size)
        if self.validation is None:
            return point, data
        again = quality_of_file(data, self.validation(), self.model.config, point.metric)
        return replace(
            point,
            quality=again.value,
            low=again.low,
            high=again.high,
            n=again.n,
            per_class=again.per_class,
            float32_quality=found.value,
            raw_quality=None,
            test_quality=None,
            test_n=None,
        ), data

    def cascade(self) -> Cascade | None:
        """The frontier's, if the ladder can have it."""
        if self.frontier.cascade and self.precision == "int8" and self.validation is None:
            logger.warning("no cascade: its int8 thresholds need held-out images, and there are none")
            return None
        return self.frontier.cascade

    def stages(self, cascade: Cascade) -> tuple[Cascade, list[StageBytes]]:
        """The cascade as it is written, and its files."""
        network = slim_cascade(settled(self.model, self.frontier, cascade.point), cascade.point)
        cascade = cascade.with_macs(*written_stage_macs(network.graph))
        files = stage_files(network, self.about, self.calibration, self.any_size)
        if self.calibration is not None and self.validation is not None:
            cascade = measured_again(cascade, files, self.validation(), self.model.config)
        return cascade, files


def _lattice(model: Mixture, points: Sequence[FrontierPoint], cascade: Cascade | None) -> LadderLattice:
    """The edges that each point and each exit of the cascade has."""
    lattice = build_lattice(model.config)
    last = named_point(model, cascade.point).edges if cascade else frozenset()
    return LadderLattice(
        full=lattice,
        points={point.name: named_point(model, point.name).edges for point in points},
        cascade=tuple(lattice.exit_edges(exit, last) for exit in cascade.exits) if cascade else (),
    )


def _write(folder: Path, file: StageBytes) -> NetworkFile:
    path = folder / f"stage{file.exit}.onnx"
    stage = NetworkFile.write(path, file.data, inputs=file.inputs, outputs=file.outputs)
    if file.head is None:
        return stage
    path = folder / f"head{file.exit}.onnx"
    head = NetworkFile.write(path, file.head.data, inputs=file.head.inputs, outputs=file.head.outputs)
    return replace(stage, head=head)
