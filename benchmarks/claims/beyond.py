"""A reviewer's controls, and what goes beyond the paper: claims of the same form as the paper's."""

from __future__ import annotations

import statistics

from benchmarks.claims import tables
from benchmarks.claims.claim import Claim, case
from benchmarks.claims.comparison import judge_peer, measure_peer
from benchmarks.claims.cutting import Runs
from benchmarks.claims.evidence import (
    averaged,
    cut_to,
    difference,
    full,
    paired,
    pooled,
    quality,
    within,
)
from benchmarks.claims.store import JSON
from benchmarks.claims.verdict import FAILS, HOLDS, UNKNOWN, Verdict, better, no_worse, percent, points

LARGEST = "largest probability"


def measure_slim(cnmm: Runs, slim: Runs, share: float) -> JSON:
    """What cutting leaves, with the weights of the mixture, less the same architecture trained alone."""
    found = []
    for ours, alone in zip(cnmm, slim, strict=False):
        (other,) = alone["points"]
        point = cut_to(ours, share, exit=other["exit"], rule="flow")
        if point:
            found.append(difference((ours, point), (alone, other)))
    return {**(pooled(found) if found else {"n": 0}), "share": share}


def judge_slim(found: JSON) -> Verdict:
    if "difference" not in found:
        return Verdict(UNKNOWN, f"no point near {found['share']:.0%} of the macs was measured")
    return no_worse(found, f"cut to {found['share']:.0%}, less the same architecture from scratch")


def measure_rules(cnmm: list[JSON], rule: str) -> JSON:
    """A cutting rule less the paper's, at three shares of the last exit's macs."""
    rows = []
    for share in sorted({row["share"] for row in cnmm[0]["rows"]}, reverse=True):
        found = []
        for each in cnmm:
            by_order = {row["order"]: row for row in each["rows"] if row["share"] == share}
            found.append(paired(by_order[rule]["answers"], by_order["flow"]["answers"], each["n"]))
        rows.append({"share": share, **pooled(found)})
    return {"rows": rows, "rule": rule, "n": cnmm[0]["n"]}


def judge_rules(found: JSON) -> Verdict:
    steps = ", ".join(f"{points(row['difference'])} at {row['share']:.0%}" for row in found["rows"])
    verdict = better(averaged(found["rows"]), f"{found['rule'].replace('_', ' ')} less flow, on average")
    return Verdict(verdict.word, f"{verdict.reason} ({steps})")


def measure_statistics(cnmm: Runs) -> JSON:
    """Statistics re-estimated at the point, less the full mixture's: of all points that are cut."""
    gains, worst = [], 0.0
    for found in cnmm:
        mine = [
            (p["test"] if found["split"] == "test" else p["held_out"]) - p["raw"]
            for p in found["points"]
            if p["cuts"] and p.get("raw") is not None
        ]
        gains += mine
    if not gains:
        return {"points": 0, "n": cnmm[0]["n"]}
    worst = max(gains)
    better = sum(gain > 0 for gain in gains)
    return {"points": len(gains), "better": better, "mean": statistics.mean(gains), "most": worst, "n": cnmm[0]["n"]}


def judge_statistics(found: JSON) -> Verdict:
    if not found["points"]:
        return Verdict(UNKNOWN, "no cut point has both figures")
    words = (
        f"better at {found['better']} of {found['points']} cut points, by {points(found['mean'])} points on average "
        f"and {points(found['most'])} at most"
    )
    share = found["better"] / found["points"]
    return Verdict(HOLDS if share >= 0.75 and found["mean"] > 0 else FAILS if share < 0.5 else UNKNOWN, words)


def measure_budgets(ours: Runs, theirs: Runs) -> JSON:
    """One way to train less another: the best points within 100, 70, 50, 35 and 20 % of the macs."""
    rows = []
    for share in (1.0, 0.7, 0.5, 0.35, 0.2):
        found = []
        for one, two in zip(ours, theirs, strict=False):
            macs = share * one["full_macs"]
            p, q = within(one, macs), within(two, macs)
            if p and q and (p["test"] is not None or one["split"] != "test"):
                found.append(difference((one, p), (two, q)))
        if found:
            rows.append({"share": share, **pooled(found)})
    return {"rows": rows, "n": ours[0]["n"]}


def judge_budgets(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    steps = ", ".join(f"{points(row['difference'])} at {row['share']:.0%}" for row in found["rows"])
    verdict = better(averaged(found["rows"]), "over budgets from 20 to 100 %, on average")
    return Verdict(verdict.word, f"{verdict.reason} ({steps})")


def measure_early_exit(cnmm: list[JSON], against: str) -> JSON:
    """Thresholds for every exit, less one threshold for all, or the best exit alone, at the same average macs."""
    rows = []
    for share in [row["share"] for row in cnmm[0]["rows"]]:
        same = [(each, row) for each in cnmm for row in each["rows"] if row["share"] == share]
        rows.append({"share": share, **pooled([paired(row["each"], row[against], each["n"]) for each, row in same])})
    return {"rows": rows, "against": against.replace("_", " "), "n": cnmm[0]["n"]}


def judge_early_exit(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no average budget is common")
    return better(averaged(found["rows"]), f"a threshold for every exit, less {found['against']}, on average")


def measure_doubt(cnmm: list[JSON], of: str) -> JSON:
    """AUROC of every signal of doubt, averaged over the seeds."""
    names = [row["signal"] for row in cnmm[0]["rows"]]
    rows = [
        {
            "signal": name,
            "auroc": statistics.mean(row[of] for each in cnmm for row in each["rows"] if row["signal"] == name),
        }
        for name in names
    ]
    return {"rows": rows, "of": of, "n": cnmm[0]["n"], "unknown": cnmm[0]["unknown"], "unknown_n": cnmm[0]["unknown_n"]}


def judge_doubt(found: JSON) -> Verdict:
    """Does any signal that a mixture adds beat the largest probability by a point of AUROC?"""
    usual = next(row["auroc"] for row in found["rows"] if row["signal"] == LARGEST)
    more = [row for row in found["rows"] if "samples" in row["signal"] or "exits" in row["signal"]]
    best = max(more, key=lambda row: row["auroc"])
    what = "errors" if found["of"] == "errors" else f"images it does not know ({found['unknown']})"
    words = f"AUROC of {what}: largest probability {usual:.3f}, "
    words += f"best of the mixture's {best['auroc']:.3f} ({best['signal']})"
    gain = best["auroc"] - usual
    return Verdict(HOLDS if gain >= 0.01 else FAILS if gain <= 0 else UNKNOWN, words)


def measure_calibration(cnmm: list[JSON]) -> JSON:
    """Expected calibration error by way, averaged over the seeds."""
    names = list(cnmm[0]["calibration"])
    rows = [{"way": name, "error": statistics.mean(each["calibration"][name] for each in cnmm)} for name in names]
    return {"rows": rows, "n": cnmm[0]["n"]}


def judge_calibration(found: JSON) -> Verdict:
    errors = {row["way"]: row["error"] for row in found["rows"]}
    words = ", ".join(f"{name} {100 * error:.1f}" for name, error in errors.items())
    ours = min(errors["mean of samples"], errors["mean of exits"])
    usual = errors["with a temperature"]
    word = HOLDS if ours < usual - 0.002 else FAILS if ours > usual + 0.002 else UNKNOWN
    return Verdict(word, f"expected calibration error, %: {words}")


def measure_seeds(cnmm: Runs) -> JSON:
    """How far two seeds are apart, nothing cut and within half of the macs."""
    values = {"in full": [quality(each, full(each)) for each in cnmm]}
    cheap = [within(each, 0.5 * each["full_macs"]) for each in cnmm]
    values["half of the macs"] = [quality(each, point) for each, point in zip(cnmm, cheap, strict=True) if point]
    return {"rows": [{"what": name, "values": found} for name, found in values.items()], "n": cnmm[0]["n"]}


def judge_seeds(found: JSON) -> Verdict:
    spread = [max(row["values"]) - min(row["values"]) for row in found["rows"] if row["values"]]
    num = max(len(row["values"]) for row in found["rows"])
    words = "; ".join(f"{row['what']}: {', '.join(percent(value) for value in row['values'])}" for row in found["rows"])
    if num < 2:
        return Verdict(UNKNOWN, f"{words}; one seed only")
    return Verdict(HOLDS if max(spread) <= 0.01 else FAILS, words)


_QUICK = {"cnmm": "curves:cifar10_quick"}

CONTROLS: tuple[Claim, ...] = (
    Claim(
        key="C1",
        title="Cut, or trained from scratch?",
        paper="A reviewer's question: is what cutting leaves worth more than the same architecture trained alone, "
        "for as many epochs?",
        where="control",
        rule_words="what cutting by flow leaves of the last exit is at most one point below the same edges trained "
        "alone",
        cases=(
            case("{cifar10}, half of the macs", _QUICK | {"slim": "curves:cifar10_slim_half"}, share=0.5),
            case("{cifar10}, a quarter", _QUICK | {"slim": "curves:cifar10_slim_quarter"}, share=0.25),
        ),
        measure=measure_slim,
        rule=judge_slim,
    ),
    Claim(
        key="C2",
        title="Against networks that users would pick instead",
        paper="Slimmable widths (one network, four widths) and plain networks from scratch at three budgets, each "
        "trained for as long as the mixture.",
        where="control",
        rule_words="the mixture is at most half a point below, on average over the peer's exits or widths",
        cases=(
            case("{cifar10}, slimmable widths", _QUICK | {"peer": "peer:cifar10_slimmable"}),
            case("{cifar10}, the largest plain network", _QUICK | {"peer": "peer:cifar10_plain_12m"}),
            case("{cifar10}, the middle plain network", _QUICK | {"peer": "peer:cifar10_plain_6m"}),
            case("{cifar10}, the smallest plain network", _QUICK | {"peer": "peer:cifar10_plain_3m"}),
        ),
        measure=measure_peer,
        rule=judge_peer,
        table=tables.by_peer,
    ),
    Claim(
        key="C3",
        title="Two seeds agree",
        paper="What decides a verdict is trained twice.",
        where="control",
        rule_words="two seeds are at most one point apart, in full and within half of the macs",
        cases=(
            case("{cifar10}, sampled", {"cnmm": "curves:cifar10_sampled"}),
            case("{cifar10}, quick", _QUICK),
            case("{cifar100}, sampled", {"cnmm": "curves:cifar100_sampled"}),
        ),
        measure=measure_seeds,
        rule=judge_seeds,
    ),
)

ORDERED = (
    ("{cifar10}, cnmm_b6s3 of the repository", "cifar10_given"),
    ("{cifar10}, sampled", "cifar10_sampled"),
    ("{cifar10}, quick", "cifar10_quick"),
)
"""What rules of cutting are compared on."""

BEYOND: tuple[Claim, ...] = (
    Claim(
        key="B1",
        title="Flow per mac is a better rule",
        paper="Cutting by the flow that is lost for every mac that is saved.",
        where="beyond the paper",
        rule_words="better than flow on average over 75, 50 and 25 % of the macs: the interval is above zero",
        cases=tuple(case(label, {"cnmm": f"orders:{role}"}, rule="flow_per_mac") for label, role in ORDERED),
        measure=measure_rules,
        rule=judge_rules,
        table=tables.by_share("less flow"),
    ),
    Claim(
        key="B2",
        title="Measured damage is a better rule",
        paper="Cutting the edge after whose removal the answers change least, measured on training images.",
        where="beyond the paper",
        rule_words="as B1",
        cases=tuple(case(label, {"cnmm": f"orders:{role}"}, rule="damage") for label, role in ORDERED),
        measure=measure_rules,
        rule=judge_rules,
        table=tables.by_share("less flow"),
    ),
    Claim(
        key="B3",
        title="Re-estimated statistics pay",
        paper="Batch statistics estimated anew at each point; the paper keeps those of training.",
        where="beyond the paper",
        rule_words="better at three quarters of the cut points, and on average (at less than half: does not hold)",
        cases=(
            case("{cifar10}, cnmm_b6s3 of the repository", {"cnmm": "frontier:cifar10_given"}),
            case("{cifar10}, cnmm_b4s3 of the repository", {"cnmm": "frontier:cifar10_given_b4"}),
            case("Fashion-MNIST, cnmm_grey of the package", {"cnmm": "frontier:fashion_given"}),
            case("{cifar10}, sampled", {"cnmm": "curves:cifar10_sampled"}),
            case("{cifar10}, quick", _QUICK),
            case("{scenes}, sampled", {"cnmm": "curves:scenes_sampled"}),
        ),
        measure=measure_statistics,
        rule=judge_statistics,
    ),
    Claim(
        key="B4",
        title="Ladder tuning pays",
        paper="In the last third of a training, each step also runs a random point.",
        where="beyond the paper",
        rule_words="better than the same training without it, on average over budgets from 20 to 100 %",
        cases=(case("{cifar10}, quick", {"ours": "curves:cifar10_quick", "theirs": "curves:cifar10_untuned"}),),
        measure=measure_budgets,
        rule=judge_budgets,
        table=tables.by_share("difference"),
    ),
    Claim(
        key="B5",
        title="The new recipe is better than the paper's for as many epochs",
        paper="Muon for every edge, a stem from patches, reflected borders and the rest of `quick`.",
        where="beyond the paper",
        rule_words="as B4",
        cases=(
            case(
                "{cifar10}, quick against sampled",
                {"ours": "curves:cifar10_quick", "theirs": "curves:cifar10_sampled"},
            ),
        ),
        measure=measure_budgets,
        rule=judge_budgets,
        table=tables.by_share("difference"),
    ),
    Claim(
        key="B6",
        title="Early exit with a threshold for every exit",
        paper="An image leaves at the first exit that is sure enough, and every exit has its own idea of enough.",
        where="beyond the paper",
        rule_words="better on average over average budgets from 20 to 60 % of the macs: the interval is above zero",
        cases=(
            case(
                "{cifar10}, quick, against one threshold", {"cnmm": "early_exit:cifar10_quick"}, against="one_threshold"
            ),
            case("{cifar10}, quick, against a fixed exit", {"cnmm": "early_exit:cifar10_quick"}, against="fixed"),
        ),
        measure=measure_early_exit,
        rule=judge_early_exit,
        table=tables.by_share("difference"),
    ),
    Claim(
        key="B7",
        title="A mixture knows where it errs",
        paper="Five samples of the mixture, or the exits of one pass, may disagree where the answer is wrong.",
        where="beyond the paper",
        rule_words="a signal of samples or exits is at least 0.01 of AUROC above the largest probability (not above: "
        "does not hold)",
        cases=(
            case("{cifar10}, sampled: errors", {"cnmm": "uncertainty:cifar10_sampled"}, of="errors"),
            case("{cifar10}, quick: errors", {"cnmm": "uncertainty:cifar10_quick"}, of="errors"),
            case("{cifar10}, sampled: other images", {"cnmm": "uncertainty:cifar10_sampled"}, of="unknown"),
            case("{cifar10}, quick: other images", {"cnmm": "uncertainty:cifar10_quick"}, of="unknown"),
        ),
        measure=measure_doubt,
        rule=judge_doubt,
        table=tables.by_signal,
    ),
    Claim(
        key="B8",
        title="A mixture is better calibrated than a temperature makes it",
        paper="The mean over samples or exits, against temperature scaling.",
        where="beyond the paper",
        rule_words="an expected calibration error at least 0.2 points below that of temperature scaling (above it by "
        "as much: does not hold)",
        cases=(
            case("{cifar10}, sampled", {"cnmm": "uncertainty:cifar10_sampled"}),
            case("{cifar10}, quick", {"cnmm": "uncertainty:cifar10_quick"}),
        ),
        measure=measure_calibration,
        rule=judge_calibration,
    ),
)
