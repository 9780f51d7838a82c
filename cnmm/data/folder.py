"""A folder of image files: `train/CLASS/*.jpg`, and `test/` or `val/` of the same form; or plainly `CLASS/*.jpg`.

Of a plain folder, a fifth of every class is drawn for testing, by the names of the files: always the same ones, also
when others are added, and whatever the seed of a training is. Images may have any size and any form that Pillow reads.
Hidden files and files with other suffixes are ignored, and folders inside a class folder belong to the class.
"""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.data.dataset import ArraySplit, Images, Labels, Split, quotas, sample_indices
from cnmm.data.identity import drawn, relative_name
from cnmm.data.images import IMAGE_SUFFIXES, FileSplit, Progress, decode_image, in_threads, shorter_side

LAYOUT = "the layout is CLASS/IMAGE, or train/CLASS/IMAGE and test/CLASS/IMAGE or val/CLASS/IMAGE"
TEST_SHARE = 0.2
"""Of the images of a plain folder."""
SMALL_SIDE, LARGE_SIDE = 48, 160
"""Up to the one, images are small (32x32); from the other on, they are photos (224x224)."""
NUM_FOR_SIZE = 200
"""Images whose headers decide the size when none is given."""


@dataclass(frozen=True, kw_only=True)
class FolderContent:
    """What `read_folder` found."""

    classes: tuple[str, ...]
    train: Split
    test: Split | None
    size: tuple[int, int]
    skipped: tuple[str, ...]
    drawn_test: bool
    """Were the test images drawn from a plain folder?"""


@dataclass(frozen=True, eq=False)
class _Listing:
    """The image files of `train/`, `test/` or `val/`, in a fixed order."""

    folder: Path
    paths: tuple[Path, ...]
    labels: Labels
    whole: bool = True
    """Must it have images of every class?"""

    def part(self, chosen: npt.NDArray[np.bool_], *, whole: bool) -> _Listing:
        paths = tuple(self.paths[index] for index in np.flatnonzero(chosen))
        return _Listing(self.folder, paths, self.labels[chosen], whole)


def read_folder(
    folder: Path,
    size: tuple[int, int] | None,
    *,
    skip_bad: bool,
    memory_limit: int,
    progress: Progress | None,
    test: Container[str] | None = None,
) -> FolderContent:
    """Opens the splits; their images are kept in memory if all of them together fit into `memory_limit` bytes.

    `test`: names of the test images of a plain folder, where they were drawn before.
    """
    classes, listings = _list_folder(folder, test)
    size = size or _choose_size(listings[0].paths, skip_bad)
    paths = [path for listing in listings for path in listing.paths]
    in_memory = len(paths) * size[0] * size[1] * 3 <= memory_limit
    images, good = _scan(paths, size, in_memory, skip_bad, progress)
    splits, start = [], 0
    for listing in listings:
        part = slice(start, start := start + len(listing.paths))
        splits.append(_make_split(listing, size, images if images is None else images[part], good[part]))
        if listing.whole:
            _check_no_class_is_empty(listing.folder, classes, splits[-1].labels, "has no image that can be read")
    return FolderContent(
        classes=classes,
        train=splits[0],
        test=splits[1] if len(splits) > 1 else None,
        size=size,
        skipped=tuple(str(paths[index]) for index in np.flatnonzero(~good)),
        drawn_test=listings[0].folder == folder,
    )


def size_for(side: float) -> tuple[int, int]:
    """The size for images whose shorter side has so many pixels."""
    if side <= SMALL_SIDE:
        return (32, 32)
    return (128, 128) if side < LARGE_SIDE else (224, 224)


def _list_folder(folder: Path, test: Container[str] | None) -> tuple[tuple[str, ...], list[_Listing]]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {LAYOUT}")
    other = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    plain = not (folder / "train").is_dir()
    if plain and other:
        raise UserError(f"{folder} has {other.name}/ but no folder train/; {LAYOUT}")
    place = folder if plain else folder / "train"
    classes = _class_names(place)
    if len(classes) < 2:
        raise UserError(f"{place} has {len(classes)} class folders, must be at least 2; {LAYOUT}")
    listings = [_list_split(place, classes)]
    if plain:
        return classes, _drawn(listings[0], len(classes), test)
    if other:
        _check_same_classes(other, classes)
        listings.append(_list_split(other, classes))
    return classes, listings


def _drawn(listing: _Listing, num_classes: int, test: Container[str] | None) -> list[_Listing]:
    """A plain folder as two listings: images for training and for testing, those that are named or drawn now."""
    names = [relative_name(path, listing.folder) for path in listing.paths]
    if test is not None:
        chosen = np.array([name in test for name in names])
    else:
        counts = np.bincount(listing.labels, minlength=num_classes)
        chosen = drawn(names, listing.labels, quotas(counts, round(TEST_SHARE * len(names))))
    return [listing.part(~chosen, whole=True), *([listing.part(chosen, whole=False)] if chosen.any() else [])]


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _check_same_classes(folder: Path, classes: tuple[str, ...]) -> None:
    found = _class_names(folder)
    missing, extra = sorted(set(classes) - set(found)), sorted(set(found) - set(classes))
    if missing:
        raise UserError(f"{folder} lacks the class {missing[0]!r} of train/; both need the same class folders")
    if extra:
        raise UserError(f"{folder} has the class {extra[0]!r}, train/ has not; both need the same class folders")


def _list_split(folder: Path, classes: tuple[str, ...]) -> _Listing:
    files = [image_files(folder / name) for name in classes]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in files])
    _check_no_class_is_empty(folder, classes, labels, "has no images; their suffixes are " + _suffix_text())
    return _Listing(folder, tuple(path for paths in files for path in paths), labels)


def _suffix_text() -> str:
    return ", ".join(sorted(IMAGE_SUFFIXES))


def _check_no_class_is_empty(folder: Path, classes: tuple[str, ...], labels: Labels, problem: str) -> None:
    for name, count in zip(classes, np.bincount(labels, minlength=len(classes)).tolist(), strict=True):
        if not count:
            raise UserError(f"the class {folder / name} {problem}")


def image_files(folder: Path) -> list[Path]:
    """All image files below a folder, sorted; hidden ones are left out."""
    found = []
    for parent, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.suffix.lower() in IMAGE_SUFFIXES)


def _raise(error: OSError) -> None:
    raise UserError(f"{error.filename}: the folder cannot be read ({error.strerror})")


def _choose_size(paths: tuple[Path, ...], skip_bad: bool) -> tuple[int, int]:
    indices = sample_indices(len(paths), NUM_FOR_SIZE)
    sides = np.zeros(len(indices))

    def measure(position: int) -> None:
        sides[position] = shorter_side(paths[indices[position]])

    in_threads(measure, len(indices), skip_bad=skip_bad)
    if not sides.any():
        raise UserError(f"none of {len(indices)} image files can be read, for example {paths[indices[0]]}")
    return size_for(float(np.median(sides[sides > 0])))


def _scan(
    paths: list[Path], size: tuple[int, int], in_memory: bool, skip_bad: bool, progress: Progress | None
) -> tuple[Images | None, npt.NDArray[np.bool_]]:
    """Looks at every file once: the images if they are to be kept, and which files are good."""
    images = np.empty((len(paths), *size, 3), np.uint8) if in_memory else None

    def look(index: int) -> None:
        if images is None and not skip_bad:
            # Decoding all of them may take hours; a damaged one is then named when it is read.
            shorter_side(paths[index])
            return
        image = decode_image(paths[index], size)
        if images is not None:
            images[index] = image

    good = np.ones(len(paths), np.bool_)
    good[in_threads(look, len(paths), skip_bad=skip_bad, progress=progress)] = False
    return images, good


def _make_split(listing: _Listing, size: tuple[int, int], images: Images | None, good: npt.NDArray[np.bool_]) -> Split:
    labels = listing.labels[good]
    paths = tuple(listing.paths[index] for index in np.flatnonzero(good))
    if images is not None:
        return ArraySplit(images if good.all() else images[good], labels, paths)
    return FileSplit(paths, labels, size)
