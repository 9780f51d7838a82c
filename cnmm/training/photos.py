"""Random views of photographs: a part of the image at the size of the whole, mirrored and recoloured.

A view is a function of (seed, epoch, image) alone, whatever else is in the batch. A part is one of the image as it was
read, at the model's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cnmm.training.config import TrainConfig
from cnmm.training.views import Pixels, draw, factor, recoloured

PHOTO_SIDE = 64
"""Images whose shorter side has so many pixels are shown as photographs, unless told."""
PHOTO_AREA, PHOTO_COLOUR = (0.35, 1.0), 0.3
"""What they are shown with: `area` and `colour` of a training."""
RATIO = 4 / 3
"""How much wider or higher than the image a part may be, relative to its area."""


class PhotoView(NamedTuple):
    """How an image is shown."""

    size: tuple[float, float]
    """Height and width of the part, as shares of the image's."""
    place: tuple[float, float]
    """Where the part lies in the image, from 0 (top, left) to 1."""
    mirrored: bool
    colours: tuple[float, float, float]
    """Factors of brightness, contrast and saturation."""


def draw_photo_view(key: tuple[object, ...], config: TrainConfig, mirrored: bool | None = None) -> PhotoView:
    """The view that belongs to a key, such as (seed, epoch, image); `mirrored` says the side, where it is not drawn."""
    area, ratio, *place, side, brightness, contrast, saturation = draw(key, 8).tolist()
    low, high = config.area
    share, stretch = (low + (high - low) * area) ** 0.5, RATIO ** (ratio - 0.5)
    colours = [factor(each, config.colour) for each in (brightness, contrast, saturation)]
    return PhotoView(
        size=(min(1.0, share / stretch), min(1.0, share * stretch)),
        place=(place[0], place[1]),
        mirrored=config.flip and (side < 0.5 if mirrored is None else mirrored),
        colours=(colours[0], colours[1], colours[2]),
    )


def show_parts(images: Tensor, views: Sequence[PhotoView]) -> Tensor:
    """The part of each image that its view shows, at the size of the image: uint8 [N, H, W, C]."""
    shown = [_part(image, view) for image, view in zip(images.numpy(), views, strict=True)]
    return torch.from_numpy(np.stack(shown))


def recolour(images: Tensor, views: Sequence[PhotoView]) -> Tensor:
    """The images with their views' colours; grey ones have no saturation."""
    shown = [recoloured(image, view.colours) for image, view in zip(images.numpy(), views, strict=True)]
    return torch.from_numpy(np.stack(shown))


def _part(image: Pixels, view: PhotoView) -> Pixels:
    height, width, channels = image.shape
    rows, columns = height * view.size[0], width * view.size[1]
    top, left = (height - rows) * view.place[0], (width - columns) * view.place[1]
    whole = Image.fromarray(image if channels == 3 else image[..., 0])
    box = (left, top, left + columns, top + rows)
    part = np.asarray(whole.resize((width, height), Image.Resampling.BILINEAR, box=box)).reshape(image.shape)
    return part[:, ::-1] if view.mirrored else part
