"""The steps of a slim network: an operating point as a plain program, which `slim` runs in torch and `export` in ONNX.

Which steps there are follows from the lattice and the surviving edges alone; their tensors are `slim`'s. Every name
says what it is, j being the map's number:

    stem   first convolution        cat{j}, u{j}  inputs of map j side by side, scaled, shifted and activated
    m{j}   the map H_j              a{j}, d{j}, z{j}  its shared part: BN-ReLU, depthwise, pointwise
    p{j}   z{j} at half resolution  r{j}, g{j}  BN-ReLU and global pooling of an edge into the output

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from cnmm.config import MixtureConfig
from cnmm.cost import CLASSIFIER_CHANNELS, classifier_sizes
from cnmm.lattice import Edge, Lattice, OperatingPoint, build_lattice, channels, map_sizes, stem_sizes

Op = Literal["conv", "affine", "concat", "pool", "mean", "linear", "resize", "add"]
IMAGE = "image"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation: reads tensors by name and makes the tensor `name`. Its weights are called `{name}.weight` etc."""

    op: Op
    name: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] = ()
    """Of the weight, for convolutions, linear layers (out, in) and scales."""
    bias: bool = False
    activation: Literal["relu", "prelu"] | None = None
    stride: int = 1
    padding: int = 0
    groups: int = 1
    largest: bool = False
    """Pooling takes the largest value instead of the mean."""
    ceil: bool = False
    """Pooling rounds an odd size up."""
    size: tuple[int, int] | None = None
    """Height and width that a resize makes."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the step's own tensors."""
        if not self.shape:
            return {}
        found = {f"{self.name}.weight": self.shape}
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
        shapes: dict[str, tuple[int, ...]] = {IMAGE: (self.config.in_chans, *self.config.input_size)}
        for step in self.steps:
            shapes[step.name] = _shape(step, [shapes[name] for name in step.inputs])
        return shapes

    def stages(self) -> list[tuple[Step, ...]]:
        """The steps that each exit needs beyond those of the exits before it."""
        made = {step.name: step for step in self.steps}
        done: set[str] = set()
        stages = []
        for exit in self.exits:
            needed: set[str] = set()
            pending = [f"logits{exit}"]
            while pending:
                name = pending.pop()
                if name != IMAGE and name not in done | needed:
                    needed.add(name)
                    pending.extend(made[name].inputs)
            stages.append(tuple(step for step in self.steps if step.name in needed))
            done |= needed
        return stages


def point_graph(config: MixtureConfig, point: OperatingPoint) -> Graph:
    """The graph of an operating point: its own exit only."""
    return _graph(config, point, (point.exit,))


def cascade_graph(config: MixtureConfig, point: OperatingPoint) -> Graph:
    """The graph of a cascade: a point's edges with every exit that they reach."""
    lattice = build_lattice(config)
    first = min(i for i, j in lattice.exit_edges(point.exit, point.edges) if j == lattice.output)
    exits = [k for k in config.exit_numbers if k <= point.exit and lattice.exits[k - 1] >= first]
    return _graph(config, point, tuple(exits))


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
        self.sizes = map_sizes(config, config.input_size)
        self.steps: list[Step] = []
        self.outputs: dict[int, str] = {}  # segmentation, by scale: the mixture of the output's inputs so far

    def build(self) -> list[Step]:
        lattice, config = self.lattice, self.config
        stem = config.channels // 4
        self._conv("stem", IMAGE, (stem, config.in_chans, 3, 3), stride=min(config.stem_stride, 2), act=self.act)
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
        readers = {j for i, j in edges if i == node and (j != lattice.output or self.segments)}
        read = (node, lattice.output) in edges and not self.segments
        # A BN-ReLU behind the map disappears in the map's convolution, if it is the only one.
        alone = bool(readers) != read and not pooled_stem
        source = self._inputs(node, mixed_inputs(lattice, edges, node))
        narrow = sum(input_widths(self.config, lattice, edges, node))
        h = self._conv(f"m{node}", source, (width, narrow, 1, 1), act=self.act if alone else None)
        if pooled_stem:
            h = self._pool("m1p", h, largest=True, size=stem_sizes(self.config, self.config.input_size)[1])
        if readers:
            self._shared(node, h if alone else self._affine(f"a{node}", h, width), width, readers)
        if read:
            self._add(Step(op="mean", name=f"g{node}", inputs=(h if alone else self._affine(f"r{node}", h, width),)))

    def _inputs(self, node: int, sources: Sequence[tuple[int, bool]]) -> str:
        """The inputs of a map side by side, after BN-ReLU."""
        if node == 1:
            return "stem"
        if chained(self.lattice, self.edges, node, self.segments):
            return f"{'p' if sources[0][1] else 'z'}{sources[0][0]}"
        widths = input_widths(self.config, self.lattice, self.edges, node)
        return self._activated(str(node), sources, sum(widths))

    def _activated(self, label: str, sources: Sequence[tuple[int, bool]], width: int) -> str:
        names = [f"{'p' if pooled else 'z'}{i}" for i, pooled in sources]
        if len(names) > 1:
            self._add(Step(op="concat", name=f"cat{label}", inputs=tuple(names)))
            names = [f"cat{label}"]
        return self._affine(f"u{label}", names[0], width)

    def _shared(self, node: int, h: str, width: int, readers: Iterable[int]) -> None:
        """DConv, at full and at half resolution as its readers need it."""
        lattice = self.lattice
        kinds = {j != lattice.output and lattice.falls((node, j)) for j in readers}
        size = self.sizes[lattice.scale(node)]
        # A BN-ReLU behind the shared part disappears in its last convolution, if it is the only one.
        alone = next((j for j in readers if chained(lattice, self.edges, j, self.segments)), None) is not None
        act = self.act if alone else None
        d = self._conv(f"d{node}", h, (width, 1, 3, 3), groups=width, bias=False)
        if kinds == {True} and not self.segments:  # pooling is linear: before the pointwise convolution it saves work
            d = self._pool(f"h{node}", d, size=size)
            self._conv(f"p{node}", d, (width // 4, width, 1, 1), bias=alone, act=act)
            return
        z = self._conv(f"z{node}", d, (width // 4, width, 1, 1), bias=alone, act=act)
        if True in kinds:
            self._pool(f"p{node}", z, largest=self.segments, size=size)

    def _classify(self, exit: int) -> None:
        """The linear parts of the output edges, their mixing and the classifier, all folded into one matrix."""
        sources = output_sources(self.lattice, self.edges, exit)
        width = sum(channels(self.config, self.lattice.scale(i)) for i in sources)
        names = tuple(f"g{i}" for i in sources)
        if len(names) > 1:
            names = (self._add(Step(op="concat", name=f"cat_e{exit}", inputs=names)),)
        shape = (self.config.num_classes, width)
        self._add(Step(op="linear", name=f"logits{exit}", inputs=names, shape=shape, bias=True))

    def _segment(self, exit: int) -> None:
        """Mixes in the maps since the last exit, scale by scale; then the classifier of pixels."""
        lattice, config, sizes = self.lattice, self.config, self.sizes
        T, before = lattice.output, [k for k in self.exits if k < exit]
        seen = output_sources(lattice, self.edges, exit)
        new = [i for i in seen if not before or i > lattice.exits[before[-1] - 1]]
        if new:
            for scale, name in self.outputs.items():
                self.outputs[scale] = self._affine(f"left{exit}_{scale}", name, config.channels, act=None, bias=False)
        for scale in sorted({lattice.scale(i) for i in new}):
            here = [i for i in new if lattice.scale(i) == scale]
            width = len(here) * channels(config, scale) // 4
            u = self._activated(f"{T}_{exit}_{scale}", [(i, False) for i in here], width)
            o = self._conv(f"o{exit}_{scale}", u, (config.channels, width, 1, 1))
            if scale in self.outputs:
                self._add(Step(op="add", name=f"sum{exit}_{scale}", inputs=(self.outputs[scale], o)))
                o = f"sum{exit}_{scale}"
            self.outputs[scale] = o
        h = ""
        for scale, name in sorted(self.outputs.items()):
            up = name if scale == 0 else self._resize(f"up{exit}_{scale}", name, sizes[scale], sizes[0])
            h = up if not h else self._add(Step(op="add", name=f"h{exit}_{scale}", inputs=(h, up)))
        middle, final = classifier_sizes(config, config.input_size)
        few = CLASSIFIER_CHANNELS
        h = self._resize(f"first_up{exit}", h, sizes[0], middle)
        h = self._affine(f"first{exit}", h, config.channels)
        h = self._conv(f"middle{exit}", h, (few, config.channels, 1, 1), bias=False)
        h = self._resize(f"second_up{exit}", h, middle, final)
        h = self._affine(f"second{exit}", h, few)
        h = self._conv(f"depthwise{exit}", h, (few, 1, 3, 3), groups=few, bias=False)
        self._conv(f"logits{exit}", h, (config.num_classes, few, 1, 1))

    def _add(self, step: Step) -> str:
        self.steps.append(step)
        return step.name

    def _conv(
        self,
        name: str,
        source: str,
        shape: tuple[int, int, int, int],
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = True,
        act: Literal["relu", "prelu"] | None = None,
    ) -> str:
        step = Step(
            op="conv",
            name=name,
            inputs=(source,),
            shape=shape,
            bias=bias,
            activation=act,
            stride=stride,
            padding=shape[2] // 2,
            groups=groups,
        )
        return self._add(step)

    def _affine(
        self,
        name: str,
        source: str,
        width: int,
        *,
        bias: bool = True,
        act: Literal["relu", "prelu", "own"] | None = "own",
    ) -> str:
        kind = self.act if act == "own" else act
        return self._add(Step(op="affine", name=name, inputs=(source,), shape=(width,), bias=bias, activation=kind))

    def _pool(self, name: str, source: str, *, size: tuple[int, int], largest: bool = False) -> str:
        odd = any(side % 2 for side in size)
        return self._add(Step(op="pool", name=name, inputs=(source,), largest=largest, ceil=odd))

    def _resize(self, name: str, source: str, old: tuple[int, int], new: tuple[int, int]) -> str:
        return source if old == new else self._add(Step(op="resize", name=name, inputs=(source,), size=new))


def _shape(step: Step, inputs: list[tuple[int, ...]]) -> tuple[int, ...]:
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
    return (width, *(step.size or size))


def mixed_inputs(lattice: Lattice, edges: frozenset[Edge], node: int) -> list[tuple[int, bool]]:
    """The maps that a map reads and whether it reads them at half resolution: kept ones first, as `Mixture` has it."""
    sources = [(i, i > 0 and lattice.falls((i, node))) for i in lattice.inputs[node] if (i, node) in edges]
    return sorted(sources, key=lambda source: (source[1], source[0]))


def chained(lattice: Lattice, edges: frozenset[Edge], node: int, segments: bool) -> bool:
    """Is this map's one input read by nothing else, so that both are links of a chain? (Largest-pooling breaks it.)"""
    if node in (1, lattice.output):
        return False
    sources = mixed_inputs(lattice, edges, node)
    if len(sources) != 1 or (segments and sources[0][1]):
        return False
    return [j for i, j in edges if i == sources[0][0] and (j != lattice.output or segments)] == [node]


def input_widths(config: MixtureConfig, lattice: Lattice, edges: frozenset[Edge], node: int) -> list[int]:
    """Channels of each of a map's inputs."""
    scales = [lattice.scale(i) if i else 0 for i, _ in mixed_inputs(lattice, edges, node)]
    return [channels(config, scale) // 4 for scale in scales]


def output_sources(lattice: Lattice, edges: frozenset[Edge], exit: int) -> list[int]:
    """The maps that an exit reads."""
    last = lattice.exits[exit - 1]
    return sorted(i for i, j in edges if j == lattice.output and i <= last)
