"""The embedded sample of Fashion-MNIST: real images for the demo and the tests, without a download. Torch-free.

6,000 training and 1,000 test images, grey, 28x28, balanced over ten classes; `scripts/make_fashion_sample.py` made it.
Fashion-MNIST is by Xiao, Rasul and Vollgraf (2017), MIT licence: see `fashion_sample.LICENSE` beside this file.
"""

from importlib.resources import files
from typing import Literal

import numpy as np
import numpy.typing as npt

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def fashion_sample(split: Literal["train", "test"]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, 28, 28, 1] with values 0..255 and their labels [N], indices into `FASHION_CLASSES`."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r} of the Fashion-MNIST sample: use 'train' or 'test'")
    with files("cnmm.data").joinpath("fashion_sample.npz").open("rb") as file, np.load(file, allow_pickle=False) as npz:
        images: npt.NDArray[np.uint8] = npz[f"{split}_images"][..., np.newaxis]
        labels: npt.NDArray[np.int64] = npz[f"{split}_labels"].astype(np.int64)
    return images, labels
