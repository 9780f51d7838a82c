"""The mixture as one network: every map, every exit, at any operating point (paper, sections 3.2 to 3.4).

The operating point is an argument of the pass, never a state of the module: two threads may run two points at once.

A pass is a loop over stages, which anyone may write: `run_stem`, then `run_map` for every surviving map in order, then
`run_exit` (`forward_exits` is one such loop, the measuring engine another). What a map gives depends only on the
images, on the surviving edges among its ancestors, and on the gates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cnmm import _fields, blocks
from cnmm._errors import UserError
from cnmm.chain import Chain, break_all_sticks, initial_logits
from cnmm.config import Gates, MixtureConfig, Preprocessing, check_input_size
from cnmm.cost import CostTable, classifier_sizes
from cnmm.lattice import Edge, Lattice, OperatingPoint, Orders, build_lattice, channels, map_sizes, reached_exits
from cnmm.prune import check_classifier
from cnmm.rows import wide

Part = Literal["kept", "pooled", "whole"]
Parts = dict[Part, Tensor | blocks.Read]
"""What others read of a node: its shared part with its moments, at the map's own resolution ("kept") or at half of it
("pooled"), and "whole", what the output of a classifier reads of the map itself."""


MOST_PARAMS = 2**30
"""Of a mixture: 4 GiB."""


class Output(NamedTuple):
    """The output H_T at one exit."""

    logits: Tensor
    mixed: dict[int, Tensor]
    """By scale: the mixture of the maps so far, at their own resolution. A later exit of the same pass goes on here."""
    sources: tuple[int, ...]
    """The maps in it."""


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
        check_affordable(config)
        self.config = config
        self.preprocessing: Preprocessing | None = None
        self.orders: Orders | None = None
        """Measured cutting orders, for points such as e4d12; a run folder keeps them."""
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

    def map_module(self, node: int) -> Map:
        """The parameters of a map and of the edges into it."""
        return cast(Map, self.maps[str(node)])

    def edge_module(self, edge: Edge) -> tuple[blocks.Mix | blocks.VectorOutput, int]:
        """The parameters of an edge: those of all edges into its map (or into the output from its scale), and which."""
        node, target = edge
        if target != self.lattice.output:
            return self.map_module(target).mix, self.map_module(target).sources.index(node)
        scale = self.lattice.scale(node)
        feeding = [i for i in self.lattice.inputs[target] if self.lattice.scale(i) == scale]
        return cast(blocks.Mix | blocks.VectorOutput, self.outputs[str(scale)]), feeding.index(node)

    def edge_statistics(self, edge: Edge) -> blocks.Statistics:
        """The running statistics of the batch normalisation that begins an edge: they belong to what it reads."""
        if edge[0] == 0:
            return self.stem_statistics
        this = self.map_module(edge[0])
        read = {"whole": this.statistics, "kept": this.kept_statistics, "pooled": this.pooled_statistics}
        statistics = read[self._reads(edge)]
        assert statistics is not None
        return statistics

    def statistics_of(self, node: int) -> list[blocks.Statistics]:
        """The running statistics that computing a node reads and updates: 0 is the stem."""
        return [self.stem_statistics] if node == 0 else _statistics_in(self.maps[str(node)])

    def statistics_of_exit(self, exit: int) -> list[blocks.Statistics]:
        """Those of the output, which all exits share, and of the exit's own classifier."""
        return _statistics_in(self.outputs) + _statistics_in(self.classifiers[str(exit)])

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
        self.check_images(x)
        values = self.gate_values(len(x), gates, group=group, temperature=temperature, generator=generator)
        return self._pass(x, edges, (exit,), values, update_statistics)[exit]

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
        exits: Collection[int] | None = None,
    ) -> dict[int, Tensor]:
        """Logits of every exit from one pass and one draw of the gates; of a point, those of the exits it reaches.

        `exits`: only these of them.
        """
        edges = self.live_edges(point)
        reached = reached_exits(self.config, self.lattice, point.exit if point else None, edges)
        self.check_images(x)
        values = self.gate_values(len(x), gates, group=group, temperature=temperature, generator=generator)
        wanted = [exit for exit in reached if exits is None or exit in exits]
        return self._pass(x, edges, wanted, values, update_statistics)

    def _pass(
        self, x: Tensor, edges: frozenset[Edge], exits: Iterable[int], gates_GE: Tensor | None, update: bool
    ) -> dict[int, Tensor]:
        """Logits of the exits: every surviving map in order, and each exit as soon as its block is done."""
        weights = self.mixing_weights(edges, gates_GE)
        readers: dict[int, list[Edge]] = {}
        for edge in edges:
            readers.setdefault(edge[0], []).append(edge)
        parts = {0: self.run_stem(x, update=update)}
        output = None
        logits: dict[int, Tensor] = {}
        for exit in exits:
            for node in sorted({j for _, j in edges if j <= self.lattice.exits[exit - 1]} - parts.keys()):
                parts[node] = self.run_map(node, parts, weights, readers[node], update=update)
            size = (x.shape[2], x.shape[3])
            output = self.run_exit(exit, parts, edges, gates_GE, size, before=output, update=update)
            logits[exit] = output.logits
        return logits

    def run_stem(self, x: Tensor, *, update: bool = True) -> Parts:
        """The first convolution, for images that `check_images` accepts: what map 1 reads."""
        x = x if x.dtype == torch.bfloat16 else x.to(self.stem.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        stride = 1 if self.config.stem_stride == 1 else 2
        h = F.conv2d(x, self.stem.to(x.dtype), stride=stride, padding=1)
        return {"kept": self.stem_statistics.read(h, update=update)}

    def run_map(
        self,
        node: int,
        parts: Mapping[int, Parts],
        weights: Mapping[Edge, Tensor],
        readers: Iterable[Edge],
        *,
        update: bool = True,
    ) -> Parts:
        """One map from the parts of its inputs, mixed by the weights of the surviving edges: what `readers` read of it.

        `update`: in training mode, the running statistics of this map take a step.
        """
        this = self.map_module(node)
        index = [k for k, i in enumerate(this.sources) if (i, node) in weights]
        sources = [this.sources[k] for k in index]
        inputs = [cast(blocks.Read, parts[i][self._reads((i, node))]) for i in sources]
        mix_GE = torch.stack([weights[i, node] for i in sources], -1)
        h = this.mix(inputs, index, mix_GE, update=update)
        if node == 1 and self.config.stem_stride == 4:
            h = blocks.pool(h, largest=True)
        kinds = {self._reads(edge) for edge in readers}
        result: Parts = {}
        if spread := kinds - {"whole"}:
            result.update(this.spread(h, spread, largest=self.config.task == "segmentation", update=update))
        if "whole" in kinds:
            output, position = self.edge_module((node, self.lattice.output))
            assert isinstance(output, blocks.VectorOutput)
            result["whole"] = output.pool(h, position, this.statistics, update=update and not spread)
        return result

    def run_exit(
        self,
        exit: int,
        parts: Mapping[int, Parts],
        edges: Iterable[Edge],
        gates_GE: Tensor | None,
        size: tuple[int, int],
        *,
        before: Output | None = None,
        update: bool = True,
    ) -> Output:
        """The output at an exit, Eq. (7) with s_t = T, and its classifier's answer for images of a height and width.

        `before`, the output at an earlier exit of the same pass: only the maps since then are mixed in, so that every
        edge into the output is evaluated once.
        """
        lattice, T = self.lattice, self.lattice.output
        sources = sorted(i for i, j in edges if j == T and i <= lattice.exits[exit - 1])
        weights = self.mixing_weights([(i, T) for i in sources], gates_GE)
        mixed = dict(before.mixed) if before else {}
        new = [i for i in sources if not before or i not in before.sources]
        if mixed and new and gates_GE is not None:
            left = (1 - gates_GE[:, [lattice.edge_index[i, T] for i in new]]).prod(1)
            mixed = {scale: h * _per_image(left, h) for scale, h in mixed.items()}
        for scale in sorted({lattice.scale(i) for i in new}):
            here = [i for i in new if lattice.scale(i) == scale]
            mix_GE = torch.stack([weights[i, T] for i in here], -1)
            inputs, index = [parts[i][self._reads((i, T))] for i in here], [self.edge_module((i, T))[1] for i in here]
            h = self.outputs[str(scale)](inputs, index, mix_GE, update=update)
            mixed[scale] = mixed[scale] + h if scale in mixed else h
        return Output(self._classify(exit, mixed, size, update), mixed, tuple(sources))

    def _classify(self, exit: int, mixed: Mapping[int, Tensor], size: tuple[int, int], update: bool) -> Tensor:
        classifier = self.classifiers[str(exit)]
        if self.config.task == "classification":
            (h,) = mixed.values()
            return cast(Tensor, classifier(h))
        first = map_sizes(self.config, size)[0]
        h = functools.reduce(torch.add, (blocks.upsample(h, first) for h in mixed.values()))
        return cast(Tensor, classifier(h, classifier_sizes(self.config, size), update=update))

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
        num_samples = _fields.checked(num_samples, "num_samples", _fields.POSITIVE)
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
            total = total + logits.softmax(1, dtype=wide(logits))
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

    def gate_values(
        self,
        num: int,
        gates: Gates | Tensor = "expectation",
        *,
        group: int | None = None,
        temperature: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> Tensor | None:
        """Gate values [G, edges] of a pass on `num` images, G a divisor of it; None: this mixture has no gates."""
        num_edges = len(self.lattice.edges)
        if self.config.mixing == "sum":
            if isinstance(gates, Tensor) or gates != "expectation":
                raise UserError("mixing='sum' has no gates to sample; leave gates='expectation'")
            return None
        group = _fields.checked(group, "group", _fields.or_null(_fields.POSITIVE))
        group = min(group or num, num)
        draws = -(-num // group)
        if isinstance(gates, Tensor):
            values = gates.expand(1, -1) if gates.dim() == 1 else gates
            if values.shape not in ((1, num_edges), (draws, num_edges)):
                raise UserError(
                    f"gates of shape {tuple(gates.shape)}: must be ({num_edges},) or ({draws}, {num_edges}) for "
                    f"{num} images in groups of {group}"
                )
        elif gates == "expectation":
            values = self.gate_logits.sigmoid()[None]
        elif gates == "relaxed":
            values = self.chain.rsample((draws,), temperature=temperature, generator=generator)
        elif gates == "hard":
            values = self.chain.sample((draws,), generator=generator)
        else:
            raise UserError(f"gates={gates!r}: must be 'expectation', 'relaxed', 'hard' or a tensor of gate values")
        if values.shape[0] == 1:
            return values
        equal = math.gcd(num, group)  # groups of equal size, where the last one would be smaller
        return values.repeat_interleave(group // equal, 0)[: num // equal]

    def check_images(self, x: Tensor) -> None:
        """Refuses what a pass cannot take."""
        config = self.config
        if x.dim() != 4 or not x.is_floating_point():
            wanted = f"must be float images [N, {config.in_chans}, height, width]"
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

    def _reads(self, edge: Edge) -> Part:
        """What an edge reads of its map: H_i itself as the output of a classifier does, or its shared part."""
        if edge[1] == self.lattice.output:
            return "whole" if self.config.task == "classification" else "kept"
        return "pooled" if edge[0] and self.lattice.falls(edge) else "kept"

    def mixing_weights(self, edges: Iterable[Edge], gates_GE: Tensor | None) -> dict[Edge, Tensor]:
        """w[i, j] of surviving edges for each of the G rows of gate values; deterministic variant: all ones."""
        if gates_GE is None:
            return dict.fromkeys(edges, self.stem.new_ones(1))
        return break_all_sticks(self.lattice, edges, gates_GE)


def _statistics_in(module: nn.Module) -> list[blocks.Statistics]:
    return [part for part in module.modules() if isinstance(part, blocks.Statistics)]


def _per_image(values_G: Tensor, like: Tensor) -> Tensor:
    """One factor per group of images, shaped to multiply `like` [N, ...]."""
    factors = values_G.repeat_interleave(like.shape[0] // values_G.shape[0])
    return factors.view(-1, *[1] * (like.dim() - 1)).to(like.dtype)


def check_affordable(config: MixtureConfig) -> None:
    """Refuses a mixture that would not fit into memory, before any of it is taken."""
    params = CostTable.of(config).exit().params
    if params > MOST_PARAMS:
        shape = f"blocks={config.blocks}, scales={config.scales}, channels={config.channels}"
        raise UserError(f"{shape}: {params:,} params, must be at most {MOST_PARAMS:,}; use fewer channels or scales")
