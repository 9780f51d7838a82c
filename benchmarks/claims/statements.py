"""The sixteen statements of the paper's experiments, in its order: each with its runs, its measure and its rule."""

from __future__ import annotations

import statistics
from itertools import pairwise

from benchmarks.claims.claim import Case, Claim, case
from benchmarks.claims.evidence import (
    Measured,
    averaged,
    difference,
    envelope,
    equal_cost_pairs,
    exits,
    full,
    interval,
    largest_within,
    opposite,
    paired,
    pooled,
    quality,
    rank_correlation,
    select,
    sum_of,
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
    together,
)

from peers.published import MANY_NETWORKS

Runs = list[Measured]
"""What was measured of the runs of one role, one for each seed."""
LOW = (0.15, 0.25, 0.35)
"""Shares of the macs that are fast inference."""


def _alone(name: str, **options: object) -> tuple[Case, ...]:
    """The ways to train, of which each is judged alone: ours that the repository has, the paper's, and ours."""
    return (
        case("{cifar10}, cnmm_b6s3 of the repository", {name: "frontier:cifar10_given"}, **options),
        case("{cifar10}, sampled", {name: "curves:cifar10_sampled"}, **options),
        case("{cifar10}, quick", {name: "curves:cifar10_quick"}, **options),
        case("{cifar100}, sampled", {name: "curves:cifar100_sampled"}, **options),
        case("{cifar100}, quick", {name: "curves:cifar100_quick"}, **options),
        case("{scenes}, of the repository", {name: "frontier:scenes_given"}, **options),
        case("{scenes}, sampled", {name: "curves:scenes_sampled"}, **options),
        case("{scenes}, street", {name: "curves:scenes_street"}, **options),
    )


def _against_single(**options: object) -> tuple[Case, ...]:
    """CNMM and CNMM-single, trained alike."""
    cases = []
    for label, role in (
        ("{cifar10}, sampled", "cifar10_sampled"),
        ("{cifar100}, sampled", "cifar100_sampled"),
        ("{scenes}, sampled", "scenes_sampled"),
    ):
        cases.append(case(label, {"cnmm": f"curves:{role}", "single": f"curves:{role}_single"}, **options))
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
    return {"curves": rows, "rising": statistics.median(row["rising"] for row in rows) if rows else 0.0, "n": cnmm[0]["n"]}


def judge_curves(found: JSON) -> Verdict:
    words = f"{len(found['curves'])} curves; rank correlation of macs and quality {found['rising']:.2f} (median)"
    if found["rising"] >= 0.8 and found["curves"]:
        return Verdict(HOLDS, words)
    return Verdict(FAILS if found["rising"] < 0.5 else UNKNOWN, words)


# 2


def measure_low_cost(cnmm: Runs, single: Runs) -> JSON:
    """CNMM less CNMM-single where little may be spent: the best of each within 15, 25 and 35 % of the macs."""
    rows = []
    for share in LOW:
        found = []
        for ours, theirs in zip(cnmm, single, strict=False):
            macs = share * ours["full_macs"]
            p, q = within(ours, macs), within(theirs, macs)
            if p and q:
                found.append(difference((ours, p), (theirs, q)))
        if found:
            rows.append({"share": share, **pooled(found)})
    return {"rows": rows, "n": cnmm[0]["n"]}


def judge_low_cost(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no point of CNMM-single is that cheap")
    return better(averaged(found["rows"]), "CNMM less CNMM-single at 15, 25 and 35 % of the macs, on average")


# 3


def measure_later_exits(cnmm: Runs) -> JSON:
    """The best point of every exit, chosen on held-out images, and the gain over the exit before."""
    best = [{exit: max(select(found, exit=exit), key=lambda p: p["held_out"]) for exit in exits(found)} for found in cnmm]
    rows = []
    for exit in exits(cnmm[0]):
        here = [(found, mine[exit]) for found, mine in zip(cnmm, best, strict=True)]
        row: JSON = {"exit": exit, "quality": statistics.mean(quality(found, point) for found, point in here)}
        if exit - 1 in best[0]:
            before = [(found, mine[exit - 1]) for found, mine in zip(cnmm, best, strict=True)]
            row["gain"] = pooled([difference(a, b) for a, b in zip(here, before, strict=True)])
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


# 4


def measure_last_exit(cnmm: Runs, single: Runs, better: bool) -> JSON:
    """The last exit less CNMM-single, nothing cut."""
    pairs = zip(cnmm, single, strict=False)
    found = pooled([difference((ours, full(ours)), (theirs, full(theirs))) for ours, theirs in pairs])
    ours, theirs = (statistics.mean(quality(each, full(each)) for each in runs) for runs in (cnmm, single))
    return {**found, "cnmm": ours, "single": theirs, "better": better}


def judge_last_exit(found: JSON) -> Verdict:
    return slightly(found, "last exit less CNMM-single, nothing cut", better=found["better"])


# 5


def measure_free(cnmm: Runs, share: float) -> JSON:
    """The last exit cut to a share of its macs, less the last exit: raw statistics and re-estimated; and the best point."""
    cut, best, raw = [], [], []
    for found in cnmm:
        whole, macs = full(found), share * found["full_macs"]
        last = exits(found)[-1]
        p, q = largest_within(found, macs, exit=last, rule="flow"), within(found, macs)
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
        return Verdict(UNKNOWN, "the last exit was not cut that far")
    verdict = no_worse(found["cut"], f"last exit cut by the paper's rule to {found['share']:.0%} of its macs")
    raw = "" if found["raw"] is None else f"; with raw statistics {points(found['raw'])}"
    return Verdict(verdict.word, f"{verdict.reason}{raw}; with the best exit {said(found['best'])}")


# 6


def measure_pairs(cnmm: Runs) -> JSON:
    """All pairs of points of different exits with macs within 3 %: how often is the earlier exit the better one?"""
    won = lost = 0
    for found in cnmm:
        for earlier, later in equal_cost_pairs(found):
            a, b = (point["held_out"] if found["split"] != "test" else point["test"] for point in (earlier, later))
            won, lost = won + (a > b), lost + (a < b)
    return {"won": won, "lost": lost, "n": cnmm[0]["n"], "split": cnmm[0]["split"]}


def judge_pairs(found: JSON) -> Verdict:
    total = found["won"] + found["lost"]
    if total < 5:
        return Verdict(UNKNOWN, f"only {total} pairs of equal cost were measured")
    share = found["won"] / total
    words = f"the earlier exit is better in {found['won']} of {total} pairs"
    return Verdict(HOLDS if share >= 0.75 else FAILS if share < 0.5 else UNKNOWN, words)


# 7


def measure_envelope(cnmm: Runs) -> JSON:
    """What cutting adds to the exits of one model: how many choices, how fine, and how much better on average."""
    rows = []
    for found in cnmm:
        alone = [full(found, exit) for exit in exits(found)]
        best, fewer = envelope(found), envelope(found, alone)
        grid = [point["macs"] for point in best]
        gain = [
            max(p["held_out"] for p in best if p["macs"] <= macs) - max(p["held_out"] for p in fewer if p["macs"] <= macs)
            for macs in grid
            if any(p["macs"] <= macs for p in fewer)
        ]
        steps = [max((b["macs"] / a["macs"] for a, b in pairwise(each)), default=1.0) for each in (best, fewer)]
        median = [statistics.median([b["macs"] / a["macs"] for a, b in pairwise(each)] or [1.0]) for each in (best, fewer)]
        rows.append({"choices": len(best), "exits": len(fewer), "gain": statistics.mean(gain) if gain else 0.0,
                     "step": median[0], "exit_step": median[1], "largest_step": steps[0]})
    return {"rows": rows, "n": cnmm[0]["held_out_n"], "split": "held out"}


def judge_envelope(found: JSON) -> Verdict:
    mean = {name: statistics.mean(row[name] for row in found["rows"]) for name in found["rows"][0]}
    words = (
        f"{mean['choices']:.0f} choices where exits alone give {mean['exits']:.0f}; a step between neighbours is "
        f"{mean['step']:.2f} x macs instead of {mean['exit_step']:.2f}; {points(mean['gain'])} points on average over exits alone"
    )
    if mean["choices"] <= mean["exits"] or mean["gain"] < 0:
        return Verdict(FAILS, words)
    return Verdict(HOLDS if mean["step"] < mean["exit_step"] else UNKNOWN, words)


# 8


def measure_peer(cnmm: Runs, peer: Runs) -> JSON:
    """At the macs of every exit of the peer: the best point of the mixture within them, less the peer. Unpaired."""
    rows = []
    for number, theirs in enumerate(peer[0]["points"]):
        found = []
        for ours, other in zip(cnmm, peer, strict=False):
            q = other["points"][number]
            p = within(ours, q["macs"])
            if p:
                found.append(difference((ours, p), (other, q)))
        if found:
            rows.append({"macs": theirs["macs"], "peer": statistics.mean(each["points"][number]["test"] for each in peer), **pooled(found)})
    return {"rows": rows, "n": peer[0]["n"]}


def judge_peer(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    steps = ", ".join(f"{points(row['difference'])} at {row['macs'] / 1e6:.1f} M" for row in found["rows"])
    verdict = no_worse(averaged(found["rows"]), "mixture less peer, on average", 0.005)
    return Verdict(verdict.word, f"{verdict.reason} ({steps})")


def measure_blocks(cnmm: Runs, more: Runs) -> JSON:
    """B = 12 less B = 6: at what B = 6 costs in full, and both in full."""
    rows = {"equal macs": [], "in full": []}
    for ours, larger in zip(cnmm, more, strict=False):
        p = within(larger, ours["full_macs"])
        if p:
            rows["equal macs"].append(difference((larger, p), (ours, within(ours, ours["full_macs"]) or full(ours))))
        rows["in full"].append(difference((larger, full(larger)), (ours, full(ours))))
    return {name: pooled(found) for name, found in rows.items() if found} | {"n": cnmm[0]["n"]}


def judge_blocks(found: JSON) -> Verdict:
    words = {name: said(found[name]) for name in ("equal macs", "in full") if name in found}
    verdict = better(found["in full"], "B = 12 less B = 6, both in full")
    beside = f"; at equal macs {words['equal macs']}" if "equal macs" in words else ""
    return Verdict(verdict.word, verdict.reason + beside)


# 9


def measure_espnet(cnmm: Runs, peer: Runs) -> JSON:
    """The paper finds ESPNetv2 slightly better: ESPNetv2 less the best point of the mixture within its macs."""
    rows = measure_peer(cnmm, peer)["rows"]
    return {"rows": [{**row, **opposite(row)} for row in rows], "n": peer[0]["n"]}


def measure_espnet1(cnmm: Runs) -> JSON:
    """The full mixture less ESPNet, as its authors report it for this data set; and the share of its macs."""
    known = MANY_NETWORKS.get(cnmm[0]["data"], {}).get("ESPNet")
    if not known:
        return {"n": cnmm[0]["n"], "difference": None}
    ((macs, theirs),) = known
    ours = [(quality(found, full(found)) - theirs / 100, *interval(found, full(found))) for found in cnmm]
    value = statistics.mean(each[0] for each in ours)
    half = max((high - low) / 2 for _, low, high in ours)
    share = cnmm[0]["full_macs"] / (1e6 * macs)
    return {"difference": value, "low": value - half, "high": value + half, "n": cnmm[0]["n"], "share": share}


def judge_espnet1(found: JSON) -> Verdict:
    """Published figures come from long trainings: being below them after a short one refutes nothing."""
    if found["difference"] is None:
        return Verdict(UNKNOWN, "no figure of ESPNet is published for these images")
    words = f"full mixture less ESPNet as published: {said(found)}, at {found['share']:.0%} of its macs"
    if found["share"] > 0.55:
        return Verdict(FAILS, f"{words}; the paper has 55 %")
    if found["low"] >= 0.005:
        return Verdict(HOLDS, words)
    return Verdict(UNKNOWN, f"{words}; that was trained for much longer")


def judge_espnet(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    return slightly(averaged(found["rows"]), "ESPNetv2 less the mixture within its macs", better=True)


# 10


def measure_pictures(cnmm: Runs) -> JSON:
    """The labels of one scene at several budgets: how many pixels are as in the dearest."""
    return {"rows": [{"macs": row["macs"], "agrees": row["agrees"]} for row in cnmm[0]["points"]], "n": cnmm[0]["n"]}


def judge_pictures(found: JSON) -> Verdict:
    shares = [row["agrees"] for row in found["rows"]]
    words = "labels as in the dearest: " + ", ".join(f"{percent(s)} % at {row['macs'] / 1e6:.0f} M" for s, row in zip(shares, found["rows"], strict=True))
    if len(shares) < 2:
        return Verdict(UNKNOWN, words)
    if shares == sorted(shares):
        return Verdict(HOLDS, words)
    return Verdict(FAILS if shares[0] > shares[-2] else UNKNOWN, words)


# 11


def measure_loss_by_cutting(sampled: Runs, expectation: Runs) -> JSON:
    """What the best point within 70, 50 and 35 % of the macs loses against the full mixture, in both trainings."""
    rows = []
    for share in (0.7, 0.5, 0.35):
        less = []
        for one, two in zip(sampled, expectation, strict=False):
            found = [_lost(each, share) for each in (one, two)]
            less.append(sum_of(found[1], opposite(found[0])))
        lost = [statistics.mean(_lost(each, share)["difference"] for each in runs) for runs in (sampled, expectation)]
        rows.append({"share": share, "sampled": lost[0], "expectation": lost[1], **pooled(less)})
    return {"rows": rows, "n": sampled[0]["n"]}


def _lost(found: Measured, share: float) -> JSON:
    point = within(found, share * found["full_macs"]) or min(found["points"], key=lambda p: p["macs"])
    return difference((found, full(found)), (found, point))


def judge_loss_by_cutting(found: JSON) -> Verdict:
    losses = "; ".join(
        f"{row['share']:.0%}: {points(-row['sampled'])} sampled, {points(-row['expectation'])} expectations" for row in found["rows"]
    )
    verdict = better(averaged(found["rows"]), "expectations lose more than samples by")
    return Verdict(verdict.word, f"{verdict.reason} ({losses})")


# 12


def measure_sum(cnmm: Runs, sum: Runs) -> JSON:
    """At the macs of every exit of the deterministic sum: the best point of the mixture, less that exit."""
    rows = []
    for exit in exits(sum[0]):
        found = []
        for ours, theirs in zip(cnmm, sum, strict=False):
            q = full(theirs, exit)
            p = within(ours, q["macs"])
            if p:
                found.append(difference((ours, p), (theirs, q)))
        if found:
            rows.append({"exit": exit, "macs": full(sum[0], exit)["macs"], **pooled(found)})
    choices = [len(envelope(found)) for found in (cnmm[0], sum[0])]
    return {"rows": rows, "choices": choices, "n": cnmm[0]["n"]}


def judge_sum(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    verdict = better(averaged(found["rows"]), "CNMM less the deterministic sum at its exits, on average")
    ours, theirs = found["choices"]
    return Verdict(verdict.word, f"{verdict.reason}; {ours} choices against {theirs}")


# 13


def measure_monte_carlo(sampled: list[JSON], gates: str) -> JSON:
    """Averages over samples, less the expectation."""
    rows = []
    numbers = sorted({row["samples"] for row in sampled[0]["rows"] if row["gates"] == gates})
    for number in numbers:
        found, values = [], []
        for each in sampled:
            rows_of = {(row["gates"], row["samples"]): row for row in each["rows"]}
            one, two = rows_of[gates, number], rows_of["expectation", 1]
            found.append(paired(one["answers"], two["answers"], each["n"]))
            values.append((one["test"], two["test"], one["macs"]))
        mean = [statistics.mean(column) for column in zip(*values, strict=True)]
        rows.append({"samples": number, "test": mean[0], "expectation": mean[1], "macs": mean[2], **pooled(found)})
    return {"rows": rows, "gates": gates, "n": sampled[0]["n"]}


def judge_monte_carlo(found: JSON) -> Verdict:
    """The paper's table has four statements: N = 1 is worse, N = 5 as good, more samples little better."""
    first, *more = found["rows"]
    table = ", ".join(f"N = {row['samples']}: {percent(row['test'])}" for row in found["rows"])
    words = f"expectation {percent(first['expectation'])}, {table}"
    worse = better(opposite(first), "expectation less one sample")
    same = [slight(row) for row in more]
    verdict = together([worse, *same])
    return Verdict(verdict.word, f"{words}; {verdict.reason}")


def slight(row: JSON) -> Verdict:
    """Within a point of the expectation, either way."""
    words = f"N = {row['samples']}: {points(row['difference'])}"
    if -0.01 < row["low"] and row["high"] < 0.01:
        return Verdict(HOLDS, words)
    return Verdict(FAILS if row["low"] > 0.01 or row["high"] < -0.01 else UNKNOWN, words)


# 14


def measure_wall_time(cnmm: list[JSON]) -> JSON:
    return {"fits": cnmm[0]["fits"], "n": cnmm[0]["n"]}


def judge_wall_time(found: JSON) -> Verdict:
    words = ", ".join(f"{name}: R2 {fit['r2']:.3f}" for name, fit in sorted(found["fits"].items()))
    least = min(fit["r2"] for fit in found["fits"].values())
    return Verdict(HOLDS if least >= 0.95 else FAILS if least < 0.9 else UNKNOWN, f"{words}, over {found['n']} points")


# 15


def measure_orders(cnmm: list[JSON], rule: str = "flow") -> JSON:
    """A cutting order less the untrained and three random ones, at three shares of the last exit's macs."""
    rows = []
    for share in sorted({row["share"] for row in cnmm[0]["rows"]}, reverse=True):
        for control in ("untrained flow", "random 0", "random 1", "random 2"):
            found = []
            for each in cnmm:
                by_order = {row["order"]: row for row in each["rows"] if row["share"] == share}
                found.append(paired(by_order[rule]["answers"], by_order[control]["answers"], each["n"]))
            rows.append({"share": share, "control": control, **pooled(found)})
    return {"rows": rows, "rule": rule, "n": cnmm[0]["n"]}


def judge_orders(found: JSON) -> Verdict:
    """At 75 and 50 %: better than every control. At 25 % hardly anything is left to choose; it is shown only."""
    decisive = [row for row in found["rows"] if row["share"] >= 0.5]
    words = "; ".join(f"{row['control']} at {row['share']:.0%}: {said(row)}" for row in decisive)
    words = f"{found['rule'].replace('_', ' ')} less {words}"
    if any(row["high"] < 0 for row in decisive):
        return Verdict(FAILS, words)
    return Verdict(HOLDS if all(row["low"] > 0 for row in decisive) else UNKNOWN, words)


# 16


def measure_structure(model: list[JSON]) -> JSON:
    return {**model[0]}


def judge_structure(found: JSON) -> Verdict:
    graphs, model = found["graphs"], found["model"]
    powers = all(each["networks"] == 2 ** (each["T"] - 1) and 2 * each["functions"] == each["T"] * (each["T"] + 1) for each in graphs)
    dense = model["macs"] == model["dense_macs"] and model["params"] == model["dense_params"]
    words = (
        f"T = 1 to {len(graphs)}: {'as stated' if powers else 'not as stated'}; cnmm_b6s3 has {model['networks']:,} networks "
        f"in {model['params']:,} parameters, and a pass has {model['macs']:,} macs, the deterministic sum {model['dense_macs']:,}"
    )
    return Verdict(HOLDS if powers and dense else FAILS if not powers or model["macs"] > 1.1 * model["dense_macs"] else UNKNOWN, words)


STATEMENTS: tuple[Claim, ...] = (
    Claim(
        key="1",
        title="Every model is a curve, traced by cutting",
        paper="“Each model is represented as a curve, traced by pruning the model to various degrees.” Figure 6 draws them; "
        "it prints no numbers.",
        where="4.2, figure 6",
        rule_words="quality rises with macs along the exits' curves: rank correlation at least 0.8 in the median (below 0.5: "
        "does not hold)",
        cases=_alone("cnmm"),
        measure=measure_curves,
        rule=judge_curves,
        picture="cutting",
    ),
    Claim(
        key="2",
        title="At low cost, CNMM is better than CNMM-single",
        paper="“Across the three datasets, the CNMM model with intermediate classifiers achieves higher accuracy in fast "
        "inference settings than the CNMM-single model.”",
        where="4.2, figure 6",
        rule_words="the difference, averaged over 15, 25 and 35 % of the macs, has an interval above zero",
        cases=_against_single(),
        measure=measure_low_cost,
        rule=judge_low_cost,
    ),
    Claim(
        key="3",
        title="Later exits are better at their best",
        paper="“As expected, the maximum performance of the intermediate classifiers increases with the step number.”",
        where="4.2, figure 6",
        rule_words="the best point of each exit is better than that of the exit before; an interval below zero refutes it",
        cases=_alone("cnmm"),
        measure=measure_later_exits,
        rule=judge_later_exits,
    ),
    Claim(
        key="4",
        title="The last exit is about as good as CNMM-single",
        paper="“Slightly worse on CIFAR-10, and slightly better at CIFAR-100 and CityScapes.”",
        where="4.2, figure 6",
        rule_words="the difference has the stated sign, its interval leaves out zero, and it is at most 2 points",
        cases=tuple(
            Case(each.label, each.needs, {"better": not each.label.startswith("{cifar10}")}) for each in _against_single()
        ),
        measure=measure_last_exit,
        rule=judge_last_exit,
    ),
    Claim(
        key="5",
        title="Half of the macs are free on CIFAR, a quarter for scenes",
        paper="“For the CIFAR datasets we can reduce the FLOP count by a factor two without significant loss in accuracy. For "
        "CityScapes, about 25 % pruning can be achieved without a significant loss.”",
        where="4.2, figure 6",
        rule_words="the last exit, cut by flow to 50 % (scenes: 75 %) of its macs, loses at most one point",
        cases=tuple(
            Case(each.label, each.needs, {"share": 0.75 if each.label.startswith("{scenes}") else 0.5}) for each in _alone("cnmm")
        ),
        measure=measure_free,
        rule=judge_free,
    ),
    Claim(
        key="6",
        title="An earlier exit cut less beats a later one cut more",
        paper="“If several exit points can achieve the same FLOP count by applying varying amounts of pruning, best "
        "performance is obtained pruning less for an earlier classifier, rather than pruning more for a later exit.”",
        where="4.2",
        rule_words="of all pairs of points with macs within 3 %, the earlier exit is better in at least three quarters (less "
        "than half: does not hold)",
        cases=_alone("cnmm"),
        measure=measure_pairs,
        rule=judge_pairs,
    ),
    Claim(
        key="7",
        title="One model realises the envelope, in finer steps than exits alone",
        paper="“This single model can realize the upper-envelope of the performance curves”; it “allows for a finer "
        "granularity to control the computational cost”, without re-training.",
        where="4.2, 4.3",
        rule_words="one set of weights gives more choices than it has exits, in finer steps, and no worse ones",
        cases=_alone("cnmm"),
        measure=measure_envelope,
        rule=judge_envelope,
    ),
    Claim(
        key="8",
        title="At least as good as other methods on CIFAR",
        paper="“CNMMs achieve similar or better accuracy-compute trade-off across a broad range of FLOP counts than all the "
        "compared methods”, up to 200 M; “only CondenseNets shows somewhat better performance for medium FLOP counts”. Figure "
        "7 prints no numbers.",
        where="4.3, figure 7",
        rule_words="trained side by side, the mixture is at most half a point below MSDNet on average over MSDNet's exits. Of "
        "SuperNet and SSS there is no published number at this cost",
        cases=(
            case("{cifar10}, quick against MSDNet", {"cnmm": "curves:cifar10_quick", "peer": "peer:cifar10_msdnet"}),
            case("{cifar10}, sampled against MSDNet", {"cnmm": "curves:cifar10_sampled", "peer": "peer:cifar10_msdnet"}),
        ),
        measure=measure_peer,
        rule=judge_peer,
        picture="peers",
    ),
    Claim(
        key="8b",
        title="Twelve blocks reach further than six",
        paper="“We compare to CNMMs using 6 and 12 blocks, using three scales in both cases.” Figure 7 draws both.",
        where="4.3, figure 7",
        rule_words="B = 12 in full is better than B = 6 in full, the interval above zero",
        cases=(case("{cifar10}, quick", {"cnmm": "curves:cifar10_b6", "more": "curves:cifar10_b12"}),),
        measure=measure_blocks,
        rule=judge_blocks,
    ),
    Claim(
        key="9",
        title="Better than ESPNet; ESPNetv2 is slightly better",
        paper="Against ESPNet: +0.5 mIoU at 45 % fewer FLOPs, and “similar performance” at less than half of its FLOPs. "
        "“ESPNetv2 gives slightly better trade-offs compared to our CNMMs.”",
        where="4.3, figure 7",
        rule_words="ESPNetv2, trained side by side, is better than the mixture within its macs, by at most 2 points. ESPNet "
        "itself is not trained here: its published points are in the figure",
        cases=(
            case("{scenes}, sampled", {"cnmm": "curves:scenes_sampled", "peer": "peer:scenes_espnetv2"}),
            case("{scenes}, street", {"cnmm": "curves:scenes_street", "peer": "peer:scenes_espnetv2"}),
        ),
        measure=measure_espnet,
        rule=judge_espnet,
        picture="scenes",
    ),
    Claim(
        key="9b",
        title="A full CNMM is better than ESPNet at 45 % fewer macs",
        paper="“A full CNMM without pruning obtains an improvement of 0.5 points of mIoU, while reducing the FLOP count by 45 %.”",
        where="4.3, figure 7",
        rule_words="at most 55 % of ESPNet's macs, and at least half a point above what its authors report, with the whole "
        "interval; being below after a shorter training decides nothing",
        cases=(
            case("{scenes}, of the repository", {"cnmm": "frontier:scenes_given"}),
            case("{scenes}, street", {"cnmm": "curves:scenes_street"}),
        ),
        measure=measure_espnet1,
        rule=judge_espnet1,
    ),
    Claim(
        key="10",
        title="Pictures at several budgets",
        paper="Figures 8 and 10: “Pixel-level predictions for a single CNMM operating under different computational "
        "constraints.”",
        where="4.3, figures 8 and 10",
        rule_words="of one scene, the more is spent, the more pixels have the label that the dearest point gives them",
        cases=(case("{scenes}, street", {"cnmm": "pictures:scenes_street"}),),
        measure=measure_pictures,
        rule=judge_pictures,
        picture="strip",
    ),
    Claim(
        key="11",
        title="Training with samples loses less by cutting than training with expectations",
        paper="“Compared to the CNMM using sampling, the accuracy decreases faster when different pruning ratios are applied.”",
        where="A.1, figure 9",
        rule_words="what expectations lose to 70, 50 and 35 % of the macs, less what samples lose, on average: the interval is "
        "above zero",
        cases=(case("{cifar100}", {"sampled": "curves:cifar100_sampled", "expectation": "curves:cifar100_expectation"}),),
        measure=measure_loss_by_cutting,
        rule=judge_loss_by_cutting,
        picture="ablations",
    ),
    Claim(
        key="12",
        title="Better than the deterministic sum with exits",
        paper="“Our CNMM model obtains better performance than its deterministic counterpart.”",
        where="A.1, figure 9",
        rule_words="the mixture less the sum at the macs of the sum's exits, on average: the interval is above zero",
        cases=(case("{cifar100}", {"cnmm": "curves:cifar100_sampled", "sum": "curves:cifar100_sum"}),),
        measure=measure_sum,
        rule=judge_sum,
    ),
    Claim(
        key="13",
        title="The expectation is as good as five samples",
        paper="Table 1, CIFAR-100: expectation 74.4 at 93 M; N = 1: 71.2 at 93 M; N = 5: 74.4 at 463 M; N = 15: 74.5 at 1390 M; "
        "N = 30: 74.6 at 2780 M.",
        where="A.1, table 1",
        rule_words="one sample is worse than the expectation, and more samples are within one point of it",
        cases=(
            case("{cifar100}, sampled, relaxed samples", {"sampled": "monte_carlo:cifar100_sampled"}, gates="relaxed"),
            case("{cifar100}, sampled, hard samples", {"sampled": "monte_carlo:cifar100_sampled"}, gates="hard"),
        ),
        measure=measure_monte_carlo,
        rule=judge_monte_carlo,
    ),
    Claim(
        key="14",
        title="Macs predict wall time",
        paper="“The number of FLOPs provides a metric that correlates very well with the actual inference wall-time.”",
        where="4",
        rule_words="a straight line explains at least 95 % of the variance of time over points of one model, in every runtime "
        "(below 90 %: does not hold)",
        cases=(case("cnmm_b6s3, written networks, one thread", {"cnmm": "wall_time:cifar10_given"}),
               case("cnmm_grey, written networks, one thread", {"cnmm": "wall_time:fashion_given"})),
        measure=measure_wall_time,
        rule=judge_wall_time,
    ),
    Claim(
        key="15",
        title="The learned probabilities find what to cut",
        paper="Section 3.4 cuts by the learned probabilities; “we can observe the effectiveness of the proposed pruning "
        "algorithm”. The paper shows no other order.",
        where="3.4, 4.2",
        rule_words="the last exit, cut by flow to 75 and 50 % of its macs, is better than if it is cut by the untrained gates "
        "and in three random orders: every interval above zero (one below zero: does not hold)",
        cases=(
            case("{cifar10}, cnmm_b6s3 of the repository", {"cnmm": "orders:cifar10_given"}),
            case("{cifar10}, sampled", {"cnmm": "orders:cifar10_sampled"}),
            case("{cifar10}, quick", {"cnmm": "orders:cifar10_quick"}),
            case("{cifar100}, sampled", {"cnmm": "orders:cifar100_sampled"}),
        ),
        measure=measure_orders,
        rule=judge_orders,
    ),
    Claim(
        key="16",
        title="2^(T-1) networks for the cost of one dense network",
        paper="“An exponential number of CNNs”: 2^(T-1) for T functions deep, with T(T+1)/2 functions in a pass, whose "
        "parameters are shared.",
        where="3.1, 3.2",
        rule_words="counted: the numbers of networks and functions are those, and a pass costs what the same graph costs as a "
        "deterministic network",
        cases=(case("counted", {"model": "structure:fashion_given"}),),
        measure=measure_structure,
        rule=judge_structure,
    ),
)
