"""Statements 11 to 16 (appendix A.1, figure 9, table 1; sections 3 and 4): variants, samples, time, orders, counts.

Each with its measure, its rule and its runs.
"""

from __future__ import annotations

import statistics

from benchmarks.claims import tables
from benchmarks.claims.claim import Claim, case
from benchmarks.claims.cutting import Runs
from benchmarks.claims.evidence import (
    Measured,
    averaged,
    difference,
    envelope,
    exits,
    full,
    opposite,
    paired,
    pooled,
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
    percent,
    points,
    together,
)

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
        f"{row['share']:.0%}: {points(-row['sampled'])} sampled, {points(-row['expectation'])} expectations"
        for row in found["rows"]
    )
    verdict = better(averaged(found["rows"]), "expectations lose more than samples by")
    return Verdict(verdict.word, f"{verdict.reason} ({losses})")


CLAIM_11 = Claim(
    key="11",
    title="Training with samples loses less by cutting than training with expectations",
    paper="“Compared to the CNMM using sampling, the accuracy decreases faster when different pruning ratios are "
    "applied.”",
    where="A.1, figure 9",
    rule_words="what expectations lose to 70, 50 and 35 % of the macs, less what samples lose, on average: the "
    "interval is above zero",
    cases=(case("{cifar100}", {"sampled": "curves:cifar100_sampled", "expectation": "curves:cifar100_expectation"}),),
    measure=measure_loss_by_cutting,
    rule=judge_loss_by_cutting,
    table=tables.by_loss,
    picture="ablations",
)


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


CLAIM_12 = Claim(
    key="12",
    title="Better than the deterministic sum with exits",
    paper="“Our CNMM model obtains better performance than its deterministic counterpart.”",
    where="A.1, figure 9",
    rule_words="the mixture less the sum at the macs of the sum's exits, on average: the interval is above zero",
    cases=(case("{cifar100}", {"cnmm": "curves:cifar100_sampled", "sum": "curves:cifar100_sum"}),),
    measure=measure_sum,
    rule=judge_sum,
    table=tables.by_exit,
)


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
    if row["low"] > -0.01 and row["high"] < 0.01:
        return Verdict(HOLDS, words)
    return Verdict(FAILS if row["low"] > 0.01 or row["high"] < -0.01 else UNKNOWN, words)


CLAIM_13 = Claim(
    key="13",
    title="The expectation is as good as five samples",
    paper="CIFAR-100: expectation 74.4 at 93 M; N = 1: 71.2 at 93 M; N = 5: 74.4 at 463 M; N = 15: 74.5 at "
    "1390 M; N = 30: 74.6 at 2780 M.",
    where="A.1, table 1",
    rule_words="one sample is worse than the expectation, and more samples are within one point of it",
    cases=(
        case(
            "{cifar100}, sampled, relaxed samples",
            {"sampled": "monte_carlo:cifar100_sampled"},
            paper=True,
            gates="relaxed",
        ),
        case("{cifar100}, sampled, hard samples", {"sampled": "monte_carlo:cifar100_sampled"}, gates="hard"),
    ),
    measure=measure_monte_carlo,
    rule=judge_monte_carlo,
    table=tables.by_samples,
)


# 14


def measure_wall_time(cnmm: list[JSON]) -> JSON:
    return {"fits": cnmm[0]["fits"], "n": cnmm[0]["n"]}


def judge_wall_time(found: JSON) -> Verdict:
    words = ", ".join(f"{name}: R2 {fit['r2']:.3f}" for name, fit in sorted(found["fits"].items()))
    least = min(fit["r2"] for fit in found["fits"].values())
    return Verdict(HOLDS if least >= 0.95 else FAILS if least < 0.9 else UNKNOWN, f"{words}, over {found['n']} points")


CLAIM_14 = Claim(
    key="14",
    title="Macs predict wall time",
    paper="“The number of FLOPs provides a metric that correlates very well with the actual inference wall-time.”",
    where="4",
    rule_words="a straight line explains at least 95 % of the variance of time over points of one model, in every "
    "runtime (below 90 %: does not hold)",
    cases=(
        case("cnmm_b6s3, written networks, one thread", {"cnmm": "wall_time:cifar10_given"}),
        case("cnmm_grey, written networks, one thread", {"cnmm": "wall_time:fashion_given"}),
    ),
    measure=measure_wall_time,
    rule=judge_wall_time,
)


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
    won, lost = sum(row["low"] > 0 for row in decisive), sum(row["high"] < 0 for row in decisive)
    words = f"{found['rule'].replace('_', ' ')} is clearly better than {won} of {len(decisive)} controls at 75 and 50 %"
    words += f", and clearly worse than {lost}; " + ", ".join(
        f"{points(min(row['difference'] for row in decisive if row['share'] == share))} points or more at {share:.0%}"
        for share in dict.fromkeys(row["share"] for row in decisive)
    )
    return Verdict(FAILS if lost else HOLDS if won == len(decisive) else UNKNOWN, words)


CLAIM_15 = Claim(
    key="15",
    title="The learned probabilities find what to cut",
    paper="Section 3.4 cuts by the learned probabilities; “we can observe the effectiveness of the proposed pruning "
    "algorithm”. The paper shows no other order.",
    where="3.4, 4.2",
    rule_words="the last exit, cut by flow to 75 and 50 % of its macs, is better than if it is cut by the untrained "
    "gates and in three random orders: every interval above zero (one below zero: does not hold)",
    cases=(
        case("{cifar10}, cnmm_b6s3 of the repository", {"cnmm": "orders:cifar10_given"}),
        case("{cifar10}, sampled", {"cnmm": "orders:cifar10_sampled"}, paper=True),
        case("{cifar10}, quick", {"cnmm": "orders:cifar10_quick"}),
        case("{cifar100}, sampled", {"cnmm": "orders:cifar100_sampled"}, paper=True),
    ),
    measure=measure_orders,
    rule=judge_orders,
    table=tables.by_control,
)


# 16


def measure_structure(model: list[JSON]) -> JSON:
    return {**model[0]}


def judge_structure(found: JSON) -> Verdict:
    graphs, model = found["graphs"], found["model"]
    powers = all(
        each["networks"] == 2 ** (each["T"] - 1) and 2 * each["functions"] == each["T"] * (each["T"] + 1)
        for each in graphs
    )
    dense = model["macs"] == model["dense_macs"] and model["params"] == model["dense_params"]
    words = (
        f"T = 1 to {len(graphs)}: {'as stated' if powers else 'not as stated'}; cnmm_b6s3 has {model['networks']:,} "
        f"networks in {model['params']:,} parameters, and a pass has {model['macs']:,} macs, the deterministic sum "
        f"{model['dense_macs']:,}"
    )
    return Verdict(
        HOLDS if powers and dense else FAILS if not powers or model["macs"] > 1.1 * model["dense_macs"] else UNKNOWN,
        words,
    )


CLAIM_16 = Claim(
    key="16",
    title="2^(T-1) networks for the cost of one dense network",
    paper="“An exponential number of CNNs”: 2^(T-1) for T functions deep, with T(T+1)/2 functions in a pass, whose "
    "parameters are shared.",
    where="3.1, 3.2",
    rule_words="counted: the numbers of networks and functions are those, and a pass costs what the same graph costs "
    "as a deterministic network",
    cases=(case("counted", {"model": "structure:fashion_given"}),),
    measure=measure_structure,
    rule=judge_structure,
)
