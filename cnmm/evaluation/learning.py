"""Where the learning went: how much of every edge was learned, how far the gates moved, and what that changes.

A batch normalisation follows every 1x1 convolution of a block, so what an edge has learned is how far its matrix has
turned away from its initialisation: 1 - cos^2 of the angle between them is the share of its energy that was learned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import inside
from cnmm.lattice import Rule
from cnmm.mixture import Mixture
from cnmm.plan import Plan
from cnmm.prune import cutting_order
from cnmm.run_folder import CONFIG_FILE, is_run, load, read_config, read_log

_TRAIN: dict[str, _fields.Check] = {
    "lr": _fields.NUMBER,
    "weight_decay": _fields.NUMBER,
    "momentum": _fields.number(0, below=1),
    "seed": _fields.whole(0, 2**63 - 1),
}
"""What is read of how a run was trained."""
INITIALISATION, NORMS = "initialisation", "norms"


@dataclass(frozen=True, kw_only=True)
class LearnedMatrix:
    """How much of one matrix was learned."""

    name: str
    """An edge such as "4->7", or "shared 4": the pointwise convolution that the edges out of map 4 share."""
    block: int
    """Counted from 1."""
    share: float


@dataclass(frozen=True, kw_only=True)
class LearnedOrder:
    """Is a cutting order learned, or that of the untrained gates?"""

    rule: Rule
    exit: int
    cuts: int
    kept: int
    """Edges that survive so many cuts by the learned order."""
    common: int
    """Those of them that survive as many cuts by the flow of the untrained gates."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What `learning_report` found."""

    method: str
    """What shares are computed from: the initialisation, or norms, where the initialisation cannot be made again."""
    matrices: tuple[LearnedMatrix, ...]
    gates_mean: float
    gates_max: float
    """How far the gates' probabilities moved."""
    orders: tuple[LearnedOrder, ...]
    gradients: Mapping[str, float] | None
    """Norm of the gradient before clipping, by block, in the last epoch that was logged."""

    def blocks(self) -> dict[int, tuple[float, float]]:
        """Mean and least learned share of each block."""
        shares: dict[int, list[float]] = {}
        for matrix in self.matrices:
            shares.setdefault(matrix.block, []).append(matrix.share)
        return {block: (sum(values) / len(values), min(values)) for block, values in sorted(shares.items())}

    def to_dict(self) -> dict[str, Any]:
        blocks = [{"block": block, "mean": mean, "least": least} for block, (mean, least) in self.blocks().items()]
        return {**dataclasses.asdict(self), "blocks": blocks}


def learning_report(source: str | Path | Mixture, seed: int = 0) -> Learning:
    """What a run folder has learned since its initialisation; of a model, since the one that `seed` gives.

    A run says its seed. If it began from the weights of another run that is gone, shares come from norms: gradients are
    orthogonal to a matrix that is normalised, so learning makes norms larger than weight decay alone leaves them.
    """
    if isinstance(source, Mixture):
        return _report(source, initial_model(source, seed), {}, None)
    if not is_run(source):
        raise UserError(f"{source}: not a run folder, and only what was trained has learned something")
    model, about = load(source), read_config(source)
    init, train = about.get("init"), about.get("train", {})
    with inside(Path(source) / CONFIG_FILE):
        _fields.get_all(train, {name: _TRAIN[name] for name in _TRAIN if name in train}, "train.")
    if init is None:
        initial: Mixture | None = initial_model(model, train.get("seed", seed))
    else:
        initial = load(init) if is_run(init) else None
    return _report(model, initial, train, next(reversed(read_log(source)), None))


def initial_model(model: Mixture, seed: int) -> Mixture:
    """The model as a training with this seed begins, but for its stem."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mixture(model.config)


def _report(
    model: Mixture, initial: Mixture | None, train: Mapping[str, Any], line: Mapping[str, Any] | None
) -> Learning:
    config, lattice = model.config, model.lattice
    if initial is None:
        left = _left_by_decay(train, line)
        shares = [max(0.0, 1 - (left * each.initial_norm / _norm(each.values)) ** 2) for each in _matrices(model)]
    else:
        pairs = zip(_matrices(model), _matrices(initial), strict=True)
        shares = [max(0.0, 1 - _cosine(each.values, start.values) ** 2) for each, start in pairs]
    matrices = tuple(
        LearnedMatrix(name=each.name, block=lattice.block(each.node) + 1, share=share)
        for each, share in zip(_matrices(model), shares, strict=True)
    )
    moved, orders = [0.0], tuple[LearnedOrder, ...]()
    if config.mixing == "gates":
        untrained = Plan(config) if initial is None else Plan(config, tuple(initial.chain.detach().logits))
        before, after = untrained.chain.gates(), model.chain.detach().gates()
        moved = [abs(after[edge] - before[edge]) for edge in lattice.edges]
        orders = tuple(_orders(model, untrained))
    return Learning(
        method=NORMS if initial is None else INITIALISATION,
        matrices=matrices,
        gates_mean=sum(moved) / len(moved),
        gates_max=max(moved),
        orders=orders,
        gradients=_gradients(line) if line else None,
    )


def _gradients(line: Mapping[str, Any]) -> dict[str, float] | None:
    found = _fields.get(line, "gradients", _fields.or_null(_fields.OBJECT))
    return found and {name: norm for name, norm in found.items() if _fields.is_number(norm)}


class _Matrix(NamedTuple):
    name: str
    node: int
    values: Tensor
    inputs: int
    """What it is initialised by: uniform within 1 / sqrt(inputs)."""

    @property
    def initial_norm(self) -> float:
        return math.sqrt(self.values.numel() / (3 * self.inputs))


def _matrices(model: Mixture) -> Iterator[_Matrix]:
    """Every matrix of the blocks: of the edges into each map, and its shared pointwise convolution."""
    for node in range(1, model.lattice.output):
        this = model.map_module(node)
        for k, source in enumerate(this.sources):
            start, end = this.mix.span(k)
            yield _Matrix(f"{source}->{node}", node, this.mix.weight.detach()[start:end], end - start)
        if this.shared is not None:
            values = this.shared.pointwise.detach().flatten(1)
            yield _Matrix(f"shared {node}", node, values, values.shape[1])


def _orders(model: Mixture, untrained: Plan) -> Iterator[LearnedOrder]:
    """After half of the cuts of each exit that has some."""
    rules: tuple[Rule, ...] = ("flow", "damage") if model.orders else ("flow",)
    for rule in rules:
        for exit in model.config.exit_numbers:
            learned, before = cutting_order(model, exit, rule=rule), cutting_order(untrained, exit)
            cuts = min(len(learned), len(before)) // 2
            if cuts:
                kept = learned[cuts].edges
                common = len(kept & before[cuts].edges)
                yield LearnedOrder(rule=rule, exit=exit, cuts=cuts, kept=len(kept), common=common)


def _left_by_decay(train: Mapping[str, Any], line: Mapping[str, Any] | None) -> float:
    """What weight decay alone leaves of a norm: SGD's rate is half of the highest on average."""
    if line is None or train.get("optimizer", "sgd") != "sgd":
        raise UserError("its initialisation is gone, and norms tell what was learned only of a run trained by SGD")
    lr, weight_decay, momentum = (_fields.get(train, name, _TRAIN[name], "train.") for name in _TRAIN if name != "seed")
    decay = line["step"] * lr / 2 * weight_decay / (1 - momentum)
    return math.exp(-decay)


def _norm(matrix: Tensor) -> float:
    return max(float(matrix.norm()), 1e-12)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum() / (_norm(a.double()) * _norm(b.double())))
