"""Batches that are iterated more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Batches(Protocol[T_co]):
    """Batches that can be iterated more than once: a list, or anything that reads them again."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T_co]: ...


@dataclass(frozen=True)
class Reread(Generic[T_co]):
    """Batches that are made anew each time, for images that do not all fit into memory."""

    make: Callable[[], Iterable[T_co]]
    num: int
    num_images: int
    """In all batches."""

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.make())


def num_images(batches: Batches[Any]) -> int:
    """In all of some batches of images, or of images and labels."""
    if isinstance(batches, Reread):
        return batches.num_images
    return sum(len(batch[0] if isinstance(batch, tuple | list) else batch) for batch in batches)
