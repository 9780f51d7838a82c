"""Files, Pillow's images and arrays as a runtime takes them: fitted as for training, and grey for networks that are.

Where pixels are labelled, images keep their own size: the label map has it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.data.dataset import Images
from cnmm.data.folder import image_files
from cnmm.data.images import decode_image, decode_sent, fit_image, in_threads, opened_sent

OneImage = str | os.PathLike[str] | Image.Image | npt.NDArray[np.uint8]
_FIX = "give another file"


def image_paths(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Image files; a folder stands for those in it and in its folders, by name."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = image_files(path)
        if not inside:
            raise UserError(f"{path}: no images in this folder; give files, or a folder of images")
        found += inside
    return tuple(found)


def to_batch(images: Any, size: tuple[int, int], channels: int) -> Images:
    """Files, Pillow's images and arrays of any size, one or several, as a uint8 array [N, H, W, C]."""
    many = _listed(images)
    batch = np.empty((len(many), *size, channels), np.uint8)

    def fit(index: int) -> None:
        batch[index] = read_image(many[index], size, channels)

    if len(many) == 1:
        fit(0)
    else:
        in_threads(fit, len(many))
    return batch


def to_pictures(images: Any, channels: int) -> list[Images]:
    """Files, Pillow's images or arrays, one or several, as uint8 arrays [H, W, C] of their own sizes."""
    if isinstance(images, np.ndarray):
        return list(_check_pictures(images, channels))
    many = _listed(images)
    pictures: list[Images] = [np.empty((0, 0, 0), np.uint8)] * len(many)

    def read(index: int) -> None:
        image: Any = many[index]
        if not isinstance(image, np.ndarray):
            pictures[index] = read_image(image, None, channels)
        elif image.ndim == 3:
            (pictures[index],) = _check_pictures(image, channels)
        else:
            raise UserError(f"an image of shape {list(image.shape)} in a list: must be [H, W, {channels}]")

    if len(many) == 1:
        read(0)
    else:
        in_threads(read, len(many))
    return pictures


def _listed(images: Any) -> list[Any]:
    """One image, or several, as a list."""
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, bytes | Mapping) or not isinstance(images, Iterable):
        raise UserError(f"images={_fields.shown(images)}: must be paths, Pillow images or a uint8 array")
    many = list(images)
    if not many:
        raise UserError("no images; give at least one")
    return many


def check_array(images: npt.NDArray[Any], size: tuple[int, int], channels: int) -> Images:
    """A uint8 array [N, H, W, C] or [H, W, C] as [N, H, W, C]."""
    return _check_array(images, (*size, channels), images.shape[-3:] == (*size, channels))


def _check_pictures(images: npt.NDArray[Any], channels: int) -> Images:
    """The same, of any height and width."""
    return _check_array(images, ("H", "W", channels), images.shape[-1:] == (channels,))


def _check_array(images: npt.NDArray[Any], shape: tuple[object, ...], fits: bool) -> Images:
    if images.dtype != np.uint8:
        raise UserError(f"images of {images.dtype}: must be uint8 with values 0 to 255")
    if images.ndim not in (3, 4) or not fits or not images.size:
        raise UserError(f"images of shape {list(images.shape)}: must be [N, {', '.join(map(str, shape))}]")
    batch: Images = np.ascontiguousarray(images.reshape(-1, *images.shape[-3:]))
    return batch


def read_sent(data: bytes, size: tuple[int, int] | None, channels: int) -> Images:
    """The content of an image file that somebody sent, as uint8 [H, W, C]; `size` None keeps its own."""
    return _as_channels(decode_sent(data, size), channels)


def sent_size(data: bytes) -> tuple[str, int]:
    """Format and pixels of such an image, from its first bytes: nothing is decoded, as the orientation would need."""
    with opened_sent(data) as image:
        return str(image.format), image.height * image.width


def read_image(image: Any, size: tuple[int, int] | None, channels: int) -> Images:
    """A file, an image of Pillow's or an array as uint8 [H, W, C], fitted to `size` (None: of its own)."""
    if isinstance(image, Image.Image):
        try:
            colours = fit_image(image, size)
        except (OSError, SyntaxError) as error:
            raise UserError(f"{image!r} cannot be decoded: {error}") from None
    elif isinstance(image, np.ndarray):
        colours = fit_image(_from_array(image), size)
    elif isinstance(image, str | os.PathLike):
        colours = decode_image(Path(image), size, fix=_FIX)
    else:
        raise UserError(f"an image is a path, a Pillow image or a uint8 array, not {type(image).__name__}")
    return _as_channels(colours, channels)


def _as_channels(colours: Images, channels: int) -> Images:
    if channels not in (1, 3):
        raise UserError(f"images of {channels} channels cannot be read from files; give arrays")
    return colours if channels == 3 else np.asarray(Image.fromarray(colours).convert("L"))[..., np.newaxis]


def _from_array(image: npt.NDArray[Any]) -> Image.Image:
    """An array [H, W], [H, W, 1] or [H, W, 3] as an image of Pillow's."""
    if image.dtype != np.uint8:
        raise UserError(f"an image of {image.dtype} in a list: must be uint8 with values 0 to 255")
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if not image.size or not (image.ndim == 2 or (image.ndim == 3 and image.shape[-1] == 3)):
        raise UserError(f"an image of shape {list(image.shape)} in a list: must be [H, W, 3], [H, W, 1] or [H, W]")
    return Image.fromarray(np.ascontiguousarray(image))
