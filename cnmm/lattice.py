"""Which maps, edges and exits exist, and their shapes (paper, section 3.1 and "Base architecture"). Torch-free.

Nodes are numbered 0..T in the order of computation: 0 is the image, T the output H_T, the others are feature maps.
An edge is a pair (i, j) with i < j: the block f_i^j that computes part of map j from map i.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.config import MixtureConfig

Edge = tuple[int, int]
Rule = Literal["flow", "flow_per_mac", "mean_flow", "damage"]
"""Which edge is cut next: that of least flow (the paper's), of least flow per mac that vanishes with it, of least flow
averaged over all exits up to this one, which keeps the earlier exits good too: the rule for cascades; or the edge whose
removal was measured to change the answers least per mac."""
Orders = Mapping[int, Sequence[Edge]]
"""Measured cutting orders: by exit, the edges in the order in which they are cut, until one network is left."""
Network = tuple[int, ...]
"""One CNN of the mixture: the nodes that it visits, from 0 to T."""


@dataclass(frozen=True)
class Dag:
    """Any directed acyclic graph with one source 0 and one output T.

    `inputs[j]` are the inputs of node j, oldest first. Exit k sees the edges into the output that come from nodes up to
    `exits[k - 1]`: "networks of bounded depth" in the paper's section 3.2.
    """

    inputs: tuple[tuple[int, ...], ...]
    exits: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.inputs) < 2 or self.inputs[0]:
            raise UserError(f"inputs={self.inputs!r}: node 0 (the image) has no inputs and at least node 1 follows it")
        for node, sources in enumerate(self.inputs[1:], start=1):
            if not sources or list(sources) != sorted(set(sources)) or sources[0] < 0 or sources[-1] >= node:
                raise UserError(f"inputs[{node}]={sources!r}: must be one or more older nodes, oldest first")
        first = self.inputs[-1][0]
        if not self.exits or list(self.exits) != sorted(set(self.exits)) or self.exits[0] < first:
            raise UserError(f"exits={self.exits!r}: must be increasing nodes, none before the output's input {first}")

    @property
    def output(self) -> int:
        """T, the last node."""
        return len(self.inputs) - 1

    @property
    def num_exits(self) -> int:
        return len(self.exits)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, by target and then by source; gates are stored in this order."""
        return tuple((i, j) for j, sources in enumerate(self.inputs) for i in sources)

    @cached_property
    def edge_index(self) -> dict[Edge, int]:
        return {edge: index for index, edge in enumerate(self.edges)}

    def exit_edges(self, exit: int | None = None, edges: Iterable[Edge] | None = None) -> frozenset[Edge]:
        """The edges, out of `edges` (default all), that lie on a path from the image to that exit's output."""
        last = self.exits[self.check_exit(exit) - 1]
        candidates = self.edges if edges is None else edges
        inputs: dict[int, list[int]] = {}
        for i, j in candidates:
            if j != self.output or i <= last:
                inputs.setdefault(j, []).append(i)
        reached = {0}  # from the image
        for j in range(1, self.output + 1):
            if any(i in reached for i in inputs.get(j, ())):
                reached.add(j)
        alive: set[Edge] = set()
        needed = {self.output}
        for j in range(self.output, 0, -1):
            if j in needed:
                found = [i for i in inputs.get(j, ()) if i in reached]
                alive.update((i, j) for i in found)
                needed.update(found)
        return frozenset(alive)

    def check_exit(self, exit: int | None) -> int:
        """The exit's number; None is the last one."""
        if exit is None:
            return self.num_exits
        exit = _fields.plain(exit)
        if not _fields.is_whole(exit) or not 1 <= exit <= self.num_exits:
            raise UserError(f"exit={exit!r}: must be an exit from 1 to {self.num_exits}")
        return exit


def full_dag(depth: int) -> Dag:
    """The dense graph of section 3: nodes 0..T with all T(T+1)/2 edges; exit t bounds the depth by t."""
    if depth < 1:
        raise UserError(f"depth={depth}: must be at least 1")
    return Dag(inputs=tuple(tuple(range(node)) for node in range(depth + 1)), exits=tuple(range(depth)))


@dataclass(frozen=True)
class Lattice(Dag):
    """B blocks x S scales, block by block; map (b, s) feeds every later map of the same or half the resolution."""

    blocks: int
    scales: int

    def block(self, node: int) -> int:
        """Block of a map, counted from 0."""
        return (node - 1) // self.scales

    def scale(self, node: int) -> int:
        """Scale of a map, 0 the finest."""
        return (node - 1) % self.scales

    def falls(self, edge: Edge) -> bool:
        """Does the resolution fall along this edge between two maps?"""
        return self.scale(edge[1]) > self.scale(edge[0])


def build_lattice(config: MixtureConfig) -> Lattice:
    """The lattice of a model."""
    return lattice_of(config.blocks, config.scales, config.task)


@lru_cache(maxsize=64)
def lattice_of(blocks: int, scales: int, task: str) -> Lattice:
    """B blocks x S scales: the output reads the coarsest maps (classification) or all of them (segmentation)."""
    inputs: list[tuple[int, ...]] = [(), (0,)]
    for node in range(2, blocks * scales + 1):
        scale = (node - 1) % scales
        inputs.append(tuple(i for i in range(1, node) if scale - (i - 1) % scales in (0, 1)))
    coarsest = range(scales, blocks * scales + 1, scales)
    inputs.append(tuple(coarsest if task == "classification" else range(1, blocks * scales + 1)))
    return Lattice(inputs=tuple(inputs), exits=tuple(coarsest), blocks=blocks, scales=scales)


def reached_exits(
    config: MixtureConfig, dag: Dag, exit: int | None = None, edges: Iterable[Edge] | None = None
) -> tuple[int, ...]:
    """The exits up to one that a set of edges (default all) reaches and that have a classifier: those of a cascade."""
    exit = dag.check_exit(exit)
    first = min(i for i, j in dag.exit_edges(exit, edges) if j == dag.output)
    return tuple(k for k in config.exit_numbers if k <= exit and dag.exits[k - 1] >= first)


def stem_sizes(config: MixtureConfig, size: Sequence[int]) -> list[tuple[int, int]]:
    """Height and width of the image, after the stem's convolution and after the stem (H_1)."""
    sizes = [(size[0], size[1])]
    sizes.append(sizes[-1] if config.stem_stride == 1 else halve(sizes[-1]))
    sizes.append(halve(sizes[-1]) if config.stem_stride == 4 else sizes[-1])
    return sizes


def map_sizes(config: MixtureConfig, size: Sequence[int]) -> list[tuple[int, int]]:
    """Height and width of the maps at each scale, finest first."""
    sizes = [stem_sizes(config, size)[-1]]
    for _ in range(config.scales - 1):
        sizes.append(halve(sizes[-1]))
    return sizes


def halve(size: tuple[int, int]) -> tuple[int, int]:
    """A stride of two, rounding up, so that odd sizes keep their last row and column."""
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def channels(config: MixtureConfig, scale: int) -> int:
    """Channels of the maps at a scale."""
    return config.channels << scale


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """An exit and the surviving edges: a value that is passed to a mixture, never a state of it."""

    exit: int
    edges: frozenset[Edge]
    name: str
    rule: Rule | None = None
    """The rule of the cutting order that it is from; None: it is from none."""
    cuts: int | None = None
    """Its place in that order."""

    def __post_init__(self) -> None:
        if not self.edges:
            raise UserError(f"operating point {self.name!r} has no edges; take one from cutting_order(model, exit=...)")

    def __repr__(self) -> str:
        return f"OperatingPoint({self.name!r}, exit={self.exit}, {len(self.edges)} edges)"


def network_point(dag: Dag, network: Network, exit: int | None = None) -> OperatingPoint:
    """One network of the mixture, alone, as an operating point."""
    exit = dag.check_exit(exit)
    edges = path_edges(network)
    allowed = dag.exit_edges(exit)
    for edge in edges:
        if edge not in allowed:
            raise UserError(f"network {network}: edge {edge[0]}->{edge[1]} does not exist at exit {exit}")
    if network[0] != 0 or network[-1] != dag.output:
        raise UserError(f"network {network}: it must lead from 0 to {dag.output}")
    return OperatingPoint(exit=exit, edges=frozenset(edges), name=f"e{exit}n{'-'.join(map(str, network))}")


def path_edges(network: Network) -> list[Edge]:
    """The edges along a network, image first."""
    return list(itertools.pairwise(network))
