"""What all verbs of the command line share: common flags, tables on stdout, words on stderr."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Protocol, Self

from tyro.conf import arg

from cnmm._errors import printable
from cnmm._progress import Waiting
from cnmm.frontier import FrontierPoint

NO_HINT = arg(help_behavior_hint="")
SAY_EVERY_S = 30.0
"""How often progress is said where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Flags of every verb."""

    json: Annotated[bool, NO_HINT] = False
    """Print exactly one JSON object."""
    debug: Annotated[bool, NO_HINT] = False
    """Show the traceback of an error (CNMM_DEBUG=1 does too)."""


class Verb(Protocol):
    """What every verb has."""

    @property
    def common(self) -> Common: ...

    def answer(self) -> dict[str, Any]:
        """Does the work and returns the fields that `--json` prints."""

    def show(self, answer: dict[str, Any]) -> None:
        """Prints the answer for people."""


class Bar:
    """Progress on stderr: on a terminal one line that leaves nothing behind, elsewhere a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        plain = functools.partial(TextColumn, markup=False)
        columns = (plain("{task.description}"), BarColumn(), plain("{task.fields[more]}"))
        console = Console(stderr=True, markup=False, emoji=False)
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", more="", total=1.0)
        self.start = self.said = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, what: str, done: float, left_s: float | None = None, more: str = "") -> None:
        """`done` is a share, from 0 to 1; without `left_s` the time left follows from it."""
        if left_s is None and done > 0:
            left_s = (time.monotonic() - self.start) * (1 - done) / done
        self._show(what, done, more, "" if left_s is None else f"{duration(left_s)} left")

    def wait(self, waiting: Waiting) -> None:
        """What somebody is waiting for; nothing is guessed here."""
        left = "" if waiting.left_s is None else f"{duration(waiting.left_s)} left"
        self._show(waiting.what, waiting.done, "", left)

    def _show(self, what: str, done: float, more: str, left: str) -> None:
        if not self.bar.disable:
            self.bar.update(self.task, description=printable(what), completed=done, more=f"{more}  {left}".strip())
        elif time.monotonic() - self.said >= SAY_EVERY_S:
            say("  ".join(part for part in (f"{what}, {done:.0%}", more, left) if part))
            self.said = time.monotonic()

    def say(self, line: str) -> None:
        """One line above the bar, which stays."""
        self.bar.console.print(printable(line), highlight=False, soft_wrap=True)
        self.said = time.monotonic()


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds; never nothing while something is left."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[str] = ()) -> None:
    """A table on stdout. Descriptions are wrapped at the width of a terminal; nothing is ever cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column != "description")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    wraps = sys.stdout.isatty() and "description" in columns
    console = Console(width=None if wraps else 2**16, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(table)
    print("\n".join(line.rstrip() for line in text.get().splitlines()).strip("\n"))


def point_row(point: FrontierPoint) -> dict[str, Any]:
    """A measured point as `--json` prints it: its fields, and its name and quality under the words of the contract."""
    return {"point": point.name, **asdict(point), point.metric: point.quality}


def cells(row: dict[str, Any], *names: str) -> tuple[str, ...]:
    """Some fields of a row as a table shows them."""
    values = ("" if row[name] is None else row[name] for name in names)
    return tuple(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def say(words: str) -> None:
    """One line for the user, beside the results."""
    print(f"cnmm: {printable(words)}", file=sys.stderr)


def write(line: str = "") -> None:
    """One line of the results; names in it may come from anywhere."""
    print(printable(line))


def one_line(error: BaseException) -> str:
    """What an error says, on one line, and which file it is about."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split()) or type(error).__name__
