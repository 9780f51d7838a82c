"""Pictures in the form of the paper's figures 6, 7 and 9, drawn from measurements alone: the same ones, the same
bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.claims.claim import Find
from benchmarks.claims.evidence import envelope, exits, quality, select
from benchmarks.claims.store import JSON
from benchmarks.claims.trainings import Scale
from cnmm.draw import FAINT, GREY, INK, PALE, STYLE, picture, require_matplotlib
from cnmm.frontier import metric_words
from peers.published import EARLY_EXIT, MANY_NETWORKS, ONE_NETWORK

_COLOURS = (
    "#38a3a5",
    "#3182ce",
    "#5b4b8a",
    "#b83280",
    "#c05621",
    "#b7791f",
    "#4d7c0f",
    "#6b7782",
    "#22303c",
    "#e53e3e",
)
_WAYS = {
    "given": "frontier:{}_given",
    "sampled": "curves:{}_sampled",
    "quick": "curves:{}_quick",
    "street": "curves:{}_street",
}
"""Runs of a data set that figure 6's form is drawn of, by the way they were trained."""
_MIXTURES = {
    "CNMM of the repository": "frontier:{}_given",
    "CNMM, sampled": "curves:{}_sampled",
    "CNMM, quick": "curves:{}_quick",
    "CNMM, street": "curves:{}_street",
    "CNMM, B = 6": "curves:{}_b6",
    "CNMM, B = 12": "curves:{}_b12",
}
_PEERS = {
    "MSDNet": "peer:{}_msdnet",
    "slimmable widths": "peer:{}_slimmable",
    "plain, each its own": ("peer:{}_plain_3m", "peer:{}_plain_6m", "peer:{}_plain_12m"),
    "ESPNetv2": "peer:{}_espnetv2",
}
_ABLATIONS = {
    "CNMM, sampled": "curves:cifar100_sampled",
    "training with expectations": "curves:cifar100_expectation",
    "deterministic with early exits": "curves:cifar100_sum",
}


def draw_all(scale: Scale, find: Find) -> dict[str, bytes]:
    """Every picture that there is something to draw of, by the name of its file."""
    found: dict[str, bytes] = {}
    for data in ("cifar10", "cifar100", "scenes"):
        for way, need in _WAYS.items():
            cnmm, single = _ask(find, need.format(data)), _ask(find, f"{need.format(data)}_single")
            if cnmm:
                words = f"{scale.titles[data]}, {'model of the repository' if way == 'given' else way}"
                found[f"cutting_{data}_{way}.svg"] = picture(draw_cutting(cnmm, single, words), ".svg")
        mixtures = {name: _ask(find, need.format(data)) for name, need in _MIXTURES.items()}
        peers = {name: _ask(find, *(each.format(data) for each in _listed(needs))) for name, needs in _PEERS.items()}
        name = "scenes" if data == "scenes" else f"peers_{data}"
        if any(mixtures.values()):
            found[f"{name}.svg"] = picture(draw_peers(mixtures, peers, scale, data), ".svg")
    ablations = {name: _ask(find, need) for name, need in _ABLATIONS.items()}
    if all(ablations.values()):
        found["ablations.svg"] = picture(draw_ablations(ablations, scale), ".svg")
    for measured in [*_ask(find, "pictures:scenes_given"), *_ask(find, "pictures:scenes_street")][:1]:
        found["strip.png"] = base64.b64decode(measured["png"])
    return found


def _listed(needs: str | Sequence[str]) -> Sequence[str]:
    return (needs,) if isinstance(needs, str) else needs


def _ask(find: Find, *needs: str) -> list[JSON]:
    """What was measured of all these roles."""
    found = []
    for need in needs:
        kind, _, role = need.partition(":")
        found += [result["found"] for result in find(kind, role)[0]]
    return found


def _axes(words: str, metric: str, n: int, split: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.2), dpi=160, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=GREY, labelsize=9)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_title(words, loc="left", color=INK, size=12, weight="bold", pad=12)
    axes.set_xlabel("macs per image (millions)", color=GREY)
    axes.set_ylabel(f"{metric_words(metric)} (%), {n:,} {split.replace(' ', '-')} images", color=GREY)
    return figure, axes


def _plot(axes: Any, found: JSON, points: Iterable[JSON], **style: Any) -> None:
    rows = sorted(points, key=lambda point: (point["macs"], -point["held_out"]))
    x, y = [point["macs"] / 1e6 for point in rows], [100 * quality(found, point) for point in rows]
    axes.plot(x, y, marker="o", markersize=3.4, linewidth=1.2, **style)


def _finish(axes: Any, best: Iterable[float]) -> None:
    """What is far below the best matters to nobody."""
    values = [100 * value for value in best]
    low, high = min(values), max(values)
    room = max(high - low, 1.0)
    axes.set_ylim(max(low - 0.3 * room, 0.0), high + 0.06 * room)
    axes.set_xlim(0, None)
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK)


def draw_cutting(cnmm: list[JSON], single: list[JSON], words: str) -> Any:
    """Figure 6's form: one curve for each exit, cut by flow, and CNMM-single's; every seed is drawn."""
    with require_matplotlib().rc_context(STYLE):
        first = cnmm[0]
        figure, axes = _axes(f"Cutting: {words}", first["metric"], first["n"], first["split"])
        for number, found in enumerate(cnmm):
            for exit in exits(found):
                colour, label = _COLOURS[(exit - 1) % 8], f"exit {exit}" if not number else None
                _plot(axes, found, select(found, exit=exit, rule="flow"), color=colour, label=label)
        for number, found in enumerate(single):
            label = "CNMM-single" if not number else None
            _plot(axes, found, select(found, rule="flow"), color=INK, linestyle="--", label=label)
        _finish(axes, (quality(found, point) for found in cnmm for point in envelope(found) if _has(found, point)))
    return figure


def _has(found: JSON, point: JSON) -> bool:
    return found["split"] != "test" or point.get("test") is not None


def _test_points(found: JSON) -> list[JSON]:
    """Of the envelope, what has test figures; of a peer, everything."""
    rows = envelope(found) if "full_macs" in found else found["points"]
    return [row for row in rows if row.get("test") is not None]


def draw_peers(mixtures: dict[str, list[JSON]], peers: dict[str, list[JSON]], scale: Scale, data: str) -> Any:
    """Figure 7's form: curves are one model, markers without a line are models of their own; test images."""
    with require_matplotlib().rc_context(STYLE):
        first = next(found[0] for found in mixtures.values() if found)
        n = next((row["test_n"] for row in first["points"] if row.get("test_n")), first["n"])
        figure, axes = _axes(f"State of the art: {scale.titles[data]}", first["metric"], n, "test")
        best: list[float] = []
        for number, (name, found) in enumerate({**mixtures, **peers}.items()):
            for seed, each in enumerate(found):
                rows = _test_points(each)
                best += [row["test"] for row in rows]
                alone = "each its own" in name
                style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "label": None if seed else name}
                style |= {"linestyle": "none"} if alone else {"linestyle": "-" if name in mixtures else "--"}
                x, y = [row["macs"] / 1e6 for row in rows], [100 * row["test"] for row in rows]
                axes.plot(x, y, marker="s" if name in peers else "o", markersize=4, linewidth=1.3, **style)
        best += _draw_published(axes, first.get("data", ""))
        _finish(axes, best)
    return figure


def _draw_published(axes: Any, data: str) -> list[float]:
    """Others' figures, in grey: filled where one network serves a curve, hollow where each point is one."""
    best = []
    for table, line in ((ONE_NETWORK, "-"), (EARLY_EXIT, "--"), (MANY_NETWORKS, "none")):
        for (name, rows), mark in zip(table.get(data, {}).items(), "DsvP^X", strict=False):
            words = name if "published" in name else f"{name}, each its own (published)"
            words += ", early exit" if table is EARLY_EXIT else ""
            fill = "none" if table is MANY_NETWORKS else GREY
            x, y = zip(*rows, strict=True)
            style: dict[str, Any] = {"color": GREY, "markerfacecolor": fill, "markersize": 4, "linewidth": 1.0}
            axes.plot(x, y, linestyle=line, marker=mark, label=words, **style)
            best += [value / 100 for value in y]
    return best


def draw_ablations(found: dict[str, list[JSON]], scale: Scale) -> Any:
    """Figure 9's form: the best combination of exits and cuts of every variant."""
    with require_matplotlib().rc_context(STYLE):
        first = next(iter(found.values()))[0]
        figure, axes = _axes(
            f"Variants of training: {scale.titles['cifar100']}", first["metric"], first["n"], first["split"]
        )
        best: list[float] = []
        for number, (name, runs) in enumerate(found.items()):
            for seed, each in enumerate(runs):
                rows = envelope(each)
                best += [quality(each, row) for row in rows]
                _plot(axes, each, rows, color=_COLOURS[(2 * number + 1) % 8], label=None if seed else name)
        _finish(axes, best)
    return figure
