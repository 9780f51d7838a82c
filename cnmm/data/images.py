"""Image files to uint8 RGB arrays of one size, with Pillow, in threads (it decodes without holding the GIL).

An image is turned as its EXIF orientation says, laid on white where it is transparent, scaled so that its shorter side
fits, and cropped at the centre. Of several frames the first is read; colour profiles are ignored.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cnmm._errors import UserError
from cnmm._files import open_regular
from cnmm.data.dataset import Images, Indices, Labels

Progress = Callable[[int, int], None]

# What Pillow decodes by itself. Not EPS: Pillow starts Ghostscript for it, whatever the file's suffix is.
_SUFFIXES = {
    "AVIF": ".avif",
    "BMP": ".bmp",
    "DDS": ".dds",
    "DIB": ".dib",
    "GIF": ".gif",
    "ICO": ".ico",
    "JPEG": ".jpg .jpeg .jpe .jfif",
    "JPEG2000": ".jp2 .j2k .jpx",
    "MPO": ".mpo",
    "PCX": ".pcx",
    "PNG": ".png .apng",
    "PPM": ".ppm .pgm .pbm .pnm",
    "PSD": ".psd",
    "QOI": ".qoi",
    "SGI": ".sgi .rgb .bw",
    "TGA": ".tga",
    "TIFF": ".tif .tiff",
    "WEBP": ".webp",
}
IMAGE_SUFFIXES = frozenset(" ".join(_SUFFIXES.values()).split())
MOST_IMAGE = 2**30
"""Bytes of a file."""
MOST_SENT_PIXELS = 2**25
"""Of an image that somebody sends: 100 MB as RGB."""
_SENT = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "TIFF", "WEBP")
_CHUNK = 16
_ORIENTATION = 0x0112
"""The EXIF tag; from 5 on, width and height change places."""
_FIX = "replace it, remove it, or leave such files out (--skip-bad, skip_bad=True)"


@dataclass(frozen=True, eq=False)
class FileSplit:
    """A split whose images are decoded each time they are read."""

    paths: tuple[Path, ...]
    labels: Labels
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Indices) -> Images:
        images = np.empty((len(indices), *self.size, 3), np.uint8)

        def decode(position: int) -> None:
            images[position] = decode_image(self.paths[indices[position]], self.size)

        in_threads(decode, len(indices))
        return images


def decode_image(path: Path, size: tuple[int, int] | None, *, fix: str = _FIX) -> Images:
    """One file as RGB, scaled and cropped to `size` (None: its own): [H, W, 3]. `fix`: what to do about a bad file."""
    with opened(path, fix) as image:
        return _decoded(image, size)


def decode_sent(data: bytes, size: tuple[int, int] | None) -> Images:
    """The same of a file's content that somebody sent."""
    with opened_sent(data) as image:
        return _decoded(image, size)


def _decoded(image: Image.Image, size: tuple[int, int] | None) -> Images:
    if size is not None:
        # A JPEG is decoded at a fraction of its size, where that leaves twice the pixels needed; others are not.
        image.draft(None, (2 * max(size), 2 * max(size)))
    return fit_image(image, size)


def fit_image(image: Image.Image, size: tuple[int, int] | None) -> Images:
    """An image of Pillow's, as `decode_image` treats a file: turned, as RGB, scaled and cropped."""
    colours = _to_rgb(ImageOps.exif_transpose(image))
    return np.asarray(colours if size is None else _fit(colours, size))


def resize_image(image: Images, size: tuple[int, int]) -> Images:
    """An image [H, W, C] at another height and width: all of it, its sides stretched as needed."""
    if image.shape[:2] == size:
        return image
    planes = [Image.fromarray(image[..., channel]) for channel in range(image.shape[-1])]
    return np.stack([np.asarray(plane.resize(size[::-1], Image.Resampling.BICUBIC)) for plane in planes], -1)


def decode_shrunk(path: Path, longest: int) -> Images:
    """One file as RGB, scaled so that its longer side has at most `longest` pixels: [H, W, 3]."""
    with opened(path) as image:
        image.draft(None, (2 * longest, 2 * longest))
        rgb = _to_rgb(ImageOps.exif_transpose(image))
        height, width = shrunk_size((rgb.height, rgb.width), longest)
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(rgb)


def shrunk_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Height and width with the same ratio whose longer side is at most `longest`; small images keep theirs."""
    share = min(1.0, longest / max(size))
    return max(1, round(size[0] * share)), max(1, round(size[1] * share))


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image as it is shown, from the file's header."""
    with opened(path) as image:
        turned = image.getexif().get(_ORIENTATION, 1) >= 5
        return (image.width, image.height) if turned else (image.height, image.width)


def shorter_side(path: Path) -> int:
    """Pixels along the shorter side, from the file's header."""
    with opened(path) as image:
        return min(image.size)


def fit_images(images: Images, size: tuple[int, int]) -> Images:
    """Grey or RGB images in memory, scaled and cropped to `size`."""
    if images.shape[1:3] == size:
        return images
    num, channels = len(images), images.shape[-1]
    fitted = np.empty((num, *size, channels), np.uint8)
    for source, target in zip(images, fitted, strict=True):
        image = Image.fromarray(source[..., 0] if channels == 1 else source)
        target[:] = np.asarray(_fit(image, size)).reshape(target.shape)
    return fitted


def in_threads(
    work: Callable[[int], object], num: int, *, skip_bad: bool = False, progress: Progress | None = None
) -> list[int]:
    """Calls `work(index)` for all indices below `num`, and returns those that raised a ValueError.

    Without `skip_bad` the first such error, by index, is raised instead. `progress` is called with (done, num) from the
    calling thread.
    """

    def run(chunk: range) -> list[int]:
        return [index for index in chunk if not _succeeds(work, index, skip_bad)]

    chunks = [range(start, min(start + _CHUNK, num)) for start in range(0, num, _CHUNK)]
    bad: list[int] = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run, chunk) for chunk in chunks]
        try:
            for chunk, future in zip(chunks, futures, strict=True):
                bad += future.result()
                if progress:
                    progress(chunk.stop, num)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return bad


def _succeeds(work: Callable[[int], object], index: int, skip_bad: bool) -> bool:
    try:
        work(index)
    except ValueError:
        if not skip_bad:
            raise
        return False
    return True


@contextmanager
def opened(path: Path, fix: str = _FIX, *, what: str = "an image") -> Iterator[Image.Image]:
    """The image with its header read; whatever goes wrong inside becomes one line that names the file."""
    try:
        with open_regular(path, MOST_IMAGE) as file, Image.open(file, formats=_formats()) as image:
            _refuse_bomb(image, Image.MAX_IMAGE_PIXELS)
            yield image
    except Exception as error:  # a damaged file makes Pillow raise nearly anything: OSError, SyntaxError, struct.error
        raise UserError(f"{path}: cannot be read as {what} ({_reason(error)}); {fix}") from None


@contextmanager
def opened_sent(data: bytes) -> Iterator[Image.Image]:
    """The same of a file's content that somebody sent: fewer formats, whose headers take no time, and fewer pixels."""
    try:
        with Image.open(io.BytesIO(data), formats=[name for name in _formats() if name in _SENT]) as image:
            _refuse_bomb(image, MOST_SENT_PIXELS)
            yield image
    except Exception as error:
        raise UserError(f"{len(data):,} bytes cannot be read as an image ({_reason(error)})") from None


@cache
def _formats() -> tuple[str, ...]:
    """Those of our formats that this build of Pillow has."""
    Image.init()
    return tuple(name for name in _SUFFIXES if name in Image.OPEN)


def _refuse_bomb(image: Image.Image, limit: int | None) -> None:
    """Pillow itself only warns above its limit, and refuses above twice the limit."""
    width, height = image.size
    if limit is not None and width * height > limit:
        raise UserError(f"{width}x{height} pixels, more than the {limit:,} that are safe to decode")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a known image format"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise UserError("pixels are floats, whose range is unknown")
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """0..65535 becomes 0..255; Pillow's own conversion would clip instead."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UserError("pixels are beyond 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    height, width = size
    return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
