"""The schema: types, ranges, lengths and finiteness of values that may come from anywhere.

Fields of JSON files, metadata of ONNX files, flags and arguments of functions are checked by the same checks, and a
message names the path of the field. Numbers of numpy count as Python's, and become those. Each format keeps the checks
of its fields beside the value that it becomes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

from cnmm._errors import UserError, is_printable

Check = tuple[Callable[[Any], bool], str]
"""What a value must fulfil, and the same in words."""
T = TypeVar("T")

LARGEST = 2**53
"""No count of anything is larger; up to here, floats hold whole numbers exactly."""
LONGEST_TEXT = 1000
"""Characters of a name."""
MOST_ITEMS = 100_000
"""Of any list."""
LATER_VERSION = "it was written by a later version of cnmm; upgrade with: pip install -U cnmm"


def get(data: Mapping[str, Any], name: str, check: Check, where: str = "") -> Any:
    """A field of an object that fulfils the check; `where` is the path of the object, such as `points[3].`."""
    if name not in data and not check[0](None):
        raise UserError(f"{where}{name} is missing: must be {check[1]}")
    return checked(data.get(name), f"{where}{name}", check)


def get_all(data: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> dict[str, Any]:
    """All fields of an object that have a check."""
    return {name: get(data, name, check, where) for name, check in checks.items()}


def read(kind: type[T], data: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> T:
    """A dataclass from an object; a field that has a default may be missing."""
    there = {
        field.name: checks[field.name]
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]  # it is a dataclass
        if field.name in data or field.default is dataclasses.MISSING
    }
    return kind(**get_all(data, there, where))


def checked(value: Any, name: str, check: Check) -> Any:
    """A value of Python's own types that fulfils the check; the message gives it this name."""
    value = plain(value)
    fulfils, words = check
    if not fulfils(value):
        raise UserError(f"{name}={shown(value)}: must be {words}")
    return value


def settle(value: object, checks: Mapping[str, Check]) -> None:
    """Checks the fields of a frozen dataclass that is being made, and replaces numbers of numpy by Python's."""
    for name, check in checks.items():
        object.__setattr__(value, name, checked(getattr(value, name), name, check))


def refuse_unknown(data: Mapping[str, Any], known: Container[str], where: str = "") -> None:
    """Refuses fields that this version does not know: without them the value would be another."""
    for name in data:
        if name not in known:
            raise UserError(f"unknown field {where}{name!s:.80}; {LATER_VERSION}")


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy, and lists of them, as Python's numbers and lists; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return _plain(value)


def _plain(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) and not isinstance(value, type) else value


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        words = repr(value)
    except (ValueError, RecursionError):  # more digits, or more brackets, than Python writes
        words = f"<{type(value).__name__} too long to write>"
    return words if len(words) <= 80 else f"{words[:77]}..."


def is_number(value: object) -> bool:
    """A finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False


def is_whole(value: object) -> bool:
    """A whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """A whole number in a range."""
    words = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
    return lambda value: is_whole(value) and least <= value <= most, f"a whole number {words}"


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf
) -> Check:
    """A finite number in a range; `above` and `below` are not in it."""
    low = "" if above == least == -math.inf else f"above {above:g}" if above >= least else f"of at least {least:g}"
    high = "" if below == most == math.inf else f"below {below:g}" if below <= most else f"at most {most:g}"
    words = f"a finite number {low} {high}" if not (low and high) else f"a number {low} and {high}"
    if -math.inf < least and most < math.inf:
        words = f"a number between {least:g} and {most:g}"

    def fulfils(value: Any) -> bool:
        return is_number(value) and least <= value <= most and above < value < below

    return fulfils, " ".join(words.split())


def text(longest: int = LONGEST_TEXT) -> Check:
    """A text that fits on one line of a terminal."""

    def fulfils(value: Any) -> bool:
        return isinstance(value, str) and 0 < len(value) <= longest and is_printable(value)

    return fulfils, f"a text on one line, of 1 to {longest} printable characters"


def list_of(check: Check, num: int | None = None, *, least: int = 0, most: int = MOST_ITEMS) -> Check:
    """A list whose items all fulfil a check: exactly `num` of them, or a number in a range."""
    fulfils, words = check
    count = f"{num} values" if num is not None else f"{least} or more values"
    least, most = (least, most) if num is None else (num, num)

    def each(value: Any) -> bool:
        return isinstance(value, list | tuple) and least <= len(value) <= most and all(map(fulfils, value))

    return each, f"a list of {count}, each {words}"


def one_of(*values: object) -> Check:
    """One of a few values; 1 is neither true nor 1.0."""

    def fulfils(value: Any) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in values)

    return fulfils, ("one of " if len(values) > 1 else "") + ", ".join(map(str, values))


def or_null(check: Check) -> Check:
    """Nothing, or what fulfils a check."""
    fulfils, words = check
    return lambda value: value is None or fulfils(value), f"{words}, or null"


NUMBER: Check = number()
COUNT: Check = whole(0)
POSITIVE: Check = whole(1)
SHARE: Check = number(0, 1)
TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")
TEXT: Check = text()
PATH: Check = (lambda value: isinstance(value, str) and 0 < len(value) <= 4096 and "\0" not in value, "a path")
COLOUR: Check = list_of(whole(0, 255), 3)
OBJECT: Check = (lambda value: isinstance(value, Mapping), "an object")
