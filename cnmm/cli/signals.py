"""Ctrl-C and SIGTERM, which Slurm, Kubernetes and Docker send: what can go on later is saved, the rest is undone.

The exit status is the usual one: 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from cnmm._errors import Stopped
from cnmm._lock import remove_passing
from cnmm.cli.terminal import say

INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, after everything was saved."""


@contextmanager
def terminable() -> Iterator[None]:
    """While this runs, SIGTERM ends the process at once, and removes what it was writing."""
    with _handled({signal.SIGTERM: _end}):
        yield


def _end(*_: object) -> NoReturn:
    """Not by an exception: in the middle of other libraries' code, those have crashed the process."""
    remove_passing()
    os.write(2, b"cnmm: terminated\n")  # the signal may have come while something was printed
    os._exit(TERMINATED)


@contextmanager
def stopping(fix: str) -> Iterator[Callable[[], bool]]:
    """While this runs, the first signal only asks to stop when that is possible; a second one interrupts at once.

    Yields what says whether it has come. `fix` is how to go on, for whoever was stopped.
    """
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGTERM:
            _end()
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say("stopping as soon as everything can be saved; press Ctrl-C again to stop at once")

    with _handled({signal.SIGINT: ask, signal.SIGTERM: ask}):
        try:
            yield lambda: bool(asked)
        except Stopped as stop:
            say(f"{stop}; {fix}")
            raise (Terminated if asked[:1] == [signal.SIGTERM] else KeyboardInterrupt) from None


@contextmanager
def _handled(handlers: dict[int, Callable[..., Any]]) -> Iterator[None]:
    """Signals belong to the main thread; in others nothing is handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
