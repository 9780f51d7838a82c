"""Comparisons of measured points: which is chosen within a budget, and how two differ, image by image. Pure functions.

A point is a row of `measures.curves`, `measures.frontier` or `measures.peer`. Points are chosen on held-out images;
what is compared are test images where all points have them, else the held-out ones, and the answer says which.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cascade import p_value
from benchmarks.claims.store import JSON, unpack_counts, unpack_truths
from cnmm.evaluation.classification import Z_95, wilson
from cnmm.evaluation.segmentation import metric_values

RESAMPLES = 1000
NEAR = 0.1
"""A point that is cut to a share of the macs is smaller by no more than this share."""
SAME_COST = 0.03
"""Points whose macs differ by no more are of equal cost."""
Measured = JSON
"""What `curves`, `frontier` or `peer` found of one run."""


def within(found: Measured, macs: float, **only: Any) -> JSON | None:
    """The best point on held-out images that fits a budget; `only` these exits, or rules."""
    fitting = [point for point in select(found, **only) if point["macs"] <= macs * (1 + 1e-9)]
    return max(fitting, key=lambda point: (point["held_out"], -point["macs"]), default=None)


def select(found: Measured, exit: int | None = None, rule: str | None = None) -> list[JSON]:
    """Points of an exit, or of a rule; nothing cut belongs to all rules."""
    return [
        point
        for point in found["points"]
        if exit in (None, point["exit"]) and (rule is None or not point["cuts"] or point["rule"] == rule)
    ]


def cut_to(found: Measured, share: float, **only: Any) -> JSON | None:
    """The largest point within a share of the macs: what cutting leaves, not what one would choose.

    None if the largest that was measured is much smaller than that.
    """
    limit, least = ((share + more) * found["full_macs"] for more in (1e-9, -NEAR))
    fitting = [point for point in select(found, **only) if least <= point["macs"] <= limit]
    return max(fitting, key=lambda point: point["macs"], default=None)


def exits(found: Measured) -> list[int]:
    return sorted({point["exit"] for point in found["points"]})


def full(found: Measured, exit: int | None = None) -> JSON:
    """An exit with nothing cut; the last unless told."""
    wanted = exits(found)[-1] if exit is None else exit
    return max(select(found, exit=wanted), key=lambda point: point["macs"])


def split_of(*points: JSON) -> str:
    """What points are compared on: test images, if all of them have those figures."""
    return "test" if all(point.get("test") is not None for point in points) else "held out"


def value(point: JSON, split: str) -> float:
    found: float = point["test"] if split == "test" else point["held_out"]
    return found


def quality(found: Measured, point: JSON) -> float:
    """On test images, if all points that were measured have them."""
    return value(point, found["split"])


def envelope(found: Measured, points: Iterable[JSON] | None = None) -> list[JSON]:
    """The points that are better than every cheaper one on held-out images."""
    best: list[JSON] = []
    for point in sorted(found["points"] if points is None else points, key=lambda p: (p["macs"], -p["held_out"])):
        if not best or point["held_out"] > best[-1]["held_out"]:
            best.append(point)
    return best


def difference(a: tuple[Measured, JSON], b: tuple[Measured, JSON], split: str | None = None) -> JSON:
    """A point less another, with a 95 % interval: image by image where both have answers, else of two shares.

    `split`: the images, if not test images wherever both have those figures.
    """
    (one, p), (two, q) = a, b
    if "answers" in p and "answers" in q and one["n"] == two["n"]:
        return paired(p["answers"], q["answers"], one["n"], one["metric"])
    split = split or split_of(p, q)
    middle, half = value(p, split) - value(q, split), math.hypot(_half(one, p, split), _half(two, q, split))
    n = min(num_images(one, p, split), num_images(two, q, split))
    return {"difference": middle, "low": middle - half, "high": middle + half, "n": n, "split": split, "paired": False}


def num_images(found: Measured, point: JSON, split: str) -> int:
    """That a point's figure is of."""
    number: int = found["held_out_n"] if split != "test" else point.get("test_n") or found["n"]
    return number


def _half(found: Measured, point: JSON, split: str) -> float:
    """Half of the 95 % interval of a point's quality."""
    low, high = interval(found, point, split)
    return (high - low) / 2


def interval(found: Measured, point: JSON, split: str) -> tuple[float, float]:
    """95 % interval of a point's quality."""
    if found["metric"] != "miou":
        return wilson(value(point, split), num_images(found, point, split))
    if "low" in point:
        return point["low"], point["high"]
    counts = torch.from_numpy(unpack_counts(point["answers"], found["n"]).copy())
    return _quantiles(_resampled(counts.double(), found["n"]))


def paired(a: str, b: str, n: int, metric: str = "accuracy") -> JSON:
    """Two answers to the same images: McNemar's test, two-sided, for images; a bootstrap over scenes for pixels."""
    if metric == "miou":
        both = torch.from_numpy(np.concatenate([unpack_counts(each, n) for each in (a, b)], 1)).double()
        drawn = _resampled(both[:, :3], n) - _resampled(both[:, 3:], n)
        middle = float(metric_values(both[:, :3].sum(0))["miou"] - metric_values(both[:, 3:].sum(0))["miou"])
        low, high = _quantiles(drawn)
        p = 2 * min(float((drawn <= 0).mean()), float((drawn >= 0).mean()))
        p = min(1.0, max(p, 1 / RESAMPLES))
        return {"difference": middle, "low": low, "high": high, "p": p, "n": n, "split": "test", "paired": True}
    ours, theirs = unpack_truths(a, n), unpack_truths(b, n)
    each = ours.astype(float) - theirs
    middle, half = float(each.mean()), Z_95 * float(each.std()) / math.sqrt(n)
    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    p = min(1.0, 2 * p_value(max(won, lost), min(won, lost)))
    about = {"p": p, "n": n, "split": "test", "paired": True}
    return {"difference": middle, "low": middle - half, "high": middle + half, **about}


def _resampled(counts_N3K: torch.Tensor, n: int) -> np.ndarray:
    """mIoU of as many scenes drawn with replacement, again and again, always the same ones."""
    times = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    drawn = (torch.from_numpy(times).double() @ counts_N3K.reshape(n, -1)).view(-1, *counts_N3K.shape[1:])
    return metric_values(drawn)["miou"].numpy()


def _quantiles(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return low, high


def pooled(found: Sequence[JSON]) -> JSON:
    """The mean of independent differences, such as those of two seeds, with its interval.

    Seeds that disagree say more than images: the interval is no narrower than the distance of the seeds from their
    mean."""
    values = [each["difference"] for each in found]
    middle = statistics.mean(values)
    se = math.sqrt(sum(((each["high"] - each["low"]) / (2 * Z_95)) ** 2 for each in found)) / len(found)
    half = max(Z_95 * se, *(abs(each - middle) for each in values))
    p = found[0].get("p") if len(found) == 1 else None
    about = {"n": found[0]["n"], "split": found[0]["split"], "seeds": len(found)}
    paired = {"paired": all(each["paired"] for each in found)}
    return {"difference": middle, "low": middle - half, "high": middle + half, "p": p, **about, **paired}


def averaged(found: Sequence[JSON]) -> JSON:
    """The mean of differences on the same images, such as those of several budgets: intervals do not shrink."""
    mean = {name: statistics.mean(each[name] for each in found) for name in ("difference", "low", "high")}
    about = {"n": found[0]["n"], "split": found[0]["split"], "paired": all(each["paired"] for each in found)}
    return {**mean, "p": None, **about}


def opposite(found: JSON) -> JSON:
    return {**found, "difference": -found["difference"], "low": -found["high"], "high": -found["low"]}


def sum_of(a: JSON, b: JSON) -> JSON:
    """Of two independent differences."""
    middle = a["difference"] + b["difference"]
    half = math.hypot(a["high"] - a["low"], b["high"] - b["low"]) / 2
    both = {"n": a["n"], "split": a["split"], "paired": a["paired"] and b["paired"], "p": None}
    return {"difference": middle, "low": middle - half, "high": middle + half, **both}


def equal_cost_pairs(found: Measured) -> list[tuple[JSON, JSON]]:
    """Pairs of points of different exits with macs within 3 %: the earlier exit first."""
    rows = sorted(found["points"], key=lambda point: (point["exit"], point["macs"]))
    return [
        (p, q)
        for p, q in itertools.combinations(rows, 2)
        if p["exit"] < q["exit"] and abs(p["macs"] - q["macs"]) <= SAME_COST * max(p["macs"], q["macs"])
    ]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: do two numbers rise together?"""
    x, y = (np.argsort(np.argsort(column, kind="stable"), kind="stable") for column in zip(*pairs, strict=True))
    return float(np.corrcoef(x, y)[0, 1]) if len(pairs) > 2 else 1.0
