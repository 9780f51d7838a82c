"""Statements 1 to 7 (section 4.2, figure 6): exits and cutting. Each with its measure, its rule and its runs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

from benchmarks.claims import tables
from benchmarks.claims.claim import Case, Claim, case
from benchmarks.claims.evidence import (
    Measured,
    averaged,
    cut_to,
    difference,
    envelope,
    equal_cost_pairs,
    exits,
    full,
    pooled,
    quality,
    rank_correlation,
    select,
    split_of,
    value,
    within,
)
from benchmarks.claims.store import JSON
from benchmarks.claims.verdict import (
    FAILS,
    HOLDS,
    UNKNOWN,
    Verdict,
    better,
    no_worse,
    percent,
    points,
    said,
    slightly,
)

Runs = list[Measured]
"""What was measured of the runs of one role, one for each seed."""
LOW = (0.1, 0.2, 0.3)
"""What is fast inference: so far from the cheapest point to the full mixture, in macs."""


def _alone(name: str) -> tuple[Case, ...]:
    """The ways to train, of which each is judged alone: ours that the repository has, the paper's, and ours."""
    return (
        case("{cifar10}, cnmm_b6s3 of the repository", {name: "frontier:cifar10_given"}),
        case("{cifar10}, cnmm_b4s3 of the repository", {name: "frontier:cifar10_given_b4"}),
        case("{cifar10}, sampled", {name: "curves:cifar10_sampled"}, paper=True),
        case("{cifar10}, quick", {name: "curves:cifar10_quick"}),
        case("{cifar100}, sampled", {name: "curves:cifar100_sampled"}, paper=True),
        case("{cifar100}, quick", {name: "curves:cifar100_quick"}),
        case("{scenes}, of the repository", {name: "frontier:scenes_given"}),
        case("{scenes}, sampled", {name: "curves:scenes_sampled"}, paper=True),
        case("{scenes}, street", {name: "curves:scenes_street"}),
    )


def _against_single() -> tuple[Case, ...]:
    """CNMM and CNMM-single, trained alike."""
    cases = []
    for label, role in (
        ("{cifar10}, sampled", "cifar10_sampled"),
        ("{cifar100}, sampled", "cifar100_sampled"),
        ("{scenes}, sampled", "scenes_sampled"),
    ):
        cases.append(case(label, {"cnmm": f"curves:{role}", "single": f"curves:{role}_single"}, paper=True))
    return tuple(cases)


# 1


def measure_curves(cnmm: Runs) -> JSON:
    """How quality follows macs along the curve of each exit that was cut at all."""
    rows = []
    for found in cnmm:
        for exit in exits(found):
            curve = select(found, exit=exit, rule="flow")
            if len(curve) > 2:
                rising = rank_correlation([(point["macs"], point["held_out"]) for point in curve])
                least, most = (end(point["macs"] for point in curve) for end in (min, max))
                rows.append({"exit": exit, "points": len(curve), "rising": rising, "range": most / least})
    return {
        "curves": rows,
        "rising": statistics.median(row["rising"] for row in rows) if rows else 0.0,
        "n": cnmm[0]["n"],
    }


def judge_curves(found: JSON) -> Verdict:
    words = f"{len(found['curves'])} curves; rank correlation of macs and quality {found['rising']:.2f} (median)"
    if found["rising"] >= 0.8 and found["curves"]:
        return Verdict(HOLDS, words)
    return Verdict(FAILS if found["rising"] < 0.5 else UNKNOWN, words)


CLAIM_1 = Claim(
    key="1",
    title="Every model is a curve, traced by cutting",
    paper="“Each model is represented as a curve, traced by pruning the model to various degrees.” Figure 6 draws "
    "them; it prints no numbers.",
    where="4.2, figure 6",
    rule_words="quality rises with macs along the exits' curves: rank correlation at least 0.8 in the median (below "
    "0.5: does not hold)",
    cases=_alone("cnmm"),
    measure=measure_curves,
    rule=judge_curves,
    picture="cutting",
)


# 2


def measure_low_cost(cnmm: Runs, single: Runs) -> JSON:
    """CNMM less CNMM-single where little may be spent: the best of each within the same macs."""
    rows = []
    least = min(point["macs"] for point in cnmm[0]["points"])
    for part in LOW:
        found, macs = [], least + part * (cnmm[0]["full_macs"] - least)
        for ours, theirs in zip(cnmm, single, strict=False):
            p, q = within(ours, macs), within(theirs, macs)
            if p and q:
                found.append(difference((ours, p), (theirs, q)))
        if found:
            rows.append({"share": macs / cnmm[0]["full_macs"], **pooled(found)})
    return {"rows": rows, "n": cnmm[0]["n"]}


def judge_low_cost(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no point of CNMM-single is that cheap")
    return better(averaged(found["rows"]), "CNMM less CNMM-single, on average over three low budgets")


CLAIM_2 = Claim(
    key="2",
    title="At low cost, CNMM is better than CNMM-single",
    paper="“Across the three datasets, the CNMM model with intermediate classifiers achieves higher accuracy in fast "
    "inference settings than the CNMM-single model.”",
    where="4.2, figure 6",
    rule_words="the difference, averaged over budgets 10, 20 and 30 % of the way from the cheapest point to the full "
    "mixture, has an interval above zero",
    cases=_against_single(),
    measure=measure_low_cost,
    rule=judge_low_cost,
    table=tables.by_share("CNMM less CNMM-single"),
)


# 3


def measure_later_exits(cnmm: Runs) -> JSON:
    """The best point of every exit, chosen on held-out images, and the gain over the exit before."""
    best = [
        {exit: max(select(found, exit=exit), key=lambda p: p["held_out"]) for exit in exits(found)} for found in cnmm
    ]
    rows = []
    for exit in exits(cnmm[0]):
        here = [(found, mine[exit]) for found, mine in zip(cnmm, best, strict=True)]
        row: JSON = {"exit": exit, "quality": statistics.mean(quality(found, point) for found, point in here)}
        if exit - 1 in best[0]:
            before = [(found, mine[exit - 1]) for found, mine in zip(cnmm, best, strict=True)]
            row["gain"] = pooled([difference(a, b, a[0]["split"]) for a, b in zip(here, before, strict=True)])
        rows.append(row)
    return {"rows": rows, "n": cnmm[0]["n"], "split": cnmm[0]["split"]}


def judge_later_exits(found: JSON) -> Verdict:
    gains = [row["gain"] for row in found["rows"] if "gain" in row]
    words = "best of each exit, %: " + ", ".join(percent(row["quality"]) for row in found["rows"])
    if not gains:
        return Verdict(UNKNOWN, f"{words}; there is one exit only")
    if any(gain["high"] < 0 for gain in gains):
        return Verdict(FAILS, f"{words}; a later exit is worse than the one before")
    if all(gain["difference"] > 0 for gain in gains):
        return Verdict(HOLDS, words)
    return Verdict(UNKNOWN, f"{words}; the intervals decide nothing")


CLAIM_3 = Claim(
    key="3",
    title="Later exits are better at their best",
    paper="“As expected, the maximum performance of the intermediate classifiers increases with the step number.”",
    where="4.2, figure 6",
    rule_words="the best point of each exit is better than that of the exit before; an interval below zero refutes it",
    cases=_alone("cnmm"),
    measure=measure_later_exits,
    rule=judge_later_exits,
)


# 4


def measure_last_exit(cnmm: Runs, single: Runs, better: bool) -> JSON:
    """The last exit less CNMM-single, nothing cut."""
    pairs = zip(cnmm, single, strict=False)
    found = pooled([difference((ours, full(ours)), (theirs, full(theirs))) for ours, theirs in pairs])
    ours, theirs = (statistics.mean(quality(each, full(each)) for each in runs) for runs in (cnmm, single))
    return {**found, "cnmm": ours, "single": theirs, "better": better}


def judge_last_exit(found: JSON) -> Verdict:
    return slightly(found, "last exit less CNMM-single, nothing cut", better=found["better"])


CLAIM_4 = Claim(
    key="4",
    title="The last exit is about as good as CNMM-single",
    paper="“Slightly worse on CIFAR-10, and slightly better at CIFAR-100 and CityScapes.”",
    where="4.2, figure 6",
    rule_words="the difference has the stated sign, its interval leaves out zero, and it is at most 2 points",
    cases=tuple(
        replace(each, options={"better": not each.label.startswith("{cifar10}")}) for each in _against_single()
    ),
    measure=measure_last_exit,
    rule=judge_last_exit,
)


# 5


def measure_free(cnmm: Runs, share: float) -> JSON:
    """The last exit cut to a share of its macs, less the last exit; that with raw statistics; and the best point."""
    cut, best, raw = [], [], []
    for found in cnmm:
        whole, last = full(found), exits(found)[-1]
        p, q = cut_to(found, share, exit=last, rule="flow"), within(found, share * found["full_macs"])
        if p and q:
            cut.append(difference((found, p), (found, whole)))
            best.append(difference((found, q), (found, whole)))
            raw += [p["raw"] - whole["raw"]] if p.get("raw") is not None and whole.get("raw") is not None else []
    about = {"share": share, "n": cnmm[0]["n"], "split": cnmm[0]["split"]}
    if not cut:
        return {**about, "cut": None}
    return {**about, "cut": pooled(cut), "best": pooled(best), "raw": statistics.mean(raw) if raw else None}


def judge_free(found: JSON) -> Verdict:
    if not found["cut"]:
        return Verdict(UNKNOWN, f"no point of the last exit near {found['share']:.0%} of its macs was measured")
    verdict = no_worse(found["cut"], f"last exit cut by the paper's rule to {found['share']:.0%} of its macs")
    raw = "" if found["raw"] is None else f"; with raw statistics {points(found['raw'])}"
    return Verdict(verdict.word, f"{verdict.reason}{raw}; with the best exit {said(found['best'])}")


CLAIM_5 = Claim(
    key="5",
    title="Half of the macs are free on CIFAR, a quarter for scenes",
    paper="“For the CIFAR datasets we can reduce the FLOP count by a factor two without significant loss in "
    "accuracy. For CityScapes, about 25 % pruning can be achieved without a significant loss.”",
    where="4.2, figure 6",
    rule_words="the last exit, cut by flow to 50 % (scenes: 75 %) of its macs, loses at most one point",
    cases=tuple(
        replace(each, options={"share": 0.75 if each.label.startswith("{scenes}") else 0.5}) for each in _alone("cnmm")
    ),
    measure=measure_free,
    rule=judge_free,
)


# 6


def measure_pairs(cnmm: Runs) -> JSON:
    """All pairs of points of different exits with macs within 3 %: how often is the earlier exit the better one?"""
    won = lost = 0
    for found in cnmm:
        for earlier, later in equal_cost_pairs(found):
            a, b = (quality(found, point) for point in (earlier, later))
            won, lost = won + (a > b), lost + (a < b)
    return {"won": won, "lost": lost, "n": cnmm[0]["n"], "split": cnmm[0]["split"]}


def judge_pairs(found: JSON) -> Verdict:
    total = found["won"] + found["lost"]
    if total < 5:
        return Verdict(UNKNOWN, f"only {total} pairs of equal cost were measured")
    share = found["won"] / total
    words = f"the earlier exit is better in {found['won']} of {total} pairs"
    return Verdict(HOLDS if share >= 0.75 else FAILS if share < 0.5 else UNKNOWN, words)


CLAIM_6 = Claim(
    key="6",
    title="An earlier exit cut less beats a later one cut more",
    paper="“If several exit points can achieve the same FLOP count by applying varying amounts of pruning, best "
    "performance is obtained pruning less for an earlier classifier, rather than pruning more for a later exit.”",
    where="4.2",
    rule_words="of all pairs of points with macs within 3 %, the earlier exit is better in at least three quarters "
    "(less than half: does not hold)",
    cases=_alone("cnmm"),
    measure=measure_pairs,
    rule=judge_pairs,
)


# 7


def measure_envelope(cnmm: Runs) -> JSON:
    """What cutting adds to the exits of one model: how many choices, how fine, and how much better on average."""
    rows = []
    for found in cnmm:
        best, fewer = envelope(found), envelope(found, [full(found, exit) for exit in exits(found)])
        split = split_of(*best, *fewer)
        gains = [
            value(_last(best, p["macs"]), split) - value(_last(fewer, p["macs"]), split)
            for p in best
            if p["macs"] >= fewer[0]["macs"]
        ]
        steps = [
            statistics.median([b["macs"] / a["macs"] for a, b in pairwise(each)] or [1.0]) for each in (best, fewer)
        ]
        about = {"choices": len(best), "exits": len(fewer), "step": steps[0], "exit_step": steps[1]}
        rows.append({**about, "gain": statistics.mean(gains or [0.0])})
    n = cnmm[0]["n"] if split == "test" else cnmm[0]["held_out_n"]
    return {"rows": rows, "n": n, "split": split}


def _last(points: list[JSON], macs: float) -> JSON:
    """Of an envelope: what a budget buys."""
    return max((point for point in points if point["macs"] <= macs), key=lambda point: point["macs"])


def judge_envelope(found: JSON) -> Verdict:
    mean = {name: statistics.mean(row[name] for row in found["rows"]) for name in found["rows"][0]}
    words = (
        f"{mean['choices']:.0f} choices where exits alone give {mean['exits']:.0f}; a step between neighbours is "
        f"{mean['step']:.2f} x macs instead of {mean['exit_step']:.2f}; {points(mean['gain'])} points on average over "
        "exits alone"
    )
    if mean["choices"] <= mean["exits"] or mean["gain"] < 0:
        return Verdict(FAILS, words)
    return Verdict(HOLDS if mean["step"] < mean["exit_step"] else UNKNOWN, words)


CLAIM_7 = Claim(
    key="7",
    title="One model realises the envelope, in finer steps than exits alone",
    paper="“This single model can realize the upper-envelope of the performance curves”; it “allows for a finer "
    "granularity to control the computational cost”, without re-training.",
    where="4.2, 4.3",
    rule_words="one set of weights gives more choices than it has exits, in finer steps, and no worse ones",
    cases=_alone("cnmm"),
    measure=measure_envelope,
    rule=judge_envelope,
)
