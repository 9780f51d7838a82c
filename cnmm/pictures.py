"""Pictures of label maps: index files with a palette, overlays with a legend, and strips that compare budgets.

Pillow and numpy alone, so that a device can draw them. Images are uint8 [H, W, 3] (or [H, W, 1], grey), label maps
uint8 [H, W] with the number of a class, or `VOID`, for every pixel.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from cnmm.cost import short_count
from cnmm.palette import VOID, VOID_COLOUR, Palette

Pixels = npt.NDArray[np.uint8]
OPACITY = 0.6
"""Of the colours of classes, over the image."""
PANEL = 360
"""Pixels along the longer side of a panel of a strip."""
GAP, PADDING, TEXT_SIZE = 8, 4, 13
INK, PAPER, GREY = (34, 48, 60), (255, 255, 255), (107, 119, 130)


class Panel(NamedTuple):
    """A label map of a strip, and what stands below it."""

    labels: Pixels
    words: str


def caption(point: str, macs: float, time_ms: float | None = None) -> str:
    """What stands below a label map: the operating point, what it costs, and how long it took."""
    words = f"{point}\n{short_count(round(macs))} macs"
    return words if time_ms is None else f"{words}, {time_ms:.1f} ms"


def index_png(labels: Pixels, palette: Palette) -> bytes:
    """A label map as a PNG whose pixel values are the classes (255 is void) and whose palette has their colours."""
    image = Image.fromarray(labels)
    image.putpalette(_table(palette).tobytes())
    return to_png(image)


def overlay(image: Pixels, labels: Pixels, classes: Sequence[str], palette: Palette) -> Image.Image:
    """The image under the colours of its classes, with a legend of those that occur."""
    coloured = Image.fromarray(_coloured(image, labels, palette))
    return _stacked([coloured, *_legend([labels], classes, palette, coloured.width)])


def strip(
    image: Pixels | None, panels: Sequence[Panel], classes: Sequence[str], palette: Palette, truth: Pixels | None = None
) -> Image.Image:
    """The same image side by side: as it is, labelled in several ways, and where these differ from the last of them.

    `truth`: what its labels should be, if that is known. Without an image, the labels alone.
    """
    maps = [*([] if truth is None else [Panel(truth, "labels")]), *panels]
    if image is None:
        colours = [(_table(palette)[panel.labels], panel.words) for panel in maps]
        image = np.full((*panels[0].labels.shape, 1), 255, np.uint8)
    else:
        colours = [(image if image.shape[-1] == 3 else image.repeat(3, -1), "image")]
        colours += [(_coloured(image, panel.labels, palette), panel.words) for panel in maps]
    if len(panels) > 1:
        colours.append((differences(image, [panel.labels for panel in panels]), "differs from the last"))
    row = _side_by_side([_captioned(_fitted(picture), words) for picture, words in colours])
    return _stacked([row, *_legend([panel.labels for panel in maps], classes, palette, row.width)])


def differences(image: Pixels, maps: Sequence[Pixels]) -> Pixels:
    """The image, pale, and in red how many of the label maps but the last one differ from it."""
    share = np.mean([labels != maps[-1] for labels in maps[:-1]], 0)[..., np.newaxis]
    pale = 255 - (255 - image.mean(-1, keepdims=True)) * 0.3
    mixed: Pixels = (pale * (1 - share) + np.array([200, 30, 30]) * share).round().astype(np.uint8)
    return mixed


def to_png(image: Image.Image) -> bytes:
    """The bytes of a file."""
    data = io.BytesIO()
    image.save(data, "png", optimize=True)
    return data.getvalue()


def _table(palette: Palette) -> Pixels:
    """The colour of every value of a mask, [256, 3]."""
    table = np.tile(np.array(VOID_COLOUR, np.uint8), (256, 1))
    table[: len(palette)] = palette
    return table


def _coloured(image: Pixels, labels: Pixels, palette: Palette) -> Pixels:
    colours = _table(palette)[labels]
    strength = np.where(labels == VOID, 0.0, OPACITY)[..., np.newaxis]
    mixed: Pixels = (image * (1 - strength) + colours * strength).round().astype(np.uint8)
    return mixed


def _fitted(picture: Pixels) -> Image.Image:
    """No larger than a panel; small pictures are enlarged by whole factors, pixel by pixel."""
    image = Image.fromarray(picture)
    factor = PANEL // max(image.size)
    if factor >= 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((PANEL, PANEL))
    return image


def _captioned(image: Image.Image, words: str) -> Image.Image:
    font = _font()
    lines = words.split("\n")
    page = Image.new("RGB", (image.width, image.height + PADDING + len(lines) * _line_height()), PAPER)
    page.paste(image)
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        draw.text((0, image.height + PADDING + number * _line_height()), line, fill=GREY if number else INK, font=font)
    return page


def _side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    page = Image.new("RGB", (width, max(image.height for image in images)), PAPER)
    left = 0
    for image in images:
        page.paste(image, (left, 0))
        left += image.width + GAP
    return page


def _stacked(images: Sequence[Image.Image]) -> Image.Image:
    height = sum(image.height for image in images) + PADDING * (len(images) - 1)
    page = Image.new("RGB", (max(image.width for image in images), height), PAPER)
    top = 0
    for image in images:
        page.paste(image, (0, top))
        top += image.height + PADDING
    return page


def _legend(maps: Sequence[Pixels], classes: Sequence[str], palette: Palette, most: int) -> list[Image.Image]:
    """Colours and names of the classes that occur, in lines of at most so many pixels, or of one name."""
    present = sorted(set().union(*(np.unique(labels).tolist() for labels in maps)) - {VOID})
    font, box = _font(), TEXT_SIZE
    widths = [box + PADDING + round(font.getlength(classes[k])) + 2 * GAP for k in present]
    most = max([most, *widths])
    lines: list[list[int]] = [[]]
    for number, width in enumerate(widths):
        if sum(widths[k] for k in lines[-1]) + width > most:
            lines.append([])
        lines[-1].append(number)
    page = Image.new("RGB", (most, len(lines) * _line_height()), PAPER)
    draw = ImageDraw.Draw(page)
    for row, members in enumerate(lines):
        left, top = 0, row * _line_height()
        for number in members:
            draw.rectangle((left, top + 2, left + box - 2, top + box), fill=tuple(palette[present[number]]))
            draw.text((left + box + PADDING, top), classes[present[number]], fill=INK, font=font)
            left += widths[number]
    return [page] if present else []


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(TEXT_SIZE)


def _line_height() -> int:
    return TEXT_SIZE + 2 * PADDING - 2
