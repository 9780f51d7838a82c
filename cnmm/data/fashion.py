"""Fashion-MNIST: the embedded sample, for the demo and the tests without a download, and the original files.

The sample is 6,000 training and 1,000 test images, grey, 28x28, balanced over ten classes;
`scripts/make_fashion_sample.py` made it. The original IDX files hold 60,000 and 10,000, and may be gzipped.
Fashion-MNIST is by Xiao, Rasul and Vollgraf (2017), MIT licence: see `fashion_sample.LICENSE` beside this file.
"""

import gzip
import struct
import zlib
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.data.dataset import ArraySplit, Images, Labels

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
HOME_PAGE = "https://github.com/zalandoresearch/fashion-mnist"
MAX_IMAGES = 1_000_000
"""Stops a damaged or hostile header before memory is taken for what it announces."""


def fashion_sample(split: Literal["train", "test"]) -> tuple[Images, Labels]:
    """Images [N, 28, 28, 1] with values 0..255 and their labels [N], indices into `FASHION_CLASSES`."""
    if split not in ("train", "test"):
        raise UserError(f"unknown split {split!r} of the Fashion-MNIST sample: use 'train' or 'test'")
    with files("cnmm.data").joinpath("fashion_sample.npz").open("rb") as file, np.load(file, allow_pickle=False) as npz:
        images: Images = npz[f"{split}_images"][..., np.newaxis]
        labels: Labels = npz[f"{split}_labels"].astype(np.int64)
    return images, labels


def read_fashion(folder: Path) -> tuple[ArraySplit, ArraySplit]:
    """Training and test images of the four original files, plain or gzipped."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; the files of Fashion-MNIST are at {HOME_PAGE}")
    return _read_split(folder, "train"), _read_split(folder, "t10k")


def _read_split(folder: Path, prefix: str) -> ArraySplit:
    images_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = _read_idx(images_path, (28, 28)), _read_idx(labels_path, ())
    if len(images) != len(labels):
        raise UserError(f"{labels_path} has {len(labels):,} labels, and {images_path.name} {len(images):,} images")
    if labels.max() >= len(FASHION_CLASSES):
        raise UserError(f"{labels_path} has the label {labels.max()}, and Fashion-MNIST has only 0 to 9")
    return ArraySplit(images[..., np.newaxis], labels.astype(np.int64))


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{folder / name} is missing, also with .gz; the files of Fashion-MNIST are at {HOME_PAGE}")


def _read_idx(path: Path, item_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """An IDX file of bytes: 0, 0, type 8, number of axes, their sizes as big-endian uint32, the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_values(cast(BinaryIO, file), item_shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: {error}; download it again from {HOME_PAGE}") from None


def _read_values(file: BinaryIO, item_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    num_axes = 1 + len(item_shape)
    header = file.read(4 + 4 * num_axes)
    magic = bytes((0, 0, 8, num_axes))
    if header[:4] != magic:
        raise UserError(f"not an IDX file of this kind: begins with {header[:4].hex() or 'nothing'}, not {magic.hex()}")
    if len(header) < 4 + 4 * num_axes:
        raise UserError("truncated inside its header")
    num, *shape = struct.unpack_from(f">{num_axes}I", header, 4)
    if tuple(shape) != item_shape:
        raise UserError(f"images of {shape[0]}x{shape[1]}, and those of Fashion-MNIST are 28x28")
    if not 0 < num <= MAX_IMAGES:
        raise UserError(f"announces {num:,} images; must be 1 to {MAX_IMAGES:,}")
    size = num * int(np.prod(item_shape, dtype=np.int64))
    raw = file.read(size + 1)
    if len(raw) != size:
        problem = f"truncated: {len(raw):,} of" if len(raw) < size else "more than"
        raise UserError(f"{problem} the {size:,} bytes that its header announces")
    return np.frombuffer(raw, np.uint8).reshape(num, *item_shape).copy()
