"""The optimizer: one step of it, its learning rate, what decays, and averages of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cnmm import distributed
from cnmm.blocks import Affine, PixelClassifier
from cnmm.mixture import Mixture
from cnmm.training.config import TrainConfig
from cnmm.training.ladder_tuning import tunes_ladder


def make_optimizer(model: Mixture, config: TrainConfig) -> torch.optim.SGD:
    """SGD with momentum; weight decay on everything, or on convolution and linear weights only."""
    spared = set() if config.decay_all else set(map(id, small_parameters(model)))
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in spared]
    plain = [parameter for parameter in model.parameters() if id(parameter) in spared]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=True,
    )


def small_parameters(model: Mixture) -> Iterator[nn.Parameter]:
    """Gates, scales, shifts and slopes of normalisations, and biases: what weight decay may spare."""
    for module in model.modules():
        if isinstance(module, Affine):
            yield from module.parameters(recurse=False)
        elif isinstance(module, nn.Linear | PixelClassifier):
            yield module.bias
        elif isinstance(module, Mixture) and module.config.mixing == "gates":
            yield module.gate_logits


def take_step(
    model: Mixture, optimizer: torch.optim.Optimizer, loss: Tensor, config: TrainConfig, *, part: float
) -> None:
    """One step down the gradient of a loss; `part` of the training is done before it."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    if tunes_ladder(model, config, part):
        model.gate_logits.grad = None  # the ladder stands still while it is tuned
    average_gradients(model)
    if config.clip:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, part)
    optimizer.step()


def learning_rate(config: TrainConfig, part: float) -> float:
    """A linear rise over the warm-up, then half a cosine down to zero."""
    if part < config.warmup:
        return config.lr * part / config.warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (part - config.warmup) / (1 - config.warmup)))


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Every process had its part of the batch: the gradient of the whole is the mean of the parts'."""
    if distributed.world_size() == 1:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    sums = distributed.total([parameter.grad for parameter in parameters if parameter.grad is not None])
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient / distributed.world_size()


class Average:
    """A moving average of the parameters; empty when it is not wanted."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = (
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()} if decay else {}
        )

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        if self.tensors:
            torch._foreach_lerp_(list(self.tensors.values()), list(model.parameters()), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                parameter.copy_(self.tensors[name])
