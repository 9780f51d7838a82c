"""The distribution over networks: the paper's reversed Markov chain p(s_0:T) (section 3.1) on any DAG.

Every node chooses one of its inputs, the newest first: it takes input i_k with probability pi[i_k, j] (the gate) if it
took none of the newer ones, and the oldest surviving input (the base) if nothing else was taken. All functions work on
plain floats, and on torch tensors (differentiable, with any leading batch shape) without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cnmm._errors import UserError
from cnmm.lattice import Dag, Edge, Network, path_edges

if TYPE_CHECKING:
    import torch

Value = Any
"""A float or a tensor: the recurrences below only add and multiply."""


class Chain:
    """The distribution that gate logits define over the networks of a DAG.

    `logits` holds one value per edge of `dag.edges`, along the last dimension. The value of a node's base input has no
    effect: its gate is one. Methods take `exit` (default the last) and `edges` (the survivors of cutting, default all).
    """

    def __init__(self, dag: Dag, logits: Sequence[float] | torch.Tensor) -> None:
        size = len(logits) if isinstance(logits, Sequence) else logits.shape[-1]
        if size != len(dag.edges):
            raise UserError(f"{size} gate logits, but the graph has {len(dag.edges)} edges; give one per edge")
        self.dag = dag
        self.logits = logits

    def gates(self) -> dict[Edge, Value]:
        """pi[i, j] = P(s_{t-1} = i | s_t = j), Eq. (5)."""
        return {edge: _sigmoid(value) for edge, value in _by_edge(self.dag, self.logits).items()}

    def detach(self) -> Chain:
        """The same distribution as plain floats: fast, and independent of what training does next."""
        values = self.logits if isinstance(self.logits, Sequence) else self.logits.detach().tolist()
        return Chain(self.dag, values)

    def weights(self, exit: int | None = None, edges: Iterable[Edge] | None = None) -> dict[Edge, Value]:
        """w[i, j]: the probability that node j, if a network visits it, takes input i."""
        logits = _by_edge(self.dag, self.logits)
        taken = {edge: _sigmoid(value) for edge, value in logits.items()}
        passed = {edge: _sigmoid(-value) for edge, value in logits.items()}
        return break_sticks(self.dag.exit_edges(exit, edges), taken, passed)

    def flow(self, exit: int | None = None, edges: Iterable[Edge] | None = None) -> dict[Edge, Value]:
        """The probability that a network uses each edge: the pairwise marginals of section 3.4."""
        return flow(self.dag, self.weights(exit, edges))

    def log_prob(self, network: Network, exit: int | None = None, edges: Iterable[Edge] | None = None) -> Value:
        """log p(s_0:T) of one network, Eq. (4)."""
        logits = _by_edge(self.dag, self.logits)
        inputs = _inputs(self.dag.exit_edges(exit, edges))
        total: Value = 0.0
        for i, j in path_edges(network):
            if i not in inputs.get(j, ()):
                raise UserError(f"network {network}: edge {i}->{j} does not exist here")
            base, *choices = inputs[j]
            for newer in reversed([k for k in choices if k > i]):
                total = total + _log_sigmoid(-logits[newer, j])
            if i != base:
                total = total + _log_sigmoid(logits[i, j])
        return total

    def networks(self, exit: int | None = None, edges: Iterable[Edge] | None = None) -> Iterator[Network]:
        """Every network of the mixture, one after the other; `count` tells how many there are."""
        inputs = _inputs(self.dag.exit_edges(exit, edges))
        pending: list[Network] = [(self.dag.output,)]
        while pending:
            tail = pending.pop()
            if tail[0] == 0:
                yield tail
            else:
                pending.extend((i, *tail) for i in inputs[tail[0]])

    def count(self, exit: int | None = None, edges: Iterable[Edge] | None = None) -> int:
        """The exact number of networks in the mixture."""
        return count_networks(self.dag, exit, edges)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Hard gates in {0, 1}, [*shape, edges]: each draw is exactly one network. Not differentiable.

        Drawn on the generator's device, without one on the CPU: a seed means the same wherever the logits are.
        """
        logits = self._tensor().detach()
        return (_uniform(shape, logits, generator) < logits.sigmoid()).to(logits.dtype)

    def rsample(
        self, shape: tuple[int, ...] = (), *, temperature: float = 2.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Relaxed gates in (0, 1), [*shape, edges], from the binary concrete distribution; differentiable.

        Drawn where `sample` draws.
        """
        import torch

        if not temperature > 0:
            raise UserError(f"temperature={temperature}: must be positive")
        logits = self._tensor()
        tiny = torch.finfo(logits.dtype).tiny
        uniform = _uniform(shape, logits, generator)
        noise = uniform.clamp_min(tiny).log() - (1 - uniform).log()  # rand() is below one
        return ((logits + noise) / temperature).sigmoid()

    def chosen(
        self, gates: Sequence[float] | torch.Tensor, exit: int | None = None, edges: Iterable[Edge] | None = None
    ) -> Network:
        """The one network that hard gates, [edges], select at an exit."""
        values = _by_edge(self.dag, gates)
        inputs = _inputs(self.dag.exit_edges(exit, edges))
        network: Network = (self.dag.output,)
        while network[0] != 0:
            base, *choices = inputs[network[0]]
            network = (next((i for i in reversed(choices) if values[i, network[0]] == 1), base), *network)
        return network

    def _tensor(self) -> torch.Tensor:
        import torch

        return torch.tensor(self.logits) if isinstance(self.logits, Sequence) else self.logits


def break_sticks(
    edges: Iterable[Edge], taken: Mapping[Edge, Value], passed: Mapping[Edge, Value] | None = None
) -> dict[Edge, Value]:
    """w[i_k, j] = pi[i_k, j] * prod_{l > k} (1 - pi[i_l, j]), with pi = 1 for the base: Eq. (7) unrolled.

    `taken` holds the gates of the edges, `passed` one minus them (computed when it is left out).
    """
    weights: dict[Edge, Value] = {}
    for j, sources in _inputs(edges).items():
        rest: Value = 1.0
        for i in reversed(sources[1:]):
            gate = taken[i, j]
            weights[i, j] = gate * rest
            rest = rest * (1 - gate if passed is None else passed[i, j])
        weights[sources[0], j] = rest
    return weights


def break_all_sticks(dag: Dag, edges: Iterable[Edge], gates_GE: torch.Tensor) -> dict[Edge, torch.Tensor]:
    """`break_sticks` for all maps at once: weights [G] of the surviving edges from gates [G, all edges of the DAG]."""
    import torch
    from torch.nn.functional import pad

    sticks = _Sticks.of(dag, frozenset(edges))
    where, base = sticks.tensors(gates_GE.device)
    # Newest input first. What follows the base of a shorter list has no gate (the last column) and no weight.
    gates_GJI = pad(gates_GE, (0, 1))[:, where].masked_fill(base, 0)
    rest_GJI = pad((1 - gates_GJI).cumprod(2)[:, :, :-1], (1, 0), value=1.0)
    weights_GJI = torch.where(base, rest_GJI, gates_GJI * rest_GJI)
    return dict(zip(sticks.edges, weights_GJI.flatten(1)[:, sticks.places].unbind(1), strict=True))


@dataclass(frozen=True)
class _Sticks:
    """Where the gates of some edges stand in a table with a row for every map, its inputs from new to old."""

    edges: tuple[Edge, ...]
    places: tuple[int, ...]
    """Of each edge in the flattened table."""
    rows: tuple[tuple[int, ...], ...]
    """Which gate it is; -1 behind the last."""
    sizes: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, dag: Dag, edges: frozenset[Edge]) -> _Sticks:
        lists: dict[int, list[Edge]] = {}
        for edge in sorted(edges, reverse=True):
            lists.setdefault(edge[1], []).append(edge)
        width = max(map(len, lists.values()))
        return cls(
            edges=tuple(edge for row in lists.values() for edge in row),
            places=tuple(r * width + k for r, row in enumerate(lists.values()) for k in range(len(row))),
            rows=tuple((*(dag.edge_index[edge] for edge in row), *[-1] * (width - len(row))) for row in lists.values()),
            sizes=tuple(map(len, lists.values())),
        )

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and where the base of each is."""
        import torch

        where = torch.tensor(self.rows, device=device)
        last = torch.tensor(self.sizes, device=device)[:, None] - 1
        return where, torch.arange(where.shape[1], device=device) == last


def flow(dag: Dag, weights: Mapping[Edge, Value]) -> dict[Edge, Value]:
    """A unit flow from the output back to the image: q_T = 1, flow[i, j] = q_j w[i, j], q_i = sum_j flow[i, j]."""
    inputs = _inputs(weights)
    visited: dict[int, Value] = {dag.output: 1.0}
    result: dict[Edge, Value] = {}
    for j in range(dag.output, 0, -1):
        for i in inputs.get(j, ()):
            result[i, j] = visited[j] * weights[i, j]
            visited[i] = visited[i] + result[i, j] if i in visited else result[i, j]
    return result


def count_networks(dag: Dag, exit: int | None = None, edges: Iterable[Edge] | None = None) -> int:
    """The exact number of paths from the image to an exit."""
    inputs = _inputs(dag.exit_edges(exit, edges))
    count = {0: 1}
    for j in range(1, dag.output + 1):
        count[j] = sum(count[i] for i in inputs.get(j, ()))
    return count[dag.output]


def initial_logits(dag: Dag, init: str) -> list[float]:
    """Gate logits before training: "half" is 0; "uniform" gives the k-th oldest input pi = 1/k, so equal weights."""
    ranks = [sources.index(i) + 1 for sources in dag.inputs for i in sources]
    return [0.0 if init == "half" or rank == 1 else -math.log(rank - 1) for rank in ranks]


def to_sequence(network: Network) -> tuple[int, ...]:
    """The paper's s_0:T of a network: s_t is the first visited node that is not before t. (0, 1, 4) is 01444."""
    return tuple(next(node for node in network if node >= t) for t in range(network[-1] + 1))


def to_network(sequence: Sequence[int]) -> Network:
    """The network that a sequence s_0:T encodes; only sequences with s_{t-1} in {t-1, s_t} encode one."""
    last = len(sequence) - 1
    if last < 1 or sequence[0] != 0 or sequence[-1] != last:
        raise UserError(f"sequence {tuple(sequence)}: it must start with 0 and end with its last position, {last}")
    for t in range(1, last + 1):
        if sequence[t - 1] not in (t - 1, sequence[t]):
            raise UserError(
                f"sequence {tuple(sequence)}: s_{t - 1}={sequence[t - 1]} must be {t - 1} or s_{t}={sequence[t]}"
            )
    return tuple(sorted(set(sequence)))


def _by_edge(dag: Dag, values: Sequence[float] | torch.Tensor) -> dict[Edge, Value]:
    columns = values if isinstance(values, Sequence) else values.unbind(-1)
    return dict(zip(dag.edges, columns, strict=True))


def _inputs(edges: Iterable[Edge]) -> dict[int, list[int]]:
    """The inputs of every node, oldest first."""
    inputs: dict[int, list[int]] = {}
    for i, j in sorted(edges):
        inputs.setdefault(j, []).append(i)
    return inputs


def _sigmoid(value: Value) -> Value:
    return 0.5 * (1 + math.tanh(value / 2)) if isinstance(value, float | int) else value.sigmoid()


def _uniform(shape: tuple[int, ...], logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Numbers in [0, 1) for the gates, [*shape, edges]: of the generator's device, brought to that of the logits."""
    import torch

    device = generator.device if generator else "cpu"
    size = (*shape, logits.shape[-1])
    return torch.rand(size, dtype=logits.dtype, device=device, generator=generator).to(logits.device)


def _log_sigmoid(value: Value) -> Value:
    if isinstance(value, float | int):
        return min(value, 0.0) - math.log1p(math.exp(-abs(value)))
    from torch.nn.functional import logsigmoid

    return logsigmoid(value)
