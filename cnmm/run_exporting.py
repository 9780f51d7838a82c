"""One point of a run as an ONNX file: checked on images that the point was measured on, where they are at hand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cnmm._errors import UserError
from cnmm._files import write_atomically
from cnmm.config import Preprocessing
from cnmm.data.dataset import Images
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.task import task_of
from cnmm.export.network import (
    ExportPrecision,
    Validation,
    check_new_file,
    check_quality,
    onnx_bytes,
    quality_of_file,
)
from cnmm.export.slim import SlimNetwork
from cnmm.frontier import FrontierPoint
from cnmm.run_images import RunImages

CHECKED_IMAGES = 200
"""Images of those that points were measured on, on which written networks are checked."""
CALIBRATION_IMAGES = 512
"""Training images from which int8 learns the range of every tensor."""

logger = logging.getLogger("cnmm")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `Run.export` wrote."""

    file: Path
    point: str
    macs: int
    params: int
    """Of the network in the file."""
    mixture_macs: int
    mixture_params: int
    """Of the mixture at the same point."""
    precision: str
    num_bytes: int
    quality: Quality | None = None
    """Of an int8 file, on held-out images; and before it was quantised:"""
    float32_quality: Quality | None = None


def check_path(out: str | Path, *, overwrite: bool = False) -> Path:
    """Where one network can be written."""
    path = Path(out)
    if path.suffix != ".onnx":
        raise UserError(f"{path}: one network needs a file name ending in .onnx; a folder needs --ladder 8")
    check_new_file(path, overwrite=overwrite)
    return path


def checking(images: RunImages, num_measured: int | None, num: int | None) -> Validation | None:
    """At most `num` of the images that points were measured on, read anew each time; None if they are not at hand."""
    try:
        split, count = images.measured_on(num_measured)
    except (OSError, UserError) as error:
        logger.info("networks are not checked on images: %s", " ".join(str(error).split()))
        return None
    words = "checking" if images.model.task == "classification" else "measuring"
    logger.info("%s every network on %s %s images", words, f"{min(num or count, count):,}", split)
    return lambda: images.some_measured(num_measured, num)


def write_network(
    path: Path,
    network: SlimNetwork,
    preprocessing: Preprocessing,
    *,
    precision: ExportPrecision,
    any_size: bool,
    calibration: Images | None,
    validation: Validation | None,
    measured: FrontierPoint | None,
) -> Exported:
    """Writes one file, if it is as good as measured; int8 is measured before and after on the same images."""
    config, metric = network.config, task_of(network.config).check_metric(measured.metric if measured else None)
    data = onnx_bytes(network, preprocessing, any_size=any_size)
    before = after = None
    if validation is not None:
        before = quality_of_file(data, validation(), config, metric)
    if measured is not None and before is not None and config.task == "classification":
        check_quality(measured, before)
    if precision == "int8":
        data = onnx_bytes(network, preprocessing, precision="int8", calibration=calibration, any_size=any_size)
        after = None if validation is None else quality_of_file(data, validation(), config, metric)
    write_atomically(path, data)
    own, mixture = network.cost, network.mixture_cost
    return Exported(
        file=path,
        point=network.point.name,
        macs=own.macs,
        params=own.params,
        mixture_macs=mixture.macs,
        mixture_params=mixture.params,
        precision=precision,
        num_bytes=len(data),
        quality=after,
        float32_quality=before if after else None,
    )
