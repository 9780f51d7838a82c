"""Random small DAGs with gates, and random cuts of them."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from cnmm.chain import Chain
from cnmm.lattice import Dag, Edge

logits = st.floats(-6, 6, allow_nan=False)


@st.composite
def dags(draw: Any, max_maps: int = 12) -> Dag:
    """Any DAG with at most `max_maps` maps between the image and the output."""
    depth = draw(st.integers(1, max_maps + 1))
    inputs: list[tuple[int, ...]] = [()]
    for node in range(1, depth + 1):
        inputs.append(tuple(sorted(draw(st.sets(st.integers(0, node - 1), min_size=1, max_size=node)))))
    exits = draw(st.sets(st.integers(inputs[-1][0], depth - 1), min_size=1))
    return Dag(inputs=tuple(inputs), exits=tuple(sorted(exits)))


@st.composite
def chains(draw: Any, max_maps: int = 12) -> Chain:
    dag = draw(dags(max_maps))
    return Chain(dag, draw(st.lists(logits, min_size=len(dag.edges), max_size=len(dag.edges))))


@st.composite
def cut_chains(draw: Any, max_maps: int = 12) -> tuple[Chain, int, frozenset[Edge]]:
    """A chain, an exit and what survives of its edges after a random sequence of allowed cuts."""
    chain = draw(chains(max_maps))
    exit = draw(st.integers(1, chain.dag.num_exits))
    edges = chain.dag.exit_edges(exit)
    for _ in range(draw(st.integers(0, 8))):
        candidates = sorted((i, j) for i, j in edges if sum(b == j for _, b in edges) > 1)
        if not candidates:
            break
        edges = chain.dag.exit_edges(exit, edges - {draw(st.sampled_from(candidates))})
    return chain, exit, edges


def literal_probability(chain: Chain, sequence: tuple[int, ...], edges: frozenset[Edge]) -> float:
    """p(s_0:T) of the paper, factor by factor: Eq. (4) with Eq. (5). A missing or cut edge is a gate of zero."""
    gates = {edge: 1 / (1 + math.exp(-value)) for edge, value in zip(chain.dag.edges, chain.logits, strict=True)}
    probability = 1.0
    for t in range(len(sequence) - 1, 0, -1):
        after, before = sequence[t], sequence[t - 1]
        inputs = sorted(i for i, j in edges if j == after)
        if t - 1 not in inputs:
            pi = 0.0
        elif t - 1 == inputs[0]:
            pi = 1.0  # the base: nothing older is left
        else:
            pi = gates[t - 1, after]
        probability *= pi if before == t - 1 else 1 - pi
    return probability
