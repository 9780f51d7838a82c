"""What a data set is: splits of uint8 images [N, H, W, C] with int64 labels [N], and how to hold some of them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError, printable

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.integer]

NUM_FOR_STATISTICS = 2000
"""Images that stand for all of a split whose images are decoded anew at every reading."""
_CHUNK = 512


class Split(Protocol):
    """Images that may or may not be in memory, with their labels."""

    @property
    def labels(self) -> Labels:
        """Labels [N], indices into the classes of the data set."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Images:
        """The images at `indices`, in that order: [len(indices), H, W, C]."""


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """A split whose images are in memory."""

    images: Images
    labels: Labels
    paths: tuple[Path, ...] = ()
    """The files that they were read from, if each has one of its own."""

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Indices) -> Images:
        return self.images[indices]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set: labelled images, or scenes, images whose pixels are labelled."""

    name: str
    spec: str
    """As the user gave it to `open_data`."""
    classes: tuple[str, ...]
    train: Split
    test: Split | None
    mean: tuple[float, ...]
    """Of each channel over the training images, in units of 255: between 0 and 1."""
    std: tuple[float, ...]
    """Like `mean`; at least one grey level, 1/255, so that dividing by it is safe."""
    size: tuple[int, int]
    """Height and width of the images as they are read."""
    in_chans: int
    palette: tuple[tuple[int, int, int], ...] = ()
    """Where pixels are labelled: red, green and blue of each class."""
    held_out: tuple[int, ...] = ()
    """Images of `train` that the set itself holds out for validation; none: they are drawn by seed."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read and were left out."""
    skip_bad: bool = False
    """Are files that cannot be read left out?"""
    root: Path | None = None
    """The folder that its files are in; none where images have no files of their own."""
    drawn_test: bool = False
    """Were the test images drawn from the same images as the training images?"""
    fingerprint: str = ""
    """Differs where training images (and drawn test images) do; empty where nobody knows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name) or "images")
        fulfils, words = _fields.TEXT
        for name in self.classes:
            if not fulfils(name):
                raise UserError(f"the class {name!r} of {self.spec}: its name must be {words}; rename it")


def channel_statistics(split: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, exact for images in memory, else of a subset that never changes."""
    indices = np.arange(len(split))
    if not isinstance(split, ArraySplit):
        indices = sample_indices(len(split), NUM_FOR_STATISTICS)
    counts: npt.NDArray[np.int64] | int = 0
    for start in range(0, len(indices), _CHUNK):
        counts = counts + histograms(split.read(indices[start : start + _CHUNK]))
    return moments(np.asarray(counts))


def moments(counts: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of 255, from how often each value occurs: [C, 256]."""
    values = np.arange(256) / 255
    share = counts / np.sum(counts, axis=1, keepdims=True)
    mean = share @ values
    variance = (share * (values - mean[:, np.newaxis]) ** 2).sum(axis=1)
    return tuple(mean.tolist()), tuple(np.sqrt(variance).clip(min=1 / 255).tolist())


def histograms(images: Images) -> npt.NDArray[np.int64]:
    """How often each value occurs in each channel: [C, 256]."""
    return np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])])


def sample_indices(num: int, limit: int) -> npt.NDArray[np.int64]:
    """Sorted indices of at most `limit` of `num` images, always the same ones."""
    if num <= limit:
        return np.arange(num)
    return np.sort(np.random.default_rng(0).choice(num, limit, replace=False))


def divide(data: DataSet, num: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sorted indices of the training images to train on, and of those held out for validation.

    `num` are drawn; a set with validation images of its own holds those out, unless `num` is 0.
    """
    if not (num and data.held_out):
        return hold_out(data.train.labels, num, seed)
    held = np.array(data.held_out)
    return np.setdiff1d(np.arange(len(data.train)), held, assume_unique=True), held


def hold_out(labels: Labels, num: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sorted indices of the images to train on, and of `num` images held out for validation.

    Stratified: each class gives its share of `num`, and keeps an image for training wherever that is possible.
    """
    if num < 0 or num >= len(labels):
        raise UserError(
            f"{num} images cannot be held out of {len(labels)} for validation: "
            f"must be 0 to {max(0, len(labels) - 1)}, so that some are left to train on"
        )
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rng = np.random.default_rng(seed)
    held = [
        rng.permutation(np.flatnonzero(inverse == c))[:quota] for c, quota in enumerate(quotas(counts, num).tolist())
    ]
    validation = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), validation, assume_unique=True), validation


def quotas(counts: npt.NDArray[np.int64], num: int) -> npt.NDArray[np.int64]:
    """`num` divided among the classes in proportion to `counts`, by largest remainder."""
    exact = num * counts
    shares: npt.NDArray[np.int64] = exact // counts.sum()
    most = counts - 1 if num <= (counts - 1).sum() else counts
    by_remainder = np.argsort(-(exact % counts.sum()), kind="stable")
    while shares.sum() < num:
        open_classes = by_remainder[shares[by_remainder] < most[by_remainder]]
        shares[open_classes[: num - shares.sum()]] += 1
    return shares
