"""Cost of any operating point, counted analytically. Torch-free.

`macs` are the multiply-adds of convolutions and linear layers for one image; batch normalisation, activations, pooling,
upsampling and mixing are not counted. `params` are the weights, scales, shifts and slopes of the layers that the point
runs, without the gates, which no network needs once it is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Self

from cnmm.config import MixtureConfig, check_input_size
from cnmm.lattice import Edge, Lattice, OperatingPoint, build_lattice, channels, map_sizes, stem_sizes

CLASSIFIER_CHANNELS = 12
"""Channels between the two convolutions of the segmentation classifier (paper, section 4.1)."""


@dataclass(frozen=True)
class Cost:
    """What one part or one operating point costs."""

    macs: int
    params: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.params + other.params)


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """The cost of every part of a mixture at one input size; a point costs the sum of the parts that it runs."""

    config: MixtureConfig
    lattice: Lattice
    shared: dict[int, Cost]
    """BN-ReLU-DConv of each map; of node 0, the stem's first convolution."""
    edges: dict[Edge, Cost]
    classifier: Cost

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, config: MixtureConfig, input_size: tuple[int, int] | None = None) -> Self:
        """The table at an input size (default the config's own)."""
        size = input_size or config.input_size
        check_input_size(config, size)
        lattice = build_lattice(config)
        _, conv_size, _ = stem_sizes(config, size)
        pixels = [prod(map_size) for map_size in map_sizes(config, size)]
        slopes = 1 if config.task == "segmentation" else 0  # a PReLU has one per channel, a ReLU none
        stem_width = config.channels // 4

        stem = config.in_chans * stem_width * 9
        shared = {0: Cost(stem * prod(conv_size), stem)}
        for node in range(1, lattice.output):
            width = channels(config, lattice.scale(node))
            kernel = 9 * width + width * width // 4
            shared[node] = Cost(kernel * pixels[lattice.scale(node)], kernel + (2 + slopes) * width)

        edges = {}
        for i, j in lattice.edges:
            if j == lattice.output and config.task == "classification":  # BN-ReLU-GP-FC-BN
                width = channels(config, lattice.scale(i))
                kernel, times = width * config.out_channels, 1
                affine = 2 * width + 2 * config.out_channels
            else:  # BN-ReLU-Conv1x1-BN
                width = stem_width if i == 0 else channels(config, lattice.scale(i)) // 4
                out = config.out_channels if j == lattice.output else channels(config, lattice.scale(j))
                kernel, affine = width * out, (2 + slopes) * width + 2 * out
                at = lattice.scale(i if j == lattice.output else j)
                times = prod(conv_size) if i == 0 else pixels[at]
            edges[i, j] = Cost(kernel * times, kernel + affine)

        return cls(
            config=config,
            lattice=lattice,
            shared=shared,
            edges=edges,
            classifier=_classifier_cost(config, size),
        )

    def reads_shared(self, edge: Edge) -> bool:
        """Does the edge read its map's shared part? Only the output edges of classification read H_i itself."""
        return edge[1] != self.lattice.output or self.config.task == "segmentation"

    def total(self, edges: Iterable[Edge], num_classifiers: int = 1) -> Cost:
        """Cost of a set of edges; a shared part counts while an edge that reads it is in the set."""
        edges = set(edges)
        readers = {edge[0] for edge in edges if self.reads_shared(edge)}
        cost = Cost(num_classifiers * self.classifier.macs, num_classifiers * self.classifier.params)
        for part in (*(self.edges[edge] for edge in edges), *(self.shared[node] for node in readers)):
            cost += part
        return cost

    def point(self, point: OperatingPoint) -> Cost:
        """Cost of an operating point: its live edges, their shared parts and its own classifier."""
        return self.total(self.lattice.exit_edges(point.exit, point.edges))

    def exit(self, exit: int | None = None) -> Cost:
        """Cost of an exit with nothing cut."""
        return self.total(self.lattice.exit_edges(exit))


def _classifier_cost(config: MixtureConfig, size: tuple[int, int]) -> Cost:
    if config.task == "classification":
        weight = config.out_channels * config.num_classes
        return Cost(weight, weight + config.num_classes)
    first = config.out_channels * CLASSIFIER_CHANNELS
    second = CLASSIFIER_CHANNELS * (9 + config.num_classes)
    middle, final = classifier_sizes(config, size)
    affine = 3 * (config.out_channels + CLASSIFIER_CHANNELS) + config.num_classes  # two BN-PReLU and a bias
    return Cost(first * prod(middle) + second * prod(final), first + second + affine)


def classifier_sizes(config: MixtureConfig, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes after the two upsamplings of the segmentation classifier: the way back through the stem."""
    image, conv_size, _ = stem_sizes(config, size)
    return (conv_size if config.stem_stride == 4 else image), image


def short_count(value: int) -> str:
    """A count in three digits: 46.9 M, 2.67 G, 512."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return str(value)
