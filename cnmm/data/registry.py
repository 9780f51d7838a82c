"""From a text such as `cifar10:DIR` to a data set, and from a data set to the model of the zoo that fits it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from cnmm._errors import UserError
from cnmm.data.cifar import read_cifar
from cnmm.data.dataset import ArraySplit, DataSet, channel_statistics
from cnmm.data.fashion import FASHION_CLASSES, fashion_sample, read_fashion
from cnmm.data.folder import SMALL_SIDE, read_folder
from cnmm.data.images import Progress, fit_images

MEMORY_LIMIT = 4 * 2**30
"""Bytes of decoded images that are kept in memory."""
ALLOWED = ("cifar10:DIR", "cifar100:DIR", "folder:DIR", "fashion", "fashion:DIR")


def open_data(
    spec: str,
    *,
    size: tuple[int, int] | None = None,
    skip_bad: bool = False,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> DataSet:
    """Opens `cifar10:DIR`, `cifar100:DIR`, `folder:DIR`, `fashion:DIR` or `fashion`, the embedded sample.

    `size` is height and width; without it CIFAR and Fashion-MNIST keep theirs, and a folder gets one that suits its
    images. Images of a folder that need more than `memory_limit` bytes stay on disk. `skip_bad` leaves out image files
    that cannot be read, and lists them in `skipped`. `progress` is called with (done, total) while a folder is read.
    """
    kind, folder = _parse(spec)
    size = None if size is None else _checked(size)
    if kind == "folder" and folder:
        return _open_folder(spec, folder, size, skip_bad, memory_limit, progress)
    if skip_bad:
        warnings.warn(f"skip_bad has no effect on {spec}: only image files of folder:DIR are skipped", stacklevel=2)
    return _open_arrays(spec, kind, folder, size, memory_limit)


def suggest_model(dataset: DataSet) -> tuple[str, tuple[int, int], str]:
    """A model of the zoo for the images of a data set, the input size, and one sentence that says why."""
    pixels = f"{dataset.size[0]}x{dataset.size[1]}"
    if min(dataset.size) <= SMALL_SIDE:
        return "cnmm_b4s3", dataset.size, f"It is for small images, here of {pixels}, and learns fast on a CPU."
    return "cnmm_b5s4", dataset.size, f"Its stem makes large images, here of {pixels}, four times smaller first."


def _checked(size: Sequence[object]) -> tuple[int, int]:
    match size:
        case [int(height), int(width)] if height >= 1 and width >= 1:
            return height, width
    raise UserError(f"size={size!r}: two whole numbers (height, width) of at least 1 are needed")


def _parse(spec: str) -> tuple[str, Path | None]:
    kind, _, folder = spec.partition(":")
    if folder and f"{kind}:DIR" in ALLOWED:
        return kind, Path(folder).expanduser()
    if spec in ALLOWED:
        return kind, None
    hint = f"; for a folder of images: folder:{spec}" if Path(spec).is_dir() else ""
    raise UserError(f"unknown data {spec!r}: allowed are {', '.join(ALLOWED)}{hint}")


def _open_folder(
    spec: str,
    folder: Path,
    size: tuple[int, int] | None,
    skip_bad: bool,
    memory_limit: int,
    progress: Progress | None,
) -> DataSet:
    content = read_folder(folder, size, skip_bad=skip_bad, memory_limit=memory_limit, progress=progress)
    mean, std = channel_statistics(content.train)
    return DataSet(
        name=folder.resolve().name,
        spec=spec,
        classes=content.classes,
        train=content.train,
        test=content.test,
        mean=mean,
        std=std,
        size=content.size,
        in_chans=3,
        skipped=content.skipped,
    )


def _open_arrays(spec: str, kind: str, folder: Path | None, size: tuple[int, int] | None, memory_limit: int) -> DataSet:
    classes, train, test = _read_arrays(kind, folder)
    height, width, in_chans = train.images.shape[1:]
    size = size or (height, width)
    needed = (len(train) + len(test)) * size[0] * size[1] * in_chans
    if needed > memory_limit:
        raise UserError(
            f"{spec} at {size[0]}x{size[1]} takes {needed:,} bytes, more than memory_limit={memory_limit:,}; "
            "use a smaller size or a larger limit"
        )
    train, test = (ArraySplit(fit_images(split.images, size), split.labels) for split in (train, test))
    mean, std = channel_statistics(train)
    return DataSet(
        name=kind, spec=spec, classes=classes, train=train, test=test, mean=mean, std=std, size=size, in_chans=in_chans
    )


def _read_arrays(kind: str, folder: Path | None) -> tuple[tuple[str, ...], ArraySplit, ArraySplit]:
    if folder is None:
        return FASHION_CLASSES, ArraySplit(*fashion_sample("train")), ArraySplit(*fashion_sample("test"))
    if kind == "fashion":
        return FASHION_CLASSES, *read_fashion(folder)
    return read_cifar(kind, folder)
