"""Files: written in one step, JSON with its format version, safetensors. Nothing here unpickles.

Files and folders are written aside, synced and renamed: what is there is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm._errors import INSTALL_TRAIN, UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step: written aside, synced, renamed, and the folder synced."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def written_aside(folder: str | Path) -> Iterator[Path]:
    """A folder that appears under its name when it is complete, or not at all."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; remove it, or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield aside
        os.chmod(aside, 0o755)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable; Windows cannot open folders, and needs no such thing."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """A JSON file with its format version."""
    write_atomically(path, (json.dumps({"format_version": FORMAT_VERSION, **data}, indent=2) + "\n").encode())


def check_version(data: Mapping[str, Any]) -> None:
    """Refuses what another version of cnmm wrote in another format."""
    if data.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"format_version={data.get('format_version')!r}, this version of cnmm reads {FORMAT_VERSION}; "
            "upgrade with: pip install -U cnmm"
        )


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as a safetensors file."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def read_tensors(path: Path, framework: str, only: str | None = None) -> dict[str, Any]:
    """The tensors of a safetensors file, for torch ("pt") or numpy ("np")."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise UserError(f"{path}: reading it needs safetensors; install it with: {INSTALL_TRAIN}") from None
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys() if only in (None, name)}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path.parent}: not a run folder ({path.name} is missing)") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None
