"""From a text such as `cifar10:DIR` to a data set, and from a data set to the model of the zoo that fits it.

A kind of data set is a function with the decorator `register_data`; its first argument is the DIR of `KIND:DIR`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from cnmm._errors import UserError
from cnmm._machine import usable_memory
from cnmm.data.cifar import read_cifar
from cnmm.data.dataset import ArraySplit, DataSet, channel_statistics
from cnmm.data.fashion import FASHION_CLASSES, fashion_sample, read_fashion
from cnmm.data.folder import SMALL_SIDE, read_folder
from cnmm.data.identity import fingerprint_of_arrays, fingerprint_of_files, paths_of
from cnmm.data.images import Progress, fit_images
from cnmm.data.masks import ClassNames
from cnmm.data.scenes import open_scenes
from cnmm.data.streets import (
    CAMVID_CLASSES,
    CAMVID_SIZE,
    CITYSCAPES_CLASSES,
    CITYSCAPES_SIZE,
    Splits,
    camvid_files,
    cityscapes_files,
    own_files,
)

MEMORY_LIMIT = min(4 * 2**30, usable_memory() // 4)
"""Bytes of decoded images that are kept in memory."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked of a data set."""

    spec: str
    size: tuple[int, int] | None
    skip_bad: bool
    memory_limit: int
    progress: Progress | None
    test: Container[str] | None


Opener = Callable[[Path | None, Request], DataSet]
_KINDS: dict[str, tuple[Opener, tuple[str, ...]]] = {}
"""By name: what opens it, and how it is spelt."""


def register_data(name: str, *, without_folder: bool = False) -> Callable[[Opener], Opener]:
    """Registers a kind of data set: `NAME:DIR` and, with `without_folder`, plain `NAME` (its folder is None)."""

    def register(function: Opener) -> Opener:
        _KINDS[name] = function, (f"{name}:DIR", *([name] if without_folder else []))
        return function

    return register


def spellings() -> tuple[str, ...]:
    """All forms that `open_data` takes."""
    return tuple(form for _, forms in _KINDS.values() for form in forms)


def open_data(
    spec: str,
    *,
    size: tuple[int, int] | None = None,
    skip_bad: bool = False,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
    test: Container[str] | None = None,
) -> DataSet:
    """Opens `cifar10:DIR`, `cifar100:DIR`, `folder:DIR`, `fashion:DIR` or `fashion`, the embedded sample.

    Scenes, whose pixels are labelled: `camvid:DIR`, `cityscapes:DIR`, `masks:DIR`. The path of a folder alone means
    `folder:DIR`.

    `size` is height and width; without it CIFAR and Fashion-MNIST keep theirs, and a folder gets one that suits its
    images. Scenes keep their ratio: they are shrunk to its longer side. Images of a folder that need more than
    `memory_limit` bytes stay on disk. `skip_bad` leaves out image files that cannot be read, and lists them in
    `skipped`. `progress` is called with (done, total) while a folder is read. `test`: names of the test images of a
    plain folder, where they were drawn before.
    """
    opener, folder = _parse(spec)
    size = None if size is None else _checked(size)
    return opener(
        folder,
        Request(spec=spec, size=size, skip_bad=skip_bad, memory_limit=memory_limit, progress=progress, test=test),
    )


def suggest_model(dataset: DataSet) -> tuple[str, tuple[int, int], str]:
    """A model of the zoo for the images of a data set, the input size, and one sentence that says why."""
    pixels = f"{dataset.size[0]}x{dataset.size[1]}"
    if dataset.palette:
        return "cnmm_seg_b5s5", dataset.size, f"It labels every pixel of images, here of {pixels}."
    if min(dataset.size) <= SMALL_SIDE:
        return "cnmm_b4s3", dataset.size, f"It is for small images, here of {pixels}, and learns fast on a CPU."
    return "cnmm_b5s4", dataset.size, f"Its stem makes large images, here of {pixels}, four times smaller first."


def _checked(size: Sequence[object]) -> tuple[int, int]:
    match size:
        case [int(height), int(width)] if height >= 1 and width >= 1:
            return height, width
    raise UserError(f"size={size!r}: must be two whole numbers (height, width) of at least 1")


def _parse(spec: str) -> tuple[Opener, Path | None]:
    kind, _, folder = spec.partition(":")
    if folder and kind in _KINDS:
        return _KINDS[kind][0], Path(folder).expanduser()
    if kind in _KINDS and spec in _KINDS[kind][1]:
        return _KINDS[kind][0], None
    if spec and Path(spec).expanduser().is_dir():
        return _folder, Path(spec).expanduser()
    raise UserError(f"unknown data {spec!r}: must be a folder of images, or one of {', '.join(spellings())}")


@register_data("cifar10")
def _cifar10(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    return _in_memory("cifar10", request, *read_cifar("cifar10", folder))


@register_data("cifar100")
def _cifar100(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    return _in_memory("cifar100", request, *read_cifar("cifar100", folder))


@register_data("folder")
def _folder(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    content = read_folder(
        folder,
        request.size,
        skip_bad=request.skip_bad,
        memory_limit=request.memory_limit,
        progress=request.progress,
        test=request.test,
    )
    paths = [
        path for split in (content.train, *([content.test] if content.drawn_test else [])) for path in paths_of(split)
    ]
    mean, std = channel_statistics(content.train)
    return DataSet(
        name=folder.resolve().name,
        spec=request.spec,
        classes=content.classes,
        train=content.train,
        test=content.test,
        mean=mean,
        std=std,
        size=content.size,
        in_chans=3,
        skipped=content.skipped,
        root=folder,
        drawn_test=content.drawn_test,
        fingerprint=fingerprint_of_files(folder, paths),
    )


@register_data("fashion", without_folder=True)
def _fashion(folder: Path | None, request: Request) -> DataSet:
    if folder is None:
        splits = ArraySplit(*fashion_sample("train")), ArraySplit(*fashion_sample("test"))
        return _in_memory("fashion", request, FASHION_CLASSES, *splits)
    return _in_memory("fashion", request, FASHION_CLASSES, *read_fashion(folder))


@register_data("camvid")
def _camvid(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    return _scenes("camvid", folder, request, CAMVID_CLASSES, camvid_files(folder), CAMVID_SIZE)


@register_data("cityscapes")
def _cityscapes(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    return _scenes("cityscapes", folder, request, CITYSCAPES_CLASSES, cityscapes_files(folder), CITYSCAPES_SIZE)


@register_data("masks")
def _masks(folder: Path | None, request: Request) -> DataSet:
    assert folder is not None
    return _scenes(folder.resolve().name, folder, request, *own_files(folder), None)


def _scenes(
    name: str, root: Path, request: Request, classes: ClassNames, splits: Splits, usual: tuple[int, int] | None
) -> DataSet:
    """Scenes at the size that was asked for, or that is usual."""
    _warn_of_skip_bad(request)
    return open_scenes(
        name,
        request.spec,
        classes,
        splits,
        root=root,
        size=request.size or usual,
        memory_limit=request.memory_limit,
        progress=request.progress,
    )


def _warn_of_skip_bad(request: Request) -> None:
    if request.skip_bad:
        words = f"skip_bad has no effect on {request.spec}: only image files of folder:DIR are skipped"
        warnings.warn(words, stacklevel=5)


def _in_memory(name: str, request: Request, classes: tuple[str, ...], train: ArraySplit, test: ArraySplit) -> DataSet:
    """A data set whose images are all decoded: fitted to the size, if it does not take too much memory."""
    _warn_of_skip_bad(request)
    height, width, in_chans = train.images.shape[1:]
    size = request.size or (height, width)
    needed = (len(train) + len(test)) * size[0] * size[1] * in_chans
    if needed > request.memory_limit:
        raise UserError(
            f"{request.spec} at {size[0]}x{size[1]} takes {needed:,} bytes, more than "
            f"memory_limit={request.memory_limit:,}; use a smaller size or a larger limit"
        )
    fingerprint = fingerprint_of_arrays(train)
    train, test = (ArraySplit(fit_images(split.images, size), split.labels) for split in (train, test))
    mean, std = channel_statistics(train)
    return DataSet(
        name=name,
        spec=request.spec,
        classes=classes,
        train=train,
        test=test,
        mean=mean,
        std=std,
        size=size,
        in_chans=in_chans,
        fingerprint=fingerprint,
    )
