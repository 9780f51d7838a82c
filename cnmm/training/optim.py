"""The optimizer: one step of it, its learning rate, what decays, and averages of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from cnmm import distributed
from cnmm.blocks import Affine, Mix, PixelClassifier, Shared, VectorOutput
from cnmm.mixture import Map, Mixture
from cnmm.training.batches import use_bfloat16
from cnmm.training.config import TrainConfig
from cnmm.training.ladder_tuning import tunes_ladder
from cnmm.training.muon import Muon, edge_matrices

ADAM_BETAS = (0.9, 0.99)
CYCLE = 5
"""Epochs of a cycle of the cyclic schedule."""
MILESTONES = (30, 60, 90, 120, 150, 170, 190)
"""Epochs at which its rates are halved."""
_SLOTS = {"momentum_buffer": "momentum", "exp_avg": "momentum", "exp_avg_sq": "second", "step": "steps"}
"""State of torch's optimizers, and what it is called in checkpoints."""


class Optimizer:
    """All parameters of a mixture: by SGD as in the paper, or the matrices of the blocks by Muon and the rest by Adam.

    All state is tensors by name (`tensors`): checkpoints hold it, and a resumed training is the same, bit by bit.
    """

    def __init__(self, model: Mixture, config: TrainConfig) -> None:
        self.model, self.config = model, config
        with_muon = config.optimizer == "muon"
        stacks = edge_matrices(model) if with_muon else ()
        self.muon = Muon(stacks, momentum=config.momentum, narrow=use_bfloat16(config.precision, model.stem.device))
        taken = set(map(id, (*self.muon.parameters, *(outer_parameters(model) if config.freeze_out else ()))))
        self.others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
        """What SGD or Adam moves."""
        groups = parameter_groups(model, config, self.others)
        self.rest: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=True)
            if with_muon
            else torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        )

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def clip(self) -> None:
        """Shortens a long gradient of what SGD or Adam moves; Muon takes a step of the same length anyway."""
        nn.utils.clip_grad_norm_(self.others, self.config.clip)

    def step(self, part: float) -> None:
        """`part` of the training is done before it. What has no gradient stands still."""
        for group in self.rest.param_groups:
            group["lr"] = learning_rate(self.config, part) * group["factor"]
        self.rest.step()
        if self.muon.stacks:
            self.muon.step(learning_rate(self.config, part, self.config.matrix_lr))

    def tensors(self) -> dict[str, Tensor]:
        """All state by name; what is not there yet is zero."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        state: dict[str, Tensor] = {}
        for parameter, momentum in zip(self.muon.parameters, self.muon.momentum, strict=True):
            state[f"momentum.{names[id(parameter)]}"] = momentum
        state |= {f"norms.{height}x{width}": norms for (height, width), norms in self.muon.norms.items()}
        adam = isinstance(self.rest, torch.optim.AdamW)
        for parameter in self.others:
            slots = self.rest.state[parameter]
            for slot in ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",):
                if slots.get(slot) is None:
                    slots[slot] = torch.zeros_like(parameter)
            if adam and "step" not in slots:
                slots["step"] = torch.zeros((), device=parameter.device)
            state |= {f"{_SLOTS[slot]}.{names[id(parameter)]}": tensor for slot, tensor in slots.items()}
        return state


def parameter_groups(
    model: Mixture, config: TrainConfig, parameters: Iterable[nn.Parameter]
) -> list[dict[str, object]]:
    """Some parameters of a mixture, by weight decay and by the factor of their learning rate."""
    spared = set() if config.decay_all else set(map(id, small_parameters(model)))
    shifts = set(map(id, shift_parameters(model)))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        decay = 0.0 if id(parameter) in spared else config.weight_decay
        factor = config.shift_lr if id(parameter) in shifts else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "factor": factor}
        for (decay, factor), members in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def small_parameters(model: Mixture) -> Iterator[nn.Parameter]:
    """Gates, scales, shifts and slopes of normalisations, and biases: what weight decay may spare."""
    for module in model.modules():
        if isinstance(module, Affine):
            yield from module.parameters(recurse=False)
        elif isinstance(module, nn.Linear | PixelClassifier):
            yield module.bias
        elif isinstance(module, Mixture) and module.config.mixing == "gates":
            yield module.gate_logits


def shift_parameters(model: Mixture) -> Iterator[nn.Parameter]:
    """Shifts of the normalisations in front of activations."""
    for module in model.modules():
        if isinstance(module, Shared | Mix | VectorOutput):
            yield module.affine.bias
        elif isinstance(module, PixelClassifier):
            yield from (module.first.bias, module.second.bias)


def outer_parameters(model: Mixture) -> Iterator[nn.Parameter]:
    """The last scale and shift of every edge into a map: one repeats its gate, a normalisation undoes the other."""
    for module in model.modules():
        if isinstance(module, Map):
            yield from module.mix.out_affine.parameters()


def take_step(
    model: Mixture,
    optimizer: Optimizer,
    loss: Tensor,
    config: TrainConfig,
    *,
    part: float,
    norms: GradientNorms | None = None,
) -> None:
    """One step down the gradient of a loss; `part` of the training is done before it. `norms` takes a note of it."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    if tunes_ladder(model, config, part):
        model.gate_logits.grad = None  # the ladder stands still while it is tuned
    average_gradients(model)
    if norms:
        norms.add()
    if config.clip:
        optimizer.clip()
    optimizer.step(part)


def learning_rate(config: TrainConfig, part: float, highest: float | None = None) -> float:
    """A linear rise over the warm-up to the highest rate (`lr` unless told), then the schedule."""
    highest = config.lr if highest is None else highest
    if config.schedule == "cyclic":
        return cyclic_rate(highest, math.floor(part * config.epochs + 1e-6), lowest=config.cycle_lr == "lowest")
    if part < config.warmup:
        return highest * part / config.warmup
    fallen = (part - config.warmup) / (1 - config.warmup)
    if config.schedule == "linear":
        return highest * (1 - fallen)
    return highest * 0.5 * (1 + math.cos(math.pi * (part - config.warmup) / (1 - config.warmup)))


def cyclic_rate(rate: float, epoch: int, *, lowest: bool) -> float:
    """The rate of an epoch, counted from 0: five times, four times, ... the lowest, which is halved at milestones.

    The first epoch has the lowest, as in the code of ESPNetv2. `rate`: the lowest of the first cycles, or the highest.
    """
    base = rate if lowest else rate / CYCLE
    base *= 0.5 ** sum(epoch >= milestone for milestone in MILESTONES)
    return base if epoch == 0 else base * (CYCLE - (epoch - 1) % CYCLE)


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Every process had its part of the batch: the gradient of the whole is the mean of the parts'."""
    if distributed.world_size() == 1:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    sums = distributed.total([parameter.grad for parameter in parameters if parameter.grad is not None])
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient / distributed.world_size()


class GradientNorms:
    """Norms of the gradients of some steps before they are clipped: of stem, blocks, output and gates."""

    def __init__(self, model: Mixture) -> None:
        names = {id(model.stem): "stem"}
        for node in range(1, model.lattice.output):
            block = str(model.lattice.block(node) + 1)
            names |= dict.fromkeys(map(id, model.map_module(node).parameters()), block)
        for part in (model.outputs, model.classifiers):
            names |= dict.fromkeys(map(id, part.parameters()), "output")
        self.parameters = [(names.get(id(parameter), "gates"), parameter) for parameter in model.parameters()]
        self.restart({})

    def restart(self, sums: Mapping[str, float]) -> None:
        """Begins, or goes on from sums of squares."""
        self.squares = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}

    @torch.no_grad()
    def add(self) -> None:
        """Takes a note of the gradients as they are."""
        present = [(name, parameter.grad) for name, parameter in self.parameters if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm([gradient for _, gradient in present])).double().square()
        for name in dict.fromkeys(name for name, _ in present):
            index = [k for k, (other, _) in enumerate(present) if other == name]
            own = squares[index].sum()
            self.squares[name] = self.squares[name].to(own) + own if name in self.squares else own

    def sums(self) -> dict[str, float]:
        """Sums of squares over the steps."""
        return {name: square.item() for name, square in self.squares.items()}

    def means(self, steps: int) -> dict[str, float]:
        """Root mean squares over the steps."""
        return {name: math.sqrt(square / steps) for name, square in self.sums().items()}


class Average:
    """A moving average of the parameters; empty when it is not wanted.

    It looks back over about a tenth of the steps at most: a long memory would keep a short training's initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = (
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()} if decay else {}
        )

    @torch.no_grad()
    def update(self, model: nn.Module, done: int) -> None:
        """After step `done`, counted from 0."""
        if self.tensors:
            decay = min(self.decay, (done + 1) / (done + 10))
            torch._foreach_lerp_(list(self.tensors.values()), list(model.parameters()), 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                parameter.copy_(self.tensors[name])

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Begins anew with the parameters as they are."""
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                self.tensors[name].copy_(parameter)
