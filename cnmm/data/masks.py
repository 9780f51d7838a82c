"""Masks: files whose pixels are classes, as numbers or as colours, to uint8 [H, W] with 255 for void.

`classes.txt` names the classes of people's own masks, one per line: `NAME`, or `NAME RED GREEN BLUE` for colour masks.
The line number, from 0, is the value of a class in index masks. A line `void` (or `ignore`) names a value or colour
that is not learned; in index masks, 255 is void as well. Lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from cnmm._errors import UserError
from cnmm._files import read_regular
from cnmm.data.images import opened
from cnmm.palette import MOST_CLASSES, VOID, Colour, Palette, default_palette

Mask = npt.NDArray[np.uint8]
"""[H, W]: the class of every pixel, or VOID."""

CLASSES_FILE = "classes.txt"
VOID_NAMES = ("void", "ignore")
LOSSLESS = ("PNG", "BMP", "TIFF", "PPM", "GIF")
"""Formats that keep every pixel as it was written."""
_FORM = "one class per line, NAME or NAME RED GREEN BLUE; a line `void` names what is not learned"


@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """What the pixels of masks mean: class by value in index masks, by colour in colour masks; or VOID."""

    values: Mapping[int, int]
    colours: Mapping[Colour, int]

    def to_json(self) -> dict[str, Any]:
        return {"values": list(self.values.items()), "colours": [[*key, to] for key, to in self.colours.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(values=dict(data["values"]), colours={(r, g, b): to for r, g, b, to in data["colours"]})


@dataclass(frozen=True, kw_only=True)
class ClassNames:
    """The classes of a set, their colours, and what its masks mean."""

    names: tuple[str, ...]
    palette: Palette
    rule: MaskRule


def decode_mask(path: Path, rule: MaskRule) -> Mask:
    """One file as classes. Whatever is wrong with it is one line that names the file."""
    with opened(path, "a mask must be a PNG or another lossless file", what="a mask") as image:
        if image.format not in LOSSLESS:
            raise UserError(f"it is a {image.format}, a photograph: pixels of a mask must be exact")
        image.load()
        if image.mode in ("1", "L", "P") and (image.mode != "P" or not rule.colours):
            return _from_values(np.asarray(image.convert("L") if image.mode == "1" else image), rule)
        if image.mode in ("P", "RGB", "RGBA"):
            return _from_colours(np.asarray(image.convert("RGB")), rule)
        bits = "16-bit" if image.mode.startswith("I") else image.mode
        raise UserError(f"its pixels are {bits}: must be 8-bit numbers of classes, or RGB colours")


def _from_values(values: npt.NDArray[Any], rule: MaskRule) -> Mask:
    table = np.full(256, -1, np.int16)
    for value, target in rule.values.items():
        table[value] = target
    mask: npt.NDArray[np.int16] = table[values]
    if mask.min(initial=0) < 0:
        row, column = np.argwhere(mask < 0)[0]
        known = [value for value, target in rule.values.items() if target != VOID]
        allowed = f"{min(known)} to {max(known)}, or a value that is void"
        raise UserError(
            f"value {values[row, column]} at row {row}, column {column}: no class has it; must be {allowed}"
        )
    return mask.astype(np.uint8)


def _from_colours(pixels: npt.NDArray[np.uint8], rule: MaskRule) -> Mask:
    if not rule.colours:
        raise UserError("its pixels are colours, and classes have none: they must be numbers of classes")
    codes = np.array(sorted((red << 16 | green << 8 | blue, to) for (red, green, blue), to in rule.colours.items()))
    wide = pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    place = np.searchsorted(codes[:, 0], wide).clip(max=len(codes) - 1)
    unknown = codes[place, 0] != wide
    if unknown.any():
        row, column = np.argwhere(unknown)[0]
        colour = " ".join(map(str, pixels[row, column]))
        raise UserError(f"colour {colour} at row {row}, column {column}: no class has it; see {CLASSES_FILE}")
    mask: Mask = codes[place, 1].astype(np.uint8)
    return mask


def read_classes(folder: Path) -> ClassNames:
    """The classes of a folder, from its `classes.txt`."""
    path = folder / CLASSES_FILE
    try:
        lines = read_regular(path, MOST_CLASSES * 2**12).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} is missing, so masks have no names: {_FORM}") from None
    except (OSError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {_FORM}") from None
    try:
        return _parse(lines)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _parse(lines: Sequence[str]) -> ClassNames:
    names: list[str] = []
    values: dict[int, int] = {VOID: VOID}
    colours: dict[Colour, int] = {}
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for value, entry in enumerate(entries):
        name, colour = _entry(entry)
        target = VOID if name.lower() in VOID_NAMES else len(names)
        if target != VOID:
            names.append(name)
        if names.count(name) > 1:
            raise UserError(f"the class {name!r} stands there twice")
        if colour is not None and colours.setdefault(colour, target) != target:
            raise UserError(f"{entry!r}: another class has this colour")
        if value < VOID:
            values[value] = target
    num_coloured = sum(target != VOID for target in colours.values())
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UserError(f"{len(names)} classes: must be 2 to {MOST_CLASSES}, {_FORM}")
    if num_coloured not in (0, len(names)):
        raise UserError("some classes have a colour and some have none; all or none must have one")
    by_class = {target: colour for colour, target in reversed(colours.items())}
    palette = tuple(by_class[k] for k in range(len(names))) if num_coloured else default_palette(len(names))
    return ClassNames(names=tuple(names), palette=palette, rule=MaskRule(values=values, colours=colours))


def _entry(line: str) -> tuple[str, Colour | None]:
    """`NAME` or `NAME RED GREEN BLUE`; commas count as spaces."""
    words = line.replace(",", " ").split()
    numbers = [int(word) for word in words[-3:] if word.isdecimal()]
    if len(words) > 3 and len(numbers) == 3:
        if max(numbers) > 255:
            raise UserError(f"{line!r}: red, green and blue must be from 0 to 255")
        return " ".join(words[:-3]), (numbers[0], numbers[1], numbers[2])
    return " ".join(line.split()), None


def shrunk_mask(mask: Mask, size: tuple[int, int]) -> Mask:
    """A mask at another height and width; classes are picked, never mixed."""
    if mask.shape == size:
        return mask
    return np.asarray(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))
