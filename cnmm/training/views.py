"""Random views of scenes: scaled, cropped, flipped and recoloured, image and mask together. Masks are never mixed.

A view is a function of (seed, epoch, image) alone, whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from cnmm.data.scenes import Scene
from cnmm.palette import VOID

Pixels = npt.NDArray[np.uint8]
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


class View(NamedTuple):
    """How a scene is shown."""

    size: tuple[int, int]
    """Height and width of the crop."""
    scale: float
    """Of the image before it is cropped."""
    place: tuple[float, float]
    """Where the crop lies, from 0 (top, left) to 1: within the scaled image, or the image within a larger crop."""
    mirrored: bool
    colours: tuple[float, float, float]
    """Factors of brightness, contrast and saturation."""


def draw_view(
    key: tuple[object, ...],
    size: tuple[int, int],
    *,
    zoom: tuple[float, float] = (1.0, 1.0),
    colour: float = 0.0,
    flip: bool = False,
) -> View:
    """The view that belongs to a key, such as (seed, epoch, image); its scale is drawn from `zoom`, by logarithm."""
    drawn = draw(key, 7)
    low, high = zoom
    return View(
        size=size,
        scale=low * (high / low) ** drawn[0],
        place=(drawn[1], drawn[2]),
        mirrored=flip and drawn[3] < 0.5,
        colours=(factor(drawn[4], colour), factor(drawn[5], colour), factor(drawn[6], colour)),
    )


def draw(key: tuple[object, ...], num: int) -> npt.NDArray[np.float64]:
    """Random numbers from 0 to 1 that belong to a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).uniform(size=num)


def factor(drawn: float, spread: float) -> float:
    """Between 1 - spread and 1 + spread."""
    return float(1 + spread * (2 * drawn - 1))


def show(scene: Scene, view: View, mean: Pixels) -> Scene:
    """The scene in a view; what lies outside of it has the mean colour and no class."""
    height, width = view.size
    whole = scene.image.shape[:2]
    scaled = [max(1, round(side * view.scale)) for side in whole]
    spans = [_span(*sides) for sides in zip(scaled, view.size, view.place, strict=True)]
    (top, rows, above), (left, columns, before) = spans
    image = np.empty((height, width, 3), np.uint8)
    image[:] = mean
    mask = np.full((height, width), VOID, np.uint8)
    here = np.s_[above : above + rows, before : before + columns]
    for target, source, way in (
        (image, scene.image, Image.Resampling.BILINEAR),
        (mask, scene.mask, Image.Resampling.NEAREST),
    ):
        down, across = (side / whole for side, whole in zip(source.shape, scaled, strict=False))
        box = (left * across, top * down, (left + columns) * across, (top + rows) * down)
        target[here] = np.asarray(Image.fromarray(source).resize((columns, rows), way, box=box))
    if view.colours != (1.0, 1.0, 1.0):
        image[here] = recoloured(image[here], view.colours)
    if view.mirrored:
        image, mask = np.ascontiguousarray(image[:, ::-1]), np.ascontiguousarray(mask[:, ::-1])
    return Scene(image, mask)


def _span(scaled: int, crop: int, place: float) -> tuple[int, int, int]:
    """Along one side: where the crop begins in the scaled image, how much of it is image, and how much comes before."""
    free = scaled - crop
    if free >= 0:
        return min(int(place * (free + 1)), free), crop, 0
    return 0, scaled, min(int(place * (1 - free)), -free)


def recoloured(pixels: Pixels, colours: tuple[float, float, float]) -> Pixels:
    """Brightness, contrast and saturation: away from black, from the mean grey, from each pixel's own grey."""
    brightness, contrast, saturation = colours
    x = pixels.astype(np.float32) * brightness
    grey = x @ _GREY if x.shape[-1] == 3 else x[..., 0]
    middle = float(grey.mean())
    x = middle + contrast * (grey[..., None] + saturation * (x - grey[..., None]) - middle)
    return (x + 0.5).clip(0, 255).astype(np.uint8)
