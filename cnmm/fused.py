"""A map as one product, with its backward by hand.

Everything after the ReLU of an edge is linear, and so is the mixing of the edges into a map. Hence a map is ONE 1x1
convolution over its concatenated inputs `U` (`mix`), and its matrix has the last batch normalisation and the mixing
weights folded in. In training, the statistics of that normalisation follow from mean and covariance of `U`:
mean = W mu, var = diag(W Cov W^T). This is exact. The first normalisation is never written to memory either: edges of
one kind share its moments (`batch_moments`), and each edge has one scale and shift for moments and affine together.

Shapes: N images, M pixels of all images, G groups of images that share one draw of the gates, E edges into a map,
K channels of one edge's input, D = sum of K over the edges, C channels of the map. Suffixes name them: `u_MD`.
Parameters, statistics and the small algebra keep the parameters' type; activations may be bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

from cnmm import distributed
from cnmm.rows import activate_rows, column_sums, images, prelu_backward, rows, scale_shift, wide

EPS = 1e-5


class _BatchMoments(torch.autograd.Function):
    """Mean and 1 / standard deviation of every channel, [2, C]; and, without gradients, mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _moments(x)
        moments_2C = torch.stack([mean, (var + EPS).rsqrt()])
        ctx.save_for_backward(x, moments_2C)
        ctx.mark_non_differentiable(mean, var)
        return moments_2C, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2C: Tensor, *_: Tensor) -> Tensor:
        x, (mean, rstd) = ctx.saved_tensors
        (grad_2C,) = distributed.total([grad_2C])
        grad_mean, grad_rstd = grad_2C / (x.numel() // x.shape[1] * distributed.world_size())
        slope = -grad_rstd * rstd**3
        return images(scale_shift(rows(x), slope, grad_mean - slope * mean, x.shape), x.shape)


batch_moments = cast(Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], _BatchMoments.apply)


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


class _MixFunction(torch.autograd.Function):
    """`blocks.Mix` with a backward by hand: big products on [M, D] here, the small algebra in `_Fold`.

    Columns of U come in runs of edges of equal width: those that read maps as they are, then those that pool them.
    """

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
        *read: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        moments, inputs = read[: len(widths)], read[len(widths) :]
        shape, runs = inputs[0].shape, _runs(widths)
        moments_2D = torch.cat(moments, 1)
        scale_D = gamma_D * moments_2D[1]
        shift_D = beta_D - scale_D * moments_2D[0]
        xs = [_beside([rows(x) for x in inputs[run.edges]]) for run in runs]
        us = [
            activate_rows(scale_shift(x, scale_D[run.columns], shift_D[run.columns], shape), _columns(slope_D, run))
            for x, run in zip(xs, runs, strict=True)
        ]
        groups, num_rows = mix_GE.shape[0], us[0].shape[0]
        # One matrix per group of images, unless scaling a group's rows touches less memory than its matrix.
        scaled = groups > 1 and num_rows // groups < weight_DC.shape[1]

        fold = _Fold(runs, weight_DC, out_gamma_EC, out_beta_EC, mix_GE, scaled=scaled)
        if running is None:
            count = num_rows * distributed.world_size()
            grams = [_gram(u, run.width, shape) for u, run in zip(us, runs, strict=True)]
            mean_D, *grams = (
                part / count for part in distributed.total([torch.cat([column_sums(u)[0] for u in us]), *grams])
            )
            fold.measure(mean_D, grams)
        else:
            fold.take(*running)
        matrix_GDC, bias_GC = (part.to(us[0].dtype) for part in fold.fold())
        h_MC: Tensor | None = None
        for u, run in zip(us, runs, strict=True):
            v = _scale_groups(u, fold.mix_GD[:, run.columns]) if scaled else u
            part = _product(v, matrix_GDC[:, run.columns], bias_GC if h_MC is None else None, shape)
            h_MC = part if h_MC is None else h_MC.add_(part)

        ctx.save_for_backward(moments_2D, gamma_D, scale_D, shift_D, slope_D, matrix_GDC, *xs, *us)
        ctx.images = [x.shape for x in inputs]
        ctx.fold = fold
        ctx.mark_non_differentiable(fold.mean_EC, fold.var_EC)
        return cast(Tensor, h_MC), fold.mean_EC, fold.var_EC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        moments_2D, gamma_D, scale_D, shift_D, slope_D, matrix_GDC, *tensors = ctx.saved_tensors
        fold, runs, shape = ctx.fold, ctx.fold.runs, ctx.images[0]
        xs, us = tensors[: len(runs)], tensors[len(runs) :]
        groups = fold.mix_GE.shape[0]
        grad_MC = grad_MC.contiguous()

        scales = [fold.mix_GD[:, run.columns] for run in runs] if fold.scaled else []
        vs = [_scale_groups(u, scale) for u, scale in zip(us, scales, strict=True)] if scales else us
        grad_matrix = [_product_backward(v, grad_MC, matrix_GDC.shape[0], shape) for v in vs]
        grad_bias = column_sums(grad_MC, groups)
        small, through = fold.backward(torch.cat(grad_matrix, 1), grad_bias)
        if through:  # by batch statistics: through the mean and the Gram matrix of U
            count = grad_MC.shape[0] * distributed.world_size()
            grad_mean_D, *grad_grams = (grad / count for grad in distributed.total(through))

        grad_inputs, grad_gammas, grad_betas, grad_slopes = [], [], [], []
        for number, (run, x, u) in enumerate(zip(runs, xs, us, strict=True)):
            grad_u = _product(grad_MC, matrix_GDC[:, run.columns].transpose(1, 2), None, shape)
            if scales:
                per_group = (grad_u * u).view(groups, -1, u.shape[1]).sum(1, dtype=fold.mix_GE.dtype)
                small[3][:, run.edges] += per_group.view(groups, -1, run.width).sum(2)
                grad_u = _scale_groups(grad_u, scales[number])
            if through:
                grad_u += _edgewise(u, 2 * grad_grams[number], grad_mean_D[run.columns], shape)
            scale, shift, slope = scale_D[run.columns], shift_D[run.columns], _columns(slope_D, run)
            if slope is None:
                grad_p = torch.ops.aten.threshold_backward.grad_input(grad_u, u, 0, grad_input=grad_u)
            else:
                grad_p, grad_slope = prelu_backward(grad_u, scale_shift(x, scale, shift, shape), slope)
                grad_slopes.append(grad_slope)
            mean, rstd = moments_2D[:, run.columns]
            affine = torch.ops.aten.native_batch_norm_backward(
                images(grad_p, shape), images(x, shape), rstd, None, None, mean, rstd, True, EPS, [False, True, True]
            )  # both sums in one pass
            grad_gammas.append(affine[1])
            grad_betas.append(affine[2])
            parts = grad_p.mul_(scale.to(grad_p.dtype)).view(-1, run.num, run.width).unbind(1)
            if grad_p.dtype == torch.bfloat16:  # adding up slices is slow in this type
                parts = tuple(part.contiguous() for part in parts)
            grad_inputs += [images(part, shape) for part, shape in zip(parts, ctx.images[run.edges], strict=True)]

        grad_gamma, grad_beta = torch.cat(grad_gammas), torch.cat(grad_betas)
        slopes = torch.cat(grad_slopes) if grad_slopes else None
        grad_moments_2D = torch.stack([-grad_beta * scale_D, grad_gamma * gamma_D / moments_2D[1]])
        grad_moments = [part for run in runs for part in grad_moments_2D[:, run.columns].view(2, run.num, -1).unbind(1)]
        return (None, None, grad_gamma, grad_beta, slopes, *small, *grad_moments, *grad_inputs)


mix = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _MixFunction.apply)
"""H_j as rows [M, C], and mean and variance [E, C] of the edges' outputs; takes the arguments of `_MixFunction`."""


class _Run(NamedTuple):
    """Edges of equal width side by side: which they are, and which columns of U are theirs."""

    width: int
    num: int
    edges: slice
    columns: slice


def _runs(widths: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    edge = column = 0
    for width, same in itertools.groupby(widths):
        num = len(list(same))
        runs.append(_Run(width, num, slice(edge, edge + num), slice(column, column + num * width)))
        edge, column = runs[-1].edges.stop, runs[-1].columns.stop
    return runs


class _Fold:
    """The small algebra of a map: the last BN and the mixing weights folded into matrices and biases.

    With W and mu, Cov of an edge's input: mean = W mu, var = diag(W Cov W^T), gain = gamma / sqrt(var + eps);
    matrix = mix gain W, bias = sum over the edges of mix (beta - gain mean). `scaled`: the mix is applied to U instead.
    """

    def __init__(
        self, runs: list[_Run], weight_DC: Tensor, gamma_EC: Tensor, beta_EC: Tensor, mix_GE: Tensor, *, scaled: bool
    ) -> None:
        self.runs, self.scaled = runs, scaled
        self.weight_DC, self.gamma_EC, self.beta_EC, self.mix_GE = weight_DC, gamma_EC, beta_EC, mix_GE
        self.mix_GD = self._spread(mix_GE.T).T
        self.measured: list[tuple[Tensor, Tensor, Tensor]] = []  # of each run: W, mu and Cov of the edges

    def take(self, mean_EC: Tensor, var_EC: Tensor) -> None:
        """The moments of the edges' outputs as they are."""
        self.mean_EC, self.var_EC = mean_EC, var_EC
        self.rstd_EC = (var_EC + EPS).rsqrt()
        self.gain_EC = self.gamma_EC * self.rstd_EC
        self.gain_DC = self._spread(self.gain_EC)
        self.plain_DC = self.weight_DC * self.gain_DC
        self.shift_EC = torch.addcmul(self.beta_EC, self.gain_EC, mean_EC, value=-1)

    def measure(self, mean_D: Tensor, grams: Sequence[Tensor]) -> None:
        """The same from the means of U and of its products, edge by edge."""
        means, variances = [], []
        for run, gram in zip(self.runs, grams, strict=True):
            mean = mean_D[run.columns].view(run.num, run.width, 1)
            weight = self.weight_DC[run.columns].view(run.num, run.width, -1)
            covariance = torch.baddbmm(gram, mean, mean.transpose(1, 2), alpha=-1)
            self.measured.append((weight, mean, covariance))
            means.append((weight * mean).sum(1))
            variances.append((torch.bmm(covariance, weight) * weight).sum(1))
        self.take(torch.cat(means), torch.cat(variances).clamp_min(0))

    def fold(self) -> tuple[Tensor, Tensor]:
        """Matrices [G, D, C], one if `scaled`, and biases [G, C]."""
        matrix_GDC = self.plain_DC[None] if self.scaled else self.plain_DC * self.mix_GD[:, :, None]
        return matrix_GDC, (self.mix_GE[:, :, None] * self.shift_EC).sum(1)

    def backward(self, grad_matrix: Tensor, grad_bias: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of W, gamma, beta and mix; then those of the mean of U and (symmetric) of the products of U."""
        grad_shift = self.mix_GE.T @ grad_bias
        grad_mix = grad_bias @ self.shift_EC.T
        if self.scaled:
            (grad_plain,) = grad_matrix
        else:
            grad_mix += self._gather((grad_matrix * self.plain_DC).sum(2).T).T
            grad_plain = (grad_matrix * self.mix_GD[:, :, None]).sum(0)
        grad_weight = grad_plain * self.gain_DC
        grad_gain = torch.addcmul(self._gather(grad_plain * self.weight_DC), grad_shift, self.mean_EC, value=-1)
        small = [grad_weight, grad_gain * self.rstd_EC, grad_shift, grad_mix]
        if not self.measured:
            return small, []
        grad_mean = -self.gain_EC * grad_shift
        grad_var = -0.5 * grad_gain * self.gain_EC * self.rstd_EC.square() * (self.var_EC > 0)
        means, grams = [], []
        for run, (weight, mean, covariance) in zip(self.runs, self.measured, strict=True):
            by_mean, by_var = grad_mean[run.edges, None], weight * grad_var[run.edges, None]
            grams.append(torch.bmm(by_var, weight.transpose(1, 2)))
            own = grad_weight[run.columns].view(weight.shape)
            own += torch.baddbmm(mean * by_mean, covariance, by_var, alpha=2)
            means.append(torch.baddbmm((weight * by_mean).sum(2, keepdim=True), grams[-1], mean, alpha=-2).flatten())
        return small, [torch.cat(means), *grams]

    def _spread(self, values_EX: Tensor) -> Tensor:
        """[E, X] to [D, X]: every column of an edge has its value."""
        return _beside([values_EX[run.edges].repeat_interleave(run.width, 0) for run in self.runs], 0)

    def _gather(self, values_DX: Tensor) -> Tensor:
        """[D, X] to [E, X]: sums over the columns of every edge."""
        return _beside([values_DX[run.columns].view(run.num, run.width, -1).sum(1) for run in self.runs], 0)


def _beside(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _columns(values_D: Tensor | None, run: _Run) -> Tensor | None:
    return None if values_D is None else values_D[run.columns]


def _scale_groups(x_MD: Tensor, factor_GD: Tensor) -> Tensor:
    groups, width = factor_GD.shape
    return (x_MD.view(groups, -1, width) * factor_GD.to(x_MD.dtype)[:, None]).view(-1, width)


def _product(x_MA: Tensor, matrix_GAB: Tensor, bias_GB: Tensor | None, shape: Sequence[int]) -> Tensor:
    """x @ matrix + bias; each group of rows has its own matrix and bias, or one matrix and its own bias.

    One matrix for all is a convolution: oneDNN's kernels are faster than a matrix product, and add the bias on the way.
    """
    matrices, width = matrix_GAB.shape[0], matrix_GAB.shape[2]
    if matrices == 1 and (bias_GB is None or bias_GB.shape[0] == 1):
        kernel = matrix_GAB[0].T.contiguous()[:, :, None, None]
        return rows(F.conv2d(images(x_MA, shape), kernel, None if bias_GB is None else bias_GB[0]))
    product = torch.bmm(x_MA.view(matrices, -1, x_MA.shape[1]), matrix_GAB).view(-1, width)
    if bias_GB is not None:
        product.view(bias_GB.shape[0], -1, width).add_(bias_GB[:, None])
    return product


def _product_backward(x_MA: Tensor, grad_MB: Tensor, matrices: int, shape: Sequence[int]) -> Tensor:
    """Gradient of the matrices of `_product`, in float32 at least."""
    if matrices > 1:
        x, grad = (part.view(matrices, -1, part.shape[1]) for part in (x_MA, grad_MB))
        return torch.bmm(x.transpose(1, 2), grad).to(wide(x_MA))
    kernel = (x_MA.shape[1], grad_MB.shape[1], 1, 1)
    found: Tensor = conv2d_weight(images(grad_MB, shape), kernel, images(x_MA, shape))  # type: ignore[no-untyped-call]
    return found.to(wide(x_MA))[None, :, :, 0, 0]


def _gram(u_MD: Tensor, width: int, shape: Sequence[int]) -> Tensor:
    """The products U^T U of every edge's own columns, [E, K, K]: the weight gradient of a convolution of U with U."""
    u = images(u_MD, shape)
    kernel = (u_MD.shape[1], width, 1, 1)
    gram: Tensor = conv2d_weight(u, kernel, u, groups=u_MD.shape[1] // width)  # type: ignore[no-untyped-call]
    return gram.view(-1, width, width).to(wide(u_MD))


def _edgewise(u_MD: Tensor, matrix_EKK: Tensor, bias_D: Tensor, shape: Sequence[int]) -> Tensor:
    """Every edge's own columns times its own symmetric matrix, plus a bias."""
    kernel = matrix_EKK.to(u_MD.dtype).view(u_MD.shape[1], -1, 1, 1)
    return rows(F.conv2d(images(u_MD, shape), kernel, bias_D.to(u_MD.dtype), groups=len(matrix_EKK)))
