"""Tables of a case: figures that do not fit into the sentence of a verdict."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.claims.claim import Table
from benchmarks.claims.store import JSON
from benchmarks.claims.verdict import percent, points

TABLE_1 = {1: 71.2, 5: 74.4, 15: 74.5, 30: 74.6}
"""The paper's, CIFAR-100: accuracy in % by number of samples; 74.4 by expectation."""


def _difference(row: JSON) -> list[str]:
    p = row.get("p")
    return [
        points(row["difference"]),
        f"{points(row['low'])} to {points(row['high'])}",
        "" if p is None else f"{p:.2g}",
    ]


def by_share(what: str) -> Callable[[JSON], Table]:
    """A difference at every share of the macs."""

    def table(found: JSON) -> Table:
        head = ["share of the macs", what, "95 % interval", "p"]
        return head, [[f"{row['share']:.0%}", *_difference(row)] for row in found["rows"]]

    return table


def by_peer(found: JSON) -> Table:
    head = ["macs of the peer", "peer, %", "mixture less peer", "95 % interval", "p"]
    return head, [[f"{row['macs'] / 1e6:.1f} M", percent(row["peer"]), *_difference(row)] for row in found["rows"]]


def by_published(found: JSON) -> Table:
    head = ["published", "which is", "macs", "published, %", "ours within these macs, %", "difference", "95 % interval"]
    rows = []
    for row in found["rows"]:
        kind = "one network" if row["one"] else "a network for each point"
        cells = [row["name"], kind, f"{row['macs'] / 1e6:.1f} M", percent(row["published"]), percent(row["ours"])]
        rows.append([*cells, *_difference(row)[:2]])
    return head, rows


def by_exit(found: JSON) -> Table:
    head = ["exit of the sum", "macs", "mixture less sum", "95 % interval", "p"]
    return head, [[str(row["exit"]), f"{row['macs'] / 1e6:.1f} M", *_difference(row)] for row in found["rows"]]


def by_control(found: JSON) -> Table:
    head = ["share of the macs", "less", "difference", "95 % interval", "p"]
    return head, [[f"{row['share']:.0%}", row["control"], *_difference(row)] for row in found["rows"]]


def by_samples(found: JSON) -> Table:
    head = ["N", "the paper, %", "ours, %", "macs", "less the expectation", "95 % interval", "p"]
    rows = []
    for row in found["rows"]:
        paper = f"{TABLE_1[row['samples']]:.1f}" if row["samples"] in TABLE_1 else ""
        cells = [str(row["samples"]), paper, percent(row["test"]), f"{row['macs'] / 1e6:.0f} M"]
        rows.append([*cells, *_difference(row)])
    return head, rows


def by_loss(found: JSON) -> Table:
    head = ["share of the macs", "sampled", "expectations", "expectations lose more by", "95 % interval", "p"]
    rows = [
        [f"{row['share']:.0%}", points(-row["sampled"]), points(-row["expectation"]), *_difference(row)]
        for row in found["rows"]
    ]
    return head, rows


def by_signal(found: JSON) -> Table:
    return ["signal of doubt", "AUROC"], [[row["signal"], f"{row['auroc']:.3f}"] for row in found["rows"]]
