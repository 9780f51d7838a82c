"""Checkpoints of a training: everything that it goes on from, bit by bit. Nothing here unpickles.

One checkpoint is one folder, `checkpoints/step-00001234`, written aside and renamed; the newest that can be read wins,
and two are kept.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from cnmm import _fields, distributed
from cnmm._errors import UserError
from cnmm._files import inside, read_json, read_tensors, to_bytes, write_atomically, write_json, written_aside
from cnmm.run_folder import CHECKPOINTS

STATE_FILE = "state.safetensors"


class State(Protocol):
    """What moves the parameters: an optimizer whose state is tensors by name."""

    def tensors(self) -> dict[str, Tensor]: ...


class Checkpoints:
    """The checkpoints of one training. Process 0 writes them, all read them."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: State,
        average: Mapping[str, Tensor],
        *,
        every_s: float,
    ) -> None:
        self.folder, self.model, self.optimizer, self.average = folder, model, optimizer, average
        self.every_s, self.saved_at = every_s, time.monotonic()
        self.notes: dict[str, float] = {}
        """What else the restored one says: sums over the steps of its epoch, for the log."""

    @property
    def due(self) -> bool:
        """Is the last one so old that the next should be written?"""
        return time.monotonic() - self.saved_at > self.every_s

    def save(self, step: int, notes: Mapping[str, float] | None = None) -> None:
        if distributed.rank() == 0:
            save_state(self.folder, self.model, self.optimizer, self.average, step, notes)
        self.saved_at = time.monotonic()

    def restore(self) -> int:
        """Puts the newest back and returns its number of steps; 0 if there is none yet."""
        step = restore(self.folder, self.model, self.optimizer, self.average)
        self.notes = _read_state(self.folder / CHECKPOINTS / _name(step))[1] if step else {}
        return step


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: State,
    average: Mapping[str, Tensor],
    step: int,
    notes: Mapping[str, float] | None = None,
) -> None:
    """Writes a checkpoint after `step` steps and removes all but the two newest."""
    parent = folder / CHECKPOINTS
    parent.mkdir(exist_ok=True)
    final = parent / _name(step)
    if final.exists():
        return
    with written_aside(final) as aside:
        write_atomically(aside / STATE_FILE, to_bytes(_state(model, optimizer, average)))
        write_json(aside / "state.json", {"step": step, "notes": dict(notes or {})})
    for old in sorted(parent.glob("step-*"))[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, model: nn.Module, optimizer: State, average: Mapping[str, Tensor]) -> int:
    """Puts the newest readable checkpoint back and returns its number of steps; 0 if there is none yet."""
    problems = []
    for path in sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            step, _ = _read_state(path)
            state = read_tensors(path / STATE_FILE, "pt")
        except (OSError, UserError) as error:
            problems.append(f"{path}: {error}")
            continue
        targets = _state(model, optimizer, average)
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in targets.items()}:
            raise UserError(f"{path}: its tensors are not those of this model; choose another folder with --out")
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(state[name])
        return step
    if problems:
        raise UserError(f"no checkpoint can be read: {'; '.join(problems)}")
    return 0


def _read_state(path: Path) -> tuple[int, dict[str, float]]:
    """After how many steps a checkpoint was written (its name and its state.json say the same), and its notes."""
    file = path / "state.json"
    data = read_json(file)
    with inside(file):
        step: int = _fields.get(data, "step", _fields.COUNT)
        if path.name != _name(step):
            raise UserError(f"step={step}: must be that of the folder's name, {path.name}")
        notes = _fields.get(data, "notes", _fields.or_null(_fields.OBJECT)) or {}
        return step, _fields.get_all(notes, dict.fromkeys(notes, _fields.NUMBER), "notes.")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _state(model: nn.Module, optimizer: State, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors that a training goes on from, by name."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"average.{name}": tensor for name, tensor in average.items()}
    return state | optimizer.tensors()
