"""One self-contained HTML page about a run: it opens from a file and refers to nothing outside itself."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image as Picture

from cnmm.cascade import is_asked
from cnmm.cost import CostTable, short_count
from cnmm.draw import draw_lattice, picture
from cnmm.evaluation.classification import TOP
from cnmm.evaluation.plot import plot_frontier
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.strips import class_rows, plot_classes
from cnmm.frontier import Frontier, FrontierPoint, metric_words
from cnmm.mixture import Mixture
from cnmm.palette import Palette
from cnmm.pictures import to_png
from cnmm.prune import named_point

NUM_EXAMPLES = 12
MOST_CLASSES = 40
"""Of a confusion matrix that is shown whole."""
TOP_NAME = f"top{TOP}_accuracy"
SHARES = (1.0, 0.5, 0.25)
"""Budgets that are drawn and compared, as parts of the full macs; the cheapest point of all joins them."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #22303c; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; } p.about { color: #6b7782; margin-top: .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #eceff1; } th { color: #6b7782; }
th:first-child, td:first-child { text-align: left; }
img.wide { width: 100%; } img.example { width: 64px; height: 64px; image-rendering: pixelated; display: block; }
.drawings { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } figure { margin: 0; }
figcaption { color: #6b7782; font-size: .9rem; }
.wrong { color: #b83232; } .right { color: #2f855a; } code { background: #eceff1; padding: .1rem .3rem; }
"""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Some images, and what the shown points say of them."""

    images: npt.NDArray[np.uint8]
    """[N, H, W, C]."""
    labels: Sequence[int]
    classes: Sequence[str]
    answers: Mapping[str, Sequence[tuple[int, float]]]
    """By point: the class of each image and its probability."""


@dataclass(frozen=True, kw_only=True)
class PixelExamples:
    """Some scenes, and how the shown points label their pixels."""

    strips: Sequence[Picture]
    classes: Sequence[str]
    palette: Palette


def report_page(
    model: Mixture,
    frontier: Frontier,
    *,
    data: str,
    latency: Mapping[str, float],
    examples: Examples | PixelExamples | None = None,
    quality: Quality | None = None,
) -> str:
    """The page. `data`: what the images are called; `latency`: p95 milliseconds by point on this machine.

    `quality`: of the full mixture on held-out images, class by class.
    """
    shown = shown_points(frontier)
    first = frontier.points[0]
    about = f"{len(frontier.points)} operating points measured on {first.n:,} {first.split} images, "
    about += f"{first.statistics} statistics. One set of weights; no retraining between points."
    metric = metric_words(frontier.metric).capitalize()
    parts = [
        f"<h1>{_text(frontier.model)}</h1>",
        f'<p class="about">{_text(data)}. {_text(about)}</p>',
        f"<h2>{_text(metric)} against cost</h2>",
        _image(picture(plot_frontier(frontier, latency), ".svg"), "svg+xml", f"{metric} against cost"),
        "<h2>The best point for every budget</h2>",
        _table(*_envelope_rows(frontier, latency)),
        "<h2>Exits, nothing cut</h2>",
        _table(*_exit_rows(model, frontier)),
        *_cascade(frontier),
        "<h2>What runs at which budget</h2>",
        "<p>Edge width shows how many networks of the mixture use the edge; what is pale is not computed.</p>",
        _drawings(model, frontier, shown),
        *(_classes(quality, examples.classes) if quality and isinstance(examples, Examples) else []),
        *([_examples(examples, shown)] if isinstance(examples, Examples) else []),
        *(_pixel_examples(examples, frontier, shown) if isinstance(examples, PixelExamples) else []),
    ]
    title = _text(f"{frontier.model}: any budget from one model")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def shown_points(frontier: Frontier) -> list[FrontierPoint]:
    """The best points at a few budgets, dearest first."""
    found = [frontier.points[0]]
    for share in SHARES:
        fitting = [point for point in frontier.points if point.macs <= share * frontier.full_macs]
        found += [max(fitting, key=lambda point: (point.quality, -point.macs))] if fitting else []
    return sorted({point.name: point for point in found}.values(), key=lambda point: -point.macs)


def _envelope_rows(frontier: Frontier, times: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    envelope = frontier.envelope()
    tested = any(point.test_quality is not None for point in envelope)
    columns = [
        "point",
        "macs",
        "of full",
        "params",
        f"{metric_words(frontier.metric)} %",
        "95 % interval",
        "raw statistics %",
    ]
    columns += (["test %"] if tested else []) + (["p95 ms here"] if times else [])
    rows = []
    for point in envelope:
        row = [point.name, short_count(point.macs), f"{point.macs / frontier.full_macs:.1%}"]
        row += [short_count(point.params), _percent(point.quality), f"{_percent(point.low)} to {_percent(point.high)}"]
        row += [_percent(point.raw_quality)] + ([_percent(point.test_quality)] if tested else [])
        rows.append(row + ([f"{times[point.name]:.2f}" if point.name in times else ""] if times else []))
    return columns, rows


def _exit_rows(model: Mixture, frontier: Frontier) -> tuple[list[str], list[list[str]]]:
    costs = CostTable.of(model.config)
    whole = {point.exit: point for point in frontier.points if point.cuts == 0}
    rows = []
    for exit in model.config.exit_numbers:
        cost = costs.exit(exit)
        found = whole.get(exit)
        networks = f"{model.chain.count(exit):,}" if model.config.mixing == "gates" else "1"
        quality = _percent(found.quality) if found else "not measured"
        rows.append([str(exit), networks, short_count(cost.macs), short_count(cost.params), quality])
    return ["exit", "networks", "macs", "params", f"{metric_words(frontier.metric)} %"], rows


def _cascade(frontier: Frontier) -> Iterable[str]:
    cascade = frontier.cascade
    if cascade is None:
        return
    yield "<h2>Early exit</h2>"
    words = (
        f"Images leave at the first exit that is sure enough: cascade {cascade.point}, {cascade.n:,} {cascade.split} "
        "images. The columns of exits say how many leave there, and from which confidence on; an exit with a dash is "
        "not asked."
    )
    yield f"<p>{_text(words)}</p>"
    rows = cascade.thresholds[:: max(1, len(cascade.thresholds) // 12)]
    columns = [
        "average macs",
        "of full",
        f"{metric_words(frontier.metric)} %",
        *(f"leave at exit {exit}" for exit in cascade.exits),
    ]
    body = []
    for row in rows:
        share = f"{row.average_macs / frontier.full_macs:.1%}"
        cells = [short_count(round(row.average_macs)), share, _percent(row.quality)]
        asked = [f"{part:.0%} from {value:.3f} on" for part, value in zip(row.exits, row.confidence, strict=False)]
        asked = [words if is_asked(value) else "-" for words, value in zip(asked, row.confidence, strict=True)]
        body.append([*cells, *asked, f"{row.exits[-1]:.0%}"])
    yield _table(columns, body)


def _drawings(model: Mixture, frontier: Frontier, shown: Sequence[FrontierPoint]) -> str:
    figures = []
    for point in shown:
        drawing = picture(draw_lattice(model, named_point(model, point.name)), ".svg")
        words = f"{point.name}: {short_count(point.macs)} macs ({point.macs / frontier.full_macs:.0%}), "
        words += f"{_percent(point.quality)} %"
        image = _image(drawing, "svg+xml", words)
        figures.append(f"<figure>{image}<figcaption>{_text(words)}</figcaption></figure>")
    return f'<div class="drawings">{"".join(figures)}</div>'


def _classes(quality: Quality, classes: Sequence[str]) -> Iterable[str]:
    """Accuracy of every class, and which are taken for which: a matrix, or of many classes the worst."""
    if not quality.confusion:
        return
    top = (
        f" The right class is among the best five of {_percent(quality.all[TOP_NAME])} %."
        if TOP_NAME in quality.all
        else ""
    )
    yield "<h2>Every class</h2>"
    yield f"<p>{quality.n:,} held-out images, nothing cut. Rows are the labels, columns the answers.{top}</p>"
    whole = len(classes) <= MOST_CLASSES
    heads = [*(f"<th>{_text(name)}</th>" for name in classes)] if whole else ["<th>most often taken for</th>"]
    rows = []
    for number, (name, value, counts) in enumerate(zip(classes, quality.per_class, quality.confusion, strict=True)):
        wrong = sorted(((-count, k) for k, count in enumerate(counts) if count and k != number))[:3]
        cells = [_cell(count, sum(counts), k == number) for k, count in enumerate(counts)]
        if not whole:
            cells = [f"<td>{_text(', '.join(f'{classes[k]} {-count:,}' for count, k in wrong))}</td>"]
        rows.append(
            f"<tr><td>{_text(name)}</td><td>{sum(counts):,}</td><td>{_percent(value)}</td>{''.join(cells)}</tr>"
        )
    first = "<th>class</th><th>images</th><th>accuracy %</th>"
    yield f"<table><tr>{first}{''.join(heads)}</tr>{''.join(rows)}</table>"


def _cell(count: int, total: int, right: bool) -> str:
    """A count of a confusion matrix, the darker the larger its share of the row."""
    red, green, blue = (47, 133, 90) if right else (184, 50, 50)
    style = f' style="background: rgba({red}, {green}, {blue}, {0.6 * count / max(total, 1):.2f})"' if count else ""
    return f"<td{style}>{f'{count:,}' if count else ''}</td>"


def _examples(examples: Examples, shown: Sequence[FrontierPoint]) -> str:
    """Some held-out images, and what each budget says of them."""
    classes, rows = examples.classes, []
    for number, (image, label) in enumerate(zip(examples.images, examples.labels, strict=True)):
        cells = [f'<td><img class="example" src="{_png(image)}" alt=""></td><td>{_text(classes[label])}</td>']
        for point in shown:
            guess, p = examples.answers[point.name][number]
            kind = "right" if guess == label else "wrong"
            cells.append(f'<td class="{kind}">{_text(classes[guess])} {p:.2f}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{_text(point.name)}, {short_count(point.macs)}</th>" for point in shown)
    table = f"<table><tr><th>image</th><th>label</th>{heads}</tr>{''.join(rows)}</table>"
    return f"<h2>Examples</h2><p>Held-out images at each of these budgets.</p>{table}"


def _pixel_examples(examples: PixelExamples, frontier: Frontier, shown: Sequence[FrontierPoint]) -> Iterable[str]:
    """Every class along the frontier, and held-out scenes at each budget."""
    classes, palette = examples.classes, examples.palette
    if all(len(point.per_class) == len(classes) for point in frontier.points):
        drawing = picture(plot_classes(frontier, classes, palette), ".svg")
        yield "<h2>Every class along the frontier</h2>"
        yield _image(drawing, "svg+xml", "IoU of every class against cost")
        yield _table(*class_rows(shown, classes))
    yield "<h2>Examples</h2>"
    yield "<p>Held-out images: their labels, the answer at each of these budgets, and in red where answers differ.</p>"
    for strip in examples.strips:
        yield _image(to_png(strip), "png", "a held-out image at several budgets")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _image(data: bytes, kind: str, words: str) -> str:
    return f'<img class="wide" alt="{_text(words)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def _png(image: np.ndarray[Any, Any]) -> str:
    from PIL import Image

    data = io.BytesIO()
    small = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    small.thumbnail((128, 128))
    small.save(data, "png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _text(words: object) -> str:
    """Class names and the like come from anywhere."""
    return html.escape(str(words))
