"""Statements 8 to 10 (section 4.3, figures 7, 8 and 10): other networks, and pictures.

Each with its measure, its rule and its runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.claims import tables
from benchmarks.claims.claim import Claim, case
from benchmarks.claims.cutting import Runs
from benchmarks.claims.evidence import (
    averaged,
    difference,
    full,
    interval,
    num_images,
    opposite,
    pooled,
    split_of,
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
from peers.published import MANY_NETWORKS, ONE_NETWORK

SIMILAR = 0.005
"""Half a point."""
PAPER_EPOCHS = 300
PUBLISHED = ("MSDNet", "DenseNet-40", "ResNet-164")
"""Methods that the paper finds no better than its own: MSDNet, and network slimming of two networks."""

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
            rows.append(
                {
                    "macs": theirs["macs"],
                    "peer": statistics.mean(each["points"][number]["test"] for each in peer),
                    **pooled(found),
                }
            )
    return {"rows": rows, "n": peer[0]["n"]}


def judge_peer(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    steps = ", ".join(f"{points(row['difference'])} at {row['macs'] / 1e6:.1f} M" for row in found["rows"])
    verdict = no_worse(averaged(found["rows"]), "mixture less peer, on average", SIMILAR)
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


CLAIM_8 = Claim(
    key="8",
    title="At least as good as other methods on CIFAR",
    paper="“CNMMs achieve similar or better accuracy-compute trade-off across a broad range of FLOP counts than all "
    "the compared methods”, up to 200 M; “only CondenseNets shows somewhat better performance for medium FLOP "
    "counts”. Figure 7 prints no numbers.",
    where="4.3, figure 7",
    rule_words="trained side by side, the mixture is at most half a point below MSDNet on average over MSDNet's "
    "exits. Of SuperNet and SSS there is no published number at this cost",
    cases=(
        case(
            "{cifar10}, sampled against MSDNet",
            {"cnmm": "curves:cifar10_sampled", "peer": "peer:cifar10_msdnet"},
            paper=True,
        ),
        case("{cifar10}, quick against MSDNet", {"cnmm": "curves:cifar10_quick", "peer": "peer:cifar10_msdnet"}),
        case(
            "{cifar100}, sampled against MSDNet",
            {"cnmm": "curves:cifar100_sampled", "peer": "peer:cifar100_msdnet"},
            paper=True,
            only="full",
        ),
    ),
    measure=measure_peer,
    rule=judge_peer,
    table=tables.by_peer,
    picture="peers",
)


CLAIM_8B = Claim(
    key="8b",
    title="Twelve blocks reach further than six",
    paper="“We compare to CNMMs using 6 and 12 blocks, using three scales in both cases.” Figure 7 draws both.",
    where="4.3, figure 7",
    rule_words="B = 12 in full is better than B = 6 in full, the interval above zero",
    cases=(
        case("{cifar10}", {"cnmm": "curves:cifar10_b6", "more": "curves:cifar10_b12"}),
        case("{cifar100}", {"cnmm": "curves:cifar100_b6", "more": "curves:cifar100_b12"}, only="full"),
    ),
    measure=measure_blocks,
    rule=judge_blocks,
)


# 8c


def measure_published(cnmm: Runs, methods: Sequence[str]) -> JSON:
    """At the macs of every published point: the best point within them, less the published figure. Test images."""
    rows = []
    for one, table in ((True, ONE_NETWORK), (False, MANY_NETWORKS)):
        for name, published in table.get(cnmm[0]["data"], {}).items():
            for macs, theirs in published if name.split(" ")[0].strip(",") in methods else ():
                chosen = [(found, within(found, 1e6 * macs)) for found in cnmm]
                best = [(found, point) for found, point in chosen if point and point.get("test") is not None]
                if not best:
                    continue
                ours = statistics.mean(point["test"] for _, point in best)
                half = max((high - low) / 2 for low, high in (interval(found, p, "test") for found, p in best))
                middle = ours - theirs / 100
                about = {"name": name, "one": one, "macs": 1e6 * macs, "published": theirs / 100, "ours": ours}
                bounds = {"difference": middle, "low": middle - half, "high": middle + half}
                n = num_images(*best[0], "test")
                rows.append({**about, **bounds, "p": None, "n": n, "split": "test", "paired": False})
    return {"rows": rows, "epochs": cnmm[0]["epochs"], "n": rows[0]["n"] if rows else cnmm[0]["n"]}


def judge_published(found: JSON) -> Verdict:
    """A short training that is below published figures refutes nothing."""
    if not found["rows"]:
        return Verdict(UNKNOWN, "nothing is published for these images, or nothing of ours is that cheap")
    verdict = no_worse(averaged(found["rows"]), "ours less published, on average", SIMILAR)
    words = f"{verdict.reason}, after {found['epochs']} epochs"
    if verdict.word != HOLDS and found["epochs"] < PAPER_EPOCHS:
        return Verdict(UNKNOWN, f"{words}; the published ones were trained for hundreds")
    return Verdict(verdict.word, words)


CLAIM_8C = Claim(
    key="8c",
    title="Similar or better than what others published, but for CondenseNet",
    paper="The same sentences, against the figures of MSDNet and network slimming (CondenseNet is “somewhat better for "
    "medium FLOP counts”: it is in the figure, and does not decide). One convention: macs, as multiply-adds; those of "
    "slimming are half of its printed FLOPs. Sources: peers/published.py.",
    where="4.3, figure 7",
    rule_words="at the macs of the published points, ours is at most half a point below on average; below after fewer "
    "than 300 epochs decides nothing",
    cases=(
        case("{cifar10}, cnmm_b6s3 of the repository", {"cnmm": "frontier:cifar10_given"}, methods=PUBLISHED),
        case("{cifar10}, sampled", {"cnmm": "curves:cifar10_sampled"}, paper=True, methods=PUBLISHED),
        case("{cifar100}, sampled", {"cnmm": "curves:cifar100_sampled"}, paper=True, methods=PUBLISHED),
    ),
    measure=measure_published,
    rule=judge_published,
    table=tables.by_published,
)


# 9


def measure_espnet(cnmm: Runs, peer: Runs) -> JSON:
    """The paper finds ESPNetv2 slightly better: ESPNetv2 less the best point of the mixture within its macs."""
    rows = measure_peer(cnmm, peer)["rows"]
    return {"rows": [{**row, **opposite(row)} for row in rows], "n": peer[0]["n"]}


def measure_espnet1(cnmm: Runs) -> JSON:
    """The best point of the mixture less ESPNet as its authors report it for these images; the share of its macs."""
    known = MANY_NETWORKS.get(cnmm[0]["data"], {}).get("ESPNet")
    if not known:
        return {"n": cnmm[0]["n"], "difference": None}
    ((macs, theirs),) = known
    best = [(found, within(found, found["full_macs"]) or full(found)) for found in cnmm]
    if split_of(*(point for _, point in best)) != "test":  # scenes of validation are much like those trained on
        return {"n": cnmm[0]["n"], "difference": None}
    middle = statistics.mean(point["test"] for _, point in best) - theirs / 100
    half = max((high - low) / 2 for low, high in (interval(found, point, "test") for found, point in best))
    about = {"n": best[0][1].get("test_n") or cnmm[0]["n"], "split": "test", "share": best[0][1]["macs"] / (1e6 * macs)}
    return {"difference": middle, "low": middle - half, "high": middle + half, **about}


def judge_espnet1(found: JSON) -> Verdict:
    """Published figures come from long trainings: being below them after a short one refutes nothing."""
    if found["difference"] is None:
        return Verdict(UNKNOWN, "there are no figures of both on the same test images")
    words = f"best point of the mixture less ESPNet as published: {said(found)}, at {found['share']:.0%} of its macs"
    if found["share"] > 0.55:
        return Verdict(FAILS, f"{words}; the paper has 55 %")
    if found["low"] >= 0.005:
        return Verdict(HOLDS, words)
    return Verdict(UNKNOWN, f"{words}; that was trained for much longer")


def judge_espnet(found: JSON) -> Verdict:
    if not found["rows"]:
        return Verdict(UNKNOWN, "no budget is common")
    return slightly(averaged(found["rows"]), "ESPNetv2 less the mixture within its macs", better=True)


CLAIM_9 = Claim(
    key="9",
    title="Better than ESPNet; ESPNetv2 is slightly better",
    paper="Against ESPNet: +0.5 mIoU at 45 % fewer FLOPs, and “similar performance” at less than half of its FLOPs. "
    "“ESPNetv2 gives slightly better trade-offs compared to our CNMMs.”",
    where="4.3, figure 7",
    rule_words="ESPNetv2, trained side by side, is better than the mixture within its macs, by at most 2 points. "
    "ESPNet itself is not trained here: its published points are in the figure",
    cases=(
        case("{scenes}, sampled", {"cnmm": "curves:scenes_sampled", "peer": "peer:scenes_espnetv2"}, paper=True),
        case("{scenes}, street", {"cnmm": "curves:scenes_street", "peer": "peer:scenes_espnetv2"}),
    ),
    measure=measure_espnet,
    rule=judge_espnet,
    table=tables.by_peer,
    picture="scenes",
)


CLAIM_9B = Claim(
    key="9b",
    title="A full CNMM is better than ESPNet at 45 % fewer macs",
    paper="“A full CNMM without pruning obtains an improvement of 0.5 points of mIoU, while reducing the FLOP count "
    "by 45 %.”",
    where="4.3, figure 7",
    rule_words="at most 55 % of ESPNet's macs, and at least half a point above what its authors report, with the whole "
    "interval; being below after a shorter training decides nothing",
    cases=(
        case("{scenes}, of the repository", {"cnmm": "frontier:scenes_given"}),
        case("{scenes}, street", {"cnmm": "curves:scenes_street"}),
    ),
    measure=measure_espnet1,
    rule=judge_espnet1,
)


# 10


def measure_pictures(cnmm: Runs) -> JSON:
    """The labels of one scene at several budgets: how many pixels are as in the dearest."""
    return {"rows": [{"macs": row["macs"], "agrees": row["agrees"]} for row in cnmm[0]["points"]], "n": cnmm[0]["n"]}


def judge_pictures(found: JSON) -> Verdict:
    shares = [row["agrees"] for row in found["rows"]]
    words = "labels as in the dearest: " + ", ".join(
        f"{percent(s)} % at {row['macs'] / 1e6:.0f} M" for s, row in zip(shares, found["rows"], strict=True)
    )
    if len(shares) < 2:
        return Verdict(UNKNOWN, words)
    if shares == sorted(shares):
        return Verdict(HOLDS, words)
    return Verdict(FAILS if shares[0] > shares[-2] else UNKNOWN, words)


CLAIM_10 = Claim(
    key="10",
    title="Pictures at several budgets",
    paper="Figures 8 and 10: “Pixel-level predictions for a single CNMM operating under different computational "
    "constraints.”",
    where="4.3, figures 8 and 10",
    rule_words="of one scene, the more is spent, the more pixels have the label that the dearest point gives them",
    cases=(
        case("{scenes}, of the repository", {"cnmm": "pictures:scenes_given"}),
        case("{scenes}, street", {"cnmm": "pictures:scenes_street"}),
    ),
    measure=measure_pictures,
    rule=judge_pictures,
    picture="strip",
)
