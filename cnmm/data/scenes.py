"""Scenes: images whose pixels are labelled. Each has a mask, and both are read together.

An image is scaled so that its longer side is at most that of the data set's size, and keeps its ratio; images of one
set may differ in size. A mask keeps its own resolution, which is what the metric is measured at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.data.dataset import DataSet, Images, Indices, Labels, histograms, moments, sample_indices
from cnmm.data.identity import fingerprint_of_files
from cnmm.data.images import Progress, decode_shrunk, image_size, in_threads, opened, shrunk_size
from cnmm.data.masks import ClassNames, Mask, MaskRule, decode_mask

Sizes = npt.NDArray[np.int64]
"""Heights and widths, [N, 2]."""

NUM_FOR_SCENE_STATISTICS = 400
"""Scenes that stand for all of a split: their pixels tell mean, standard deviation and how frequent classes are."""
LONGEST = 1024
"""Pixels along the longer side of images whose size nobody gave."""


class Scene(NamedTuple):
    """An image [H, W, 3] and its mask [h, w]."""

    image: Images
    mask: Mask


class SceneSplit(Protocol):
    """Scenes that may or may not be in memory."""

    @property
    def labels(self) -> Labels:
        """What holding out is stratified by: scenes have nothing of the kind, so all are alike."""

    @property
    def sizes(self) -> Sizes:
        """Of the images."""

    @property
    def mask_sizes(self) -> Sizes:
        """Of the masks."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Images:
        """Images that are all of one size, [len(indices), H, W, 3]."""

    def scenes(self, indices: Indices) -> list[Scene]:
        """The scenes at `indices`, in that order."""


class _Split:
    """What both kinds have in common."""

    sizes: Sizes
    mask_sizes: Sizes
    paths: tuple[Path, ...] = ()
    """The files of the images."""

    @property
    def labels(self) -> Labels:
        return np.zeros(len(self.sizes), np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, indices: Indices) -> Images:
        if len(np.unique(self.sizes[indices], axis=0)) > 1:
            raise UserError("these images differ in size; read them as scenes, or those of one size together")
        return np.stack([scene.image for scene in self.scenes(indices)])

    def scenes(self, indices: Indices) -> list[Scene]:
        raise NotImplementedError


class ArrayScenes(_Split):
    """Scenes in memory."""

    def __init__(self, content: Sequence[Scene]) -> None:
        self.content = list(content)
        self.sizes = np.array([scene.image.shape[:2] for scene in self.content], np.int64).reshape(-1, 2)
        self.mask_sizes = np.array([scene.mask.shape for scene in self.content], np.int64).reshape(-1, 2)

    def scenes(self, indices: Indices) -> list[Scene]:
        return [self.content[index] for index in indices]


class FileScenes(_Split):
    """Scenes that are decoded each time they are read."""

    def __init__(self, pairs: Sequence[Pair], rule: MaskRule, longest: int, mask_sizes: Sizes) -> None:
        self.pairs, self.rule, self.longest, self.mask_sizes = tuple(pairs), rule, longest, mask_sizes
        self.sizes = _shrunk_sizes(mask_sizes, longest)

    def scenes(self, indices: Indices) -> list[Scene]:
        found: dict[int, Scene] = {}

        def decode(position: int) -> None:
            found[position] = decode_scene(self.pairs[indices[position]], self.rule, self.longest)

        in_threads(decode, len(indices))
        return [found[position] for position in range(len(indices))]


class Pair(NamedTuple):
    """Files of a scene."""

    image: Path
    mask: Path


def decode_scene(pair: Pair, rule: MaskRule, longest: int) -> Scene:
    """Image and mask of one scene, both checked."""
    _check_sizes(pair)
    return Scene(decode_shrunk(pair.image, longest), decode_mask(pair.mask, rule))


def _check_sizes(pair: Pair) -> tuple[int, int]:
    """Height and width of both files, from their headers."""
    size = image_size(pair.image)
    with opened(pair.mask, what="a mask") as mask:
        found = (mask.height, mask.width)
    if found != size:
        raise UserError(
            f"{pair.mask}: it is {found[0]}x{found[1]} (height x width), its image {pair.image} is "
            f"{size[0]}x{size[1]}; both must have the same size"
        )
    return size


def open_scenes(
    name: str,
    spec: str,
    classes: ClassNames,
    splits: Mapping[str, Sequence[Pair]],
    *,
    root: Path,
    size: tuple[int, int] | None,
    memory_limit: int,
    progress: Progress | None,
) -> DataSet:
    """A data set of scenes from its files in a folder: "train", and if there are such, "val" and "test".

    Validation images of its own are held out of the training; alone, without test images, they are the test images.
    """
    names = ("train", "val") if "test" in splits else ("train",)
    training = [pair for part in names for pair in splits.get(part, ())]
    testing = splits.get("test", splits.get("val", ()))
    sizes = _all_sizes([*training, *testing])
    size = size or _common_size(sizes[: len(training)])
    content = _Content(classes.rule, max(size), memory_limit, progress)
    content.decode([*training, *testing], sizes)
    train = content.split(0, len(training))
    mean, std = scene_statistics(train)
    return DataSet(
        name=name,
        spec=spec,
        classes=classes.names,
        train=train,
        test=content.split(len(training), len(training) + len(testing)) if testing else None,
        mean=mean,
        std=std,
        size=size,
        in_chans=3,
        palette=classes.palette,
        held_out=tuple(range(len(splits["train"]), len(training))),
        root=root,
        fingerprint=fingerprint_of_files(root, [path for pair in training for path in pair]),
    )


def _all_sizes(pairs: Sequence[Pair]) -> Sizes:
    """Height and width of all files as they are, [N, 2]."""
    sizes = np.zeros((len(pairs), 2), np.int64)

    def look(index: int) -> None:
        sizes[index] = _check_sizes(pairs[index])

    in_threads(look, len(pairs))
    return sizes


def _common_size(sizes: Sizes) -> tuple[int, int]:
    """Height and width that most images have, once the largest are shrunk."""
    counts = Counter(shrunk_size((height, width), LONGEST) for height, width in sizes.tolist())
    return max(counts, key=lambda size: (counts[size], size))


class _Content:
    """The scenes of all splits: decoded, if they fit into memory."""

    def __init__(self, rule: MaskRule, longest: int, memory_limit: int, progress: Progress | None) -> None:
        self.rule, self.longest, self.memory_limit, self.progress = rule, longest, memory_limit, progress
        self.scenes: list[Scene | None] = []

    def decode(self, pairs: Sequence[Pair], sizes: Sizes) -> None:
        """`sizes`: of the files."""
        self.pairs, self.sizes, self.scenes = pairs, sizes, []
        if int(3 * _shrunk_sizes(sizes, self.longest).prod(1).sum() + sizes.prod(1).sum()) > self.memory_limit:
            return
        self.scenes = [None] * len(pairs)

        def decode(index: int) -> None:
            self.scenes[index] = decode_scene(pairs[index], self.rule, self.longest)

        in_threads(decode, len(pairs), progress=self.progress)

    def split(self, start: int, stop: int) -> ArrayScenes | FileScenes:
        split: ArrayScenes | FileScenes
        if self.scenes:
            split = ArrayScenes([scene for scene in self.scenes[start:stop] if scene is not None])
        else:
            split = FileScenes(self.pairs[start:stop], self.rule, self.longest, self.sizes[start:stop])
        split.paths = tuple(pair.image for pair in self.pairs[start:stop])
        return split


def _shrunk_sizes(sizes: Sizes, longest: int) -> Sizes:
    shrunk = [shrunk_size((height, width), longest) for height, width in sizes.tolist()]
    return np.array(shrunk, np.int64).reshape(-1, 2)


def scene_statistics(split: SceneSplit) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of 255, over some scenes that are always the same."""
    counts = np.zeros((3, 256), np.int64)
    for scene in _some(split, np.arange(len(split))):
        counts += histograms(scene.image)
    return moments(counts)


def class_shares(split: SceneSplit, indices: Indices, num_classes: int) -> npt.NDArray[np.float64]:
    """Share of every class among the labelled pixels of some of these scenes that are always the same."""
    counts = np.zeros(256, np.int64)
    for scene in _some(split, indices):
        counts += np.bincount(scene.mask.ravel(), minlength=256)
    shares: npt.NDArray[np.float64] = counts[:num_classes] / max(1, counts[:num_classes].sum())
    return shares


def _some(split: SceneSplit, indices: Indices) -> Iterator[Scene]:
    """Scenes that stand for all of these."""
    for index in sample_indices(len(indices), NUM_FOR_SCENE_STATISTICS):
        yield from split.scenes(indices[[index]])


def same_sizes(split: SceneSplit, indices: Indices, num_pixels: int) -> list[Indices]:
    """Indices in batches of equal sizes, of images and of masks, with at most so many pixels, but for single images."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in indices.tolist():
        groups.setdefault((*split.sizes[index].tolist(), *split.mask_sizes[index].tolist()), []).append(index)
    parts: list[Indices] = []
    for (height, width, *_), members in groups.items():
        most = max(1, num_pixels // (height * width))
        parts += np.array_split(np.array(members), -(-len(members) // most))
    return parts
