"""The error that is the user's to mend, and the one that is nobody's; all others are bugs and keep their traceback."""

from __future__ import annotations

import unicodedata

INSTALL_TRAIN = 'pip install "cnmm[train]"'
_LONGEST = 2000
"""Characters of a message; what is longer loses its middle."""
_HIDDEN = {"Cc", "Cs", "Zl", "Zp"}
"""Control characters, halves of characters, ends of lines and paragraphs."""
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What makes a terminal show text in another order than it is in."""


def is_printable(text: str) -> bool:
    """One line without control characters: safe on a terminal and in a table."""
    return text.isprintable() or not any(map(_is_hidden, text))


def printable(text: str) -> str:
    """The text on one line; control characters, such as terminal escapes, become what Python would write: `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(ascii(char)[1:-1] if _is_hidden(char) else char for char in text)


def _is_hidden(char: str) -> bool:
    return char in _DIRECTIONS or unicodedata.category(char) in _HIDDEN


class Stopped(Exception):
    """Work was asked to stop; everything up to now is saved, and the same call goes on from there."""


class UserError(ValueError):
    """Says the value, what it must be, and the fix, on one line. The command line prints it, exit status 2."""

    def __init__(self, message: str) -> None:
        text = printable(" ".join(message.split()))
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
        super().__init__(text)
