"""Verdicts, and the rules that most claims are judged by: pure functions from numbers to one of three words and a
reason.

A difference is {difference, low, high}: with its 95 % interval, in shares (0.01 is a point). Rules ask where the
interval lies; where it decides nothing, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.claims.store import JSON

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be judged at this scale"
MATTERS = 0.002
"""A difference that matters to somebody: 0.2 points."""
SIGNIFICANT_LOSS = 0.01
"""What the paper calls a significant loss, it does not say. We take one point."""
SLIGHTLY = 0.02
"""Nor what slightly is: at most two points."""


@dataclass(frozen=True)
class Verdict:
    """One of the three, and why, in words made from the numbers."""

    word: str
    reason: str


def points(share: float) -> str:
    """A difference in points, with its sign."""
    return f"{100 * share:+.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def said(found: JSON) -> str:
    """A difference with its interval, in words."""
    words = f"{points(found['difference'])} points ({points(found['low'])} to {points(found['high'])})"
    return words + (f", p = {found['p']:.2g}" if found.get("p") is not None else "")


def better(found: JSON, what: str) -> Verdict:
    """Is one better than another? Holds above zero, fails below what matters."""
    if found["low"] > 0:
        return Verdict(HOLDS, f"{what}: {said(found)}")
    if found["high"] < MATTERS:
        return Verdict(FAILS, f"{what}: {said(found)}")
    return Verdict(UNKNOWN, f"{what}: {said(found)}; the interval decides nothing")


def no_worse(found: JSON, what: str, margin: float = SIGNIFICANT_LOSS) -> Verdict:
    """Is one as good as another, but for a margin? Holds above minus the margin, fails below it."""
    words = f"{what}: {said(found)}, where {100 * margin:g} points may be lost"
    if found["low"] > -margin:
        return Verdict(HOLDS, words)
    if found["high"] < -margin:
        return Verdict(FAILS, words)
    return Verdict(UNKNOWN, f"{words}; the interval decides nothing")


def slightly(found: JSON, what: str, *, better: bool) -> Verdict:
    """Is the difference of the stated sign, and small?"""
    sign = 1 if better else -1
    low, high = sorted((sign * found["low"], sign * found["high"]))
    words = f"{what}: {said(found)}"
    if low > 0 and sign * found["difference"] <= SLIGHTLY:
        return Verdict(HOLDS, words)
    if high < 0:
        return Verdict(FAILS, f"{words}; the paper has the other sign")
    if low > SLIGHTLY:
        return Verdict(FAILS, f"{words}; more than {100 * SLIGHTLY:g} points are not slight")
    return Verdict(UNKNOWN, f"{words}; the interval decides nothing")


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several parts: fails if one fails, holds if all hold."""
    words = "; ".join(verdict.reason for verdict in verdicts)
    found = [verdict.word for verdict in verdicts]
    if FAILS in found:
        return Verdict(FAILS, words)
    return Verdict(HOLDS if found and set(found) == {HOLDS} else UNKNOWN, words)
