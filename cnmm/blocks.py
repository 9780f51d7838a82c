"""The blocks f_i^j: shared parts, edges and outputs (paper, section 4.1, "Implementation for ...").

An edge is BN-ReLU-Conv1x1-BN on the shared tensor of its source map. All edges into a map are one module (`Mix`), whose
arithmetic is `fused`: one product over the concatenated inputs. Edges of one kind share the moments of the batch
normalisation that begins them (`Read`).

Shapes have the suffixes of `fused`: N images, G groups of images that share one draw of the gates, E edges into a map,
K channels of one edge's input, C channels of the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnmm import distributed, fused, pixels
from cnmm.cost import CLASSIFIER_CHANNELS
from cnmm.fused import EPS
from cnmm.rows import activate, images, wide

MOMENTUM = 0.1


def uniform_(tensor: Tensor, fan_in: int) -> nn.Parameter:
    """torch's own initialisation of convolutions and linear layers."""
    return nn.Parameter(nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)))


class Read(NamedTuple):
    """What edges read: a tensor, and the moments of the batch normalisation that they all begin with."""

    z: Tensor
    moments_2K: Tensor
    """Mean and 1 / standard deviation of every channel: of the batch when training, else the running ones."""


class Statistics(nn.Module):
    """Running mean and variance of one batch normalisation."""

    mean: Tensor
    var: Tensor
    momentum: float = MOMENTUM

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))

    def read(self, x: Tensor, *, update: bool = True) -> Read:
        """[N, C, h, w] with its moments: those of the batch when training (which updates these), else these."""
        if not self.training:
            return Read(x, torch.stack([self.mean, (self.var + EPS).rsqrt()]))
        moments_2C, batch_mean, batch_var = fused.batch_moments(x)
        if update:
            self.update(batch_mean, batch_var, x.numel() // x.shape[1])
        return Read(x, moments_2C)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, *, update: bool = True) -> Tensor:
        """Batch normalisation of [N, C, h, w]: by the batch when training (which updates these), else by these."""
        if self.training and distributed.world_size() > 1:
            _, (mean, rstd) = self.read(x, update=update)
            scale = weight * rstd
            return x * _per_channel(scale, x) + _per_channel(bias - mean * scale, x)
        if self.training and pixels.is_narrow(x):
            y, batch_mean, batch_var = pixels.normalise(x, weight, bias, EPS)
            if update:
                self.update(batch_mean, batch_var, x.numel() // x.shape[1])
            return y
        mean, var = (self.mean, self.var) if update or not self.training else (None, None)
        return F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum, EPS)

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, count: int, index: Tensor | None = None) -> None:
        """One step of the running averages (of the rows `index`), with the unbiased variance as torch does.

        `count`: values of this process that the statistics were computed from.
        """
        count *= distributed.world_size()
        var = var * (count / (count - 1))
        if index is None:
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(var, self.momentum)
        else:
            self.mean[index] = self.mean[index].lerp(mean, self.momentum)
            self.var[index] = self.var[index].lerp(var, self.momentum)


def _per_channel(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C.to(like.dtype).view(1, -1, 1, 1)


class Affine(nn.Module):
    """Scale and shift of a batch normalisation, and the slopes of the PReLU behind it if there is one."""

    slope: nn.Parameter | None

    def __init__(self, *shape: int, prelu: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        if prelu:
            self.slope = nn.Parameter(torch.full(shape, 0.25))
        else:
            self.register_parameter("slope", None)


class Shared(nn.Module):
    """BN-ReLU-DConv of a map, which all edges that leave it share; DConv is a depthwise 3x3 and a pointwise 1x1."""

    def __init__(self, channels: int, *, prelu: bool) -> None:
        super().__init__()
        self.affine = Affine(channels, prelu=prelu)
        self.depthwise = uniform_(torch.empty(channels, 1, 3, 3), 9)
        self.pointwise = uniform_(torch.empty(channels // 4, channels, 1, 1), channels)

    def forward(self, h: Tensor, statistics: Statistics, *, update: bool = True) -> Tensor:
        h = statistics.normalise(h, self.affine.weight, self.affine.bias, update=update)
        h = activate(h, self.affine.slope)
        h = F.conv2d(h, self.depthwise.to(h.dtype), padding=1, groups=h.shape[1])
        return F.conv2d(h, self.pointwise.to(h.dtype))


class Mix(nn.Module):
    """All edges into one map, from normalised inputs to the mixture H_j = sum_i w[i, j] f_i^j(H_i).

    `widths` are the channels K of the edges' inputs, equal widths side by side; parameters of all edges are stored
    together, in that order. The inputs come normalised, because edges of one kind share the normalisation of the BN
    that begins them; scale and shift are each edge's own.
    """

    def __init__(self, widths: Sequence[int], channels: int, *, prelu: bool) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.affine = Affine(sum(widths), prelu=prelu)
        weights: list[Tensor] = [uniform_(torch.empty(width, channels), width) for width in widths]
        self.weight = nn.Parameter(torch.cat(weights).detach())
        self.out_affine = Affine(len(widths), channels)
        self.statistics = Statistics(len(widths), channels)

    def forward(self, inputs: Sequence[Read], index: Sequence[int], mix_GE: Tensor, *, update: bool = True) -> Tensor:
        """`inputs[k]` is what edge `index[k]` reads, and `mix_GE[:, k]` its weight in each group of images."""
        widths = [self.widths[k] for k in index]
        affine, outer, stats = self.affine, self.out_affine, self.statistics
        small: list[Tensor | None] = [affine.weight, affine.bias, affine.slope]
        small += [self.weight, outer.weight, outer.bias]
        running = [stats.mean, stats.var]
        edges = None
        if len(index) < len(self.widths):
            edges = torch.tensor(index, device=mix_GE.device)
            columns = torch.cat([torch.arange(*self.span(k), device=mix_GE.device) for k in index])
            picks = [columns] * 4 + [edges] * 2
            small = [part if part is None else part[pick] for part, pick in zip(small, picks, strict=True)]
            running = [part[edges] for part in running]
        moments, tensors = [read.moments_2K for read in inputs], [read.z for read in inputs]
        h_MC, mean, var = fused.mix(widths, None if self.training else running, *small, mix_GE, *moments, *tensors)
        if self.training and update:
            stats.update(mean, var, h_MC.shape[0], edges)
        return images(h_MC, tensors[0].shape)

    def span(self, edge: int) -> tuple[int, int]:
        """The columns of U that are an edge's: from the first up to the second."""
        start = sum(self.widths[:edge])
        return start, start + self.widths[edge]


class VectorOutput(nn.Module):
    """The edges into the output of a classifier, BN-ReLU-GP-FC-BN on H_i: a vector per edge and image."""

    def __init__(self, edges: int, channels: int, out_channels: int) -> None:
        super().__init__()
        self.affine = Affine(edges, channels)
        self.weight = uniform_(torch.empty(edges, channels, out_channels), channels)
        self.out_affine = Affine(edges, out_channels)
        self.statistics = Statistics(edges, out_channels)

    def pool(self, h: Tensor, edge: int, statistics: Statistics, *, update: bool) -> Tensor:
        """BN-ReLU-GP of one edge, [N, C]."""
        x = statistics.normalise(h, self.affine.weight[edge], self.affine.bias[edge], update=update)
        return activate(x, None).mean((2, 3), dtype=wide(x))

    def forward(self, pooled: Sequence[Tensor], index: Sequence[int], mix_GE: Tensor, *, update: bool = True) -> Tensor:
        """FC-BN of the edges `index` and their mixture, [N, out_channels]."""
        stats, edges = self.statistics, torch.tensor(index, device=mix_GE.device)
        y_NEC = torch.bmm(torch.stack(list(pooled)), self.weight[edges]).transpose(0, 1)
        mean, rstd = stats.mean[edges], (stats.var[edges] + EPS).rsqrt()
        if self.training:
            moments, batch_mean, batch_var = fused.batch_moments(y_NEC.flatten(1)[:, :, None, None])
            mean, rstd = moments.view(2, *mean.shape)
            if update:
                stats.update(batch_mean.view_as(mean), batch_var.view_as(mean), len(y_NEC), edges)
        y_NEC = torch.addcmul(self.out_affine.bias[edges], y_NEC - mean, rstd * self.out_affine.weight[edges])
        mix_NE = mix_GE.repeat_interleave(len(y_NEC) // mix_GE.shape[0], 0)
        return (y_NEC * mix_NE[:, :, None]).sum(1)


class PixelClassifier(nn.Module):
    """The segmentation classifier, UP-BN-PReLU-Conv-UP-BN-PReLU-DConv."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        middle = CLASSIFIER_CHANNELS
        self.first = Affine(channels, prelu=True)
        self.first_statistics = Statistics(channels)
        self.conv = uniform_(torch.empty(middle, channels, 1, 1), channels)
        self.second = Affine(middle, prelu=True)
        self.second_statistics = Statistics(middle)
        self.depthwise = uniform_(torch.empty(middle, 1, 3, 3), 9)
        self.pointwise = uniform_(torch.empty(num_classes, middle, 1, 1), middle)
        self.bias = uniform_(torch.empty(num_classes), middle)

    def forward(self, h: Tensor, sizes: Sequence[tuple[int, int]], *, update: bool = True) -> Tensor:
        """`sizes`: heights and widths after the two upsamplings."""
        h = upsample(h, sizes[0])
        h = self.first_statistics.normalise(h, self.first.weight, self.first.bias, update=update)
        h = activate(h, self.first.slope)
        h = upsample(F.conv2d(h, self.conv.to(h.dtype)), sizes[1])
        h = self.second_statistics.normalise(h, self.second.weight, self.second.bias, update=update)
        h = activate(h, self.second.slope)
        h = F.conv2d(h, self.depthwise.to(h.dtype), padding=1, groups=h.shape[1])
        return pixels.planes(h, self.pointwise.to(h.dtype).flatten(1), self.bias.to(h.dtype))


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, to an exact size."""
    return x if x.shape[2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)


def pool(x: Tensor, *, largest: bool) -> Tensor:
    """2x2 pooling, rounding sizes up; what lies outside the map is not counted."""
    if largest:
        return F.max_pool2d(x, 2, ceil_mode=True)
    return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
