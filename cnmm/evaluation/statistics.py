"""Batch statistics at an operating point: re-estimated in expectation mode on a few thousand images, stored, put back.

Points with re-estimated statistics do not share one set of running averages, so each keeps its own, in a file beside
`frontier.json`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm._files import read_tensors, to_bytes
from cnmm.blocks import Statistics
from cnmm.evaluation.kept import Kept
from cnmm.frontier import RAW, Frontier
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture


@torch.no_grad()
def reestimated(
    model: Mixture,
    batches: Iterable[Tensor],
    point: OperatingPoint | None = None,
    kept: Kept | None = None,
    on_images: Callable[[int], None] = lambda num: None,
) -> Mixture:
    """A copy whose statistics are those of expectation mode at a point, averaged over batches of images (no labels).

    `on_images` is told after every batch how many images it had.
    """
    model = copy.deepcopy(model).train()
    statistics = [module for module in model.modules() if isinstance(module, Statistics)]
    buffers = dict(model.named_buffers())

    def restore(known: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            buffer.copy_(known[name])

    sweep = (kept or Kept()).sweep(batches, lambda: buffers, restore)
    for count, images in sweep:
        for module in statistics:
            module.momentum = 1 / count  # a plain average
        model.forward_exits(images, point)
        on_images(len(images))
    if not sweep.done:
        raise UserError("no images to estimate statistics on")
    for module in statistics:
        vars(module).pop("momentum", None)
    return model.eval()


def with_statistics(model: Mixture, buffers: Mapping[str, Tensor]) -> Mixture:
    """A copy in eval mode with re-estimated statistics of a point: `frontier.buffers[name]` or `load_statistics`."""
    result = copy.deepcopy(model).eval()
    own = dict(result.named_buffers())
    for name, tensor in buffers.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UserError(f"statistics {name!r} of shape {tuple(tensor.shape)} do not belong to this model")
        own[name].copy_(tensor)
    return result


def settled(model: Mixture, frontier: Frontier, name: str) -> Mixture:
    """The mixture with the statistics that a frontier measured a point with (or its cascade, by the point's name)."""
    if frontier.points[0].statistics == RAW:
        return with_statistics(model, {})
    check_known(frontier, name)
    return with_statistics(model, frontier.buffers[name])


def check_known(frontier: Frontier, name: str) -> None:
    """Refuses a point whose re-estimated statistics a frontier lacks."""
    if frontier.points[0].statistics != RAW and name not in frontier.buffers:
        raise UserError(f"the statistics of {name} are not stored with the frontier; measure again: cnmm frontier RUN")


def statistics_bytes(buffers: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The re-estimated statistics of points as a file."""
    return to_bytes({f"{point}/{name}": t.clone() for point, named in buffers.items() for name, t in named.items()})


def load_statistics(path: Path) -> dict[str, dict[str, Tensor]]:
    """The re-estimated statistics in a file, by point and by name in the mixture's state."""
    buffers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(path, "pt").items():
        point, slash, name = key.partition("/")
        if not slash:
            raise UserError(f"{path}: tensor {key!r}: must be named POINT/NAME")
        buffers.setdefault(point, {})[name] = tensor
    return buffers
