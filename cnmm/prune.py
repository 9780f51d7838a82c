"""Cutting order per exit (paper, section 3.4, "Network pruning"). Torch-free.

The edge that the fewest networks use is cut, the flow is computed anew, and so on until one network is left. To cut is
to set the gate to zero: the edge's weight passes to the older inputs of its map. A map that no path uses any more
vanishes with its shared part and its edges, which are not counted as cuts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, get_args

from cnmm._errors import UserError
from cnmm.chain import Chain, break_sticks, flow
from cnmm.config import MixtureConfig
from cnmm.cost import CostTable
from cnmm.lattice import Dag, Edge, OperatingPoint, Orders, Rule, build_lattice

_LETTERS: dict[str, Rule] = {"c": "flow", "m": "flow_per_mac", "a": "mean_flow", "d": "damage"}
_TIE = 1e-9  # flows that differ by less, relatively, are equal but for rounding


class Mixable(Protocol):
    """What cutting needs of a mixture: a trained one, or a plan of one."""

    @property
    def config(self) -> MixtureConfig: ...
    @property
    def chain(self) -> Chain: ...
    @property
    def orders(self) -> Orders | None: ...


def cutting_order(model: Mixable, exit: int | None = None, *, rule: Rule = "flow") -> list[OperatingPoint]:
    """All operating points of an exit: the k-th has k cuts, the last is a single network."""
    if rule not in get_args(Rule):
        raise UserError(f"rule={rule!r}: must be one of {', '.join(get_args(Rule))}")
    lattice = build_lattice(model.config)
    exit = check_classifier(model.config, lattice, exit)
    if model.config.mixing == "sum":  # no gates, so nothing says what to cut
        steps = [lattice.exit_edges(exit)]
    elif rule == "damage":
        if not model.orders or exit not in model.orders:
            raise UserError(
                "rule='damage': its cutting orders were not measured; `cnmm frontier RUN` measures and stores them"
            )
        return order_points(model.config, exit, model.orders[exit])
    else:
        costs = CostTable.of(model.config) if rule == "flow_per_mac" else None
        exits = [k for k in model.config.exit_numbers if k <= exit] if rule == "mean_flow" else [exit]
        steps = _cut(model.chain.detach(), exits, costs)
    return _points(exit, rule, steps)


def named_point(model: Mixable, name: str) -> OperatingPoint:
    """The operating point of a name like "e5c37": exit 5, 37 cuts by the flow rule.

    Other letters are other rules: m is flow per mac, d is measured damage, a is mean flow.
    """
    match = re.fullmatch(r"e(\d+)([cmad])(\d+)", name)
    if not match:
        raise UserError(
            f"point {name!r}: must look like e5c37 (exit 5, 37 cuts by flow; m is flow per mac, d is measured damage)"
        )
    exit, letter, cuts = int(match[1]), match[2], int(match[3])
    numbers = model.config.exit_numbers
    if exit not in numbers:
        raise UserError(f"point {name!r}: there is no exit {exit}; must be one of {', '.join(map(str, numbers))}")
    try:
        order = cutting_order(model, exit, rule=_LETTERS[letter])
    except UserError as error:
        raise UserError(f"point {name!r}: {error}") from None
    if cuts >= len(order):
        raise UserError(
            f"point {name!r}: exit {exit} has 0 to {len(order) - 1} cuts; try e{exit}{letter}{len(order) - 1}"
        )
    return order[cuts]


def check_classifier(config: MixtureConfig, dag: Dag, exit: int | None) -> int:
    """The exit's number, if it has a classifier; None is the last exit."""
    exit = dag.check_exit(exit)
    if exit not in config.exit_numbers:
        raise UserError(f"exit={exit}: this mixture has one final classifier only; use exit={config.blocks}")
    return exit


def order_points(config: MixtureConfig, exit: int, cuts: Sequence[Edge]) -> list[OperatingPoint]:
    """The points of a measured order."""
    return _points(exit, "damage", follow_cuts(build_lattice(config), exit, cuts))


def follow_cuts(dag: Dag, exit: int, cuts: Sequence[Edge]) -> list[frozenset[Edge]]:
    """The surviving edges of an exit after 0, 1, 2, ... of these cuts, which must leave one network."""
    left = Survivors(dag.exit_edges(exit))
    steps = [left.edges]
    for number, edge in enumerate(cuts):
        if edge not in left.candidates():
            raise UserError(f"exit {exit}, cut {number + 1}: edge {edge[0]}->{edge[1]} cannot be cut there")
        left.cut(edge)
        steps.append(left.edges)
    if left.candidates():
        raise UserError(f"exit {exit}: its {len(cuts)} cuts do not lead to a single network")
    return steps


def _points(exit: int, rule: Rule, steps: Iterable[frozenset[Edge]]) -> list[OperatingPoint]:
    letter = next(letter for letter, name in _LETTERS.items() if name == rule)
    return [
        OperatingPoint(exit=exit, edges=edges, name=f"e{exit}{letter}{cuts}", rule=rule, cuts=cuts)
        for cuts, edges in enumerate(steps)
    ]


def _cut(chain: Chain, exits: list[int], costs: CostTable | None) -> list[frozenset[Edge]]:
    """The surviving edges of the last of the exits after 0, 1, 2, ... cuts, by the flow averaged over the exits."""
    dag = chain.dag
    taken, passed = chain.gates(), Chain(dag, [-logit for logit in chain.logits]).gates()
    left = Survivors(dag.exit_edges(exits[-1]))
    steps = [left.edges]
    while candidates := left.candidates():
        used = dict.fromkeys(left.edges, 0.0)
        for exit in exits:
            here = left.edges if exit == exits[-1] else dag.exit_edges(exit, left.edges)
            for edge, part in flow(dag, break_sticks(here, taken, passed)).items() if here else ():
                used[edge] += part / len(exits)
        if costs is not None:
            used = {edge: used[edge] / left.macs_saved(edge, costs) for edge in candidates}
        least = min(used[edge] for edge in candidates)
        ties = [edge for edge in candidates if used[edge] <= least * (1 + _TIE)]
        left.cut(max(ties, key=lambda edge: (edge[1], edge[0])))
        steps.append(left.edges)
    return steps


class Survivors:
    """The edges of an exit while they are cut one after the other."""

    def __init__(self, edges: frozenset[Edge]) -> None:
        self.edges = edges
        self.readers: dict[int, set[int]] = {node: set() for edge in edges for node in edge}
        self.inputs: dict[int, set[int]] = {node: set() for edge in edges for node in edge}
        for i, j in edges:
            self.readers[i].add(j)
            self.inputs[j].add(i)

    def candidates(self) -> list[Edge]:
        """The edges that may be cut: their map has other inputs. None: a single network is left."""
        return [(i, j) for i, j in self.edges if len(self.inputs[j]) > 1]

    def cut(self, edge: Edge) -> None:
        gone = self.vanishing(edge)
        for i, j in gone:
            self.readers[i].discard(j)
            self.inputs[j].discard(i)
        self.edges = self.edges - gone

    def vanishing(self, edge: Edge) -> set[Edge]:
        """The edge itself and all edges into maps that nothing reads any more once it is cut."""
        gone = {edge}
        pending = [edge[0]]
        while pending:
            node = pending.pop()
            if all((node, reader) in gone for reader in self.readers[node]):
                gone.update((source, node) for source in self.inputs[node])
                pending.extend(self.inputs[node])
        return gone

    def macs_saved(self, edge: Edge, costs: CostTable) -> int:
        """All macs that vanish along with a cut: edges, and shared parts that no surviving edge reads."""
        gone = self.vanishing(edge)
        saved = sum(costs.edges[lost].macs for lost in gone)
        for node in {i for i, _ in gone}:
            sharing = [(node, reader) for reader in self.readers[node] if costs.reads_shared((node, reader))]
            if sharing and all(reader in gone for reader in sharing):
                saved += costs.shared[node].macs
        return saved
