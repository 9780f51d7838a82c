"""Moves the parameters of a peer: all by SGD, or its convolutions by Muon and the rest by Adam, as for mixtures."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from cnmm.training.batches import use_bfloat16
from cnmm.training.config import TrainConfig
from cnmm.training.muon import Muon, Stack
from cnmm.training.optim import ADAM_BETAS, learning_rate


class PeerOptimizer:
    """All state is tensors by name (`tensors`): checkpoints hold it."""

    def __init__(self, network: nn.Module, config: TrainConfig) -> None:
        self.network, self.config = network, config
        adam = config.optimizer == "muon"
        stacks = weight_matrices(network) if adam else []
        self.muon = Muon(stacks, momentum=config.momentum, narrow=use_bfloat16(config.precision))
        taken = set(map(id, self.muon.parameters))
        self.others = [p for p in network.parameters() if p.requires_grad and id(p) not in taken]
        groups = _groups(network, config, self.others)
        self.rest: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=True)
            if adam
            else torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        )
        slots = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
        for parameter in self.others:  # there from the start, so that a checkpoint can fill them
            self.rest.state[parameter] |= {slot: torch.zeros_like(parameter) for slot in slots}
            if adam:
                self.rest.state[parameter]["step"] = torch.zeros(())

    def step(self, loss: Tensor, part: float) -> None:
        """One step down the gradient of a loss; `part` of the training is done before it."""
        self.network.zero_grad()
        torch.autograd.backward(loss)
        for group in self.rest.param_groups:
            group["lr"] = learning_rate(self.config, part) * group["factor"]
        self.rest.step()
        if self.muon.stacks:
            self.muon.step(learning_rate(self.config, part, self.config.matrix_lr))

    def tensors(self) -> dict[str, Tensor]:
        """All state by name."""
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        state = {f"norms.{height}x{width}": norms for (height, width), norms in self.muon.norms.items()}
        for parameter, momentum in zip(self.muon.parameters, self.muon.momentum, strict=True):
            state[f"momentum.{names[id(parameter)]}"] = momentum
        for parameter in self.others:
            slots = self.rest.state[parameter].items()
            state |= {f"{slot}.{names[id(parameter)]}": tensor for slot, tensor in slots}
        return state


def weight_matrices(network: nn.Module) -> list[Stack]:
    """Weights of convolutions without bias, which a normalisation follows, group by group; no depthwise ones."""
    stacks = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None and module.in_channels > module.groups:
            heights = (module.out_channels // module.groups,) * module.groups
            stacks.append(Stack(cast(nn.Parameter, module.weight), heights))
    return stacks


def _groups(network: nn.Module, config: TrainConfig, parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    """By weight decay, of which normalisations and biases may be spared, and by learning rate, faster for shifts."""
    shifts = {id(module.bias) for module in network.modules() if isinstance(module, nn.BatchNorm2d)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        decay = config.weight_decay if config.decay_all or parameter.dim() > 1 else 0.0
        factor = config.shift_lr if id(parameter) in shifts else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "factor": factor} for (decay, factor), members in groups.items()]
