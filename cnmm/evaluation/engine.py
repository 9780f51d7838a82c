"""Many operating points on the same images: what they have in common is computed once.

What a map holds depends only on the images and on the surviving edges among its ancestors; so do the batch statistics
re-estimated there. Hence every batch meets all points in turn, and a map is computed once for all points that agree on
its ancestors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from cnmm._errors import UserError
from cnmm.blocks import Statistics
from cnmm.cost import CostTable
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.quality import Quality
from cnmm.evaluation.task import task_of
from cnmm.lattice import Edge, OperatingPoint
from cnmm.mixture import Mixture, Parts
from cnmm.prune import check_classifier

MEMO_BYTES = 2**30
"""Memory for maps that later points of the same batch may need."""


class Tick(Protocol):
    """Is told that a part of a batch is done: just now, or by a process before this one."""

    def __call__(self, part: float, *, fresh: bool = True) -> None: ...


@dataclass(frozen=True)
class _Node:
    """A node with certain surviving ancestors, the same in all points that have it."""

    node: int
    exit: int
    """Of the output, whose classifiers differ by exit; 0 for the maps."""
    into: tuple[Edge, ...]
    buffers: tuple[str, ...]
    """Names of its statistics in the mixture's state."""
    readers: set[Edge]
    """The edges that read it, in any point so far."""


class Engine:
    """Evaluates many points on the same batches, and computes once what they have in common.

    It owns a copy of the model, into which the statistics of a node are put just before the node is computed. Keys are
    numbers of nodes with their surviving ancestors.
    """

    def __init__(self, model: Mixture, memo_bytes: int = MEMO_BYTES) -> None:
        self.model = copy.deepcopy(model).eval()
        self.costs = CostTable.of(model.config)
        self.memo_bytes = memo_bytes
        self.evaluated_macs = 0
        """Macs so far, over all images."""
        self.nodes: dict[int, _Node] = {}
        self.keys: dict[OperatingPoint, dict[int, int]] = {}
        """By point and node."""
        self.known: dict[int, dict[str, Tensor]] = {}
        """Re-estimated statistics by key."""
        self._numbers: dict[tuple[int, ...], int] = {}
        self._live = dict(self.model.named_buffers())
        self._names = {buffer: name for name, buffer in self._live.items()}
        self._own = {name: buffer.clone() for name, buffer in self._live.items()}
        self._statistics = [module for module in self.model.modules() if isinstance(module, Statistics)]

    def ordered(self, points: Iterable[OperatingPoint]) -> list[OperatingPoint]:
        """Takes points in; returns them so that neighbours have much in common: full exits, then exit by exit."""
        points = list(points)
        for point in points:
            if point not in self.keys:
                self.keys[point] = self._take_in(point)
        full = {exit: self.model.lattice.exit_edges(exit) for exit in self.model.config.exit_numbers}
        return sorted(points, key=lambda p: (p.edges != full[p.exit], p.exit, -len(p.edges), p.name))

    def macs(self, points: Iterable[OperatingPoint]) -> int:
        """Macs of evaluating all these points on one image, where what they have in common counts once."""
        return sum(map(self._macs, {key for point in points for key in self.keys[point].values()}))

    def estimate(
        self, points: Sequence[OperatingPoint], batches: Iterable[Tensor], tick: Tick, kept: Kept | None = None
    ) -> None:
        """Re-estimates the statistics of the points exactly as `reestimated` does for one."""
        known: dict[int, dict[str, Tensor]] = {}

        def state() -> dict[str, Tensor]:
            return {f"{key}/{name}": tensor for key, named in known.items() for name, tensor in named.items()}

        def restore(found: Mapping[str, Tensor]) -> None:
            for key in {key for point in points for key in self.keys[point].values()}:
                known[key] = {name: found[f"{key}/{name}"] for name in self.nodes[key].buffers}

        sweep = (kept or Kept()).sweep(batches, state, restore)
        if sweep.done:
            tick(sweep.done, fresh=False)
        self.model.train()
        shares = self._shares(points)
        for count, images in sweep:
            for module in self._statistics:
                module.momentum = 1 / count  # a plain average
            for point, _ in self._sweep(points, images, known):
                tick(shares[point])
        self.model.eval()
        if not sweep.done:
            raise UserError("no images to estimate statistics on")
        self.known |= known

    def evaluate(
        self,
        points: Sequence[OperatingPoint],
        batches: Iterable[tuple[Tensor, Tensor]],
        tick: Tick,
        *,
        metric: str,
        raw: bool,
        kept: Kept | None = None,
    ) -> dict[str, Quality]:
        """Quality of the points by name, with their re-estimated or the model's own statistics."""
        task, num_classes = task_of(self.model.config), self.model.config.num_classes
        meters = {point.name: task.meter(num_classes) for point in points}

        def state() -> dict[str, Tensor]:
            return {f"{name}/{part}": t for name, meter in meters.items() for part, t in meter.state().items()}

        def restore(found: Mapping[str, Tensor]) -> None:
            for name, meter in meters.items():
                own = f"{name}/"
                meter.restore({key.removeprefix(own): t for key, t in found.items() if key.startswith(own)})

        sweep = (kept or Kept()).sweep(batches, state, restore)
        if sweep.done:
            tick(sweep.done, fresh=False)
        shares = self._shares(points)
        for _, (images, target) in sweep:
            for point, logits in self._sweep(points, images, {} if raw else self.known):
                meters[point.name].add(logits, target)
                tick(shares[point])
        return {name: meter.quality(metric) for name, meter in meters.items()}

    def answers(
        self, points: Sequence[OperatingPoint], images: Tensor, *, raw: bool
    ) -> Iterator[tuple[OperatingPoint, Tensor]]:
        """What all points say about one batch, with their re-estimated or the model's own statistics."""
        return self._sweep(points, images, {} if raw else self.known)

    def buffers(self, point: OperatingPoint) -> dict[str, Tensor]:
        """The re-estimated statistics of a point."""
        return {name: tensor for key in self.keys[point].values() for name, tensor in self.known[key].items()}

    def _shares(self, points: Sequence[OperatingPoint]) -> dict[OperatingPoint, float]:
        """What each point adds to the work of a batch, where those before it are done: shares of all of it."""
        seen: set[int] = set()
        macs = {}
        for point in points:
            new = set(self.keys[point].values()) - seen
            macs[point] = sum(map(self._macs, new))
            seen |= new
        whole = max(sum(macs.values()), 1)
        return {point: own / whole for point, own in macs.items()}

    def _take_in(self, point: OperatingPoint) -> dict[int, int]:
        """Keys of the nodes of a point."""
        check_classifier(self.model.config, self.model.lattice, point.exit)
        edges = sorted(self.model.live_edges(point), key=lambda edge: edge[::-1])
        keys = {0: self._number(0, (), 0, {})}
        for node, into in itertools.groupby(edges, key=lambda edge: edge[1]):
            sources = tuple(i for i, _ in into)
            exit = point.exit if node == self.model.lattice.output else 0
            keys[node] = self._number(node, sources, exit, keys)
        for i, j in edges:
            self.nodes[keys[i]].readers.add((i, j))
        return keys

    def _number(self, node: int, sources: tuple[int, ...], exit: int, keys: Mapping[int, int]) -> int:
        key = self._numbers.setdefault((node, exit, *(keys[i] for i in sources)), len(self._numbers))
        if key not in self.nodes:
            statistics = self.model.statistics_of_exit(exit) if exit else self.model.statistics_of(node)
            buffers = tuple(self._names[buffer] for module in statistics for buffer in module.buffers())
            into = tuple((i, node) for i in sources)
            self.nodes[key] = _Node(node=node, exit=exit, into=into, buffers=buffers, readers=set())
        return key

    def _macs(self, key: int) -> int:
        node, costs = self.nodes[key], self.costs
        macs = sum(costs.edges[edge].macs for edge in node.into)
        if node.exit:
            return macs + costs.classifier.macs
        return macs + (costs.shared[node.node].macs if any(map(costs.reads_shared, node.readers)) else 0)

    def _sweep(
        self, points: Sequence[OperatingPoint], images: Tensor, known: dict[int, dict[str, Tensor]]
    ) -> Iterator[tuple[OperatingPoint, Tensor]]:
        """Logits of all points on one batch. In training mode, what the batch tells goes into `known`."""
        self.model.check_images(images)
        gates = self.model.gate_values(len(images))
        memo = _Memo(self.memo_bytes, (key for point in points for key in self.keys[point].values()))
        learned: set[int] = set()
        for point in points:
            parts: dict[int, Parts] = {}
            for node, key in self.keys[point].items():  # in the order of computation, the output last
                done = memo.take(key)
                if done is None:
                    self._set_statistics(key, known)
                    done = self._compute(key, images, parts, gates)
                    if self.model.training and key not in learned:  # computed anew for want of memory: not twice
                        known[key] = {name: self._live[name].clone() for name in self.nodes[key].buffers}
                        learned.add(key)
                memo.keep(key, done)
                parts[node] = done
            yield point, cast(Tensor, parts[self.model.lattice.output]["whole"])

    def _set_statistics(self, key: int, known: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Puts a node's own statistics into the model: what is known of it, or else the trained ones."""
        source = known.get(key, self._own)
        for name in self.nodes[key].buffers:
            self._live[name].copy_(source[name])

    def _compute(self, key: int, images: Tensor, parts: Mapping[int, Parts], gates: Tensor | None) -> Parts:
        """One node by expectation, from the parts of its inputs; of the output, the logits are "whole"."""
        this, model = self.nodes[key], self.model
        self.evaluated_macs += self._macs(key) * len(images)
        if this.node == 0:
            return model.run_stem(images)
        if this.exit:
            size = (images.shape[2], images.shape[3])
            return {"whole": model.run_exit(this.exit, parts, this.into, gates, size).logits}
        return model.run_map(this.node, parts, model.mixing_weights(this.into, gates), this.readers)


class _Memo:
    """Parts of nodes within a number of bytes. What is needed again last is forgotten first."""

    def __init__(self, limit: int, uses: Iterable[int]) -> None:
        self.limit, self.size = limit, 0
        self.parts: dict[int, Parts] = {}
        self.uses: dict[int, list[int]] = {}
        """Positions among all uses to come, the next one last."""
        for position, key in reversed(list(enumerate(uses))):
            self.uses.setdefault(key, []).append(position)

    def take(self, key: int) -> Parts | None:
        """The parts of a key, if they are here; `keep` gives them back."""
        parts = self.parts.pop(key, None)
        if parts is not None:
            self.size -= _num_bytes(parts)
        return parts

    def keep(self, key: int, parts: Parts) -> None:
        """The next of the uses is over: keeps the parts if there are more of them to come."""
        self.uses[key].pop()
        if self.uses[key]:
            self.parts[key] = parts
            self.size += _num_bytes(parts)
        while self.size > self.limit:
            last = max(self.parts, key=lambda key: self.uses[key][-1])
            self.size -= _num_bytes(self.parts.pop(last))


def _num_bytes(parts: Parts) -> int:
    return sum(part.nbytes if isinstance(part, Tensor) else part.z.nbytes for part in parts.values())
