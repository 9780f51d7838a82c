"""The mixture as one network: every map, every exit, at any operating point (paper, sections 3.2 to 3.4).

The operating point is an argument of the pass, never a state of the module: two threads may run two points at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cnmm import blocks
from cnmm._errors import UserError
from cnmm.chain import Chain, initial_logits
from cnmm.config import Gates, MixtureConfig, Preprocessing, check_input_size
from cnmm.cost import classifier_sizes
from cnmm.lattice import Edge, Lattice, OperatingPoint, build_lattice, channels, map_sizes
from cnmm.prune import check_classifier

Part = Literal["kept", "pooled", "whole"]
Parts = dict[Part, Tensor | blocks.Read]
"""What others read of a node: its shared part with its moments, at the map's own resolution ("kept") or at half of it,
and "whole", the tensor that a classifier's output reads of the map itself. Of the output it is the logits."""
Visit = Callable[[int, Callable[[], Parts]], Parts]
"""Stands between a pass and the nodes that it computes: called with each node and the function that computes it."""


class Map(nn.Module):
    """One feature map H_j: the edges into it, the statistics of H_j and the part that the edges out of it share."""

    shared: blocks.Shared | None

    def __init__(self, sources: Iterable[int], widths: list[int], width: int, *, shared: bool, prelu: bool) -> None:
        super().__init__()
        self.sources = tuple(sources)
        self.mix = blocks.Mix(widths, width, prelu=prelu)
        self.statistics = blocks.Statistics(width)
        self.shared = blocks.Shared(width, prelu=prelu) if shared else None
        self.kept_statistics = blocks.Statistics(width // 4) if shared else None
        self.pooled_statistics = blocks.Statistics(width // 4) if shared else None

    def spread(self, h: Tensor, kinds: Iterable[Part], *, largest: bool, update: bool) -> Parts:
        """What the edges that leave this map read: those that are pooled, or kept as they are."""
        assert self.shared is not None
        assert self.kept_statistics is not None
        assert self.pooled_statistics is not None
        z = self.shared(h, self.statistics, update=update)
        return {
            kind: self.pooled_statistics.read(blocks.pool(z, largest=largest), update=update)
            if kind == "pooled"
            else self.kept_statistics.read(z, update=update)
            for kind in sorted(kinds)
        }


class Mixture(nn.Module):
    """A Convolutional Neural Mixture Model. `cnmm.create_model` makes one by name."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.preprocessing: Preprocessing | None = None
        self.lattice: Lattice = build_lattice(config)
        if config.mixing == "gates":
            self.gate_logits = nn.Parameter(torch.tensor(initial_logits(self.lattice, config.gate_init)))
        lattice, prelu = self.lattice, config.task == "segmentation"
        stem = config.channels // 4
        self.stem = blocks.uniform_(torch.empty(stem, config.in_chans, 3, 3), 9 * config.in_chans)
        self.stem_statistics = blocks.Statistics(stem)

        self.maps = nn.ModuleDict()
        read = {i for i, j in lattice.edges if j != lattice.output or prelu}
        for node in range(1, lattice.output):
            sources = lattice.inputs[node]
            if node > 1:  # kept inputs first, then those that are pooled: equal widths side by side
                sources = tuple(sorted(sources, key=lambda i, node=node: (lattice.falls((i, node)), i)))  # type: ignore[misc]
            widths = [self._width(i) // 4 if i else stem for i in sources]
            self.maps[str(node)] = Map(sources, widths, self._width(node), shared=node in read, prelu=prelu)

        self.outputs = nn.ModuleDict()
        self.classifiers = nn.ModuleDict()
        for scale in range(config.scales):
            feeding = [i for i in lattice.inputs[lattice.output] if lattice.scale(i) == scale]
            if not feeding:
                continue
            width = channels(config, scale)
            self.outputs[str(scale)] = (
                blocks.Mix([width // 4] * len(feeding), config.out_channels, prelu=True)
                if prelu
                else blocks.VectorOutput(len(feeding), width, config.out_channels)
            )
        for exit in config.exit_numbers:
            self.classifiers[str(exit)] = (
                blocks.PixelClassifier(config.out_channels, config.num_classes)
                if prelu
                else nn.Linear(config.out_channels, config.num_classes)
            )

    @property
    def chain(self) -> Chain:
        """The distribution over networks that the gates define."""
        if self.config.mixing == "sum":
            raise UserError("mixing='sum' has no gates, so no distribution over networks and no cutting")
        return Chain(self.lattice, self.gate_logits)

    def forward(
        self,
        x: Tensor,
        point: OperatingPoint | None = None,
        *,
        gates: Gates | Tensor = "expectation",
        group: int | None = None,
        temperature: float = 2.0,
        generator: torch.Generator | None = None,
        update_statistics: bool = True,
    ) -> Tensor:
        """Logits [N, classes] or [N, classes, height, width] at an operating point (default: the full last exit).

        Images are float, normalised; if they are bfloat16, so are all activations. `gates`: the expectation, a
        "relaxed" sample (with its `temperature`) or a "hard" one, or values [edges] or [draws, edges] in the order of
        `lattice.edges`. A sample is drawn for every `group` images (1: each image its own; None: one for the batch).
        In training mode a pass normalises by its batch and updates the running statistics, if it may.
        """
        exit = check_classifier(self.config, self.lattice, point.exit if point else None)
        edges = self.live_edges(point)
        values = self._draw(gates, x, group, temperature, generator)
        return self._run(x, edges, (exit,), values, update_statistics)[exit]

    def forward_exits(
        self,
        x: Tensor,
        point: OperatingPoint | None = None,
        *,
        gates: Gates | Tensor = "expectation",
        group: int | None = None,
        temperature: float = 2.0,
        generator: torch.Generator | None = None,
        update_statistics: bool = True,
    ) -> dict[int, Tensor]:
        """Logits of every exit from one pass and one draw of the gates; of a point, those of the exits it reaches."""
        edges = self.live_edges(point)
        last = point.exit if point else self.lattice.num_exits
        first = min(i for i, j in edges if j == self.lattice.output)
        exits = [k for k in self.config.exit_numbers if k <= last and self.lattice.exits[k - 1] >= first]
        values = self._draw(gates, x, group, temperature, generator)
        return self._run(x, edges, tuple(exits), values, update_statistics)

    def forward_visited(
        self, x: Tensor, point: OperatingPoint, visit: Visit, also: frozenset[Edge] = frozenset()
    ) -> Tensor:
        """Logits at a point by expectation, where `visit` may keep the parts of a node for another pass.

        The parts of a map depend only on the images, the surviving edges among its ancestors, and which of them are
        read: by edges of the point, or by edges `also` out of its maps.
        """
        exit = check_classifier(self.config, self.lattice, point.exit)
        values = self._draw("expectation", x, None, 1.0, None)
        return self._run(x, self.live_edges(point), (exit,), values, True, visit, also)[exit]

    @torch.no_grad()
    def monte_carlo(
        self,
        x: Tensor,
        num_samples: int,
        point: OperatingPoint | None = None,
        *,
        hard: bool = False,
        temperature: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Class probabilities averaged over samples of the gates, drawn anew for each image (the paper's table 1)."""
        if num_samples < 1:
            raise UserError(f"num_samples={num_samples}: at least 1 is needed")
        if self.training:
            raise UserError("monte_carlo uses the running statistics; call model.eval() first")
        total = torch.zeros((), device=x.device)
        for _ in range(num_samples):
            logits = self(
                x,
                point,
                gates="hard" if hard else "relaxed",
                group=1,
                temperature=temperature,
                generator=generator,
            )
            total = total + logits.softmax(1, dtype=blocks.wide(logits))
        return total / num_samples

    def live_edges(self, point: OperatingPoint | None = None) -> frozenset[Edge]:
        """The edges that a pass at this point evaluates."""
        if point is None:
            return self.lattice.exit_edges()
        unknown = sorted(point.edges - set(self.lattice.edges))
        if unknown:
            raise UserError(
                f"point {point.name!r} has edge {unknown[0][0]}->{unknown[0][1]}, which {self.config.name!r} does not; "
                "take points from cutting_order(model, exit=...) of the same model"
            )
        if self.config.mixing == "sum" and point.edges != self.lattice.exit_edges(point.exit):
            raise UserError(f"point {point.name!r}: mixing='sum' has no cutting; use the full exit, e{point.exit}c0")
        live = self.lattice.exit_edges(point.exit, point.edges)
        if not live:
            raise UserError(f"point {point.name!r}: its edges do not lead from the image to exit {point.exit}")
        return live

    def _width(self, node: int) -> int:
        return channels(self.config, self.lattice.scale(node))

    def _draw(
        self,
        gates: Gates | Tensor,
        x: Tensor,
        group: int | None,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Tensor | None:
        """Gate values [G, edges], G a divisor of the number of images."""
        self._check_images(x)
        num, num_edges = x.shape[0], len(self.lattice.edges)
        if self.config.mixing == "sum":
            if isinstance(gates, Tensor) or gates != "expectation":
                raise UserError("mixing='sum' has no gates to sample; leave gates='expectation'")
            return None
        if group is not None and group < 1:
            raise UserError(f"group={group}: a number of images of at least 1, or None for the whole batch")
        group = min(group or num, num)
        draws = -(-num // group)
        if isinstance(gates, Tensor):
            values = gates.expand(1, -1) if gates.dim() == 1 else gates
            if values.shape not in ((1, num_edges), (draws, num_edges)):
                raise UserError(
                    f"gates of shape {tuple(gates.shape)}: ({num_edges},) or ({draws}, {num_edges}) is needed for "
                    f"{num} images in groups of {group}"
                )
        elif gates == "expectation":
            values = self.gate_logits.sigmoid()[None]
        elif gates == "relaxed":
            values = self.chain.rsample((draws,), temperature=temperature, generator=generator)
        elif gates == "hard":
            values = self.chain.sample((draws,), generator=generator)
        else:
            raise UserError(f"gates={gates!r}: allowed are 'expectation', 'relaxed', 'hard' or a tensor of gate values")
        if values.shape[0] == 1:
            return values
        equal = math.gcd(num, group)  # groups of equal size, where the last one would be smaller
        return values.repeat_interleave(group // equal, 0)[: num // equal]

    def _check_images(self, x: Tensor) -> None:
        config = self.config
        if x.dim() != 4 or not x.is_floating_point():
            wanted = f"float images [N, {config.in_chans}, height, width] are needed"
            raise UserError(f"images of shape {tuple(x.shape)} and type {x.dtype}: {wanted}")
        if x.shape[1] != config.in_chans:
            raise UserError(
                f"images with {x.shape[1]} channels: {config.name!r} takes {config.in_chans}; convert the images or "
                f"create_model(..., in_chans={x.shape[1]})"
            )
        size = (x.shape[2], x.shape[3])
        check_input_size(config, size)
        # Batch statistics need two values: two images, or two pixels in the coarsest maps of one.
        single = config.task == "classification" or math.prod(map_sizes(config, size)[-1]) == 1
        least = 2 if self.training and single else 1
        if x.shape[0] < least:
            raise UserError(f"a batch of {x.shape[0]} images: training needs at least {least}, or call model.eval()")

    def _run(
        self,
        x: Tensor,
        edges: frozenset[Edge],
        exits: tuple[int, ...],
        gates: Tensor | None,
        update: bool,
        visit: Visit = lambda node, compute: compute(),
        also: frozenset[Edge] = frozenset(),
    ) -> dict[int, Tensor]:
        """Evaluates the edges, map after map, and the exits as soon as their block is done.

        What edges `also` read of the maps is computed, too, but not those edges.
        """
        lattice = self.lattice
        weights = self._weights(edges, gates)
        output = _Output(self, edges, gates, x, update)
        readers: dict[int, list[Edge]] = {}
        for edge in edges | also:
            readers.setdefault(edge[0], []).append(edge)
        parts: dict[int, Parts] = {0: visit(0, functools.partial(self._stem, x, update))}
        maps: dict[int, Tensor | blocks.Read] = {}  # what the output reads of the maps since the last exit
        logits: dict[int, Tensor] = {}
        alive = {j for _, j in edges}
        for node in range(1, lattice.exits[exits[-1] - 1] + 1):
            if node in alive:
                compute = functools.partial(self._map, node, parts, weights, readers.get(node, ()), output, update)
                parts[node] = visit(node, compute)
                if (node, lattice.output) in edges:
                    maps[node] = parts[node][self._reads((node, lattice.output))]
            if node in lattice.exits and lattice.exits.index(node) + 1 in exits:
                exit = lattice.exits.index(node) + 1
                answer = visit(lattice.output, functools.partial(output.exit, exit, maps))
                logits[exit] = cast(Tensor, answer["whole"])
        return logits

    def _reads(self, edge: Edge) -> Part:
        """What an edge reads of its map: H_i itself as the output of a classifier does, or its shared part."""
        if edge[1] == self.lattice.output:
            return "whole" if self.config.task == "classification" else "kept"
        return "pooled" if edge[0] and self.lattice.falls(edge) else "kept"

    def _stem(self, x: Tensor, update: bool) -> Parts:
        x = x if x.dtype == torch.bfloat16 else x.to(self.stem.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        stride = 1 if self.config.stem_stride == 1 else 2
        h = F.conv2d(x, self.stem.to(x.dtype), stride=stride, padding=1)
        return {"kept": self.stem_statistics.read(h, update=update)}

    def _map(
        self,
        node: int,
        parts: Mapping[int, Parts],
        weights: Mapping[Edge, Tensor],
        readers: Iterable[Edge],
        output: _Output,
        update: bool,
    ) -> Parts:
        """One map from the parts of its inputs: what its readers read of it."""
        this = cast(Map, self.maps[str(node)])
        index = [k for k, i in enumerate(this.sources) if (i, node) in weights]
        sources = [this.sources[k] for k in index]
        inputs = [parts[i][self._reads((i, node))] for i in sources]
        mix_GE = torch.stack([weights[i, node] for i in sources], -1)
        h = this.mix(inputs, index, mix_GE, update=update)
        if node == 1 and self.config.stem_stride == 4:
            h = blocks.pool(h, largest=True)
        kinds = {self._reads(edge) for edge in readers}
        result: Parts = {}
        if spread := kinds - {"whole"}:
            result.update(this.spread(h, spread, largest=self.config.task == "segmentation", update=update))
        if "whole" in kinds:
            result["whole"] = output.read(node, h, this.statistics, update=update and not spread)
        return result

    def _weights(self, edges: Iterable[Edge], gates_GE: Tensor | None) -> dict[Edge, Tensor]:
        """Mixing weights [G] of the edges: `break_sticks` for all maps at once; deterministic variant: all ones."""
        edges = frozenset(edges)
        if gates_GE is None:
            return dict.fromkeys(edges, self.stem.new_ones(1))
        sticks = _Sticks.of(self.lattice, edges)
        where, base = sticks.tensors(gates_GE.device)
        # Newest input first. What follows the base of a shorter list has no gate (the last column) and no weight.
        gates_GJI = F.pad(gates_GE, (0, 1))[:, where].masked_fill(base, 0)
        rest_GJI = F.pad((1 - gates_GJI).cumprod(2)[:, :, :-1], (1, 0), value=1.0)
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
    @functools.lru_cache(maxsize=256)
    def of(cls, lattice: Lattice, edges: frozenset[Edge]) -> _Sticks:
        number = {edge: k for k, edge in enumerate(lattice.edges)}
        lists: dict[int, list[Edge]] = {}
        for edge in sorted(edges, reverse=True):
            lists.setdefault(edge[1], []).append(edge)
        width = max(map(len, lists.values()))
        return cls(
            edges=tuple(edge for row in lists.values() for edge in row),
            places=tuple(r * width + k for r, row in enumerate(lists.values()) for k in range(len(row))),
            rows=tuple((*(number[edge] for edge in row), *[-1] * (width - len(row))) for row in lists.values()),
            sizes=tuple(map(len, lists.values())),
        )

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, and where the base of each is."""
        where = torch.tensor(self.rows, device=device)
        last = torch.tensor(self.sizes, device=device)[:, None] - 1
        return where, torch.arange(where.shape[1], device=device) == last


class _Output:
    """The output H_T of one pass, exit after exit: Eq. (7) with s_t = T. Every edge into it is evaluated once."""

    def __init__(
        self, model: Mixture, edges: frozenset[Edge], gates_GE: Tensor | None, x: Tensor, update: bool
    ) -> None:
        self.model, self.gates_GE, self.x, self.update = model, gates_GE, x, update
        self.lattice = model.lattice
        self.sources = sorted(i for i, j in edges if j == self.lattice.output)
        self.mixed: dict[int, Tensor] = {}  # by scale: the mixture of the inputs so far, at their own resolution

    def read(self, node: int, h: Tensor, statistics: blocks.Statistics, *, update: bool) -> Tensor:
        """BN-ReLU-GP of a map, for classification."""
        output = cast(blocks.VectorOutput, self.model.outputs[str(self.lattice.scale(node))])
        return output.pool(h, self._position(node), statistics, update=update)

    def exit(self, exit: int, maps: dict[int, Tensor | blocks.Read]) -> Parts:
        """Mixes the maps in that have come since the last exit (and forgets them), then classifies."""
        model, lattice = self.model, self.lattice
        T = lattice.output
        seen = [i for i in self.sources if i <= lattice.exits[exit - 1]]
        weights = model._weights([(i, T) for i in seen], self.gates_GE)
        if self.mixed and self.gates_GE is not None and maps:
            left = (1 - self.gates_GE[:, [lattice.edges.index((i, T)) for i in maps]]).prod(1)
            for scale, h in self.mixed.items():
                self.mixed[scale] = h * _per_image(left, h)
        for scale in sorted({lattice.scale(i) for i in maps}):
            new = [i for i in sorted(maps) if lattice.scale(i) == scale]
            mix_GE = torch.stack([weights[i, T] for i in new], -1)
            inputs, index = [maps[i] for i in new], [self._position(i) for i in new]
            h = model.outputs[str(scale)](inputs, index, mix_GE, update=self.update)
            self.mixed[scale] = self.mixed[scale] + h if scale in self.mixed else h
        maps.clear()
        classifier = model.classifiers[str(exit)]
        if model.config.task == "classification":
            (h,) = self.mixed.values()
            return {"whole": classifier(h)}
        size = (self.x.shape[2], self.x.shape[3])
        first = map_sizes(model.config, size)[0]
        h = functools.reduce(torch.add, (blocks.upsample(h, first) for h in self.mixed.values()))
        sizes = classifier_sizes(model.config, size)
        return {"whole": classifier(h, sizes, update=self.update)}

    def _position(self, node: int) -> int:
        """Which of its scale's edges into the output this map's is."""
        scale = self.lattice.scale(node)
        return [i for i in self.lattice.inputs[self.lattice.output] if self.lattice.scale(i) == scale].index(node)


def _per_image(values_G: Tensor, like: Tensor) -> Tensor:
    """One factor per group of images, shaped to multiply `like` [N, ...]."""
    factors = values_G.repeat_interleave(like.shape[0] // values_G.shape[0])
    return factors.view(-1, *[1] * (like.dim() - 1)).to(like.dtype)
