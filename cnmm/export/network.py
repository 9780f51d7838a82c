"""A slim network as an ONNX file, or a cascade as one file per stage: what a device runs without torch.

Files are compared with the network in torch, at two batch sizes, before they are put in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cnmm._errors import INSTALL_TRAIN, UserError
from cnmm._files import write_atomically
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.data.dataset import Images, Labels
from cnmm.data.masks import Mask
from cnmm.evaluation.classification import Z_95
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.task import task_of
from cnmm.export.onnx_writer import onnx_model, onnx_stages
from cnmm.export.quantise import image_batches, quantised
from cnmm.export.slim import SlimNetwork, costs
from cnmm.frontier import FrontierPoint, metric_words
from cnmm.ladder import ANSWERS, IMAGE
from cnmm.mixture import Mixture

ExportPrecision = Literal["float32", "int8"]
LabelledImages = tuple[Images, Labels | Mask]
Validation = Callable[[], Iterable[LabelledImages]]
"""Batches of images with labels, read anew each time."""
TOLERANCE = 1e-4
"""Largest difference of a probability between the file and the network in torch."""


def export_onnx(
    network: SlimNetwork,
    path: str | Path,
    preprocessing: Preprocessing | None = None,
    *,
    precision: ExportPrecision = "float32",
    calibration: Images | None = None,
    any_size: bool = False,
    **metadata: object,
) -> None:
    """One file: uint8 images [N, H, W, C] in, probabilities out (of segmentation, logits); metadata says the rest.

    `preprocessing`: that of the mixture it was made from, unless told. `calibration`: images [N, H, W, C] from which
    int8 learns the range of every tensor. `any_size`: H and W are those of the images, not of the mixture's config.
    """
    check_new_file(path)
    about = preprocessing_of(network, preprocessing)
    data = onnx_bytes(network, about, precision=precision, calibration=calibration, any_size=any_size, **metadata)
    write_atomically(Path(path), data)


def preprocessing_of(model: Mixture | SlimNetwork, given: Preprocessing | None = None) -> Preprocessing:
    """What was given, or what the model was loaded with; without either, a file would say nothing about its images."""
    about: Preprocessing | None = given or cast(Any, model.preprocessing)
    if about is None:
        raise UserError(
            "this model does not know its classes, mean and standard deviation; load a trained run with cnmm.load, "
            "or set model.preprocessing, for example to cnmm.Preprocessing.plain(model.config)"
        )
    about.check_fits(model.config)
    return about


def check_any_size(config: MixtureConfig, any_size: bool) -> None:
    """Refuses to let the size open where a network has one answer for a whole image."""
    if any_size and config.task != "segmentation":
        height, width = config.input_size
        raise UserError(
            f"any_size is for segmentation; images to classify are fitted to {height}x{width}, leave it out"
        )


def check_new_file(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuses to write over something, unless it is a file that may be replaced, or where there is no folder."""
    path = Path(path)
    if path.exists() and not (overwrite and path.is_file()):
        raise UserError(f"{path} exists; replace it with --overwrite, remove it, or choose another file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")


def onnx_bytes(
    network: SlimNetwork,
    preprocessing: Preprocessing,
    *,
    precision: ExportPrecision = "float32",
    calibration: Images | None = None,
    any_size: bool = False,
    **metadata: object,
) -> bytes:
    """A slim network as a checked ONNX file."""
    check_any_size(network.config, any_size)
    metadata = {"precision": precision, **costs(network), **metadata}
    with _needs_onnx():
        model = onnx_model(network.graph, _tensors(network), preprocessing, any_size=any_size, **metadata)
    data: bytes = model.SerializeToString()
    _check([data], network, preprocessing, any_size)
    if precision == "int8":
        data = quantised(data, image_batches(calibrating(calibration)))
    return data


def calibrating(images: Images | None) -> Images:
    """The images to calibrate on, if there are any."""
    if images is None or not len(images):
        raise UserError("int8 needs images to calibrate on; give them with --data")
    return images


def stage_bytes(
    network: SlimNetwork, preprocessing: Preprocessing, *, any_size: bool = False, **metadata: object
) -> list[tuple[bytes, bytes | None]]:
    """The stages of a cascade as checked ONNX files, one for each exit, or two: `onnx_stages`."""
    with _needs_onnx():
        models = onnx_stages(network.graph, _tensors(network), preprocessing, any_size=any_size, **metadata)
    stages = [(stage.SerializeToString(), head and head.SerializeToString()) for stage, head in models]
    _check([file for stage in stages for file in stage if file], network, preprocessing, any_size)
    return stages


def _tensors(network: SlimNetwork) -> Mapping[str, npt.NDArray[Any]]:
    state = network.state_dict().items()
    return {name.removeprefix("layers."): tensor.detach().cpu().numpy() for name, tensor in state}


def _check(files: Sequence[bytes], network: SlimNetwork, preprocessing: Preprocessing, any_size: bool) -> None:
    """Runs the files one after the other, and compares every exit with torch, for one image and for several."""
    rng, about, config = np.random.default_rng(0), preprocessing, network.config
    mean, std = (torch.tensor(values).float().view(1, -1, 1, 1) * 255 for values in (about.mean, about.std))
    sessions = [open_onnx(data) for data in files]
    segments = config.task == "segmentation"  # whose images are large
    other = tuple(side - side // 4 | 1 for side in about.size) if any_size else about.size
    for num, size in ((1, about.size), (2 if segments else 3, other)):
        images = rng.integers(0, 256, (num, *size, config.in_chans), dtype=np.uint8)
        x = (torch.from_numpy(images).permute(0, 3, 1, 2).float() - mean) / std
        with torch.no_grad():
            expected = list(network.forward_exits(x).values())
        answers = list(walk(sessions, {IMAGE: images}))
        for answer, wanted in zip(answers, expected[-len(answers) :], strict=True):
            found = answer.softmax(1) if segments else answer
            worst = float((found - wanted.softmax(1)).abs().max())
            if not worst <= TOLERANCE:
                raise UserError(
                    f"the exported network differs from the one in torch by {worst:.1e} in a probability "
                    f"(allowed is {TOLERANCE:.0e}); nothing was written; please report this with your versions"
                )


def walk(sessions: Iterable[Any], made: dict[str, npt.NDArray[Any]]) -> Iterator[Tensor]:
    """The answers of files that run one after the other; what they make for later ones joins what was `made` before."""
    for session in sessions:
        names = [output.name for output in session.get_outputs()]
        feed = {source.name: made[source.name] for source in session.get_inputs()}
        made.update(zip(names, session.run(names, feed), strict=True))
        if names[0] in ANSWERS:
            yield torch.from_numpy(made.pop(names[0]))


def open_onnx(data: bytes, threads: int = 1) -> Any:
    """An onnxruntime session of a file's bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def quality_of_file(data: bytes, batches: Iterable[LabelledImages], config: MixtureConfig, metric: str) -> Quality:
    """Quality of a file on images [N, H, W, C] with labels, by onnxruntime."""
    session, meter = open_onnx(data), task_of(config).meter(config.num_classes)
    for images, labels in batches:
        (answers,) = session.run(None, {IMAGE: images})
        meter.add(torch.from_numpy(answers), torch.from_numpy(labels))
    return meter.quality(metric)


def check_quality(point: FrontierPoint, found: Quality) -> None:
    """Refuses a network whose quality on some of the images that its point was measured on is far from the point's."""
    spread = (point.high - point.low) / (2 * Z_95) * math.sqrt(max(0.0, point.n / found.n - 1))
    allowed = max(0.01, 2 / found.n) + 4 * spread + 1e-9
    if abs(found.value - point.quality) > allowed:
        raise UserError(
            f"{point.name}: its network has {metric_words(point.metric)} {found.value:.4f} on {found.n:,} "
            f"{point.split} images, measured was {point.quality:.4f}; nothing was written; measure again: cnmm frontier"
        )


@contextmanager
def _needs_onnx() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise UserError(f"exporting needs onnx, which is not installed; install it with: {INSTALL_TRAIN}") from None
