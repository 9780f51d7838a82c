"""Colours of classes, for label maps and overlays. Torch-free.

In memory a mask is uint8 [height, width]: each pixel is the number of a class, or `VOID`, which is never learned, never
counted, and never predicted.
"""

from __future__ import annotations

import functools
import itertools

Colour = tuple[int, int, int]
Palette = tuple[Colour, ...]

VOID = 255
"""The value of pixels that have no class."""
VOID_COLOUR: Colour = (0, 0, 0)
MOST_CLASSES = 255
"""As many as a mask can tell apart beside void."""

CAMVID: Palette = (
    (128, 128, 128),
    (128, 0, 0),
    (192, 192, 128),
    (128, 64, 128),
    (0, 0, 192),
    (128, 128, 0),
    (192, 128, 128),
    (64, 64, 128),
    (64, 0, 128),
    (64, 64, 0),
    (0, 128, 192),
)
"""The 11 classes that CamVid is reported on."""
CITYSCAPES: Palette = (
    (128, 64, 128),
    (244, 35, 232),
    (70, 70, 70),
    (102, 102, 156),
    (190, 153, 153),
    (153, 153, 153),
    (250, 170, 30),
    (220, 220, 0),
    (107, 142, 35),
    (152, 251, 152),
    (70, 130, 180),
    (220, 20, 60),
    (255, 0, 0),
    (0, 0, 142),
    (0, 0, 70),
    (0, 60, 100),
    (0, 80, 100),
    (0, 0, 230),
    (119, 11, 32),
)
"""The 19 train ids of Cityscapes."""

_LEVELS = (0, 43, 85, 128, 170, 213, 255)


@functools.cache
def default_palette(num: int) -> Palette:
    """Distinguishable colours for `num` classes; those of fewer classes are the first of them.

    Each is the colour of a grid that looks least like all before it, black (void) and white among them.
    """
    grid = list(itertools.product(_LEVELS, _LEVELS, _LEVELS))
    seen = {colour: _lab(colour) for colour in grid}
    distance = {
        colour: min(_apart(lab, seen[0, 0, 0]), _apart(lab, seen[255, 255, 255])) for colour, lab in seen.items()
    }
    found: list[Colour] = []
    for _ in range(num):
        best = max(grid, key=lambda colour: distance[colour])
        found.append(best)
        for colour, lab in seen.items():
            distance[colour] = min(distance[colour], _apart(lab, seen[best]))
    return tuple(found)


def _apart(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Squared distance of two colours in Lab, where it is nearly that of the eye."""
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def _lab(colour: Colour) -> tuple[float, float, float]:
    """sRGB to CIE Lab, under daylight (D65)."""
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour))
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)
