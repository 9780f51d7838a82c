"""Muon, edge by edge: every matrix of a block learns at the same relative speed.

A batch normalisation follows every 1x1 convolution of a block, so only the direction of its weights matters. By SGD,
how fast a direction turns depends on the edge's mixing weight and on what decay has left of its norm: edges that are
late or rarely used stay as they were initialised. Here each edge's matrix [K, C], and each pointwise one, keeps its
norm and turns by the same angle in every step, in the direction of its orthogonalised momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cnmm.blocks import Mix, Shared

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: they push small singular values up fastest, and end between 0.7 and 1.2."""
NEWTON_SCHULZ_STEPS = 3
_TINY = 1e-12


@dataclass(frozen=True)
class Stack:
    """A parameter that holds matrices below one another."""

    parameter: nn.Parameter
    heights: tuple[int, ...]
    """Rows of each matrix."""

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """The matrices of the parameter, or of a tensor of its shape."""
        return torch.split_with_sizes(values.flatten(1), self.heights)


def edge_matrices(model: nn.Module) -> Iterator[Stack]:
    """The 1x1 convolutions that a normalisation follows: of all edges into maps, and of the shared parts.

    Depthwise convolutions have no matrix to speak of, and the large FC of a classifier's output gains nothing.
    """
    for module in model.modules():
        if isinstance(module, Mix):
            yield Stack(module.weight, module.widths)
        elif isinstance(module, Shared):
            yield Stack(module.pointwise, (module.pointwise.shape[0],))


class Muon:
    """Turns matrices by the same angle in every step; all of one shape at once.

    Their norms are those at the start. They belong to the state: a training that goes on in another process has
    another initialisation.
    """

    def __init__(self, stacks: Iterable[Stack], *, momentum: float, narrow: bool) -> None:
        """`narrow`: orthogonalise in bfloat16."""
        self.stacks, self.decay, self.narrow = list(stacks), momentum, narrow
        self.momentum = [torch.zeros_like(stack.parameter) for stack in self.stacks]
        self.weights = self._by_shape(stack.parameter.detach() for stack in self.stacks)
        """Views of all matrices, by shape."""
        self.norms = {shape: _norms(torch.stack(views)) for shape, views in self.weights.items()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [stack.parameter for stack in self.stacks]

    @torch.no_grad()
    def step(self, angle: float) -> None:
        """`angle`: the length of the step relative to the matrix; then the matrix gets its norm back."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        torch._foreach_mul_(self.momentum, self.decay)
        torch._foreach_add_(self.momentum, gradients)
        ways = self._by_shape(torch._foreach_add(gradients, self.momentum, alpha=self.decay))  # Nesterov's
        for shape, parts in ways.items():
            way = orthogonalised(torch.stack(parts), narrow=self.narrow)
            weight, norms = torch.stack(self.weights[shape]), self.norms[shape]
            weight.addcmul_(way, norms / _norms(way), value=-angle)
            weight.mul_(norms / _norms(weight))
            torch._foreach_copy_(self.weights[shape], list(weight.unbind()))

    def _by_shape(self, tensors: Iterable[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
        shapes: dict[tuple[int, int], list[Tensor]] = {}
        for stack, tensor in zip(self.stacks, tensors, strict=True):
            for matrix in stack.split(tensor):
                shapes.setdefault((matrix.shape[0], matrix.shape[1]), []).append(matrix)
        return shapes


def orthogonalised(matrices: Tensor, *, narrow: bool, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """[B, K, C] with singular values pushed towards one by Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / _norms(matrices)
    x = x.bfloat16() if narrow else x
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.transpose(1, 2) if tall else x
    return x.to(matrices.dtype)


def _norms(matrices: Tensor) -> Tensor:
    """Frobenius norms, [B, 1, 1]."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norms.clamp_min(_TINY)
