"""Pictures of a mixture: maps by block and scale, edge width proportional to flow, and what an operating point cuts.

Needs matplotlib, which is imported only when something is drawn; no global state of pyplot is touched. The same input
gives the same bytes. Lengths are in inches.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm._errors import INSTALL_TRAIN, UserError
from cnmm._files import write_atomically
from cnmm.chain import count_networks
from cnmm.config import MixtureConfig
from cnmm.cost import CostTable, short_count
from cnmm.lattice import Edge, Lattice, OperatingPoint, build_lattice, channels, map_sizes
from cnmm.prune import Mixable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

STYLE = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so that every machine draws the same letters
    "path.simplify": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "cnmm",
    "text.parse_math": False,  # names come from anywhere, and one with dollars is no formula
}
_NO_METADATA: dict[str, dict[str, Any]] = {
    ".svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    ".png": {"Software": None},
}

INK, GREY, PALE, FAINT = "#22303c", "#6b7782", "#c3cad0", "#eceff1"
_KEEP, _FALL, _OUT, _CHOSEN = "#2b6cb0", "#c05621", "#5b4b8a", "#2f855a"
_FILL = "#dbe9f6"
_EDGE_COLOURS = {"keep": _KEEP, "fall": _FALL, "output": _OUT, "stem": INK}
_THICKEST = 8.0  # points, of an edge that every network uses

Point = tuple[float, float]


def draw_lattice(model: Mixable, point: OperatingPoint | None = None) -> Figure:
    """The lattice of a mixture (or of its plan), in full or at an operating point."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    _check_point(model.config, point)
    scene = _Scene(model.config, point, _flows(model, point))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=scene.layout.size, dpi=160, facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, scene.layout.size[0]), ylim=(0, scene.layout.size[1]))
        _draw_rows(axes, scene)
        _draw_edges(axes, scene)
        _draw_nodes(axes, scene)
        _draw_exits(axes, scene)
        _draw_words(axes, scene)
        _draw_legend(axes, scene)
    return figure


def save_picture(figure: Figure, path: str | Path) -> None:
    """Writes a figure as .svg or .png, in one step, without dates."""
    path = Path(path)
    data = picture(figure, check_suffix(path))
    try:
        write_atomically(path, data)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no folder {path.parent}; make it with: mkdir -p {path.parent}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another file or folder") from None


def picture(figure: Figure, suffix: str) -> bytes:
    """A figure as the bytes of an .svg or .png file."""
    data = io.BytesIO()
    with require_matplotlib().rc_context(STYLE):
        figure.savefig(data, format=suffix[1:], metadata=_NO_METADATA[suffix])
    found = data.getvalue()
    if suffix == ".svg":
        found = re.sub(rb"<!DOCTYPE[^>]*>\s*", b"", found)  # it names a file on the web, which nobody needs
    return found


def check_suffix(path: Path) -> str:
    """The suffix of a picture, if it is one that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: pictures are {' or '.join(SUFFIXES)}; try {path.with_suffix(SUFFIXES[0])}")
    return path.suffix.lower()


def require_matplotlib() -> Any:
    """The package, or one line that says how to install it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError(f"drawing needs matplotlib, which is missing; install it with: {INSTALL_TRAIN}") from None
    return matplotlib


def _check_point(config: MixtureConfig, point: OperatingPoint | None) -> None:
    unknown = sorted(point.edges - set(build_lattice(config).edges)) if point else []
    if point and unknown:
        i, j = unknown[0]
        raise UserError(
            f"point {point.name!r} has edge {i}->{j}, which {config.name!r} does not; take points from "
            "cutting_order(model, exit=...) of the same model"
        )


def _flows(model: Mixable, point: OperatingPoint | None) -> dict[Edge, float] | None:
    """The flow of every live edge; None for the deterministic variant, which has no networks to choose from."""
    if model.config.mixing == "sum":
        return None
    chain = model.chain.detach()
    return chain.flow(point.exit, point.edges) if point else chain.flow()


@dataclass(frozen=True)
class _Layout:
    """Where everything is: a column per block, a row per scale, the output as a bar below."""

    config: MixtureConfig
    left = 2.55
    right = 0.6
    bottom = 1.5
    top = 0.98

    @property
    def column(self) -> float:
        return min(max(4.4 / max(self.config.blocks - 1, 1), 1.5 if self.config.blocks <= 7 else 1.12), 2.8)

    @property
    def row(self) -> float:
        return 1.28 if self.config.scales <= 3 else 1.12

    @property
    def lean(self) -> float:
        """How far right a map stands of the finer one of its block, which is computed before it."""
        return 0.34 * min(self.column, 1.5) / max(self.config.scales - 1, 1)

    @property
    def roof(self) -> float:
        """Room for the arcs above the finest maps."""
        return 0.5 + 0.035 * self.config.blocks

    @property
    def size(self) -> Point:
        config = self.config
        width = self.exit_x(config.blocks) + self.right
        height = self.bottom + self.row * (config.scales - 1) + 0.55 + self.roof + self.top
        return max(width, 8.0), height

    @property
    def bar(self) -> float:
        """Height at which the output is drawn."""
        return self.bottom - 0.36

    def place(self, block: int, scale: int) -> Point:
        """Centre of a map."""
        x = self.left + self.column * block + self.lean * scale
        return x, self.bottom + 0.45 + self.row * (self.config.scales - 1 - scale)

    def box(self, scale: int) -> Point:
        """Width and height of a map: coarser maps are lower and, with twice the channels, wider."""
        return 0.2 * 1.28**scale, 0.56 * 0.74**scale

    def gutter(self, block: int, scale: int) -> float:
        """Where the edge from a map to the output comes down: right of its block, the coarsest straight below it."""
        coarsest = self.config.scales - 1
        x, _ = self.place(block, coarsest)
        return x if scale == coarsest else x + self.box(coarsest)[0] / 2 + 0.02 + 0.07 * (coarsest - scale)

    def exit_x(self, exit: int) -> float:
        """An exit reads the edges on its left."""
        first = 0 if self.config.task == "segmentation" else self.config.scales - 1
        return self.gutter(exit - 1, first) + 0.24


@dataclass(frozen=True)
class _Scene:
    """What is drawn: the model's shape, and which of it the point keeps."""

    config: MixtureConfig
    point: OperatingPoint | None
    flows: dict[Edge, float] | None

    @cached_property
    def layout(self) -> _Layout:
        return _Layout(self.config)

    @cached_property
    def lattice(self) -> Lattice:
        return build_lattice(self.config)

    @cached_property
    def live(self) -> frozenset[Edge]:
        exit, edges = (self.point.exit, self.point.edges) if self.point else (None, None)
        return self.lattice.exit_edges(exit, edges)

    @cached_property
    def alive(self) -> set[int]:
        return {node for edge in self.live for node in edge}

    @cached_property
    def costs(self) -> CostTable:
        return CostTable.of(self.config)

    @property
    def exit(self) -> int:
        return self.point.exit if self.point else self.config.blocks

    def flow(self, edge: Edge) -> float:
        return 0.2 if self.flows is None else self.flows[edge]

    def kind(self, edge: Edge) -> str:
        if edge[0] == 0:
            return "stem"
        if edge[1] == self.lattice.output:
            return "output"
        return "fall" if self.lattice.falls(edge) else "keep"

    def at(self, node: int) -> tuple[Point, Point]:
        """Centre and size of a map."""
        scale = self.lattice.scale(node)
        return self.layout.place(self.lattice.block(node), scale), self.layout.box(scale)

    def curve(self, edge: Edge) -> list[Point]:
        """Start, two control points and end of an edge: it passes through the bands between the rows, past all maps."""
        kind = self.kind(edge)
        if kind == "stem":
            (x, y), (w, _) = self.at(1)
            return _straight((x - 0.62, y), (x - w / 2, y))
        if kind == "output":
            return self._to_output(edge[0])
        (x0, y0), (w0, h0) = self.at(edge[0])
        (x1, y1), (w1, h1) = self.at(edge[1])
        span = self.lattice.block(edge[1]) - self.lattice.block(edge[0])
        if kind == "fall":
            start, end = (x0 + w0 / 8, y0 - h0 / 2), (x1 - w1 / 8, y1 + h1 / 2)
            middle = start[1] + 0.62 * (end[1] - start[1])
            return [start, (start[0], middle), (end[0], middle), end]
        if span == 1:
            return _straight((x0 + w0 / 2, y0), (x1 - w1 / 2, y1))
        top = y0 + h0 / 2
        lift = top + 0.22 + 0.62 * self.layout.roof * (span - 1) / max(self.config.blocks - 2, 1)
        lean = 0.25 * self.layout.column
        return [(x0 + w0 / 5, top), (x0 + lean, lift), (x1 - lean, lift), (x1 - w1 / 5, top)]

    def _to_output(self, node: int) -> list[Point]:
        (x, y), (w, h) = self.at(node)
        bar = self.layout.bar + 0.05
        down = self.layout.gutter(self.lattice.block(node), self.lattice.scale(node))
        if down == x:
            return _straight((x, y - h / 2), (x, bar))
        return [(x + w / 2, y - h / 4), (down, y - h / 4), (down, y - 0.3), (down, bar)]


def _straight(start: Point, end: Point) -> list[Point]:
    return [start, start, end, end]


def _width(flow: float) -> float:
    return 0.4 + (_THICKEST - 0.4) * math.pow(flow, 0.7)  # sparing the thin ones


def _opacity(flow: float) -> float:
    return 0.38 + 0.54 * min(flow / 0.2, 1.0)


def _draw_rows(axes: Axes, scene: _Scene) -> None:
    """The name of each scale at the left."""
    for scale, size in enumerate(map_sizes(scene.config, scene.config.input_size)):
        _, y = scene.layout.place(0, scale)
        width = channels(scene.config, scale)
        axes.text(0.3, y + 0.02, f"{size[0]}×{size[1]}", size=9.5, color=INK, va="bottom")
        axes.text(0.3, y - 0.02, f"{width} channels", size=8, color=GREY, va="top")


def _draw_edges(axes: Axes, scene: _Scene) -> None:
    """Cut edges first, then the live ones from the least flow to the greatest, so that thick ones lie on top."""
    cut = [edge for edge in scene.lattice.edges if edge not in scene.live]
    for edge in cut:
        _draw_curve(axes, scene.curve(edge), color=PALE, width=0.6, opacity=0.7, dashed=True)
    for edge in sorted(scene.live, key=lambda edge: (scene.flow(edge), edge)):
        flow, kind = scene.flow(edge), scene.kind(edge)
        subtle = 0.6 if kind == "output" and scene.config.task == "segmentation" else 1.0
        colour = _EDGE_COLOURS[kind]
        _draw_curve(axes, scene.curve(edge), color=colour, width=_width(flow), opacity=subtle * _opacity(flow))


def _draw_curve(
    axes: Axes, points: Sequence[Point], *, color: str, width: float, opacity: float, dashed: bool = False
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    path = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    style: Any = (0, (4, 3)) if dashed else "solid"
    patch = PathPatch(path, fill=False, edgecolor=color, linewidth=width, alpha=opacity, linestyle=style)
    patch.set_capstyle("butt")
    axes.add_patch(patch)


def _draw_nodes(axes: Axes, scene: _Scene) -> None:
    (x, y), _ = scene.at(1)
    _draw_box(axes, (x - 0.62 - 0.21, y), (0.42, 0.42), fill=FAINT, line=INK)
    axes.text(x - 0.83, y + 0.27, "image", size=8, color=GREY, ha="center", va="bottom")
    for node in range(1, scene.lattice.output):
        centre, size = scene.at(node)
        alive = node in scene.alive
        _draw_box(axes, centre, size, fill=_FILL if alive else "white", line=INK if alive else PALE, dashed=not alive)


def _draw_box(axes: Axes, centre: Point, size: Point, *, fill: str, line: str, dashed: bool = False) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = centre[0] - size[0] / 2, centre[1] - size[1] / 2
    style = f"round,pad=0,rounding_size={min(0.05, min(size) / 3)}"
    patch = FancyBboxPatch(corner, *size, boxstyle=style, facecolor=fill, edgecolor=line, linewidth=1.0, zorder=3)
    patch.set_linestyle((0, (3, 2)) if dashed else "solid")
    axes.add_patch(patch)


def _draw_exits(axes: Axes, scene: _Scene) -> None:
    """The output as a bar that grows with the blocks; each exit reads what is on its left."""
    layout = scene.layout
    start, end = layout.left - 0.18, layout.exit_x(scene.config.blocks) + 0.2
    used = layout.exit_x(scene.exit) + 0.2
    _draw_box(axes, ((start + end) / 2, layout.bar), (end - start, 0.1), fill="white", line=PALE)
    _draw_box(axes, ((start + used) / 2, layout.bar), (used - start, 0.1), fill="#e4dff2", line=_OUT)
    axes.text(0.3, layout.bar + 0.02, "output", size=9.5, color=INK, va="bottom")
    axes.text(0.3, layout.bar - 0.02, "mixes its inputs", size=8, color=GREY, va="top")
    for exit in scene.config.exit_numbers:
        _draw_exit(axes, scene, exit)


def _draw_exit(axes: Axes, scene: _Scene, exit: int) -> None:
    from matplotlib.patches import Polygon

    x, y = scene.layout.exit_x(exit), scene.layout.bar - 0.05
    chosen = scene.point is not None and exit == scene.exit
    off = scene.point is not None and not chosen
    colour = _CHOSEN if chosen else PALE if off else _OUT
    axes.add_patch(Polygon([(x - 0.08, y), (x + 0.08, y), (x, y - 0.14)], closed=True, facecolor=colour, zorder=4))
    weight = "bold" if chosen else "normal"
    axes.text(x, y - 0.2, f"exit {exit}", size=8.5, color=colour, ha="center", va="top", weight=weight)
    if not off:
        macs = _macs(scene) if chosen else scene.costs.exit(exit).macs
        axes.text(x, y - 0.36, short_count(macs), size=7.5, color=GREY, ha="center", va="top")


def _macs(scene: _Scene) -> int:
    return (scene.costs.point(scene.point) if scene.point else scene.costs.exit()).macs


def _draw_words(axes: Axes, scene: _Scene) -> None:
    top = scene.layout.size[1]
    axes.text(0.3, top - 0.28, scene.config.name, size=14, color=INK, weight="bold", va="top")
    axes.text(0.3, top - 0.6, "  ·  ".join(_facts(scene)), size=10, color=GREY, va="top")


def _facts(scene: _Scene) -> Iterable[str]:
    """The line below the title."""
    macs = _macs(scene)
    if scene.point:
        yield f"operating point {scene.point.name}"
    yield f"{short_count(macs)} macs" + (f" of {short_count(scene.costs.exit().macs)}" if scene.point else "")
    if scene.flows is None:
        yield "all weights one"
        return
    networks = count_networks(scene.lattice, scene.exit, scene.live)
    text = f"{networks:,} network" + ("" if networks == 1 else "s")
    yield text + (f" of {count_networks(scene.lattice):,}" if scene.point else " in the mixture")


def _draw_legend(axes: Axes, scene: _Scene) -> None:
    """Colours and thickness of the edges, along the bottom."""
    x, y = 0.3, 0.3
    entries: list[tuple[str, dict[str, Any]]] = []
    if scene.config.scales > 1:
        entries.append(("same resolution", {"color": _KEEP, "width": 2.0, "opacity": 0.9}))
        entries.append(("half resolution", {"color": _FALL, "width": 2.0, "opacity": 0.9}))
    if scene.flows is not None:
        for flow, words in ((1.0, "used by all networks"), (0.25, "by 25 %"), (0.02, "by 2 %")):
            entries.append((words, {"color": GREY, "width": _width(flow), "opacity": _opacity(flow)}))
    if scene.point:
        entries.append(("off", {"color": PALE, "width": 1.0, "opacity": 1.0, "dashed": True}))
    for words, style in entries:
        _draw_curve(axes, _straight((x, y), (x + 0.34, y)), **style)
        axes.text(x + 0.42, y, words, size=8, color=GREY, va="center")
        x += 0.42 + 0.06 * len(words) + 0.24
