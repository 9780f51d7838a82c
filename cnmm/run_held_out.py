"""What a run held out, remembered in `held_out.json`: no figure is ever measured on images that it was trained on.

Images with files are remembered by name and by what is in them; others by their place, which is only good as long as
the data set's fingerprint is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import inside, read_json, write_json
from cnmm.data import DataSet, Split, divide
from cnmm.data.identity import digest, names_of

HELD_OUT_FILE = "held_out.json"
Indices = npt.NDArray[np.int64]

logger = logging.getLogger("cnmm")


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Some images of a split."""

    names: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    """Of what is in each of these files."""
    indices: tuple[int, ...] = ()
    """Where images have no names."""

    @classmethod
    def of(cls, data: DataSet, split: Split, indices: Indices) -> Marked:
        names = names_of(data, split)
        if data.root is None or not names:
            return cls(indices=tuple(indices.tolist()))
        chosen = tuple(names[index] for index in indices)
        return cls(names=chosen, digests=tuple(digest(data.root / name) for name in chosen))

    def to_dict(self) -> dict[str, Any]:
        return {"names": self.names, "digests": self.digests} if self.names else {"indices": self.indices}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What a run held out, and of which images."""

    fingerprint: str
    num: int
    """Training images, with those held out."""
    validation: Marked
    test: Marked | None
    """Where test images were drawn from the same images."""

    @cached_property
    def test_names(self) -> frozenset[str] | None:
        return None if self.test is None else frozenset(self.test.names)

    def validation_of(self, data: DataSet) -> Indices:
        """Those held out for validation that are still there, as they were."""
        return self._found(data, data.train, self.validation, "validation")

    def test_of(self, data: DataSet, split: Split) -> Indices:
        """The test images: where they were drawn, those that are still there, as they were."""
        return np.arange(len(split)) if self.test is None else self._found(data, split, self.test, "testing")

    def check_same(self, data: DataSet) -> None:
        """Refuses images that a training cannot go on with."""
        if not self._is_same(data):
            raise UserError(
                f"the images of {data.spec} have changed since this run began ({self.num:,} then, {len(data.train):,} "
                f"now); put them back to go on, or start another run: --out, or --overwrite"
            )

    def _is_same(self, data: DataSet) -> bool:
        return not self.fingerprint or self.fingerprint == data.fingerprint

    def _found(self, data: DataSet, split: Split, marked: Marked, what: str) -> Indices:
        if not marked.names:
            if not self._is_same(data):
                raise UserError(
                    f"{data.spec} does not have the images that this run was trained on, so nobody knows what it held "
                    f"out for {what}; use --split test, or --data with the images of the training"
                )
            if max(marked.indices, default=0) >= len(split):
                raise UserError(f"{HELD_OUT_FILE} names image {max(marked.indices):,}, {data.spec} has {len(split):,}")
            return np.array(marked.indices, np.int64)
        places = {name: index for index, name in enumerate(names_of(data, split))}
        found = [(places[name], name, value) for name, value in self._pairs(marked) if name in places]
        if data.root is not None and not self._is_same(data):
            found = [(index, name, value) for index, name, value in found if digest(data.root / name) == value]
            self._say(data, len(found), len(marked.names), what)
        if marked.names and not found:
            raise UserError(
                f"{data.spec} has none of the {len(marked.names):,} images that this run held out for {what}; "
                "use --data with the images of the training"
            )
        return np.sort(np.array([index for index, _, _ in found], np.int64))

    def _pairs(self, marked: Marked) -> list[tuple[str, str]]:
        return list(zip(marked.names, marked.digests, strict=True))

    def _say(self, data: DataSet, found: int, num: int, what: str) -> None:
        logger.warning(
            "the images of %s have changed since training; of the %s that were held out for %s, %s",
            data.spec,
            f"{num:,}",
            what,
            "all are used" if found == num else f"the {found:,} that are still there are used",
        )


def save_held_out(folder: Path, data: DataSet, val: int, seed: int) -> None:
    """Writes what a training that begins holds out."""
    validation = Marked.of(data, data.train, divide(data, val, seed)[1])
    about = {"fingerprint": data.fingerprint, "num": len(data.train), "validation": validation.to_dict()}
    if data.drawn_test and data.test is not None:
        about["test"] = Marked.of(data, data.test, np.arange(len(data.test))).to_dict()
    write_json(folder / HELD_OUT_FILE, about)


def load_held_out(folder: Path) -> HeldOut | None:
    """What a run held out; None of a run that does not remember."""
    path = folder / HELD_OUT_FILE
    if not path.exists():
        return None
    fix = "without it, nobody knows what was held out"
    data = read_json(path, fix=fix)
    with inside(path, fix):
        test = _fields.get(data, "test", _fields.or_null(_fields.OBJECT))
        return HeldOut(
            fingerprint=_fields.get(data, "fingerprint", _TEXT),
            num=_fields.get(data, "num", _fields.POSITIVE),
            validation=_read_marked(_fields.get(data, "validation", _fields.OBJECT), "validation."),
            test=None if test is None else _read_marked(test, "test."),
        )


def _read_marked(data: Mapping[str, Any], where: str) -> Marked:
    if "indices" in data:
        return Marked(indices=tuple(_fields.get(data, "indices", _fields.list_of(_fields.COUNT, most=_MOST), where)))
    names = _fields.get(data, "names", _fields.list_of(_TEXT, most=_MOST), where)
    digests = _fields.get(data, "digests", _fields.list_of(_TEXT, len(names)), where)
    return Marked(names=tuple(names), digests=tuple(digests))


_MOST = 10_000_000
_TEXT: _fields.Check = (lambda value: isinstance(value, str), "a text")  # names of files may be anything
