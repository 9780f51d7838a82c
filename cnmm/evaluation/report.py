"""One self-contained HTML page about a run: it opens from a file and refers to nothing outside itself."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cnmm.cost import CostTable, short_count
from cnmm.draw import draw_lattice, picture
from cnmm.evaluation.plot import plot_frontier
from cnmm.frontier import FrontierPoint
from cnmm.prune import named_point
from cnmm.run import Run
from cnmm.runtime import latency

NUM_EXAMPLES = 12
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


def report(run: Run, *, on_problem: Callable[[str], None] = lambda words: None) -> str:
    """The page. Without images at hand it has no examples, and `on_problem` is told why."""
    frontier = run.frontier
    shown = shown_points(run)
    first = frontier.points[0]
    about = f"{len(frontier.points)} operating points measured on {first.n:,} {first.split} images, "
    about += f"{first.statistics} statistics. One set of weights; no retraining between points."
    times = _latency(run)
    figure = _image(picture(plot_frontier(frontier, times), ".svg"), "svg+xml", "Accuracy against cost")
    parts = [
        f"<h1>{_text(frontier.model)}</h1>",
        f'<p class="about">{_text(run.about.get("data", {}).get("name", "no data named"))}. {_text(about)}</p>',
        "<h2>Accuracy against cost</h2>",
        figure,
        "<h2>The best point for every budget</h2>",
        _table(*_envelope_rows(run, times)),
        "<h2>Exits, nothing cut</h2>",
        _table(*_exit_rows(run)),
        *_cascade(run),
        "<h2>What runs at which budget</h2>",
        "<p>An edge is as thick as many networks of the mixture use it; what is pale is not computed.</p>",
        _drawings(run, shown),
    ]
    try:
        parts.append(_examples(run, shown))
    except (OSError, ValueError) as error:
        on_problem(f"no examples in the report: {' '.join(str(error).split())}")
    title = _text(f"{frontier.model}: any budget from one model")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def shown_points(run: Run) -> list[FrontierPoint]:
    """The best points at a few budgets, dearest first."""
    frontier = run.frontier
    found = [frontier.points[0]]
    for share in SHARES:
        fitting = [point for point in frontier.points if point.macs <= share * frontier.full_macs]
        found += [max(fitting, key=lambda point: (point.accuracy, -point.macs))] if fitting else []
    return sorted({point.point: point for point in found}.values(), key=lambda point: -point.macs)


def _latency(run: Run) -> dict[str, float]:
    try:
        return latency.p95(run.folder)
    except ValueError:
        return {}


def _envelope_rows(run: Run, times: dict[str, float]) -> tuple[list[str], list[list[str]]]:
    envelope = run.frontier.envelope()
    tested = any(point.test_accuracy is not None for point in envelope)
    columns = ["point", "macs", "of full", "params", "accuracy %", "95 % interval", "raw statistics %"]
    columns += (["test %"] if tested else []) + (["p95 ms here"] if times else [])
    rows = []
    for point in envelope:
        row = [point.point, short_count(point.macs), f"{point.macs / run.frontier.full_macs:.1%}"]
        row += [short_count(point.params), _percent(point.accuracy), f"{_percent(point.low)} to {_percent(point.high)}"]
        row += [_percent(point.raw_accuracy)] + ([_percent(point.test_accuracy)] if tested else [])
        rows.append(row + ([f"{times[point.point]:.2f}" if point.point in times else ""] if times else []))
    return columns, rows


def _exit_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    costs, measured = CostTable.of(run.model.config), {point.point: point for point in run.frontier.points}
    rows = []
    for exit in run.model.config.exit_numbers:
        cost = costs.exit(exit)
        found = next((measured[name] for name in (f"e{exit}c0", f"e{exit}m0") if name in measured), None)
        networks = f"{run.model.chain.count(exit):,}" if run.model.config.mixing == "gates" else "1"
        accuracy = _percent(found.accuracy) if found else "not measured"
        rows.append([str(exit), networks, short_count(cost.macs), short_count(cost.params), accuracy])
    return ["exit", "networks", "macs", "params", "accuracy %"], rows


def _cascade(run: Run) -> Iterable[str]:
    cascade = run.frontier.cascade
    if cascade is None:
        return
    yield "<h2>Early exit</h2>"
    words = (
        f"Images leave at the first exit that is sure enough: cascade {cascade.point}, {cascade.n:,} {cascade.split} "
        "images. The columns of exits say how many leave there, and from which confidence on."
    )
    yield f"<p>{_text(words)}</p>"
    rows = cascade.thresholds[:: max(1, len(cascade.thresholds) // 12)]
    columns = [
        "average macs",
        "of full",
        "accuracy %",
        *(f"leave at exit {exit}" for exit in cascade.exits),
    ]
    body = []
    for row in rows:
        share = f"{row.average_macs / run.frontier.full_macs:.1%}"
        cells = [short_count(round(row.average_macs)), share, _percent(row.accuracy)]
        asked = [*(f" from {value:.3f} on" for value in row.confidence), ""]
        body.append([*cells, *(f"{part:.0%}{words}" for part, words in zip(row.exits, asked, strict=True))])
    yield _table(columns, body)


def _drawings(run: Run, shown: Sequence[FrontierPoint]) -> str:
    figures = []
    for point in shown:
        drawing = picture(draw_lattice(run.model, named_point(run.model, point.point)), ".svg")
        words = f"{point.point}: {short_count(point.macs)} macs ({point.macs / run.frontier.full_macs:.0%}), "
        words += f"{_percent(point.accuracy)} %"
        image = _image(drawing, "svg+xml", words)
        figures.append(f"<figure>{image}<figcaption>{_text(words)}</figcaption></figure>")
    return f'<div class="drawings">{"".join(figures)}</div>'


@torch.no_grad()
def _examples(run: Run, shown: Sequence[FrontierPoint]) -> str:
    """Some held-out images, and what each budget says of them."""
    images, labels = run.held_out(NUM_EXAMPLES)
    classes = run.preprocessing.classes
    x = run.images.prepare(torch.from_numpy(images).permute(0, 3, 1, 2)).float()
    answers = []
    for point in shown:
        operating = named_point(run.model, point.point)
        answers.append(run.settled(operating)(x, operating).softmax(1).max(1))
    rows = []
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        cells = [f'<td><img class="example" src="{_png(image)}" alt=""></td><td>{_text(classes[label])}</td>']
        for found in answers:
            guess, p = int(found.indices[number]), float(found.values[number])
            kind = "right" if guess == label else "wrong"
            cells.append(f'<td class="{kind}">{_text(classes[guess])} {p:.2f}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{_text(point.point)}, {short_count(point.macs)}</th>" for point in shown)
    table = f"<table><tr><th>image</th><th>label</th>{heads}</tr>{''.join(rows)}</table>"
    return f"<h2>Examples</h2><p>Held-out images at each of these budgets.</p>{table}"


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
