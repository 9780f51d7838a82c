"""The blocks f_i^j: shared parts, edges and outputs (paper, section 4.1, "Implementation for ...").

An edge is BN-ReLU-Conv1x1-BN on the shared tensor of its source map. Everything after its ReLU is linear, and so is the
mixing of the edges into a map. Hence a map is ONE 1x1 convolution over its concatenated inputs `U` (`Mix`), and its
matrix has the last batch normalisation and the mixing weights folded in. In training, the statistics of that
normalisation follow from mean and covariance of `U`: mean = W mu, var = diag(W Cov W^T). This is exact.

Shapes: N images, M pixels of all images, G groups of images that share one draw of the gates, E edges into a map,
K channels of one edge's input, D = sum of K over the edges, C channels of the map. Suffixes name them: `u_MD`.
Parameters, statistics and the small algebra keep the parameters' type; activations may be bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cnmm import distributed
from cnmm.cost import CLASSIFIER_CHANNELS

EPS = 1e-5
MOMENTUM = 0.1
_GRAM_COLUMNS = 64  # a product with fewer columns leaves the processor idle, with more it computes what nobody reads
_CHUNK_ROWS = 1024  # bfloat16 products are summed in float32 over chunks of so many rows


def uniform_(tensor: Tensor, fan_in: int) -> nn.Parameter:
    """torch's own initialisation of convolutions and linear layers."""
    return nn.Parameter(nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)))


def activate(x: Tensor, slope: Tensor | None) -> Tensor:
    """ReLU, or PReLU when there are slopes."""
    return F.relu(x, inplace=True) if slope is None else F.prelu(x, slope.to(x.dtype))


def rows(x: Tensor) -> Tensor:
    """[N, C, h, w] in channels-last order as the matrix [M, C]; no copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def images(x_MC: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse of `rows`, for images of a shape [N, any, h, w]; no copy."""
    num, _, height, width = shape
    return x_MC.view(num, height, width, -1).permute(0, 3, 1, 2)


class Statistics(nn.Module):
    """Running mean and variance of one batch normalisation."""

    mean: Tensor
    var: Tensor
    momentum: float = MOMENTUM

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))

    def normalise(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, update: bool = True
    ) -> Tensor:
        """Batch normalisation of [N, C, h, w]: by the batch when training (which updates these), else by these."""
        if self.training and (weight is None or distributed.world_size() > 1):
            y, batch_mean, batch_var = _normalise(x)
            if update:
                self.update(batch_mean, batch_var, x.numel() // x.shape[1])
            return y if weight is None or bias is None else y * _per_channel(weight, y) + _per_channel(bias, y)
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


class _Normalise(torch.autograd.Function):
    """Batch normalisation without scale and shift. torch's own backward is eight times slower on few channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _moments(x)
        scale = (var + EPS).rsqrt()
        y = images(_scale_shift(rows(x), scale, -mean * scale), x.shape)
        ctx.save_for_backward(y, scale)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        y_MC, grad_MC = rows(y), rows(grad)
        sums = distributed.total([_column_sums(grad_MC), _column_sums(grad_MC * y_MC)])
        shift, slope = (-scale * part / (grad_MC.shape[0] * distributed.world_size()) for part in sums)
        grad_x = _scale_shift(y_MC, slope, shift).addcmul_(grad_MC, scale.to(y.dtype))
        return images(grad_x, y.shape)


_normalise = cast(Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], _Normalise.apply)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel over the images and pixels of all processes."""
    unused = torch.zeros(2, x.shape[1], dtype=wide(x), device=x.device)  # it is their type that the result has
    mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
    world = distributed.world_size()
    if world == 1:
        return mean, var
    (everywhere,) = distributed.total([mean])
    everywhere = everywhere / world
    (spread,) = distributed.total([var + (mean - everywhere).square()])
    return everywhere, spread / world


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

    def forward(self, inputs: Sequence[Tensor], index: Sequence[int], mix_GE: Tensor, *, update: bool = True) -> Tensor:
        """`inputs[k]` is the input of edge `index[k]`, and `mix_GE[:, k]` its weight in each group of images."""
        widths = [self.widths[k] for k in index]
        affine, outer, stats = self.affine, self.out_affine, self.statistics
        small: list[Tensor | None] = [affine.weight, affine.bias, affine.slope]
        small += [self.weight, outer.weight, outer.bias]
        running = [stats.mean, stats.var]
        edges = None
        if len(index) < len(self.widths):
            edges = torch.tensor(index, device=mix_GE.device)
            columns = torch.cat([torch.arange(*self._span(k), device=mix_GE.device) for k in index])
            picks = [columns] * 4 + [edges] * 2
            small = [part if part is None else part[pick] for part, pick in zip(small, picks, strict=True)]
            running = [part[edges] for part in running]
        h_MC, mean, var = _mix(widths, None if self.training else running, *small, mix_GE, *inputs)
        if self.training and update:
            stats.update(mean, var, h_MC.shape[0], edges)
        return images(h_MC, inputs[0].shape)

    def _span(self, edge: int) -> tuple[int, int]:
        start = sum(self.widths[:edge])
        return start, start + self.widths[edge]


class _MixFunction(torch.autograd.Function):
    """`Mix` with a backward by hand: big products on [M, D] here, autograd through the small algebra of `_fold`."""

    @staticmethod
    def forward(
        ctx: Any,
        widths: list[int],
        running: list[Tensor] | None,
        gamma_D: Tensor,
        beta_D: Tensor,
        slope_D: Tensor | None,
        weight_DC: Tensor,
        out_gamma_EC: Tensor,
        out_beta_EC: Tensor,
        mix_GE: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_MD = torch.cat([rows(x) for x in inputs], 1) if len(inputs) > 1 else rows(inputs[0])
        u_MD = activate(_scale_shift(x_MD, gamma_D, beta_D), slope_D)
        groups = mix_GE.shape[0]
        # One matrix per group of images, unless scaling a group's rows touches less memory than its matrix.
        scaled = groups > 1 and u_MD.shape[0] // groups < weight_DC.shape[1]
        owner_D = torch.repeat_interleave(torch.tensor(widths, device=x_MD.device), output_size=sum(widths))

        leaves = [weight_DC, out_gamma_EC, out_beta_EC, mix_GE]
        if running is None:
            count = u_MD.shape[0] * distributed.world_size()
            leaves += [part / count for part in distributed.total([_column_sums(u_MD), *_grams(u_MD, widths)])]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            mean_EC, var_EC = running or _output_moments(widths, leaves[0], leaves[4], leaves[5:])
            matrix_GDC, bias_GC = _fold(owner_D, mean_EC, var_EC, *leaves[:4], scaled=scaled)
        small = matrix_GDC.detach().to(u_MD.dtype), bias_GC.detach().to(u_MD.dtype)
        v_MD = _scale_groups(u_MD, mix_GE[:, owner_D]) if scaled else u_MD
        h_MC = _grouped_product(v_MD, *small)

        ctx.save_for_backward(x_MD, u_MD, gamma_D, beta_D, slope_D, owner_D, small[0])
        ctx.images = [x.shape for x in inputs]
        ctx.folded = leaves, (matrix_GDC, bias_GC)
        ctx.edge_widths = widths
        ctx.scaled = scaled
        mean_EC, var_EC = mean_EC.detach(), var_EC.detach()
        ctx.mark_non_differentiable(mean_EC, var_EC)
        return h_MC, mean_EC, var_EC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, u_MD, gamma_D, beta_D, slope_D, owner_D, matrix_GDC = ctx.saved_tensors
        leaves, folded = ctx.folded
        mix_GE = leaves[3].detach()
        groups = mix_GE.shape[0]
        grad_MC = grad_MC.contiguous()

        v_MD = _scale_groups(u_MD, mix_GE[:, owner_D]) if ctx.scaled else u_MD
        grad_matrix, grad_bias = _grouped_backward(v_MD, grad_MC, matrix_GDC.shape[0], groups)
        small = list(torch.autograd.grad(folded, leaves, (grad_matrix, grad_bias), allow_unused=True))
        grad_u = _grouped_product(grad_MC, matrix_GDC.transpose(1, 2), None)
        if ctx.scaled:
            per_group = (grad_u * u_MD).view(groups, -1, u_MD.shape[1]).sum(1, dtype=mix_GE.dtype)
            small[3] = small[3] + torch.zeros_like(mix_GE).index_add_(1, owner_D, per_group)
            grad_u = _scale_groups(grad_u, mix_GE[:, owner_D])
        if len(leaves) > 4:  # by batch statistics: through the mean and the Gram matrix of U
            count = u_MD.shape[0] * distributed.world_size()
            grad_mean, *grad_grams = (grad / count for grad in distributed.total(small[4:]))
            grad_u += grad_mean.to(grad_u.dtype)
            for (start, stop, _width), grad in zip(_gram_blocks(ctx.edge_widths), grad_grams, strict=True):
                grad_u[:, start:stop].addmm_(u_MD[:, start:stop], (grad + grad.T).to(u_MD.dtype))

        grad_slope = None
        if slope_D is None:
            grad_p = torch.ops.aten.threshold_backward.grad_input(grad_u, u_MD, 0, grad_input=grad_u)
        else:
            p_MD = _scale_shift(x_MD, gamma_D, beta_D)
            grad_slope = _column_sums(grad_u * p_MD.clamp_max(0))
            grad_p = torch.where(p_MD > 0, grad_u, grad_u * slope_D.to(grad_u.dtype))
        grad_beta = _column_sums(grad_p)
        grad_gamma = _column_sums(grad_p * x_MD)
        parts = grad_p.mul_(gamma_D.to(grad_p.dtype)).split(ctx.edge_widths, 1)
        grad_inputs = [images(part, shape) for part, shape in zip(parts, ctx.images, strict=True)]
        return (None, None, grad_gamma, grad_beta, grad_slope, *small[:4], *grad_inputs)


_mix = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _MixFunction.apply)


def _scale_shift(x_MD: Tensor, gamma_D: Tensor, beta_D: Tensor) -> Tensor:
    return torch.addcmul(beta_D.to(x_MD.dtype), x_MD, gamma_D.to(x_MD.dtype))


def _scale_groups(x_MD: Tensor, factor_GD: Tensor) -> Tensor:
    groups, width = factor_GD.shape
    return (x_MD.view(groups, -1, width) * factor_GD.to(x_MD.dtype)[:, None]).view(-1, width)


def _grouped_product(x_MA: Tensor, matrix_GAB: Tensor, bias_GB: Tensor | None) -> Tensor:
    """x @ matrix + bias; each group of rows has its own matrix and bias, or one matrix and its own bias."""
    width, matrices = matrix_GAB.shape[2], matrix_GAB.shape[0]
    if matrices == 1 and bias_GB is not None and bias_GB.shape[0] == 1:
        return torch.addmm(bias_GB[0], x_MA, matrix_GAB[0])
    product = torch.bmm(x_MA.view(matrices, -1, x_MA.shape[1]), matrix_GAB).view(-1, width)
    if bias_GB is not None:
        product.view(bias_GB.shape[0], -1, width).add_(bias_GB[:, None])
    return product


def _grouped_backward(x_MA: Tensor, grad_MB: Tensor, matrices: int, groups: int) -> tuple[Tensor, Tensor]:
    """Gradients of the matrices and of the biases of `_grouped_product`, in float32 at least."""
    x = x_MA.view(matrices, -1, x_MA.shape[1])
    grad_matrix = _summed_product(x, grad_MB.view(matrices, -1, grad_MB.shape[1]))
    if groups == 1:
        return grad_matrix, _column_sums(grad_MB)[None]
    return grad_matrix, grad_MB.view(groups, -1, grad_MB.shape[1]).sum(1, dtype=wide(grad_MB))


def wide(x: Tensor) -> torch.dtype:
    """The type for sums and probabilities: that of the tensor, but float32 for bfloat16."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _summed_product(a_GMA: Tensor, b_GMB: Tensor) -> Tensor:
    """a^T b per group; bfloat16 products are rounded per chunk of rows and summed in float32."""
    groups, count = a_GMA.shape[:2]
    if a_GMA.dtype != torch.bfloat16 or count % _CHUNK_ROWS:
        return torch.bmm(a_GMA.transpose(1, 2), b_GMB).to(wide(a_GMA))
    a, b = (x.reshape(-1, _CHUNK_ROWS, x.shape[2]) for x in (a_GMA, b_GMB))
    products = torch.bmm(a.transpose(1, 2), b)
    return products.view(groups, -1, *products.shape[1:]).sum(1, dtype=torch.float32)


def _column_sums(x_MD: Tensor) -> Tensor:
    """Sums over the rows: in two steps, which is faster than one and as exact; in bfloat16 as a product with ones."""
    if x_MD.dtype == torch.bfloat16:
        return _summed_product(x_MD.new_ones(1, x_MD.shape[0], 1), x_MD[None])[0, 0]
    return x_MD.view(math.gcd(x_MD.shape[0], 64), -1, x_MD.shape[1]).sum(1).sum(0)


def _gram_blocks(widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first column, end, K): runs of edges of equal width K, cut into blocks of few columns."""
    blocks: list[tuple[int, int, int]] = []
    column = 0
    for width in widths:
        if blocks and blocks[-1][2] == width and blocks[-1][1] - blocks[-1][0] + width <= _GRAM_COLUMNS:
            blocks[-1] = (blocks[-1][0], column + width, width)
        else:
            blocks.append((column, column + width, width))
        column += width
    return blocks


def _grams(u_MD: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """U^T U, for each block of columns."""
    blocks = (u_MD[:, start:stop] for start, stop, _ in _gram_blocks(widths))
    return [_summed_product(block[None], block[None])[0] for block in blocks]


def _output_moments(
    widths: Sequence[int], weight_DC: Tensor, mean_D: Tensor, grams: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of every edge's output W u over the batch: W mu and diag(W Cov W^T)."""
    means, variances = [], []
    for (start, stop, width), gram in zip(_gram_blocks(widths), grams, strict=True):
        num = (stop - start) // width
        weight = weight_DC[start:stop].view(num, width, -1)
        mean = mean_D[start:stop].view(num, width, 1)
        diagonal = gram.view(num, width, num, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        covariance = diagonal - mean * mean.transpose(1, 2)
        means.append((weight * mean).sum(1))
        variances.append((torch.bmm(covariance, weight) * weight).sum(1))
    return torch.cat(means), torch.cat(variances).clamp_min(0)


def _fold(
    owner_D: Tensor,
    mean_EC: Tensor,
    var_EC: Tensor,
    weight_DC: Tensor,
    gamma_EC: Tensor,
    beta_EC: Tensor,
    mix_GE: Tensor,
    *,
    scaled: bool,
) -> tuple[Tensor, Tensor]:
    """The last BN and the mixing weights folded into matrices and biases (`scaled`: the weights are applied to U)."""
    gain_EC = gamma_EC * (var_EC + EPS).rsqrt()
    bias_GC = (mix_GE[:, :, None] * (beta_EC - gain_EC * mean_EC)).sum(1)
    gain_GEC = gain_EC[None] if scaled else mix_GE[:, :, None] * gain_EC
    return weight_DC * gain_GEC[:, owner_D], bias_GC


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
        if self.training:
            y, mean, var = _normalise(y_NEC.flatten(1)[:, :, None, None])
            if update:
                stats.update(mean.view(len(index), -1), var.view(len(index), -1), len(y_NEC), edges)
            y_NEC = y.view(y_NEC.shape)
        else:
            y_NEC = (y_NEC - stats.mean[edges]) * (stats.var[edges] + EPS).rsqrt()
        y_NEC = y_NEC * self.out_affine.weight[edges] + self.out_affine.bias[edges]
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
        return F.conv2d(h, self.pointwise.to(h.dtype), self.bias.to(h.dtype))


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, to an exact size."""
    return x if x.shape[2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)


def pool(x: Tensor, *, largest: bool) -> Tensor:
    """2x2 pooling, rounding sizes up; what lies outside the map is not counted."""
    if largest:
        return F.max_pool2d(x, 2, ceil_mode=True)
    return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
