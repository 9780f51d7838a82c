"""Files and Pillow's images as a runtime takes them: fitted as for training, and grey for networks that are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cnmm._errors import UserError
from cnmm.data.dataset import Images
from cnmm.data.images import decode_image, fit_image, in_threads

OneImage = str | os.PathLike[str] | Image.Image
_FIX = "give another file"


def to_batch(images: Any, size: tuple[int, int], channels: int) -> Images:
    """Files and Pillow's images, one or several, as a uint8 array [N, H, W, C]."""
    many = [images] if isinstance(images, str | os.PathLike | Image.Image) else list(images)
    if not many:
        raise UserError("no images; give at least one")
    batch = np.empty((len(many), *size, channels), np.uint8)

    def fit(index: int) -> None:
        batch[index] = _one_image(many[index], size, channels)

    if len(many) == 1:
        fit(0)
    else:
        in_threads(fit, len(many))
    return batch


def _one_image(image: Any, size: tuple[int, int], channels: int) -> Images:
    if channels not in (1, 3):
        raise UserError(f"images of {channels} channels cannot be read from files; give arrays")
    if isinstance(image, Image.Image):
        try:
            colours = fit_image(image, size)
        except (OSError, SyntaxError) as error:
            raise UserError(f"{image!r} cannot be decoded: {error}") from None
    elif isinstance(image, str | os.PathLike):
        colours = decode_image(Path(image), size, fix=_FIX)
    else:
        raise UserError(f"an image is a path or a Pillow image, or all are one uint8 array, not {type(image).__name__}")
    return colours if channels == 3 else np.asarray(Image.fromarray(colours).convert("L"))[..., np.newaxis]
