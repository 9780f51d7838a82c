"""What a claim is: a statement, the cases in which it is judged, what is computed of their runs, and the rule.

A case names what it needs as `kind:role`, such as `cnmm="curves:cifar10_sampled"`: the measurement `curves` of all
runs that play the role, one for each seed. `measure` gets these lists by name and returns what the page shows; `rule`
sees nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.claims.store import JSON, rounded
from benchmarks.claims.verdict import FAILS, HOLDS, UNKNOWN, Verdict

NOT_RUN = "cannot be judged: not run"
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One data set, and one way to train."""

    label: str
    """With names of data in braces, which every scale fills in."""
    needs: Mapping[str, str]
    paper: bool = False
    """Is it trained in the paper's way? Where such cases were run, they decide; ours stand beside them."""
    scales: tuple[str, ...] = ("smoke", "cpu", "full")
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else `measure` is told."""


def case(label: str, needs: Mapping[str, str], *, paper: bool = False, only: str = "", **options: Any) -> Case:
    """`only`: the one scale that has such runs."""
    scales = (only,) if only else ("smoke", "cpu", "full")
    return Case(label=label, needs=needs, paper=paper, scales=scales, options=options)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that runs can confirm or refute."""

    key: str
    title: str
    paper: str
    """What the paper says, with its number if it has one; of our own claims, what they are about."""
    where: str
    """In the paper."""
    rule_words: str
    """The rule, in a sentence."""
    cases: tuple[Case, ...]
    measure: Callable[..., JSON]
    rule: Callable[[JSON], Verdict]
    table: Callable[[JSON], Table] | None = None
    """Figures of a case that do not fit into a sentence: the head and the rows."""
    picture: str | None = None
    """A figure of `figures` that belongs to it."""


@dataclass(frozen=True)
class Judged:
    """A case with what was found, or why it was not."""

    case: Case
    found: JSON | None
    verdict: Verdict
    runs: tuple[str, ...]


Find = Callable[[str, str], tuple[list[JSON], str]]
"""From a kind and a role to its measurements by seed, and why there are none if there are none."""


def judge(claim: Claim, find: Find, scale: str) -> list[Judged]:
    """Every case that a claim has at a scale."""
    return [_judge(claim, each, find) for each in claim.cases if scale in each.scales]


def _judge(claim: Claim, asked: Case, find: Find) -> Judged:
    inputs, runs, missing = {}, [], []
    for name, need in asked.needs.items():
        kind, _, role = need.partition(":")
        results, why = find(kind, role)
        inputs[name] = [result["found"] for result in results]
        runs += [result["training"] for result in results]
        missing += [] if results else [why]
    if missing:
        return Judged(asked, None, Verdict(NOT_RUN, "; ".join(dict.fromkeys(missing))), ())
    found = rounded(claim.measure(**inputs, **asked.options))
    return Judged(asked, found, claim.rule(found), tuple(dict.fromkeys(runs)))


def overall(cases: Sequence[Judged]) -> Verdict:
    """Of all cases that were run, or of those trained in the paper's way if there are such.

    One that does not hold refutes the claim; it holds if at least half of them do.
    """
    ran = [each for each in cases if each.verdict.word != NOT_RUN]
    if not ran:
        return Verdict(NOT_RUN, f"none of {len(cases)} cases" if len(cases) > 1 else "")
    papers = [each for each in ran if each.case.paper]
    notes = [f"{len(ran)} of {len(cases)} cases run"] if len(ran) < len(cases) else []
    if not papers and any(each.case.paper for each in cases):
        notes.append("with our training; the paper's was not run")
    words = [each.verdict.word for each in papers or ran]
    enough = HOLDS if 2 * words.count(HOLDS) >= len(words) else UNKNOWN
    word = FAILS if FAILS in words else enough
    if len(words) > 1 and words.count(word) < len(words):
        notes.insert(0, f"{words.count(word)} of {len(words)} that decide")
    return Verdict(word, "; ".join(notes))
