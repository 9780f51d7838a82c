"""What tells images apart: the names of files, what is in them, and a fingerprint of a whole data set.

A run remembers with these what it held out, whatever happens to the folder of its images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cnmm.data.dataset import ArraySplit, DataSet, Split


def names_of(data: DataSet, split: Split) -> tuple[str, ...]:
    """Names of the images of a split, relative to the data set's folder; nothing where images have no files."""
    return tuple(relative_name(path, data.root) for path in paths_of(split)) if data.root else ()


def paths_of(split: Split | None) -> tuple[Path, ...]:
    """The files of the images of a split, where each has one of its own."""
    paths: tuple[Path, ...] = getattr(split, "paths", ())
    return paths


def relative_name(path: Path, root: Path) -> str:
    """A file's name inside a folder, alike on all systems."""
    return path.relative_to(root).as_posix()


def digest(path: Path) -> str:
    """Of what is in a file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def fingerprint_of_files(root: Path, paths: Iterable[Path]) -> str:
    """Of files: their names and sizes, in any order."""
    lines = sorted(f"{relative_name(path, root)} {path.stat().st_size}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def fingerprint_of_arrays(split: ArraySplit) -> str:
    """Of images in memory and their labels, in this order."""
    found = hashlib.blake2b(repr(split.images.shape).encode(), digest_size=32)
    found.update(np.ascontiguousarray(split.images).data)
    found.update(np.ascontiguousarray(split.labels).data)
    return found.hexdigest()


def drawn(names: Iterable[str], groups: npt.NDArray[np.int64], quotas: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """So many names of every group, drawn by a hash of the name: always the same, whatever other names there are."""
    keys = np.array([hashlib.blake2b(name.encode("utf-8", "surrogateescape")).hexdigest() for name in names])
    chosen = np.zeros(len(keys), np.bool_)
    for group, quota in enumerate(quotas.tolist()):
        members = np.flatnonzero(groups == group)
        chosen[members[np.argsort(keys[members])[:quota]]] = True
    return chosen
