"""What a report shows where pixels are labelled: scenes at several budgets, and every class along the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from cnmm.data.images import resize_image
from cnmm.data.scenes import Scene
from cnmm.draw import FAINT, GREY, INK, PALE, STYLE, require_matplotlib
from cnmm.frontier import Frontier, FrontierPoint
from cnmm.mixture import Mixture
from cnmm.palette import Palette
from cnmm.pictures import Panel, caption, strip
from cnmm.prune import named_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_STRIPS = 4


@torch.no_grad()
def scene_strip(
    scene: Scene,
    x: Tensor,
    points: Mapping[FrontierPoint, Mixture],
    classes: Sequence[str],
    palette: Palette,
    latency: Mapping[str, float],
) -> Image.Image:
    """A scene, its mask, what each point says of it, and where the points differ from the last.

    `x`: the image as networks take it, [1, C, H, W]; `points`: with the mixture that has a point's statistics;
    `latency`: p95 milliseconds by point.
    """
    size = (scene.mask.shape[0], scene.mask.shape[1])
    panels = []
    for point, model in points.items():
        logits = model(x, named_point(model, point.name)).float()
        labels = F.interpolate(logits, size, mode="bilinear", align_corners=False).argmax(1)[0]
        panels.append(Panel(labels.byte().cpu().numpy(), caption(point.name, point.macs, latency.get(point.name))))
    return strip(resize_image(scene.image, size), panels, classes, palette, truth=scene.mask)


def class_rows(points: Sequence[FrontierPoint], classes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table: the IoU of every class at some points."""
    columns = ["IoU %", *(point.name for point in points)]
    rows = [[name, *(_percent(point.per_class[k]) for point in points)] for k, name in enumerate(classes)]
    return columns, rows


def plot_classes(frontier: Frontier, classes: Sequence[str], palette: Palette) -> Figure:
    """The IoU of every class at the best points, against their macs."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    best = frontier.envelope()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.6), dpi=160, facecolor="white", layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE)
        axes.tick_params(colors=GREY, labelsize=9)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        for k, name in enumerate(classes):
            seen = [(point.macs / 1e6, 100 * value) for point in best if (value := point.per_class[k]) is not None]
            colour = tuple(channel / 255 for channel in palette[k])
            axes.plot(*zip(*seen, strict=True), color=colour, marker="o", markersize=3.4, label=name) if seen else None
        axes.set_xlabel("macs per image (millions)", color=GREY)
        first = frontier.points[0]
        axes.set_ylabel(f"IoU (%), {first.n:,} {first.split} images", color=GREY)
        axes.set_ylim(0, 100)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
