"""What the tensors of a slim network are made of: kernels and batch normalisations of a mixture, by name.

Values, so that the walk over the lattice (`graph`) needs no torch; `slim` computes the tensors. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cnmm.lattice import Edge


@dataclass(frozen=True)
class Stem:
    """The first convolution."""


@dataclass(frozen=True)
class SharedPart:
    """A convolution of the part that the edges out of a map share."""

    node: int
    name: Literal["depthwise", "pointwise"]


@dataclass(frozen=True)
class MixedEdges:
    """The convolutions of edges into a node side by side, with their last BN and their weights in the mixture.

    The weights are those that the edges have when all edges `among` survive.
    """

    edges: tuple[Edge, ...]
    among: tuple[Edge, ...]


@dataclass(frozen=True)
class Remainder:
    """The factor by which the weight of older edges into the output falls once newer ones join them."""

    older: tuple[Edge, ...]
    among: tuple[Edge, ...]


@dataclass(frozen=True)
class Scores:
    """The linear parts of the output edges of classification, their mixture and the classifier: one matrix."""

    exit: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class ClassifierPart:
    """A convolution of the classifier of pixels."""

    exit: int
    name: Literal["conv", "depthwise", "pointwise"]


@dataclass(frozen=True)
class EdgeNorm:
    """The batch normalisation that begins an edge."""

    edge: Edge


@dataclass(frozen=True)
class SharedNorm:
    """The batch normalisation that begins the shared part of a map."""

    node: int


@dataclass(frozen=True)
class ClassifierNorm:
    """A batch normalisation of the classifier of pixels."""

    exit: int
    name: Literal["first", "second"]


Kernel = Stem | SharedPart | MixedEdges | Remainder | Scores | ClassifierPart
Norm = EdgeNorm | SharedNorm | ClassifierNorm
