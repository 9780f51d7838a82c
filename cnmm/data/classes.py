"""Classes of two data sets compared by name."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from cnmm._errors import UserError
from cnmm.data.dataset import ArraySplit, DataSet, Split
from cnmm.data.images import FileSplit

logger = logging.getLogger("cnmm")


def in_order(data: DataSet, classes: tuple[str, ...], owner: str) -> DataSet:
    """The data set with its classes in this order, that of `owner`; an error if they are others."""
    if data.classes == classes:
        return data
    extra, missing = sorted(set(data.classes) - set(classes)), sorted(set(classes) - set(data.classes))
    if extra or missing:
        problem = f"its class {extra[0]!r} is unknown to {owner}" if extra else f"it lacks the class {missing[0]!r}"
        counts = f"{len(data.classes)} classes, {owner} has {len(classes)}"
        raise UserError(f"{data.spec}: {problem} ({counts}); both must have the same class names")
    logger.warning(
        "the classes of %s come in another order than those of %s: they are matched by name", data.spec, owner
    )
    place = np.array([classes.index(name) for name in data.classes])
    test = None if data.test is None else _relabelled(data.test, place, data.spec)
    return dataclasses.replace(data, classes=classes, train=_relabelled(data.train, place, data.spec), test=test)


def _relabelled(split: Split, place: np.ndarray, spec: str) -> Split:
    if not isinstance(split, ArraySplit | FileSplit) or split.labels.ndim != 1:
        raise UserError(f"{spec}: its classes come in another order, and only labels of whole images can be matched")
    return dataclasses.replace(split, labels=place[split.labels])
