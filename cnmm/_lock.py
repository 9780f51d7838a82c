"""Locks that end with their process, however it ends: the kernel holds them (flock), a file only says whose they are.

Where a system has no such locks (Windows, some network file systems), nothing is locked.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cnmm._errors import UserError

LOCK_FILE = ".lock"
"""In a run folder while a process changes it."""
_ours: set[tuple[int, Path]] = set()
"""What must not outlive a process, with its number: a fork has this set, and nothing in it is its own."""


@contextmanager
def passing(path: Path) -> Iterator[None]:
    """Inside, a file or folder belongs to this process; in the end it is removed, if it is still there."""
    _ours.add(mark := (os.getpid(), path))
    try:
        yield
    finally:
        remove(path)
        _ours.discard(mark)


def remove_passing() -> None:
    """For a process that ends at once: removes what belongs to it."""
    for pid, path in list(_ours):
        if pid == os.getpid():
            remove(path)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def hold(handle: int, *, wait: bool = False) -> bool:
    """Locks an open file or folder until it is closed. False if another process holds it; True if nothing can."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Was this, which its maker holds, left behind by a process that is gone? Inside, this process holds it."""
    handle = _open_plain(path)
    if handle is None:
        yield False
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:  # held, or nobody can know
        free = False
    try:
        yield free
    finally:
        os.close(handle)


def _open_plain(path: Path) -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Only this process changes the folder inside; a UserError names the process that does so already."""
    path = folder / LOCK_FILE
    handle = _open_held(path)
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "doing": doing, "since": time.strftime("%H:%M:%S")}
        with suppress(OSError):  # on a full disk the lock has no name, and holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(owner).encode(), 0)
        with passing(path):  # it is removed before others can hold it
            yield
    finally:
        os.close(handle)


def _open_held(path: Path) -> int:
    """The lock file, held. One that was removed meanwhile belongs to nobody: then a new one.

    It is written to, so a link in its place, which may lead anywhere, is not followed.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        if not hold(handle):
            os.close(handle)
            raise UserError(_in_use(path))
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)


def _in_use(path: Path) -> str:
    owner = _owner(path)
    if not owner:
        return f"{path.parent} is in use by another process; wait until it has ended"
    pid, host, doing = (str(owner.get(name))[:80] for name in ("pid", "host", "doing"))
    here = host == socket.gethostname()
    fix = f"wait for it, or stop it with: kill {pid}" if here else "wait for it, or stop it there"
    place = "" if here else f" on {host!r}"
    return f"{path.parent} is in use: {doing!r}, process {pid}{place}, since {str(owner.get('since'))[:8]}; {fix}"


def _owner(path: Path) -> dict[str, Any]:
    """What the holder has written; it writes at once, but not in the same moment."""
    for _ in range(20):
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(path.read_text("utf-8"))
            if isinstance(found, dict):
                return found
        time.sleep(0.02)
    return {}
