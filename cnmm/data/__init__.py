"""Data: readers that give whole data sets as uint8 arrays. Importing this package does not import torch."""

from cnmm.data.fashion import FASHION_CLASSES, fashion_sample

__all__ = ["FASHION_CLASSES", "fashion_sample"]
