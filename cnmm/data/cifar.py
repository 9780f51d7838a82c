"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from their original Python files. Nothing in these files is executed.

They are pickles. Each file must have the size and md5 of the original, and is then read by an unpickler that knows
three names of numpy, has stand-ins for them that can only hold uint8 values, and refuses every other name.
"""

from __future__ import annotations

import hashlib
import io
import pickle  # noqa: TID251 - the original files are pickles; the only use is `CifarUnpickler`, which runs nothing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from cnmm._errors import UserError
from cnmm.data.dataset import ArraySplit, Images, Labels

HOME_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
MAX_ROWS, NUM_VALUES = 60_000, 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The files of a data set and the names of what is inside them."""

    archive: str
    folder: str
    num_classes: int
    labels: bytes
    class_names: bytes
    files: dict[str, tuple[int, str]]
    """Size in bytes and md5 of each file: the training files, then the test file, then the names of the classes."""


VARIANTS = {
    "cifar10": Variant(
        archive="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        num_classes=10,
        labels=b"labels",
        class_names=b"label_names",
        files={
            "data_batch_1": (31_035_704, "c99cafc152244af753f735de768cd75f"),
            "data_batch_2": (31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
            "data_batch_3": (31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
            "data_batch_4": (31_035_696, "634d18415352ddfa80567beed471001a"),
            "data_batch_5": (31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            "test_batch": (31_035_526, "40351d587109b95175f43aff81a1287e"),
            "batches.meta": (158, "5ff9c542aee3614f3951f8cda6e48888"),
        },
    ),
    "cifar100": Variant(
        archive="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        num_classes=100,
        labels=b"fine_labels",
        class_names=b"fine_label_names",
        files={
            "train": (155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
            "test": (31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            "meta": (1_473, "7973b15100ade9c7d40fb424638fde48"),
        },
    ),
}


def read_cifar(kind: str, folder: Path) -> tuple[tuple[str, ...], ArraySplit, ArraySplit]:
    """Classes, training and test images of `kind` in `folder`, which holds the unpacked archive or is inside it."""
    variant = VARIANTS[kind]
    if (folder / variant.folder).is_dir():
        folder = folder / variant.folder
    for name in variant.files:
        _check_size(folder / name, variant)
    *train, test, meta = variant.files
    classes = _read_classes(folder / meta, variant)
    parts = [_read_batch(folder / name, variant) for name in train]
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return classes, ArraySplit(images, labels), ArraySplit(*_read_batch(folder / test, variant))


def _check_size(path: Path, variant: Variant) -> None:
    size, _ = variant.files[path.name]
    if not path.is_file():
        raise UserError(f"{path} is missing; unpack {variant.archive} from {HOME_PAGE} and give the folder it makes")
    found = path.stat().st_size
    if found < size:
        raise _damaged(path, variant, f"is truncated: {found:,} of {size:,} bytes")
    if found > size:
        raise _damaged(path, variant, f"is not the original file: {found:,} bytes, expected {size:,}")


def _read_original(path: Path, variant: Variant) -> bytes:
    """The content, after its md5 has shown that it is the original's."""
    _, md5 = variant.files[path.name]
    raw = path.read_bytes()
    found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if found != md5:
        raise _damaged(path, variant, f"is not the original file: its md5 is {found}, expected {md5}")
    return raw


def _damaged(path: Path, variant: Variant, problem: str) -> UserError:
    return UserError(f"{path} {problem}; download {variant.archive} again from {HOME_PAGE}")


def _read_classes(path: Path, variant: Variant) -> tuple[str, ...]:
    names = _read_dict(path, variant).get(variant.class_names)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise _damaged(path, variant, "has no list of class names")
    if len(names) != variant.num_classes:
        raise _damaged(path, variant, f"names {len(names)} classes, not {variant.num_classes}")
    return tuple(name.decode("ascii", "replace") for name in names)


def _read_batch(path: Path, variant: Variant) -> tuple[Images, Labels]:
    content = _read_dict(path, variant)
    data, labels = content.get(b"data"), content.get(variant.labels)
    if not isinstance(data, _Array) or data.values.shape[1] != NUM_VALUES:
        raise _damaged(path, variant, f"has no images of {NUM_VALUES:,} values")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise _damaged(path, variant, "has no list of labels")
    if len(labels) != len(data.values):
        raise _damaged(path, variant, f"has {len(labels):,} labels for {len(data.values):,} images")
    if not all(0 <= label < variant.num_classes for label in labels):
        raise _damaged(path, variant, f"has labels outside 0..{variant.num_classes - 1}")
    planes = data.values.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, np.int64)


def _read_dict(path: Path, variant: Variant) -> dict[object, object]:
    try:
        content = unpickle(_read_original(path, variant))
    except _RefusedError as error:
        raise _damaged(path, variant, f"is refused, and nothing in it was run: {error}") from None
    if not isinstance(content, dict):
        raise _damaged(path, variant, f"holds a {type(content).__name__}, not a dict")
    return content


def unpickle(raw: bytes) -> object:
    """Dicts, lists, tuples, numbers, bytes and `_Array`. What a pickle names is neither imported nor called."""
    try:
        return CifarUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a pickle that is damaged makes the unpickler raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _RefusedError(f"{reason:.200}") from None


class _RefusedError(UserError):
    """The reason why a pickle is not read."""


class CifarUnpickler(pickle.Unpickler):
    """Gives stand-ins for the three names that the original files use."""

    def find_class(self, module: str, name: str, /) -> object:
        try:
            return _STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise UserError(f"it names {module}.{name}, which no file of CIFAR does") from None

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise UserError("it refers to objects outside the file, which no file of CIFAR does")


class _StandIn:
    """Instances stand for names, since a class or function could be changed by a pickle's BUILD. These refuse it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise UserError("it changes a name instead of using it")


class _Ndarray(_StandIn):
    """Stands for `numpy.ndarray`, which the files name but do not call."""

    __slots__ = ()


class _Dtype(_StandIn):
    """Stands for `numpy.dtype`, and for the one type it may make."""

    __slots__ = ()

    def __call__(self, *args: object) -> _Uint8:
        if args != (b"u1", 0, 1):
            raise UserError(f"its values are of type {args[:1]!r}, and only uint8 is read")
        return _Uint8()


class _Reconstruct(_StandIn):
    """Stands for `numpy.core.multiarray._reconstruct`: makes an array that has no values yet."""

    __slots__ = ()

    def __call__(self, *args: object) -> _Array:
        if args != (_STAND_INS["numpy.ndarray"], (0,), b"b"):
            raise UserError("it makes something that is not an array")
        return _Array()


class _Uint8:
    """The dtype of the values. Its state is a constant."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if state != (3, b"|", None, None, None, -1, -1, 0):
            raise UserError("its values have a type with fields or objects, and only uint8 is read")


class _Array:
    """Stands for an array of uint8 with two axes."""

    __slots__ = ("values",)

    values: Images

    def __init__(self) -> None:
        self.values = np.empty((0, 0), np.uint8)

    def __setstate__(self, state: object) -> None:
        match state:
            case (1, (int(rows), int(columns)), _Uint8(), False, bytes(raw)):
                pass
            case _:
                raise UserError("its array is not one of uint8 with two axes")
        if not (0 < rows <= MAX_ROWS and 0 < columns <= NUM_VALUES):
            raise UserError(f"its array is {rows} x {columns}, and at most {MAX_ROWS} x {NUM_VALUES} is read")
        if len(raw) != rows * columns:
            raise UserError(f"its array of {rows} x {columns} has {len(raw)} bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(rows, columns)


_STAND_INS: dict[str, _StandIn] = {
    "numpy.core.multiarray._reconstruct": _Reconstruct(),
    "numpy.ndarray": _Ndarray(),
    "numpy.dtype": _Dtype(),
}
