"""Files: written in one step, JSON with its format version, safetensors. Nothing here unpickles.

Files and folders are written aside, synced and renamed: what is there is complete. What a killed process has left aside
is swept away by the next one that writes to the same place. What is read may come from anywhere: only regular files are
read, so that nothing hangs or never ends, and their size is checked before.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from cnmm import _fields
from cnmm._errors import INSTALL_TRAIN, UserError
from cnmm._lock import abandoned, hold, passing, remove

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
_ASIDE = ".aside"
"""How the names of files and folders end that are not complete yet; they are hidden as well."""
MOST_JSON, MOST_HEADER = 2**26, 2**26
"""Bytes of a JSON file, and of the header of a safetensors file."""
_DEEPEST = 20
"""Objects and lists inside each other."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step: written aside, synced, renamed, and the folder synced."""
    with _beside(path, lambda: tempfile.mkstemp(**_hidden(path))) as (aside, handle):
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.chmod(aside, 0o644)
        if os.name == "nt":  # where only closed files can be renamed
            os.close(handle)
        os.replace(aside, path)
    sync_folder(path.parent)


@contextmanager
def written_aside(folder: str | Path, *, overwrite: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """A folder that appears under its name when it is complete, or not at all.

    `overwrite`: says of a folder that is there whether it may be replaced.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    old = there and overwrite is not None and overwrite(folder)
    if there and not old:
        other = "it is not what --overwrite replaces" if overwrite else "replace it with --overwrite"
        raise UserError(f"{folder} exists; {other}, remove it, or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _beside(folder, lambda: _made_folder(folder)) as (aside, _):
        yield aside
        os.chmod(aside, 0o755)
        if old:
            with _beside(folder, lambda: _made_folder(folder)) as (gone, _):
                os.rmdir(gone)
                os.replace(folder, gone)
                os.replace(aside, folder)
        else:
            os.replace(aside, folder)
    sync_folder(folder.parent)


def _check_replaceable(folder: Path) -> None:
    """Refuses what no folder can be put in the place of: a link, and the folder that somebody is in."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link; give the folder that it leads to")
    with suppress(OSError):  # the current folder may be gone
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UserError(f"{folder} is the folder that you are in, or above it; give the name of a new folder in it")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of the system's temporary ones that is gone afterwards; after a kill, when the next is made."""
    place = Path(tempfile.gettempdir()) / "cnmm"
    with _beside(place, lambda: _made_folder(place)) as (folder, _):
        yield folder


def sweep(folder: Path) -> None:
    """Removes what processes that are gone have left aside in a folder."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(".") and entry.name.endswith(_ASIDE):
                with abandoned(Path(entry.path)) as free:
                    if free:
                        remove(Path(entry.path))


@contextmanager
def _beside(path: Path, make: Callable[[], tuple[int, str]]) -> Iterator[tuple[Path, int]]:
    """A hidden file or folder beside `path` and its handle; what is still there in the end is removed.

    It is held as long as its process lives, so others know what to sweep away.
    """
    sweep(path.parent)
    with named(path):
        handle, name = make()
        while not (hold(handle, wait=True) and os.path.exists(name)):  # swept away before it was held
            os.close(handle)
            handle, name = make()
        try:
            with passing(Path(name)):
                yield Path(name), handle
        finally:
            with suppress(OSError):
                os.close(handle)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the system, such as a full disk, name this path: not what is written aside of it, and not nothing."""
    try:
        yield
    except OSError as error:
        aside = os.path.abspath(path.with_name(f".{path.name}."))
        if error.filename is None or os.path.abspath(error.filename).startswith(aside):
            error.filename = str(path)
        raise


def _hidden(path: Path) -> dict[str, Any]:
    return {"dir": path.parent, "prefix": f".{path.name}.", "suffix": _ASIDE}


def _made_folder(path: Path) -> tuple[int, str]:
    name = tempfile.mkdtemp(**_hidden(path))
    return (os.open(os.devnull, os.O_RDONLY) if os.name == "nt" else os.open(name, os.O_RDONLY)), name


def checksum(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def as_path(value: object) -> Path:
    """A path from what somebody gave as one."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UserError(f"{_fields.shown(value)}: must be the path of a file or folder")
    return Path(value)


def open_regular(path: Path, most: int) -> BinaryIO:
    """Opens a file for reading, if it is a regular one of at most so many bytes: no pipe, no device, no folder.

    What is wrong is said without the path: `inside` adds it.
    """
    _check_regular(os.stat(path), most)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_regular(os.fstat(handle), most)  # it may have become another
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_regular(about: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise UserError("must be a regular file, not a folder, a pipe or a device")
    if about.st_size > most:
        raise UserError(f"{about.st_size:,} bytes: must be at most {most:,}")


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of a regular file, if there are at most so many."""
    with open_regular(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it has grown
        raise UserError(f"more bytes than {most:,}")
    return data


def check_beside(path: Path) -> None:
    """Refuses a link that leaves the folder that it is in."""
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise UserError("is a link to a file outside of the folder; put the file itself there")


def read_json(path: Path, *, fix: str = "") -> dict[str, Any]:
    """The object in a JSON file of this format version; a missing file is a FileNotFoundError or NotADirectoryError.

    `fix`: what to do about a file that is no such thing.
    """
    with inside(path, fix):
        try:
            data = read_regular(path, MOST_JSON)
        except (FileNotFoundError, NotADirectoryError, UserError):
            raise
        except (OSError, ValueError) as error:  # a ValueError: the path has a null character
            raise UserError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
        found = parse_json(data)
        if not isinstance(found, dict):
            raise UserError(f"must be an object, not {_fields.shown(found)}")
        check_version(found)
        return found


def parse_json(data: bytes | str, *, finite: bool = True) -> Any:
    """What JSON holds, if it is well-formed, not nested too deeply and, if need be, without NaN and infinities."""
    try:
        found = json.loads(data, parse_constant=_refuse_constant if finite else None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot be read as JSON: {error}") from None
    level: list[Any] = [[found]]
    depth = -1
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise UserError(f"cannot be read as JSON: nested more than {_DEEPEST} deep")
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no finite number")


@contextmanager
def inside(path: str | Path, fix: str = "") -> Iterator[None]:
    """What is wrong with the content of a file is said with its path, and with what to do about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}" + (f"; {fix}" if fix else "")) from None


def check_version(data: Mapping[str, Any]) -> None:
    """Refuses what another version of cnmm wrote in another format."""
    found = data.get("format_version")
    if not (_fields.is_whole(found) and found == FORMAT_VERSION):
        raise UserError(
            f"format_version={_fields.shown(found)}, this version of cnmm reads {FORMAT_VERSION}; "
            "upgrade with: pip install -U cnmm"
        )


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as a safetensors file."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def read_tensors(path: Path, framework: str, only: str | None = None) -> dict[str, Any]:
    """The tensors of a safetensors file, for torch ("pt") or numpy ("np")."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError:
        raise UserError(f"{path}: reading it needs safetensors; install it with: {INSTALL_TRAIN}") from None
    try:
        _check_header(path)
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys() if only in (None, name)}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path.parent}: not a run folder ({path.name} is missing)") from None
    except Exception as error:  # safetensors raises classes of its own, and what torch and numpy raise
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None


def _check_header(path: Path) -> None:
    """Its first eight bytes say how long the header is, which is read before anything else is checked."""
    with open_regular(path, 2**50) as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER:
        raise UserError(f"a header of {size:,} bytes, must be at most {MOST_HEADER:,}")
