"""Slim networks: an operating point as a plain network. No gates, no batch normalisation, no dead layers.

One 1x1 convolution per map: the last BN of every edge and the mixing weights are folded into it, exactly as in
`blocks.Mix`. Everything between the pooling of the output edges and the class scores is linear, so it is one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnmm import blocks, fused
from cnmm._errors import UserError
from cnmm._files import read_tensors, to_bytes, write_atomically, write_json
from cnmm.config import MixtureConfig
from cnmm.cost import Cost, CostTable
from cnmm.export import graph
from cnmm.export.graph import Graph, Step
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Map, Mixture
from cnmm.prune import named_point
from cnmm.run_folder import CONFIG_FILE, WEIGHTS_FILE, read_config


class SlimNetwork(nn.Module):
    """A graph with its tensors. `forward` gives the scores of its last exit, `forward_exits` those of all."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
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
        """That of its operating point; a network of several exits counts every classifier."""
        table = CostTable.of(self.config)
        return table.total(table.lattice.exit_edges(self.point.exit, self.point.edges), len(self.graph.exits))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_exits(x)[self.graph.exits[-1]]

    def forward_exits(self, x: Tensor) -> dict[int, Tensor]:
        """Scores of every exit, for normalised float images."""
        made = {graph.IMAGE: x}
        for step in self.graph.steps:
            made[step.name] = self._run(step, [made[name] for name in step.inputs])
        return {exit: made[f"logits{exit}"] for exit in self.graph.exits}

    def _run(self, step: Step, inputs: list[Tensor]) -> Tensor:
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
        assert step.size is not None
        return blocks.upsample(x, step.size)


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
        step, weight = self.step, cast(Tensor, self.weight)
        bias = cast(Tensor, self.bias) if step.bias else None
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

    A point is a value, its name, or a point of a frontier. Its statistics are best estimated anew before:
    `cnmm.evaluation.statistics.reestimated(model, images, point)`.
    """
    found = find_point(model, point)
    return _folded(model, graph.point_graph(model.config, found))


def slim_cascade(model: Mixture, point: OperatingPoint | str | Any = None) -> SlimNetwork:
    """A point's edges with all exits that they reach."""
    return _folded(model, graph.cascade_graph(model.config, find_point(model, point)))


def find_point(model: Mixture, point: OperatingPoint | str | Any) -> OperatingPoint:
    """An operating point from itself, its name, or something with a field `point` that is its name."""
    if point is None:
        last = model.config.exit_numbers[-1]
        return OperatingPoint(exit=last, edges=model.lattice.exit_edges(last), name=f"e{last}c0")
    if not isinstance(point, OperatingPoint):
        return named_point(model, point if isinstance(point, str) else point.point)
    model.live_edges(point)  # refuses points of another model
    return point


def save_slim(network: SlimNetwork, folder: str | Path, **about: Any) -> None:
    """Writes a folder that `load_slim` reads by itself; `about` goes into config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name.removeprefix("layers."): tensor for name, tensor in network.state_dict().items()}
    write_atomically(folder / WEIGHTS_FILE, to_bytes(state))
    point = network.point
    described = {"name": point.name, "exit": point.exit, "edges": sorted(map(list, point.edges))}
    slim = {"point": described, "exits": list(network.graph.exits)}
    cost = {"macs": network.cost.macs, "params": network.cost.params}
    write_json(folder / CONFIG_FILE, {"model": network.config.to_dict(), "slim": slim, **cost, **about})


def load_slim(folder: str | Path) -> SlimNetwork:
    """The slim network of a folder, in eval mode."""
    about = read_config(folder)
    try:
        config = MixtureConfig.from_dict(about["model"])
        found = about["slim"]["point"]
        edges = frozenset((int(i), int(j)) for i, j in found["edges"])
        point = OperatingPoint(exit=int(found["exit"]), edges=edges, name=str(found["name"]))
        several = len(about["slim"]["exits"]) > 1
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{Path(folder) / CONFIG_FILE}: no slim network ({error!r}); `cnmm slim` makes one") from None
    made = (graph.cascade_graph if several else graph.point_graph)(config, point)
    tensors = read_tensors(Path(folder) / WEIGHTS_FILE, "pt")
    needed = {name for step in made.steps for name in step.tensors}
    if needed != tensors.keys():
        odd = sorted(needed ^ tensors.keys())[0]
        raise UserError(f"{Path(folder) / WEIGHTS_FILE}: {odd!r} does not fit {CONFIG_FILE}; they are of two networks")
    return SlimNetwork(made, tensors).eval()


@torch.no_grad()
def _folded(model: Mixture, made: Graph) -> SlimNetwork:
    tensors = _Folder(model, made).fold()
    return SlimNetwork(made, {name: tensor.float().contiguous() for name, tensor in tensors.items()}).eval()


class _Folder:
    """Computes the tensors of a graph from those of a mixture, in float64."""

    def __init__(self, model: Mixture, made: Graph) -> None:
        self.model, self.made = model, made
        self.lattice = model.lattice
        self.edges = model.live_edges(made.point)
        self.gates = None if model.config.mixing == "sum" else model.gate_logits.double().sigmoid()[None]
        self.weights = model.mixing_weights(self.edges, self.gates)
        self.tensors: dict[str, Tensor] = {}

    def fold(self) -> dict[str, Tensor]:
        steps = {step.name for step in self.made.steps}
        self._stem()
        for node in range(1, self.lattice.output):
            if f"m{node}" in steps:
                self._map(node, steps)
        before: list[int] = []
        for exit in self.made.exits:
            if self.model.config.task == "classification":
                self._classify(exit)
            else:
                self._segment(exit, before, steps)
            before.append(exit)
        return self.tensors

    def _put(self, name: str, weight: Tensor, bias: Tensor | None = None, slope: Tensor | None = None) -> None:
        for kind, tensor in (("weight", weight), ("bias", bias), ("slope", slope)):
            if tensor is not None:
                self.tensors[f"{name}.{kind}"] = tensor

    def _stem(self) -> None:
        affine = self._node(1).mix.affine
        scale, shift = _scale_shift(self.model.stem_statistics, affine)
        self._put("stem", self.model.stem.double() * scale.view(-1, 1, 1, 1), shift, affine.slope)

    def _map(self, node: int, steps: set[str]) -> None:
        this = self._node(node)
        sources = graph.mixed_inputs(self.lattice, self.edges, node)
        index = [this.sources.index(i) for i, _ in sources]
        weights = [self.weights[i, node] for i, _ in sources]
        matrix_DC, bias_C = _mixed(this.mix, index, weights)
        reads = f"g{node}" in steps
        shared = f"d{node}" in steps
        slope = None
        if shared and f"a{node}" not in steps:
            assert this.shared is not None
            scale, shift = _scale_shift(this.statistics, this.shared.affine)
            matrix_DC, bias_C, slope = matrix_DC * scale, bias_C * scale + shift, this.shared.affine.slope
        elif reads and f"r{node}" not in steps:
            scale, shift = self._reading(node)
            matrix_DC, bias_C = matrix_DC * scale, bias_C * scale + shift
        self._put(f"m{node}", matrix_DC.T[:, :, None, None], bias_C, slope)
        if f"u{node}" in steps:
            self._inputs(f"u{node}", this.mix, index, sources)
        if f"r{node}" in steps:
            self._put(f"r{node}", *self._reading(node))
        if shared:
            assert this.shared is not None
            if f"a{node}" in steps:
                affine = this.shared.affine
                self._put(f"a{node}", *_scale_shift(this.statistics, affine), affine.slope)
            self._put(f"d{node}", this.shared.depthwise)
            self._pointwise(f"z{node}" if f"z{node}" in steps else f"p{node}", node, this.shared)

    def _pointwise(self, name: str, node: int, shared: blocks.Shared) -> None:
        """The last convolution of a shared part, with the BN of its only reader folded in if there is one."""
        weight = shared.pointwise.double()
        reader = max((j for i, j in self.edges if i == node and j != self.lattice.output), default=0)
        if reader and graph.chained(self.lattice, self.edges, reader, self.model.config.task == "segmentation"):
            mix, (source,) = self._node(reader).mix, graph.mixed_inputs(self.lattice, self.edges, reader)
            scale, shift, slope = self._input(mix, self._node(reader).sources.index(node), source)
            self._put(name, weight * scale.view(-1, 1, 1, 1), shift, slope)
        else:
            self._put(name, weight)

    def _inputs(self, name: str, mix: blocks.Mix, index: list[int], sources: list[tuple[int, bool]]) -> None:
        """BN of the inputs of a map: the normalisation is the source's, scale and shift are the edge's own."""
        parts = [self._input(mix, k, source) for k, source in zip(index, sources, strict=True)]
        scales, shifts, slopes = zip(*parts, strict=True)
        self._put(name, torch.cat(scales), torch.cat(shifts), None if slopes[0] is None else torch.cat(slopes))

    def _input(self, mix: blocks.Mix, edge: int, source: tuple[int, bool]) -> tuple[Tensor, Tensor, Tensor | None]:
        node, pooled = source
        statistics = self._node(node).pooled_statistics if pooled else self._node(node).kept_statistics
        assert statistics is not None
        columns = slice(*mix.span(edge))
        slope = None if mix.affine.slope is None else mix.affine.slope[columns]
        return (*_scale_shift(statistics, mix.affine, columns), slope)

    def _reading(self, node: int) -> tuple[Tensor, Tensor]:
        """BN of an output edge of classification."""
        output = cast(blocks.VectorOutput, self.model.outputs[str(self.lattice.scale(node))])
        return _scale_shift(self._node(node).statistics, output.affine, self._position(node))

    def _classify(self, exit: int) -> None:
        """FC-BN of the output edges, their mixture and the classifier: one matrix and one bias."""
        sources = graph.output_sources(self.lattice, self.edges, exit)
        weights = self._output_weights(sources)
        classifier = cast(nn.Linear, self.model.classifiers[str(exit)])
        final = classifier.weight.double()
        parts, bias = [], classifier.bias.double()
        for i in sources:
            output = cast(blocks.VectorOutput, self.model.outputs[str(self.lattice.scale(i))])
            k = self._position(i)
            scale, shift = _scale_shift(output.statistics, output.out_affine, k, k)
            parts.append(final @ (output.weight[k].double() * scale * weights[i]).T)
            bias = bias + final @ (shift * weights[i])
        self._put(f"logits{exit}", torch.cat(parts, 1), bias)

    def _segment(self, exit: int, before: list[int], steps: set[str]) -> None:
        lattice, model = self.lattice, self.model
        seen = graph.output_sources(lattice, self.edges, exit)
        weights = self._output_weights(seen)
        new = [i for i in seen if not before or i > lattice.exits[before[-1] - 1]]
        if before and new:
            old = [i for i in seen if i not in new]
            left = weights[old[0]] / self._output_weights(old)[old[0]]
            for scale in range(model.config.scales):
                if f"left{exit}_{scale}" in steps:
                    self._put(f"left{exit}_{scale}", left * torch.ones(model.config.channels, dtype=torch.float64))
        for scale in sorted({lattice.scale(i) for i in new}):
            here = [i for i in new if lattice.scale(i) == scale]
            mix = cast(blocks.Mix, model.outputs[str(scale)])
            index = [self._position(i) for i in here]
            matrix_DC, bias_C = _mixed(mix, index, [weights[i] for i in here])
            self._put(f"o{exit}_{scale}", matrix_DC.T[:, :, None, None], bias_C)
            self._inputs(f"u{lattice.output}_{exit}_{scale}", mix, index, [(i, False) for i in here])
        classifier = cast(blocks.PixelClassifier, model.classifiers[str(exit)])
        first, second = classifier.first, classifier.second
        self._put(f"first{exit}", *_scale_shift(classifier.first_statistics, first), first.slope)
        self._put(f"middle{exit}", classifier.conv)
        self._put(f"second{exit}", *_scale_shift(classifier.second_statistics, second), second.slope)
        self._put(f"depthwise{exit}", classifier.depthwise)
        self._put(f"logits{exit}", classifier.pointwise, classifier.bias)

    def _output_weights(self, sources: list[int]) -> dict[int, Tensor]:
        T = self.lattice.output
        return {i: w for (i, _), w in self.model.mixing_weights([(i, T) for i in sources], self.gates).items()}

    def _node(self, node: int) -> Map:
        return cast(Map, self.model.maps[str(node)])

    def _position(self, node: int) -> int:
        scale, T = self.lattice.scale(node), self.lattice.output
        return [i for i in self.lattice.inputs[T] if self.lattice.scale(i) == scale].index(node)


def _scale_shift(
    statistics: blocks.Statistics, affine: blocks.Affine, own: Any = ..., row: Any = ...
) -> tuple[Tensor, Tensor]:
    """A batch normalisation as scale and shift; `own`: which part of the affine, `row`: which of the statistics."""
    gamma, beta = affine.weight[own].double(), affine.bias[own].double()
    scale = gamma * (statistics.var[row].double() + fused.EPS).rsqrt()
    return scale, beta - statistics.mean[row].double() * scale


def _mixed(mix: blocks.Mix, index: list[int], weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The matrix [D, C] and the bias of a map: convolutions, last BN and mixing weights of its edges."""
    matrices, bias = [], torch.zeros((), dtype=torch.float64)
    for k, weight in zip(index, weights, strict=True):
        scale, shift = _scale_shift(mix.statistics, mix.out_affine, k, k)
        matrices.append(mix.weight[slice(*mix.span(k))].double() * scale * weight)
        bias = bias + shift * weight
    return torch.cat(matrices), bias
