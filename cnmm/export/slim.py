"""Slim networks: an operating point as a plain network. No gates, no batch normalisation, no dead layers.

One 1x1 convolution per map: the last BN of every edge and the mixing weights are folded into it, exactly as in
`blocks.Mix`. Everything between the pooling of the output edges and the class scores is linear, so it is one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnmm import _fields, blocks, fused
from cnmm._errors import UserError
from cnmm._files import inside, read_tensors, to_bytes, write_atomically, write_json
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.cost import Cost, CostTable
from cnmm.export import graph
from cnmm.export.graph import Graph, Step
from cnmm.export.ingredients import (
    ClassifierNorm,
    ClassifierPart,
    EdgeNorm,
    Kernel,
    MixedEdges,
    Norm,
    Remainder,
    Scores,
    SharedNorm,
    SharedPart,
    Stem,
)
from cnmm.lattice import Edge, OperatingPoint, Rule, build_lattice
from cnmm.mixture import Mixture
from cnmm.prune import named_point
from cnmm.run_folder import CONFIG_FILE, WEIGHTS_FILE, read_config


class SlimNetwork(nn.Module):
    """A graph with its tensors. `forward` gives the scores of its last exit, `forward_exits` those of all."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        self.preprocessing: Preprocessing | None = None
        self.layers = nn.ModuleDict()
        for step in graph.steps:
            if step.tensors:
                self.layers[step.name] = _Layer(step, tensors)

    @property
    def config(self) -> MixtureConfig:
        return self.graph.config

    @property
    def point(self) -> OperatingPoint:
        return self.graph.point

    @property
    def cost(self) -> Cost:
        """Of this network, as it is written and runs."""
        return self.graph.cost

    @property
    def mixture_cost(self) -> Cost:
        """Of the mixture at the same point, before anything is folded; several exits count every classifier."""
        table = CostTable.of(self.config)
        return table.total(table.lattice.exit_edges(self.point.exit, self.point.edges), len(self.graph.exits))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_exits(x)[self.graph.exits[-1]]

    def forward_exits(self, x: Tensor) -> dict[int, Tensor]:
        """Scores of every exit, for normalised float images of any size that the mixture takes."""
        made = {graph.IMAGE: x}
        for step in self.graph.steps:
            made[step.name] = self._run(step, [made[name] for name in step.inputs], (x.shape[2], x.shape[3]))
        return {exit: made[f"logits{exit}"] for exit in self.graph.exits}

    def _run(self, step: Step, inputs: list[Tensor], size: tuple[int, int]) -> Tensor:
        x = inputs[0]
        if step.tensors:
            return cast(Tensor, self.layers[step.name](x))
        if step.op == "concat":
            return torch.cat(inputs, 1)
        if step.op == "add":
            return inputs[0] + inputs[1]
        if step.op == "mean":
            return x.mean((2, 3), keepdim=True)
        if step.op == "pool":
            return blocks.pool(x, largest=step.largest)
        return blocks.upsample(x, graph.halved(size, step.halvings))


class _Layer(nn.Module):
    """A convolution, a linear layer or a scale and shift, with the activation behind it."""

    def __init__(self, step: Step, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.step = step
        for name, shape in step.tensors.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape:
                raise UserError(f"tensor {name!r} is {tuple(tensor.shape)}, the network needs {shape}")
            self.register_parameter(name.rpartition(".")[2], nn.Parameter(tensor.float(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        step = self.step
        if step.op == "activate":
            return F.prelu(x, cast(Tensor, self.slope))
        weight, bias = cast(Tensor, self.weight), cast(Tensor, self.bias) if step.bias else None
        if step.op == "conv":
            x = F.conv2d(x, weight, bias, step.stride, step.padding, groups=step.groups)
        elif step.op == "linear":
            x = F.linear(x.flatten(1), weight, bias)
        else:
            x = x * weight.view(1, -1, 1, 1)
            x = x if bias is None else x + bias.view(1, -1, 1, 1)
        if step.activation == "relu":
            return F.relu(x)
        return F.prelu(x, cast(Tensor, self.slope)) if step.activation else x

    def extra_repr(self) -> str:
        return f"{self.step.op} {'x'.join(map(str, self.step.shape))}" + f" {self.step.activation or ''}".rstrip()


def slim(model: Mixture, point: OperatingPoint | str | Any = None) -> SlimNetwork:
    """The plain network of an operating point (default: the full last exit), with the statistics that the model has.

    A point is a value, its name, or a point of a frontier. Re-estimate its statistics first:
    `cnmm.evaluation.statistics.reestimated(model, images, point)`.
    """
    found = find_point(model, point)
    return _folded(model, graph.point_graph(model.config, found))


def slim_cascade(model: Mixture, point: OperatingPoint | str | Any = None) -> SlimNetwork:
    """A point's edges with all exits that they reach."""
    return _folded(model, graph.cascade_graph(model.config, find_point(model, point)))


def find_point(model: Mixture, point: OperatingPoint | str | Any) -> OperatingPoint:
    """An operating point from itself, its name, or a measured point of a frontier."""
    if point is None:
        last = model.config.exit_numbers[-1]
        return OperatingPoint(exit=last, edges=model.lattice.exit_edges(last), name=f"e{last}c0", rule="flow", cuts=0)
    if not isinstance(point, OperatingPoint):
        return named_point(model, point if isinstance(point, str) else point.name)
    model.live_edges(point)  # refuses points of another model
    return point


def save_slim(network: SlimNetwork, folder: str | Path, **about: Any) -> None:
    """Writes a folder that `load_slim` reads by itself; `about` goes into config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name.removeprefix("layers."): tensor for name, tensor in network.state_dict().items()}
    write_atomically(folder / WEIGHTS_FILE, to_bytes(state))
    point = network.point
    described = {field: getattr(point, field) for field in ("name", "rule", "cuts", "exit")}
    described["edges"] = sorted(map(list, point.edges))
    slim = {"point": described, "exits": list(network.graph.exits)}
    write_json(folder / CONFIG_FILE, {"model": network.config.to_dict(), "slim": slim, **costs(network), **about})


def costs(network: SlimNetwork) -> dict[str, int]:
    """What a network costs as it is written, and what the mixture costs at the same point, as files say it."""
    own, mixture = network.cost, network.mixture_cost
    mixed = {"mixture_macs": mixture.macs, "mixture_params": mixture.params}
    return {"macs": own.macs, "params": own.params, **mixed}


def load_slim(folder: str | Path) -> SlimNetwork:
    """The slim network of a folder, in eval mode."""
    about = read_config(folder)
    if "slim" not in about:
        raise UserError(f"{folder}: not a slim network; make one with: cnmm slim RUN -o DIR")
    with inside(Path(folder) / CONFIG_FILE):
        config = MixtureConfig.from_dict(about["model"], "model.")
        slim = _fields.get(about, "slim", _fields.OBJECT)
        point = _read_point(_fields.get(slim, "point", _fields.OBJECT, "slim."), config)
        several = len(_fields.get(slim, "exits", _fields.list_of(_fields.POSITIVE, least=1), "slim.")) > 1
    made = (graph.cascade_graph if several else graph.point_graph)(config, point)
    tensors = read_tensors(Path(folder) / WEIGHTS_FILE, "pt")
    needed = {name for step in made.steps for name in step.tensors}
    if needed != tensors.keys():
        odd = sorted(needed ^ tensors.keys())[0]
        raise UserError(f"{Path(folder) / WEIGHTS_FILE}: {odd!r} does not fit {CONFIG_FILE}; they are of two networks")
    return SlimNetwork(made, tensors).eval()


def _read_point(data: Mapping[str, Any], config: MixtureConfig) -> OperatingPoint:
    where = "slim.point."
    exit = _fields.get(data, "exit", _fields.one_of(*config.exit_numbers), where)
    pairs = _fields.get(data, "edges", _fields.list_of(_fields.list_of(_fields.COUNT, 2), least=1), where)
    edges, lattice = frozenset((i, j) for i, j in pairs), build_lattice(config)
    if not edges <= lattice.exit_edges(exit) or lattice.exit_edges(exit, edges) != edges:
        raise UserError(f"{where}edges: must be edges of the model that lead from the image to exit {exit}")
    checks = {
        "name": _fields.TEXT,
        "rule": _fields.or_null(_fields.one_of(*get_args(Rule))),
        "cuts": _fields.or_null(_fields.COUNT),
    }
    return OperatingPoint(exit=exit, edges=edges, **_fields.get_all(data, checks, where))


@torch.no_grad()
def _folded(model: Mixture, made: Graph) -> SlimNetwork:
    evaluator = _Evaluator(model)
    tensors = {name: tensor for step in made.steps for name, tensor in evaluator.tensors(step).items()}
    network = SlimNetwork(made, {name: tensor.float().contiguous() for name, tensor in tensors.items()})
    network.preprocessing = model.preprocessing
    return network.eval()


class _Evaluator:
    """Computes what the ingredients of steps stand for from the tensors of a mixture, in float64."""

    def __init__(self, model: Mixture) -> None:
        self.model = model
        self.gates = None if model.config.mixing == "sum" else model.gate_logits.double().sigmoid()[None]

    def tensors(self, step: Step) -> dict[str, Tensor]:
        """By name: weight, bias and slope, as far as the step has them."""
        if not step.tensors:
            return {}
        weight, bias = (None, None) if step.kernel is None else self._kernel(step.kernel, step.shape)
        slope = None
        if step.norms:
            scales, shifts, slopes = zip(*map(self._norm, step.norms), strict=True)
            scale, shift = torch.cat(scales), torch.cat(shifts)
            slope = None if slopes[0] is None else torch.cat(slopes)
            weight = scale if weight is None else weight * scale.view(-1, *[1] * (weight.dim() - 1))
            bias = shift if bias is None else bias * scale + shift
        named = {f"{step.name}.weight": weight, f"{step.name}.bias": bias, f"{step.name}.slope": slope}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _kernel(self, kernel: Kernel, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        model = self.model
        match kernel:
            case Stem():
                return model.stem.double(), None
            case SharedPart():
                return getattr(_shared(model, kernel.node), kernel.name).double(), None
            case MixedEdges():
                matrix_DC, bias_C = self._mixed(kernel)
                return matrix_DC.T[:, :, None, None], bias_C
            case Remainder():
                first = kernel.older[0]
                left = self._weights(kernel.among)[first] / self._weights(kernel.older)[first]
                return left * torch.ones(shape, dtype=torch.float64), None
            case Scores():
                return self._scores(kernel)
            case ClassifierPart():
                classifier = _pixel_classifier(model, kernel.exit)
                bias = classifier.bias.double() if kernel.name == "pointwise" else None
                return getattr(classifier, kernel.name).double(), bias

    def _norm(self, norm: Norm) -> tuple[Tensor, Tensor, Tensor | None]:
        """A batch normalisation as scale and shift, and the slopes behind it."""
        model = self.model
        match norm:
            case EdgeNorm():
                module, k = model.edge_module(norm.edge)
                own = slice(*module.span(k)) if isinstance(module, blocks.Mix) else k
                return _scale_shift(model.edge_statistics(norm.edge), module.affine, own)
            case SharedNorm():
                return _scale_shift(model.map_module(norm.node).statistics, _shared(model, norm.node).affine)
            case ClassifierNorm():
                classifier = _pixel_classifier(model, norm.exit)
                if norm.name == "first":
                    return _scale_shift(classifier.first_statistics, classifier.first)
                return _scale_shift(classifier.second_statistics, classifier.second)

    def _mixed(self, kernel: MixedEdges) -> tuple[Tensor, Tensor]:
        """The matrix [D, C] and the bias: convolutions, last BN and mixing weights of the edges."""
        weights = self._weights(kernel.among)
        matrices, bias = [], torch.zeros((), dtype=torch.float64)
        for edge in kernel.edges:
            mix, k = self.model.edge_module(edge)
            assert isinstance(mix, blocks.Mix)
            scale, shift, _ = _scale_shift(mix.statistics, mix.out_affine, k, k)
            matrices.append(mix.weight[slice(*mix.span(k))].double() * scale * weights[edge])
            bias = bias + shift * weights[edge]
        return torch.cat(matrices), bias

    def _scores(self, kernel: Scores) -> tuple[Tensor, Tensor]:
        """FC-BN of the output edges, their mixture and the classifier: one matrix and one bias."""
        weights = self._weights(kernel.edges)
        classifier = cast(nn.Linear, self.model.classifiers[str(kernel.exit)])
        final = classifier.weight.double()
        parts, bias = [], classifier.bias.double()
        for edge in kernel.edges:
            output, k = self.model.edge_module(edge)
            scale, shift, _ = _scale_shift(output.statistics, output.out_affine, k, k)
            parts.append(final @ (output.weight[k].double() * scale * weights[edge]).T)
            bias = bias + final @ (shift * weights[edge])
        return torch.cat(parts, 1), bias

    def _weights(self, edges: tuple[Edge, ...]) -> dict[Edge, Tensor]:
        return self.model.mixing_weights(edges, self.gates)


def _shared(model: Mixture, node: int) -> blocks.Shared:
    shared = model.map_module(node).shared
    assert shared is not None
    return shared


def _pixel_classifier(model: Mixture, exit: int) -> blocks.PixelClassifier:
    return cast(blocks.PixelClassifier, model.classifiers[str(exit)])


def _scale_shift(
    statistics: blocks.Statistics, affine: blocks.Affine, own: Any = ..., row: Any = ...
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A batch normalisation as scale and shift, and the slopes; `own`: part of the affine, `row`: of the statistics."""
    gamma, beta = affine.weight[own].double(), affine.bias[own].double()
    scale = gamma * (statistics.var[row].double() + fused.EPS).rsqrt()
    slope = None if affine.slope is None else affine.slope[own].double()
    return scale, beta - statistics.mean[row].double() * scale, slope
