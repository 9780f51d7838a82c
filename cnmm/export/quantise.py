"""int8: weights and activations of 8 bits, their ranges learned on images by onnxruntime's static quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cnmm._files import scratch_folder
from cnmm.data.dataset import Images
from cnmm.ladder import IMAGE

LARGE = 2**16
"""Values of an image from which on they go through the network one by one, for the sake of memory."""


def quantised(data: bytes, images: Images) -> bytes:
    """The same network with int8 weights and activations, whose ranges are learned on images."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            at_once = 32 if images[0].size < LARGE else 1
            self.left = iter(np.array_split(images, max(1, len(images) // at_once)))

        def get_next(self) -> dict[str, Images] | None:
            batch = next(self.left, None)
            return None if batch is None else {IMAGE: batch}

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
