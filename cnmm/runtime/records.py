"""Answers about many images in a file, one line each, written as they come: JSON lines or CSV. Torch-free.

Whatever ends the process, what is in the file is complete but for its last line. The next call drops that line, leaves
out the images that have an answer, and goes on. Images that cannot be read have a line that says why.
"""

from __future__ import annotations

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError, printable
from cnmm._files import named
from cnmm._lock import hold
from cnmm._progress import Clock, OnWait, no_wait
from cnmm.data.images import in_threads
from cnmm.runtime.answers import Prediction
from cnmm.runtime.inputs import read_image
from cnmm.runtime.session import Session

SUFFIXES = (".jsonl", ".csv")
AT_ONCE = 64
"""Images that are read and answered together."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What `predict_to_file` did."""

    file: Path
    num_new: int
    num_known: int
    """Images that had an answer in the file before."""
    num_bad: int
    """New images that could not be read."""


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8): the third of eight."""
    number, slash, total = text.partition("/")
    if slash and number.isascii() and total.isascii() and number.isdigit() and total.isdigit() and len(text) < 20:
        found = int(number), int(total)
        if found[0] < found[1]:
            return found
    raise UserError(f"shard {_fields.shown(text)}: must be I/N with I from 0 to N - 1, for example 0/4")


def predict_to_file(
    session: Session,
    images: Sequence[str | os.PathLike[str]],
    out: str | Path,
    *,
    top: int = 3,
    shard: str | None = None,
    on_wait: OnWait = no_wait,
    **asked: Any,
) -> Recorded:
    """Answers about image files in a file `out` that ends in .jsonl or .csv; those that it has already are left out.

    `asked` is what `Session.predict` can be asked for. With `shard="I/N"`, only every N-th image, by sorted path, is
    looked at, beginning with number I: N processes share the work, each with a file of its own.
    """
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: answers about images are written to a file that ends in .jsonl or .csv")
    if "deadline_ms" in asked:
        raise UserError("a deadline is for one image; for many of them, give a budget, a confidence or average macs")
    files = sorted({str(Path(path)) for path in images})
    if shard is not None:
        number, total = parse_shard(shard)
        files = files[number::total]
    form: Form = (Lines if out.suffix == ".jsonl" else Table)(_fields.checked(top, "top", _fields.POSITIVE))
    words = ", ".join(f"{name} {value}" for name, value in asked.items()) or "the best point"
    words = f"{words} of {session.title}"
    with named(out), _held(out) as file:
        known = form.begin(file, out, words)
        left = [path for path in files if form.name(path) not in known]
        report = Clock({"images": 1.0}, {"images": len(left)}).watching("images", "classifying images", on_wait)
        num_bad = 0
        for start in range(0, len(left), AT_ONCE):
            part = left[start : start + AT_ONCE]
            rows = list(_rows(session, part, top, words, asked))
            file.write(b"".join(form.line(row) for row in rows))
            file.flush()
            num_bad += sum("error" in row for row in rows)
            report(len(part))
        os.fsync(file.fileno())
    return Recorded(file=out, num_new=len(left), num_known=len(files) - len(left), num_bad=num_bad)


def _held(path: Path) -> BinaryIO:
    """The file, for this process only; a link in its place may lead to another, and is followed as anywhere."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: must be a regular file, not a folder, a pipe or a device")
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    if not hold(file.fileno()):
        file.close()
        raise UserError(f"{path}: another process is writing to it; give each its own file, and --shard I/N")
    return file


def _rows(session: Session, files: Sequence[str], top: int, words: str, asked: Mapping[str, Any]) -> Iterator[Row]:
    """One for each file, in this order."""
    size = None if session.task == "segmentation" else session.input_size
    images: list[Any] = [None] * len(files)
    errors: list[str] = [""] * len(files)

    def read(index: int) -> None:
        try:
            images[index] = read_image(files[index], size, session.channels)
        except UserError as error:
            errors[index] = str(error)

    in_threads(read, len(files))
    good = [image for image in images if image is not None]
    answers: Iterator[Row] = iter(())
    if good:
        answers = _answered(session.predict(good if size is None else np.stack(good), **asked), top)
    for path, error in zip(files, errors, strict=True):
        yield {"file": path, **({"error": error} if error else next(answers)), "asked": words}


def _answered(found: Prediction, top: int) -> Iterator[Row]:
    for best, exit, sure in zip(found.top(top), found.exits.tolist(), found.confidence.tolist(), strict=True):
        (label, p), *_ = best
        more = [{"label": each, "p": share} for each, share in best]
        yield {"label": label, "p": p, "top": more, "exit": exit, "confidence": sure, "point": found.point}


class Form(ABC):
    """How answers are written."""

    def __init__(self, top: int) -> None:
        self.top = top

    def begin(self, file: BinaryIO, path: Path, asked: str) -> set[str]:
        """The names of the images that have an answer in the file, which then ends after its last complete line."""
        file.seek(0)
        end, known = self.head(file, path), set()
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            row = self.read(line)
            if row is None:
                raise UserError(f"{path}: line {number} is not one of these answers; choose another file")
            if row["asked"] != asked:
                raise UserError(
                    f"{path}: it holds answers of {row['asked']!r}, this asks for {asked!r}; choose another file"
                )
            known.add(row["file"])
            end += len(line)
        file.truncate(end)
        file.seek(end)
        return known

    def head(self, file: BinaryIO, path: Path) -> int:
        """Writes or checks what comes before the first answer; how many bytes that is."""
        return 0

    name: Callable[[str], str]
    """How a path is written."""

    @abstractmethod
    def line(self, row: Row) -> bytes:
        """An answer as it stands in the file."""

    @abstractmethod
    def read(self, line: bytes) -> Row | None:
        """The fields "file" and "asked" of a line, if it is one."""


class Lines(Form):
    """JSON lines."""

    name = staticmethod(str)

    def line(self, row: Row) -> bytes:
        return (json.dumps(row, allow_nan=False) + "\n").encode()

    def read(self, line: bytes) -> Row | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        there = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("file", "asked"))
        return row if there else None


class Table(Form):
    """CSV with a head; every answer is one line, whatever is in a name."""

    name = staticmethod(printable)

    def __init__(self, top: int) -> None:
        super().__init__(top)
        more = [f"{name}{number}" for number in range(2, top + 1) for name in ("label", "p")]
        self.columns = ["file", "label", "p", *more, "exit", "confidence", "point", "asked", "error"]

    def head(self, file: BinaryIO, path: Path) -> int:
        wanted, found = self._written(self.columns), file.readline()
        if not found.endswith(b"\n"):  # nothing, or not even all of the head
            file.seek(0)
            file.truncate(0)
            file.write(wanted)
        elif found != wanted:
            raise UserError(
                f"{path}: its columns are not {','.join(self.columns)}; choose another file, or another --top"
            )
        return len(wanted)

    def line(self, row: Row) -> bytes:
        best: Row = {}
        for number, one in enumerate(row.get("top", ())[1:], start=2):
            best |= {f"label{number}": one["label"], f"p{number}": one["p"]}
        fields = {**best, **row, "file": printable(row["file"])}
        return self._written([fields.get(column, "") for column in self.columns])

    def read(self, line: bytes) -> Row | None:
        try:
            (cells,) = csv.reader([line.decode("utf-8", "surrogateescape")])
        except (ValueError, csv.Error):
            return None
        return dict(zip(self.columns, cells, strict=True)) if len(cells) == len(self.columns) else None

    def _written(self, cells: Sequence[object]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue().encode("utf-8", "surrogateescape")
