"""Ctrl-C and SIGTERM, which Slurm, Kubernetes and Docker send: what can go on later is saved, the rest is undone.

The exit status is the usual one: 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from cnmm._errors import Stopped
from cnmm.cli.terminal import say


class Terminated(KeyboardInterrupt):
    """SIGTERM, which undoes what is half done like Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """While this runs, SIGTERM raises `Terminated`, so that files written aside do not stay."""

    def end(*_: object) -> NoReturn:
        raise Terminated

    with _handled({signal.SIGTERM: end}):
        yield


@contextmanager
def stopping(fix: str) -> Iterator[Callable[[], bool]]:
    """While this runs, the first signal only asks to stop when that is possible; a second one interrupts at once.

    Yields what says whether it has come. `fix` is how to go on, for whoever was stopped.
    """
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if asked:
            raise _interruption(number)
        asked.append(number)
        say("stopping as soon as everything can be saved; press Ctrl-C again to stop at once")

    with _handled({signal.SIGINT: ask, signal.SIGTERM: ask}):
        try:
            yield lambda: bool(asked)
        except Stopped as stop:
            say(f"{stop}; {fix}")
            raise _interruption(asked[0] if asked else signal.SIGINT) from None


def _interruption(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


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
