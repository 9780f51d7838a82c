"""Writing ladder folders: envelope points of a frontier and its cascade as ONNX files, with their manifest.

A ladder is written aside and renamed when it is complete. `cnmm.ladder` has the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from cnmm._files import written_aside
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.data.dataset import Images
from cnmm.evaluation.statistics import settled
from cnmm.export.network import (
    ExportPrecision,
    LabelledImages,
    check_any_size,
    onnx_bytes,
    open_onnx,
    preprocessing_of,
    quality_of_file,
    stage_bytes,
)
from cnmm.export.slim import SlimNetwork, slim, slim_cascade
from cnmm.frontier import Frontier, FrontierPoint
from cnmm.ladder import Ladder, NetworkFile, answer_of
from cnmm.mixture import Mixture


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
    validation: Callable[[], Iterable[LabelledImages]] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """A ladder folder: envelope points of a frontier, its cascade, and the manifest `ladder.json`.

    Points have the statistics that the frontier measured them with. `preprocessing`: the model's own unless told.
    `any_size`: one set of files for images of any height and width, for segmentation. `validation`: batches of uint8
    images and labels on which int8 networks are measured anew.
    """
    about = preprocessing_of(model, preprocessing)
    check_any_size(model.config, any_size)
    answer = answer_of(model.config.task)
    chosen, cascade = list(frontier.ladder(points)), frontier.cascade
    total = len(chosen) + (1 if cascade else 0)
    networks: dict[str, NetworkFile] = {}
    stages: tuple[NetworkFile, ...] = ()
    with written_aside(folder) as aside:
        for number, point in enumerate(chosen):
            network = slim(settled(model, frontier, point.name), point.name)
            data = onnx_bytes(network, about, precision=precision, calibration=calibration, any_size=any_size)
            if precision == "int8" and validation is not None:
                chosen[number] = _measured_again(point, data, model.config, validation())
            networks[point.name] = NetworkFile.write(aside / f"{point.name}.onnx", data, outputs=(answer,))
            on_progress(number + 1, total)
        if cascade:
            staged = slim_cascade(settled(model, frontier, cascade.point), cascade.point)
            stages = _write_stages(aside, staged, about, any_size)
            on_progress(total, total)
        Ladder(
            folder=aside,
            task=model.config.task,
            frontier=replace(frontier, points=tuple(chosen)),
            networks=networks,
            stages=stages,
            preprocessing=about,
            precision=precision,
            any_size=any_size,
        ).save()


def _measured_again(
    point: FrontierPoint, data: bytes, config: MixtureConfig, batches: Iterable[LabelledImages]
) -> FrontierPoint:
    """The point with the quality of its int8 network."""
    found = quality_of_file(data, batches, config, point.metric)
    return replace(
        point,
        quality=found.value,
        low=found.low,
        high=found.high,
        n=found.n,
        raw_quality=None,
        test_quality=None,
        test_n=None,
    )


def _write_stages(folder: Path, network: SlimNetwork, about: Preprocessing, any_size: bool) -> tuple[NetworkFile, ...]:
    stages = []
    for exit, data in zip(network.graph.exits, stage_bytes(network, about, any_size=any_size), strict=True):
        session = open_onnx(data)
        names = {
            "inputs": tuple(tensor.name for tensor in session.get_inputs()),
            "outputs": tuple(tensor.name for tensor in session.get_outputs()),
        }
        stages.append(NetworkFile.write(folder / f"stage{exit}.onnx", data, **names))
    return tuple(stages)
