"""What a claim is: a statement, the cases in which it is judged, what is computed of their runs, and the rule.

A case names what it needs as `kind:role`, such as `cnmm="curves:cifar10_sampled"`: the measurement `curves` of all runs that
play the role, one for each seed. `measure` gets these lists by name and returns what the page shows; `rule` sees nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.claims.store import JSON, rounded
from benchmarks.claims.verdict import FAILS, HOLDS, UNKNOWN, Verdict

NOT_RUN = "cannot be judged: not run"


@dataclass(frozen=True)
class Case:
    """One data set, or one way to train."""

    label: str
    needs: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)


def case(label: str, needs: Mapping[str, str], **options: Any) -> Case:
    """`options` are told to `measure`, beside what it needs."""
    return Case(label, needs, options)


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


def judge(claim: Claim, find: Find) -> list[Judged]:
    """Every case of a claim."""
    return [_judge(claim, each, find) for each in claim.cases]


def _judge(claim: Claim, asked: Case, find: Find) -> Judged:
    inputs, runs = {}, []
    for name, need in asked.needs.items():
        kind, _, role = need.partition(":")
        results, why = find(kind, role)
        if not results:
            return Judged(asked, None, Verdict(NOT_RUN, why), ())
        inputs[name] = [result["found"] for result in results]
        runs += [result["training"] for result in results]
    found = rounded(claim.measure(**inputs, **asked.options))
    return Judged(asked, found, claim.rule(found), tuple(dict.fromkeys(runs)))


def overall(cases: list[Judged]) -> Verdict:
    """Of all cases that were judged: one that does not hold refutes the claim; those left out are named."""
    words = [each.verdict.word for each in cases]
    missing = [each.case.label for each in cases if each.verdict.word == NOT_RUN]
    where = f"not run: {', '.join(missing)}" if missing else ""
    ran = [word for word in words if word != NOT_RUN]
    if not ran:
        return Verdict(NOT_RUN, "")
    for word in (FAILS, HOLDS):
        if word in ran:
            split = f"{ran.count(word)} of {len(ran)} cases" if len(ran) > 1 else ""
            return Verdict(word, "; ".join(part for part in (split, where) if part))
    return Verdict(UNKNOWN, where)
