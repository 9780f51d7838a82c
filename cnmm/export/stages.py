"""The stages of a cascade as ONNX files. int8 stages have thresholds of their own, found with what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch

from cnmm.cascade import Cascade
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.data.dataset import Images
from cnmm.evaluation.calibrate import calibrated
from cnmm.evaluation.task import task_of
from cnmm.export.graph import Graph
from cnmm.export.network import LabelledImages, open_onnx, stage_bytes, walk
from cnmm.export.quantise import image_batches, quantised
from cnmm.export.slim import SlimNetwork
from cnmm.ladder import IMAGE


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """One file of a cascade, and the tensors that it reads and makes."""

    exit: int
    data: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    head: StageBytes | None = None
    """What answers, where that is a file of its own."""


def written_stage_macs(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What an answer at each exit costs beyond one at the exit before it; and asking each exit but the last."""
    stages = [graph.cost_of(steps).macs for steps in graph.stages()]
    heads = [graph.cost_of(steps).macs for steps in graph.heads()]
    macs = [max(0, own - before) for own, before in zip(stages, (0, *heads), strict=False)]
    return tuple(macs), tuple(heads[:-1])


def stage_files(
    network: SlimNetwork, about: Preprocessing, calibration: Images | None, any_size: bool = False
) -> list[StageBytes]:
    """The stages of a cascade; with images to calibrate on, as int8."""
    files = stage_bytes(network, about, any_size=any_size, precision="float32" if calibration is None else "int8")
    if calibration is not None:
        files = _quantised(files, calibration)
    return [
        replace(_described(exit, data), head=_described(exit, head) if head else None)
        for exit, (data, head) in zip(network.graph.exits, files, strict=True)
    ]


def _quantised(files: Sequence[tuple[bytes, bytes | None]], images: Images) -> list[tuple[bytes, bytes | None]]:
    """Each file as int8, whose ranges are learned on what the int8 stages before it make of the images."""
    done: list[tuple[bytes, bytes | None]] = []
    for data, head in files:
        before = [stage for stage, _ in done]
        data = quantised(data, _feeds(before, images, data))
        done.append((data, head and quantised(head, _feeds([*before, data], images, head))))
    return done


def _feeds(files: Sequence[bytes], images: Images, reader: bytes) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """What a file reads of what others make."""
    sessions, needed = [open_onnx(data) for data in files], [source.name for source in open_onnx(reader).get_inputs()]
    for made in image_batches(images):
        for _ in walk(sessions, made):
            pass
        yield {name: made[name] for name in needed}


def _described(exit: int, data: bytes) -> StageBytes:
    session = open_onnx(data)
    inputs, outputs = (
        tuple(tensor.name for tensor in tensors) for tensors in (session.get_inputs(), session.get_outputs())
    )
    return StageBytes(exit=exit, data=data, inputs=inputs, outputs=outputs)


def measured_again(
    cascade: Cascade, files: Sequence[StageBytes], batches: Iterable[LabelledImages], config: MixtureConfig
) -> Cascade:
    """The cascade with thresholds for what its files answer about images with labels."""
    sessions = [open_onnx(each.data) for file in files for each in (file, file.head) if each]
    choices = task_of(config).choices(config.num_classes, cascade.metric)
    for images, labels in batches:
        answers = list(walk(sessions, {IMAGE: images}))
        if config.task == "classification":  # the files give probabilities, and scores are asked for
            answers = [answer.clamp_min(1e-30).log() for answer in answers]
        choices.add(answers, torch.from_numpy(labels))
    rows = calibrated(choices, cascade.macs, cascade.asking)
    return replace(cascade, thresholds=rows, n=len(choices.confidence))
