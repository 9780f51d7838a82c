"""Data sets as uint8 images and int64 labels, read with numpy and Pillow. Importing this package does not import torch.

`open_data("cifar10:DIR")` is the way in; `hold_out` sets validation images aside; `suggest_model` names a model.
"""

from cnmm.data.dataset import ArraySplit, DataSet, Split, divide, hold_out
from cnmm.data.fashion import FASHION_CLASSES, fashion_sample
from cnmm.data.images import FileSplit
from cnmm.data.registry import MEMORY_LIMIT, open_data, suggest_model
from cnmm.data.workers import Workers, num_workers

__all__ = [
    "FASHION_CLASSES",
    "MEMORY_LIMIT",
    "ArraySplit",
    "DataSet",
    "FileSplit",
    "Split",
    "Workers",
    "divide",
    "fashion_sample",
    "hold_out",
    "num_workers",
    "open_data",
    "suggest_model",
]
