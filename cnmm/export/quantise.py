"""int8: weights and activations of 8 bits, their ranges learned on images by onnxruntime's static quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm._files import scratch_folder
from cnmm.data.dataset import Images
from cnmm.ladder import IMAGE

LARGE = 2**16
"""Values of an image from which on they go through the network one by one, for the sake of memory."""


def quantised(data: bytes, feeds: Iterable[Mapping[str, npt.NDArray[Any]]]) -> bytes:
    """The same network with int8 weights and activations, whose ranges are learned on batches of its inputs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
            batch = next(self.left, None)
            return None if batch is None else dict(batch)

    with scratch_folder() as folder:
        plain, prepared, done = (str(folder / name) for name in ("plain.onnx", "prepared.onnx", "int8.onnx"))
        Path(plain).write_bytes(data)
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            done,
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["Conv", "Concat", "AveragePool", "MaxPool", "GlobalAveragePool", "Add"],
        )
        return Path(done).read_bytes()


def image_batches(images: Images) -> list[dict[str, Images]]:
    """Images as a network's inputs, some at a time."""
    at_once = 32 if images[0].size < LARGE else 1
    return [{IMAGE: batch} for batch in np.array_split(images, max(1, len(images) // at_once))]
