"""What work is under way, how much of it is done, and how long the rest will take.

Work is of several kinds, and each kind has a speed of its own. All of it is planned in the beginning, so the time left
counts what has not begun yet, too. The speed of a kind is learned while it runs; until then it follows from what the
other kinds have shown, and from how much slower or faster than those it usually is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FORGETTING = 0.99
"""What an observation still weighs after the next one of its kind: the speed is that of the last hundred or so."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What somebody is waiting for."""

    what: str
    """What is being done, in words."""
    done: float
    """The share of it that is done, from 0 to 1."""
    left_s: float | None = None
    """Estimated seconds to the end of everything, not of this alone; None: nobody knows yet."""


OnWait = Callable[[Waiting], None]


def no_wait(waiting: Waiting) -> None:
    """Tells nobody."""


def reading(on_wait: OnWait) -> Callable[[int, int], None]:
    """For those who read images: so many of all are read."""
    start = time.monotonic()

    def report(done: int, total: int) -> None:
        left_s = (time.monotonic() - start) * (total - done) / done if done else None
        on_wait(Waiting(what=f"reading images, {done:,} of {total:,}", done=done / max(total, 1), left_s=left_s))

    return report


class Clock:
    """The time left of planned work."""

    def __init__(self, usual: Mapping[str, float], plan: Mapping[str, float] | None = None) -> None:
        """`usual`: seconds that a unit of each kind takes, relative to one another. `plan`: units of work by kind."""
        self.usual = usual
        self.left: dict[str, float] = dict.fromkeys(usual, 0.0) | dict(plan or {})
        """Units that are still to be done, by kind."""
        self.planned = dict(self.left)
        self._seen: dict[str, tuple[float, float]] = {}
        """Seconds and units of late, by kind."""
        self._begun: set[str] = set()
        """Kinds with one observation only. It is slow, since much happens for the first time, and soon forgotten."""
        self._spent: dict[str, float] = {}
        """Seconds in all, by kind."""
        self._last = time.monotonic()

    def plan(self, kind: str, units: float) -> None:
        """So much is left of a kind, as far as it is known now."""
        self.planned[kind] = self.planned[kind] - self.left[kind] + units
        self.left[kind] = units

    def skip(self) -> None:
        """What has passed since the last observation tells nothing about any kind."""
        self._last = time.monotonic()

    def tick(self, kind: str, units: float = 1.0, *, fresh: bool = True) -> None:
        """So much more is done: in the time since the last observation or, not `fresh`, by a process before this."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        self.left[kind] = max(0.0, self.left[kind] - units)
        if fresh:
            seconds, amount = (0.0, 0.0) if kind in self._begun else self._seen.get(kind, (0.0, 0.0))
            (self._begun.discard if kind in self._seen else self._begun.add)(kind)
            self._seen[kind] = FORGETTING * seconds + elapsed, FORGETTING * amount + units
            self._spent[kind] = self._spent.get(kind, 0.0) + elapsed

    def watching(self, kind: str, what: str, on_wait: OnWait) -> Callable[[int], None]:
        """For those who take work off piece by piece, and say how many units each piece had: `on_wait` is told."""
        whole = max(self.left[kind], 1e-9)

        def report(units: int) -> None:
            self.tick(kind, units)
            on_wait(Waiting(what=what, done=1 - self.left[kind] / whole, left_s=self.left_s))

        return report

    def rate(self, kind: str) -> float | None:
        """Seconds for a unit of a kind, as it is or as one would expect; None: nothing was observed yet."""
        seconds, amount = self._seen.get(kind, (0.0, 0.0))
        if amount > 0:
            return seconds / amount
        weights = {other: spent for other, spent in self._spent.items() if self._seen[other][1] > 0}
        total = sum(weights.values())
        if not total:
            return None
        scale = sum(
            spent * self._seen[other][0] / self._seen[other][1] / self.usual[other] for other, spent in weights.items()
        )
        return self.usual[kind] * scale / total

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end of everything planned."""
        rates = {kind: self.rate(kind) for kind, units in self.left.items() if units > 0}
        return None if None in rates.values() else sum(self.left[kind] * (rate or 0.0) for kind, rate in rates.items())

    @property
    def done(self) -> float:
        """The share of the planned time that is over."""
        whole = sum(units * (self.rate(kind) or self.usual[kind]) for kind, units in self.planned.items())
        rest = sum(units * (self.rate(kind) or self.usual[kind]) for kind, units in self.left.items())
        return 1 - rest / whole if whole else 0.0
