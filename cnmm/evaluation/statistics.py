"""Batch statistics at an operating point: re-estimated in expectation mode on a few thousand images, stored, put back.

Points with re-estimated statistics do not share one set of running averages, so each keeps its own, in
`statistics.safetensors` of the run folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cnmm._errors import UserError
from cnmm._files import read_tensors, to_bytes, write_atomically
from cnmm.blocks import Statistics
from cnmm.frontier import RAW, Frontier
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture

STATISTICS_FILE = "statistics.safetensors"


@torch.no_grad()
def reestimated(model: Mixture, batches: Iterable[Tensor], point: OperatingPoint | None = None) -> Mixture:
    """A copy whose statistics are those of expectation mode at a point, averaged over batches of images (no labels)."""
    model = copy.deepcopy(model).train()
    statistics = [module for module in model.modules() if isinstance(module, Statistics)]
    count = 0
    for images in batches:
        count += 1
        for module in statistics:
            module.momentum = 1 / count  # a plain average
        model.forward_exits(images, point)
    if not count:
        raise UserError("no images to estimate statistics on")
    for module in statistics:
        del module.momentum
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
    if name not in frontier.buffers:
        raise UserError(f"the statistics of {name} are not stored with the frontier; measure again: cnmm frontier RUN")
    return with_statistics(model, frontier.buffers[name])


def save_statistics(folder: str | Path, buffers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Writes the re-estimated statistics of points into a run folder, in one step."""
    tensors = {f"{point}/{name}": tensor.clone() for point, named in buffers.items() for name, tensor in named.items()}
    write_atomically(Path(folder) / STATISTICS_FILE, to_bytes(tensors))


def load_statistics(folder: str | Path) -> dict[str, dict[str, Tensor]]:
    """The re-estimated statistics in a run folder, by point and by name in the mixture's state; none without a file."""
    path = Path(folder) / STATISTICS_FILE
    buffers: dict[str, dict[str, Tensor]] = {}
    if not path.exists():
        return buffers
    for key, tensor in read_tensors(path, "pt").items():
        point, slash, name = key.partition("/")
        if not slash:
            raise UserError(f"{path}: tensor {key!r}: must be named POINT/NAME")
        buffers.setdefault(point, {})[name] = tensor
    return buffers
