"""Scores of pixels in numpy: label maps at the size of an image, and how sure a network is of it.

Both go block by block, so that what they work on stays in the cache: faster here than the operators of both runtimes.
Shapes: K classes, H and W the height and width of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]

BLOCK_PIXELS = 2**16
"""Of one class, in one block."""


def label_map(scores_KHW: Floats, size: tuple[int, int]) -> Labels:
    """The best class of every pixel of an image of this height and width: scores are upsampled first."""
    own_size = scores_KHW.shape[1:] == size
    labels = np.zeros(size, np.uint8)
    upsampled = _Bilinear(scores_KHW.shape[1:], size)
    for rows in _blocks(size):
        found = labels[rows]
        best = scores_KHW[0, rows].copy() if own_size else upsampled.rows(scores_KHW[0], rows)
        better = np.empty(best.shape, np.bool_)
        for number in range(1, len(scores_KHW)):
            score = scores_KHW[number, rows] if own_size else upsampled.rows(scores_KHW[number], rows)
            np.greater(score, best, out=better)
            np.maximum(score, best, out=best)
            np.maximum(found, better.view(np.uint8) * np.uint8(number), out=found)  # later classes have larger numbers
    return labels


def image_confidence(scores_KHW: Floats) -> float:
    """The mean over the pixels of the largest class probability, at the resolution of the scores."""
    total = 0.0
    for rows in _blocks(scores_KHW.shape[1:]):
        block = scores_KHW[:, rows]
        best = block.max(0)
        mass = np.zeros_like(best)
        for score in block:
            mass += np.exp(score - best)
        total += float((1 / mass).sum(dtype=np.float64))
    return total / math.prod(scores_KHW.shape[1:])


def _blocks(size: tuple[int, ...]) -> Iterator[slice]:
    """Rows that are worked on together."""
    step = max(1, BLOCK_PIXELS // size[1])
    for first in range(0, size[0], step):
        yield slice(first, min(first + step, size[0]))


class _Bilinear:
    """Bilinear upsampling as the networks do it: pixels are areas, and nothing lies beyond the outer ones' centres."""

    def __init__(self, old: tuple[int, ...], new: tuple[int, int]) -> None:
        (self.above, self.below, self.down), (self.left, self.right, self.across) = (
            _neighbours(before, after) for before, after in zip(old, new, strict=True)
        )

    def rows(self, plane_HW: Floats, rows: slice) -> Floats:
        """Some rows of the new plane."""
        first, last = self.above[rows.start], self.below[rows.stop - 1] + 1
        wide = _between(plane_HW[first:last], self.left, self.right, self.across, 1)
        return _between(wide, self.above[rows] - first, self.below[rows] - first, self.down[rows, np.newaxis], 0)


def _neighbours(old: int, new: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Floats]:
    """For every new place the two old ones around it, and how far it lies from the first towards the second."""
    place = np.clip((np.arange(new) + 0.5) * (old / new) - 0.5, 0, old - 1)
    first = place.astype(np.intp)
    return first, np.minimum(first + 1, old - 1), (place - first).astype(np.float32)


def _between(
    plane: Floats, first: npt.NDArray[np.intp], second: npt.NDArray[np.intp], part: Floats, axis: int
) -> Floats:
    """first + part * (second - first), along an axis."""
    start, found = plane.take(first, axis), plane.take(second, axis)
    found -= start
    found *= part
    found += start
    return found
