"""What a measurement has found so far, kept in files: a measurement that was killed goes on to the same result.

Measuring is a sequence of sweeps over batches, always in the same order. After every batch, all that a sweep knows is a
few tensors by name; they are written from time to time, and put back bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cnmm._errors import Stopped, UserError
from cnmm._files import read_tensors, to_bytes, write_atomically

SAVE_EVERY_S = 30.0
"""How often what was found is written, unless told."""
_DONE = "done"
"""The tensor that says how many batches a sweep has seen."""

T = TypeVar("T")
State = Mapping[str, Tensor]


class Kept:
    """The sweeps of one measurement. Without a folder, nothing is kept."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        of: object = None,
        every_s: float | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`of`: all that the measurement depends on, as JSON; what was kept of another one is not used."""
        digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = None if folder is None else folder / digest
        self.every_s = SAVE_EVERY_S if every_s is None else every_s
        self.should_stop, self.saved_at = should_stop, time.monotonic()
        self.num_sweeps = 0
        self.unsaved: dict[int, Callable[[], dict[str, Tensor]]] = {}
        """What is newer than its file, by number of the sweep."""

    def sweep(self, batches: Iterable[T], state: Callable[[], State], restore: Callable[[State], None]) -> Sweep[T]:
        """The next sweep. `state`: all that it knows after a batch; `restore` puts back what was known before."""
        number, self.num_sweeps = self.num_sweeps, self.num_sweeps + 1
        return Sweep(self, number, batches, state, self._put_back(number, restore))

    def note(self, number: int, state: Callable[[], State], done: int) -> None:
        """A sweep has seen so many batches, and knows this. Written if that is due; stops if that was asked for."""
        stop = self.should_stop()
        if self.folder is not None:
            self.unsaved[number] = lambda: {**state(), _DONE: torch.tensor(done)}
            if stop or time.monotonic() - self.saved_at > self.every_s:
                self._save(self.folder)
        if stop:
            raise Stopped("measuring was stopped" + ("" if self.folder is None else "; what was measured is kept"))

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, state in sorted(self.unsaved.items()):
            write_atomically(self._file(number), to_bytes(state()))
        self.unsaved.clear()
        self.saved_at = time.monotonic()

    def clear(self) -> None:
        """The measurement is complete, and in files of its own: forgets everything, also of others."""
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _put_back(self, number: int, restore: Callable[[State], None]) -> int:
        """How many batches of a sweep are known already, after that knowledge was put back."""
        if self.folder is None or not self._file(number).is_file():
            return 0
        try:
            known = read_tensors(self._file(number), "pt")
            done = int(known.pop(_DONE))
            restore(known)
        except (KeyError, ValueError, RuntimeError):
            raise UserError(f"{self._file(number)}: damaged; remove {self.folder.parent} to measure anew") from None
        return done

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"sweep-{number:03d}.safetensors"


class Sweep(Generic[T]):
    """Iterates over the batches that are not known yet, with their numbers from 1."""

    def __init__(self, kept: Kept, number: int, batches: Iterable[T], state: Callable[[], State], done: int) -> None:
        self.kept, self.number, self.batches, self.state = kept, number, batches, state
        self.done = done
        """Batches seen so far, also by processes that were killed."""

    def __iter__(self) -> Iterator[tuple[int, T]]:
        if isinstance(self.batches, Sized) and self.done == len(self.batches):
            return
        for count, batch in enumerate(islice(self.batches, self.done, None), start=self.done + 1):
            yield count, batch
            self.done = count
            self.kept.note(self.number, self.state, count)
