"""Fields of JSON files that may come from anywhere: each is checked, and a message names its path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cnmm._errors import UserError

Check = tuple[Callable[[Any], bool], str]
"""What a value must fulfil, and the same in words."""


def get(data: Mapping[str, Any], name: str, check: Check, where: str = "") -> Any:
    """A field of an object that fulfils the check; `where` is the path of the object, such as `points[3].`."""
    fulfils, words = check
    value = data.get(name)
    if not fulfils(value):
        found = repr(value)[:80] if name in data else "missing"
        raise UserError(f"{where}{name} is {found}; it must be {words}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def list_of(check: Check, num: int | None = None, *, least: int = 0) -> Check:
    """A list whose items all fulfil a check: exactly `num` of them, or at least so many."""
    fulfils, words = check
    count = f"{num} values" if num is not None else f"{least} or more values"

    def each(value: Any) -> bool:
        right = isinstance(value, list | tuple) and (len(value) == num if num is not None else len(value) >= least)
        return right and all(fulfils(item) for item in value)

    return each, f"a list of {count}, each {words}"


def one_of(*values: object) -> Check:
    return lambda value: value in values, " or ".join(repr(value) for value in values)


def or_null(check: Check) -> Check:
    fulfils, words = check
    return lambda value: value is None or fulfils(value), f"{words}, or null"


NUMBER: Check = (_is_number, "a finite number")
COUNT: Check = (lambda value: _is_whole(value, 0), "a whole number of at least 0")
POSITIVE: Check = (lambda value: _is_whole(value, 1), "a whole number of at least 1")
SHARE: Check = (lambda value: _is_number(value) and 0 <= value <= 1, "a number between 0 and 1")
TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")
TEXT: Check = (_is_text, "a text on one line")
OBJECT: Check = (lambda value: isinstance(value, Mapping), "an object")
