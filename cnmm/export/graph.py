"""The steps of a slim network: an operating point as a plain program, which `slim` runs in torch and `ladder` in ONNX.

Which steps there are follows from the lattice and the surviving edges alone. A step says what its tensors are made of
(a kernel, batch normalisations, or both); `slim` computes them from a mixture. Every name says what it is, j being the
map's number:

    stem   first convolution        cat{j}, u{j}  inputs of map j side by side, scaled, shifted and activated
    m{j}   the map H_j              a{j}, d{j}, z{j}  its shared part: BN-ReLU, depthwise, pointwise
    p{j}   z{j} at half resolution  r{j}, g{j}  BN-ReLU and global pooling of an edge into the output

Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from cnmm.config import MixtureConfig
from cnmm.cost import CLASSIFIER_CHANNELS, Cost
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
from cnmm.lattice import Edge, Lattice, OperatingPoint, build_lattice, channels, halve, reached_exits

Op = Literal["conv", "affine", "activate", "concat", "pool", "mean", "linear", "resize", "add"]
IMAGE = "image"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation: reads tensors by name and makes the tensor `name`. Its weights are called `{name}.weight` etc."""

    op: Op
    name: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] = ()
    """Of the weight, for convolutions, linear layers (out, in) and scales."""
    kernel: Kernel | None = None
    """What the weight is made of, and the bias of kernels that have one."""
    norms: tuple[Norm, ...] = ()
    """Batch normalisations folded in behind the kernel, side by side; without a kernel, a scale and shift."""
    bias: bool = False
    activation: Literal["relu", "prelu"] | None = None
    stride: int = 1
    padding: int = 0
    groups: int = 1
    largest: bool = False
    """Pooling takes the largest value instead of the mean."""
    halvings: int = 0
    """A resize makes the height and width of the image, halved so many times."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the step's own tensors."""
        if not self.shape:
            return {}
        found = {} if self.op == "activate" else {f"{self.name}.weight": self.shape}
        if self.bias:
            found[f"{self.name}.bias"] = self.shape[:1]
        if self.activation == "prelu":
            found[f"{self.name}.slope"] = self.shape[:1]
        return found


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The steps of one set of surviving edges and the exits that it is asked for; `logits{k}` is exit k's answer."""

    config: MixtureConfig
    point: OperatingPoint
    exits: tuple[int, ...]
    steps: tuple[Step, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor for one image: channels, height and width; of an image's scores, the classes alone."""
        size = self.config.input_size
        shapes: dict[str, tuple[int, ...]] = {IMAGE: (self.config.in_chans, *size)}
        for step in self.steps:
            shapes[step.name] = _shape(step, [shapes[name] for name in step.inputs], size)
        return shapes

    @property
    def cost(self) -> Cost:
        """What the written network costs: macs of its convolutions, scales among them, and values of its tensors."""
        return self.cost_of(self.steps)

    def cost_of(self, steps: Iterable[Step]) -> Cost:
        """What some of the steps cost: a scale is written as a convolution of every channel by itself, and counts.

        Activations do not, in whatever form they are written.
        """
        steps = [step for step in steps if step.tensors]
        products = [step for step in steps if step.op != "activate"]
        macs = sum(prod(step.shape) * prod(self.shapes[step.name][1:]) for step in products)
        return Cost(macs, sum(prod(shape) for step in steps for shape in step.tensors.values()))

    def stages(self) -> list[tuple[Step, ...]]:
        """The steps that each exit needs beyond those of the exits before it."""
        done: set[str] = set()
        stages = []
        for exit in self.exits:
            needed = self._needed(exit) - done
            stages.append(tuple(step for step in self.steps if step.name in needed))
            done |= needed
        return stages

    def heads(self) -> list[tuple[Step, ...]]:
        """Of each stage the steps that no later one needs, and so nobody if this exit is not asked.

        Empty for the last exit, which is asked by all who come so far, and where an answer costs next to nothing: a
        classifier of images is one small matrix.
        """
        if self.config.task != "segmentation":
            return [()] * len(self.exits)
        heads = []
        for number, steps in enumerate(self.stages()):
            later: set[str] = set().union(*(self._needed(exit) for exit in self.exits[number + 1 :]))
            head = tuple(step for step in steps if step.name not in later)
            heads.append(head if len(head) < len(steps) else ())
        return heads

    def _needed(self, exit: int) -> set[str]:
        """Names of all steps on the way to an exit's answer."""
        made = {step.name: step for step in self.steps}
        needed: set[str] = set()
        pending = [f"logits{exit}"]
        while pending:
            name = pending.pop()
            if name != IMAGE and name not in needed:
                needed.add(name)
                pending.extend(made[name].inputs)
        return needed


def point_graph(config: MixtureConfig, point: OperatingPoint) -> Graph:
    """The graph of an operating point: its own exit only."""
    return _graph(config, point, (point.exit,))


def cascade_graph(config: MixtureConfig, point: OperatingPoint) -> Graph:
    """The graph of a cascade: a point's edges with every exit that they reach."""
    return _graph(config, point, reached_exits(config, build_lattice(config), point.exit, point.edges))


def _graph(config: MixtureConfig, point: OperatingPoint, exits: tuple[int, ...]) -> Graph:
    steps = tuple(_Builder(config, build_lattice(config), point, exits).build())
    return Graph(config=config, point=point, exits=exits, steps=steps)


class _Builder:
    """Walks the lattice once, map after map, and writes the steps down."""

    def __init__(self, config: MixtureConfig, lattice: Lattice, point: OperatingPoint, exits: Sequence[int]) -> None:
        self.config, self.lattice, self.exits = config, lattice, exits
        self.edges: frozenset[Edge] = lattice.exit_edges(point.exit, point.edges)
        self.segments = config.task == "segmentation"
        self.act: Literal["relu", "prelu"] = "prelu" if self.segments else "relu"
        self.halvings = {1: 0, 2: 1, 4: 2}[config.stem_stride]  # of the image, down to the finest maps
        self.steps: list[Step] = []
        self.outputs: dict[int, str] = {}  # segmentation, by scale: the mixture of the output's inputs so far

    def build(self) -> list[Step]:
        lattice, config = self.lattice, self.config
        shape = (config.channels // 4, config.in_chans, 3, 3)
        self._conv("stem", IMAGE, Stem(), shape, norms=[EdgeNorm((0, 1))], stride=min(config.stem_stride, 2))
        for node in range(1, lattice.output):
            if any(j == node for _, j in self.edges):
                self._map(node)
            for exit in self.exits:
                if lattice.exits[exit - 1] == node:
                    self._segment(exit) if self.segments else self._classify(exit)
        return self.steps

    def _map(self, node: int) -> None:
        """The map itself, its shared part and what the output reads of it."""
        lattice, edges = self.lattice, self.edges
        width = channels(self.config, lattice.scale(node))
        pooled_stem = node == 1 and self.config.stem_stride == 4
        readers = self._readers(node)
        pooled_vector = (node, lattice.output) in edges and not self.segments
        # A BN-ReLU behind the map disappears in the map's convolution, if it is the only one.
        alone = bool(readers) != pooled_vector and not pooled_stem
        shared, vector = SharedNorm(node), EdgeNorm((node, lattice.output))
        inputs = self._inputs(node)
        shape = (width, sum(map(self._width, inputs)), 1, 1)
        behind: list[Norm] = [shared if readers else vector] if alone else []
        h = self._conv(f"m{node}", self._read(node), MixedEdges(inputs, inputs), shape, norms=behind, bias=True)
        if pooled_stem:
            h = self._pool("m1p", h, largest=True)
        if readers:
            self._shared(node, h if alone else self._affine(f"a{node}", h, width, [shared]), width, readers)
        if pooled_vector:
            h = h if alone else self._affine(f"r{node}", h, width, [vector])
            self._add(Step(op="mean", name=f"g{node}", inputs=(h,)))

    def _inputs(self, node: int) -> tuple[Edge, ...]:
        """The edges into a map, those that read at its own resolution first."""
        edges = [(i, j) for i, j in self.edges if j == node]
        return tuple(sorted(edges, key=lambda edge: (self._pooled(edge), edge)))

    def _readers(self, node: int) -> tuple[Edge, ...]:
        """The edges that read the shared part of a map."""
        T = self.lattice.output
        return tuple((i, j) for i, j in self.edges if i == node and (j != T or self.segments))

    def _pooled(self, edge: Edge) -> bool:
        """Does the edge read its map at half resolution?"""
        return edge[0] > 0 and edge[1] != self.lattice.output and self.lattice.falls(edge)

    def _width(self, edge: Edge) -> int:
        """Channels of what an edge reads of a shared part, or of the stem."""
        return channels(self.config, self.lattice.scale(edge[0]) if edge[0] else 0) // 4

    def _chained(self, edge: Edge) -> bool:
        """Is it all that its target reads and all that reads its source: a link of a chain? (Max pooling breaks it.)"""
        if edge[0] == 0 or edge[1] == self.lattice.output or (self.segments and self._pooled(edge)):
            return False
        return self._inputs(edge[1]) == (edge,) == self._readers(edge[0])

    def _read(self, node: int) -> str:
        """The inputs of a map side by side, after BN-ReLU."""
        inputs = self._inputs(node)
        if node == 1:
            return "stem"
        if self._chained(inputs[0]):
            return self._name(inputs[0])
        return self._activated(str(node), inputs)

    def _name(self, edge: Edge) -> str:
        return f"{'p' if self._pooled(edge) else 'z'}{edge[0]}"

    def _activated(self, label: str, edges: Sequence[Edge]) -> str:
        names = [self._name(edge) for edge in edges]
        if len(names) > 1:
            names = [self._add(Step(op="concat", name=f"cat{label}", inputs=tuple(names)))]
        return self._affine(f"u{label}", names[0], sum(map(self._width, edges)), [EdgeNorm(edge) for edge in edges])

    def _shared(self, node: int, h: str, width: int, readers: Sequence[Edge]) -> None:
        """DConv, at full and at half resolution as its readers need it."""
        kinds = {self._pooled(edge) for edge in readers}
        # A BN-ReLU behind the shared part disappears in its last convolution, if it is the only one.
        behind = [EdgeNorm(edge) for edge in readers if self._chained(edge)]
        pointwise, shape = SharedPart(node, "pointwise"), (width // 4, width, 1, 1)
        d = self._conv(f"d{node}", h, SharedPart(node, "depthwise"), (width, 1, 3, 3), groups=width)
        if kinds == {True} and not self.segments:  # pooling is linear: before the pointwise convolution it saves work
            self._conv(f"p{node}", self._pool(f"h{node}", d), pointwise, shape, norms=behind)
            return
        z = self._conv(f"z{node}", d, pointwise, shape, norms=behind)
        if True in kinds:
            self._pool(f"p{node}", z, largest=self.segments)

    def _output_edges(self, exit: int) -> tuple[Edge, ...]:
        """The edges into the output that an exit sees."""
        T, last = self.lattice.output, self.lattice.exits[exit - 1]
        return tuple(sorted((i, j) for i, j in self.edges if j == T and i <= last))

    def _classify(self, exit: int) -> None:
        """The linear parts of the output edges, their mixing and the classifier, all folded into one matrix."""
        edges = self._output_edges(exit)
        width = sum(channels(self.config, self.lattice.scale(i)) for i, _ in edges)
        names = tuple(f"g{i}" for i, _ in edges)
        if len(names) > 1:
            names = (self._add(Step(op="concat", name=f"cat_e{exit}", inputs=names)),)
        shape, scores = (self.config.num_classes, width), Scores(exit, edges)
        self._add(Step(op="linear", name=f"logits{exit}", inputs=names, shape=shape, kernel=scores, bias=True))

    def _segment(self, exit: int) -> None:
        """Mixes in the maps since the last exit, scale by scale; then the classifier of pixels."""
        config, scale_of = self.config, self.lattice.scale
        before = [k for k in self.exits if k < exit]
        older = self._output_edges(before[-1]) if before else ()
        seen = self._output_edges(exit)
        new = [edge for edge in seen if edge not in older]
        if new:
            left, shape = Remainder(older, seen), (config.channels,)
            for scale, name in self.outputs.items():
                step = Step(op="affine", name=f"left{exit}_{scale}", inputs=(name,), shape=shape, kernel=left)
                self.outputs[scale] = self._add(step)
        for scale in sorted({scale_of(i) for i, _ in new}):
            here = tuple(edge for edge in new if scale_of(edge[0]) == scale)
            u = self._activated(f"{self.lattice.output}_{exit}_{scale}", here)
            width = sum(map(self._width, here))
            mixed = MixedEdges(here, seen)
            o = self._conv(f"o{exit}_{scale}", u, mixed, (config.channels, width, 1, 1), bias=True)
            if scale in self.outputs:
                o = self._add(Step(op="add", name=f"sum{exit}_{scale}", inputs=(self.outputs[scale], o)))
            self.outputs[scale] = o
        h = ""
        for scale, name in sorted(self.outputs.items()):
            up = name if scale == 0 else self._resize(f"up{exit}_{scale}", name, self.halvings)
            h = up if not h else self._add(Step(op="add", name=f"h{exit}_{scale}", inputs=(h, up)))
        self._classify_pixels(exit, h)

    def _classify_pixels(self, exit: int, h: str) -> None:
        """Scale and shift of a BN before the upsampling, which commutes with them: fewer pixels, and one layout."""
        config, few = self.config, CLASSIFIER_CHANNELS
        first, second = ClassifierNorm(exit, "first"), ClassifierNorm(exit, "second")
        h = self._affine(f"first{exit}", h, config.channels, [first], active=not self.halvings)
        if self.halvings:
            h = self._resize(f"first_up{exit}", h, self.halvings - 1)
            h = self._activate(f"first_act{exit}", h, config.channels, first)
        kernel, shape, up = ClassifierPart(exit, "conv"), (few, config.channels, 1, 1), self.halvings == 2
        h = self._conv(f"middle{exit}", h, kernel, shape, norms=[second], active=not up)
        if up:
            h = self._resize(f"second_up{exit}", h, 0)
            h = self._activate(f"second_act{exit}", h, few, second)
        h = self._conv(f"depthwise{exit}", h, ClassifierPart(exit, "depthwise"), (few, 1, 3, 3), groups=few)
        last = ClassifierPart(exit, "pointwise")
        self._conv(f"logits{exit}", h, last, (config.num_classes, few, 1, 1), bias=True)

    def _add(self, step: Step) -> str:
        self.steps.append(step)
        return step.name

    def _conv(
        self,
        name: str,
        source: str,
        kernel: Kernel,
        shape: tuple[int, int, int, int],
        *,
        norms: Sequence[Norm] = (),
        bias: bool = False,
        stride: int = 1,
        groups: int = 1,
        active: bool = True,
    ) -> str:
        """A convolution; with batch normalisations behind it, those are folded in, and if `active`, the activation."""
        step = Step(
            op="conv",
            name=name,
            inputs=(source,),
            shape=shape,
            kernel=kernel,
            norms=tuple(norms),
            bias=bias or bool(norms),
            activation=self.act if norms and active else None,
            stride=stride,
            padding=shape[2] // 2,
            groups=groups,
        )
        return self._add(step)

    def _affine(self, name: str, source: str, width: int, norms: Sequence[Norm], *, active: bool = True) -> str:
        """Batch normalisations side by side, and if `active`, the activation."""
        step = Step(
            op="affine",
            name=name,
            inputs=(source,),
            shape=(width,),
            norms=tuple(norms),
            bias=True,
            activation=self.act if active else None,
        )
        return self._add(step)

    def _activate(self, name: str, source: str, width: int, norm: Norm) -> str:
        """The activation behind a batch normalisation, alone."""
        step = Step(op="activate", name=name, inputs=(source,), shape=(width,), norms=(norm,), activation=self.act)
        return self._add(step)

    def _pool(self, name: str, source: str, *, largest: bool = False) -> str:
        return self._add(Step(op="pool", name=name, inputs=(source,), largest=largest))

    def _resize(self, name: str, source: str, halvings: int) -> str:
        return self._add(Step(op="resize", name=name, inputs=(source,), halvings=halvings))


def halved(size: tuple[int, int], times: int) -> tuple[int, int]:
    """A height and width after so many strides of two."""
    return functools.reduce(lambda found, _: halve(found), range(times), size)


def _shape(step: Step, inputs: list[tuple[int, ...]], image: tuple[int, int]) -> tuple[int, ...]:
    width, *size = inputs[0]
    if step.op == "linear":
        return step.shape[:1]
    if step.op == "mean":
        return (width, 1, 1)
    if step.op == "concat":
        return (sum(shape[0] for shape in inputs), *size)
    if step.op == "conv":
        return (step.shape[0], *(-(-side // step.stride) for side in size))
    if step.op == "pool":
        return (width, *((side + 1) // 2 for side in size))
    return (width, *(halved(image, step.halvings) if step.op == "resize" else size))
