"""Usage errors on one line: what is wrong with a command line, and the nearest thing that would be right.

The parser's own complaint is a box of several lines, and it takes a misspelt flag for a missing one. Flags have ranges,
which are checked before any work begins; those of a model and a training are fields of their configs, which check them.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.budget import parse_budget

Parse = Callable[[Sequence[str]], object]
"""Parses a command line, or prints a help page or a complaint and raises SystemExit."""


RANGES: dict[str, _fields.Check] = {
    "batch": _fields.whole(1, 2**16),
    "confidence": _fields.SHARE,
    "cores": _fields.whole(1, 1024),
    "deadline_ms": _fields.number(above=0, most=1e9),
    "drain_s": _fields.number(0, 3600),
    "images": _fields.whole(1, 10**9),
    "images_per_request": _fields.whole(1, 10_000),
    "ladder": _fields.whole(1, 1000),
    "load": _fields.number(above=0, most=1000),
    "monte_carlo": _fields.whole(0, 10_000),
    "points": _fields.whole(1, 100_000),
    "port": _fields.whole(0, 65535),
    "rate": _fields.number(above=0, most=1e6),
    "requests": _fields.whole(1, 10**8),
    "seconds": _fields.number(0, 3600),
    "seed": _fields.whole(0, 2**32 - 1),
    "target_ms": _fields.number(above=0, most=1e9),
    "threads": _fields.whole(1, 256),
    "top": _fields.whole(1, 100_000),
    "workers": _fields.whole(0, 256),
}
"""Of every number that a verb takes."""


def check_ranges(verb: object) -> None:
    """Refuses numbers out of range and budgets that are none."""
    for name, value in vars(verb).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _fields.checked(value, f"--{name.replace('_', '-')}", RANGES[name])
        elif name in ("budget", "average_macs") and value is not None:
            parse_budget(value)


def check_verb(args: Sequence[str], verbs: Iterable[str]) -> None:
    """Refuses a command line that does not begin with a verb."""
    verbs = list(verbs)
    if not args:
        raise UserError(f"no verb given: must be one of {', '.join(verbs)}; `cnmm --help` explains them")
    first = args[0]
    if first not in verbs and first not in ("-h", "--help") and not first.startswith("--tyro-"):
        raise UserError(f"unknown verb {first!r}: must be one of {', '.join(verbs)}{_nearest(first, verbs)}")


@contextlib.contextmanager
def on_one_line(args: Sequence[str], parse: Parse) -> Iterator[None]:
    """Turns the complaint of a parser that runs inside into one line; `parse` is asked again, for its help page."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        verb = f"cnmm {args[0]}"
        known = _flags(_help_page(args[0], parse))
        for word in _given_flags(args[1:]):
            if word.replace("_", "-") not in known:
                near = _nearest(word, known)
                raise UserError(f"unknown flag {word} of `{verb}`{near or '; '}`{verb} --help` lists all") from None
        raise UserError(f"{_first_words(box.getvalue())}; see `{verb} --help`") from None


def _given_flags(words: Sequence[str]) -> list[str]:
    """What looks like a flag, without its value; numbers may be negative, and after `--` nothing is a flag."""
    words = words[: words.index("--")] if "--" in words else words
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    return [flag for flag in flags if re.match(r"--?[^\W\d]", flag)]


def _help_page(verb: str, parse: Parse) -> str:
    page = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(page):
        parse([verb, "--help"])
    return page.getvalue()


def _flags(page: str) -> set[str]:
    """Every flag that a help page shows; those that a text mentions are flags of the verb, too."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", page))


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), sorted(known), 1, 0.5)
    return f"; did you mean {near[0]}? " if near else ""


def _first_words(box: str) -> str:
    """The first part of a box, which says what is wrong, without its title, its frame and its colours."""
    _, *lines = re.sub(r"\x1b\[[0-9;]*m|\[/?bold\]", "", box).splitlines() or [""]
    inner = [line.strip("│ ") for line in lines]
    parts = [list(part) for rule, part in itertools.groupby(inner, _is_rule) if not rule]
    text = " ".join(" ".join(parts[0] if parts else []).split()).rstrip(".")
    text = re.sub(r"\. Expected one of \(([^)]*)\)", _choices, text)
    return re.sub(r"^Missing from cnmm \w+: ", "missing ", text) or "the command line cannot be read"


def _choices(found: re.Match[str]) -> str:
    """They come in any order, and with the word for none of them."""
    names = set(re.findall(r"'([^']*)'", found[1])) - {"None"}
    return f": must be one of {', '.join(sorted(names))}"


def _is_rule(line: str) -> bool:
    return len(line) > 2 and not line.strip("─-╰╯")
