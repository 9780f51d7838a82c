"""The images of a load test: of a folder, of a data set with its labels, or noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError

if TYPE_CHECKING:
    from cnmm.serve.about import About

MOST_BYTES = 2**26
"""Of images in memory; further requests repeat the first ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Images of so many different requests."""

    images: npt.NDArray[np.uint8]
    """[requests, images of each, H, W, C]"""
    labels: npt.NDArray[np.int64] | None
    """[requests, images of each], indices into the server's classes."""


def take_images(
    about: About, folder: str | Path | None, data: str | None, per_request: int, requests: int, seed: int
) -> Sample:
    """Images in a random order, each once if there are enough."""
    generator = np.random.default_rng((seed, 2))
    most = max(per_request, min(requests * per_request, MOST_BYTES // int(np.prod(about.image_shape))))
    labels = None
    if data is not None:
        images, labels = _labelled(about, data, most, generator)
    elif folder is not None:
        images = _of_folder(about, Path(folder), most, generator)
    else:
        images = generator.integers(0, 256, (most, *about.image_shape), np.uint8)
    num = max(1, len(images) // per_request)
    order = np.resize(np.arange(len(images)), num * per_request).reshape(num, per_request)
    return Sample(images=images[order], labels=None if labels is None else labels[order])


def _of_folder(about: About, folder: Path, most: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    from cnmm.runtime.inputs import image_paths, to_batch

    paths = image_paths([folder])
    chosen = generator.permutation(len(paths))[:most]
    return to_batch([paths[index] for index in chosen], about.image_shape[:2], about.image_shape[2])


def _labelled(
    about: About, spec: str, most: int, generator: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Test images of a data set, or its training images if it has no others; its classes must be the server's."""
    from cnmm.data.registry import open_data

    if about.task != "classification":
        raise UserError(f"data {spec!r}: labels are compared for classification only; give images instead")
    dataset = open_data(spec, size=about.image_shape[:2])
    if unknown := sorted(set(dataset.classes) - set(about.classes)):
        raise UserError(f"data {spec!r}: the server does not know the class {unknown[0]!r}")
    if dataset.in_chans != about.image_shape[2]:
        raise UserError(
            f"data {spec!r}: images of {dataset.in_chans} channels, and the server takes {about.image_shape[2]}"
        )
    split = dataset.test if dataset.test is not None else dataset.train
    chosen = generator.permutation(len(split))[:most]
    numbers = np.array([about.classes.index(name) for name in dataset.classes])
    return split.read(chosen), numbers[split.labels[chosen]]
