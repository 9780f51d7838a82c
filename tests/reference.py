"""The paper's mixture, transcribed literally: the oracle that the tests hold the fast implementation against.

One module per operation, one batch-norm per use, and the recurrence of Eq. (sampling_conditional) with one running
sample per node. Slow on purpose, and it shares no code with `cnmm`.

Nodes are 0 (image), 1..B*S (maps, block-major) and T = B*S + 1 (output); an edge (i, j) is the function f_i^j.
Exits are numbered 1..B. Sizes are (height, width); macs are multiply-adds of one image.
"""

from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Edge = tuple[int, int]
Size = tuple[int, int]
Config = Any  # an object with: task blocks scales channels num_classes in_chans stem_stride out_channels exits mixing


def output_node(config: Config) -> int:
    return int(config.blocks * config.scales + 1)


def block_of(config: Config, i: int) -> int:
    """The block of map i, counted from 1 as the exits are."""
    return int((i - 1) // config.scales + 1)


def scale_of(config: Config, i: int) -> int:
    return int((i - 1) % config.scales)


def all_edges(config: Config, exit: int | None = None) -> list[Edge]:
    """The edges of the lattice, in order; with `exit`, the output reads the blocks up to that exit's only."""
    T, coarsest = output_node(config), config.scales - 1
    edges = [(0, 1)]
    for i in range(1, T):
        for j in range(i + 1, T):
            if scale_of(config, j) - scale_of(config, i) in (0, 1):
                edges.append((i, j))
        feeds_output = config.task == "segmentation" or scale_of(config, i) == coarsest
        if feeds_output and (exit is None or block_of(config, i) <= exit):
            edges.append((i, T))
    return edges


def live_edges(config: Config, edges: Set[Edge] | None, exit: int) -> list[Edge]:
    """The surviving edges that lie on a path from the image to the output as `exit` reads it."""
    kept = [e for e in all_edges(config, exit) if edges is None or e in edges]
    reached, needed = {0}, {output_node(config)}
    for i, j in kept:
        if i in reached:
            reached.add(j)
    for i, j in reversed(kept):
        if j in needed:
            needed.add(i)
    return [(i, j) for i, j in kept if i in reached and j in needed]


def activation(config: Config, channels: int) -> nn.Module:
    return nn.ReLU() if config.task == "classification" else nn.PReLU(channels)


def upsample(x: Tensor, size: Size) -> Tensor:
    return x if x.shape[-2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)


class SharedPart(nn.Module):
    """BN-act-DConv: the start of f_i^j, the same for all j."""

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.act = activation(config, channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.pointwise = nn.Conv2d(channels, channels // 4, 1, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        z: Tensor = self.pointwise(self.depthwise(self.act(self.bn(h))))
        return z


class ConvEdge(nn.Module):
    """BN-act-Conv-BN: the rest of f_i^j, after the pooling."""

    def __init__(self, config: Config, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.act = activation(config, in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, z: Tensor) -> Tensor:
        f: Tensor = self.bn2(self.conv(self.act(self.bn1(z))))
        return f


class GlobalEdge(nn.Module):
    """BN-ReLU-GP-FC-BN: f_i^T of classification."""

    def __init__(self, config: Config, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.act = activation(config, in_channels)
        self.fc = nn.Linear(in_channels, out_channels, bias=False)
        self.bn2 = nn.BatchNorm1d(out_channels)

    def forward(self, h: Tensor) -> Tensor:
        f: Tensor = self.bn2(self.fc(self.act(self.bn1(h)).mean(dim=(2, 3))))
        return f


class PixelClassifier(nn.Module):
    """UP-BN-PReLU-Conv-UP-BN-PReLU-DConv: theta_k of segmentation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(config.out_channels)
        self.act1 = activation(config, config.out_channels)
        self.conv = nn.Conv2d(config.out_channels, 12, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(12)
        self.act2 = activation(config, 12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.pointwise = nn.Conv2d(12, config.num_classes, 1)

    def forward(self, h: Tensor, first: Size, second: Size) -> Tensor:
        h = self.conv(self.act1(self.bn1(upsample(h, first))))
        h = self.act2(self.bn2(upsample(h, second)))
        logits: Tensor = self.pointwise(self.depthwise(h))
        return logits


class ReferenceMixture(nn.Module):
    """All functions f_i^j and classifiers theta_k, and the recurrence over them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.T = T = output_node(config)
        self.classification = config.task == "classification"
        channels = {i: config.channels * 2 ** scale_of(config, i) for i in range(1, T)}
        narrow = {0: config.channels // 4} | {i: c // 4 for i, c in channels.items()}  # after the initial operations
        channels[T] = config.out_channels

        stride = 1 if config.stem_stride == 1 else 2
        self.stem_conv = nn.Conv2d(config.in_chans, narrow[0], 3, stride=stride, padding=1, bias=False)
        self.shared, self.edge, self.classifier = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for i, j in all_edges(config):
            if j == T and self.classification:
                self.edge[f"{i}_{j}"] = GlobalEdge(config, channels[i], channels[j])
                continue
            if i > 0 and str(i) not in self.shared:
                self.shared[str(i)] = SharedPart(config, channels[i])
            self.edge[f"{i}_{j}"] = ConvEdge(config, narrow[i], channels[j])
        self.exits = list(range(1, config.blocks + 1)) if config.exits == "all" else [config.blocks]
        for k in self.exits:
            linear = nn.Linear(config.out_channels, config.num_classes)
            self.classifier[str(k)] = linear if self.classification else PixelClassifier(config)

    def sizes(self, x: Tensor) -> tuple[Size, Size, Size]:
        """Sizes of H_1 and of the targets of the classifier's first and second UP."""
        height, width = x.shape[-2:]
        full = (height, width)
        half = ((height + 1) // 2, (width + 1) // 2)
        quarter = ((half[0] + 1) // 2, (half[1] + 1) // 2)
        return {1: (full, full, full), 2: (half, full, full), 4: (quarter, half, full)}[self.config.stem_stride]

    def initial(self, i: int, h: Tensor, targets: Iterable[int]) -> Tensor:
        """What the functions f_i^j to `targets` do first, with the same parameters for all j."""
        if i > 0 and self.classification and all(j == self.T for j in targets):
            return h  # GlobalEdge shares nothing
        z: Tensor = self.stem_conv(h) if i == 0 else self.shared[str(i)](h)
        return z

    def function(self, i: int, j: int, h: Tensor, z: Tensor, x: Tensor) -> Tensor:
        """f_i^j(h), where z is what the initial operations made of h; x tells the sizes."""
        if j == self.T and self.classification:
            z = h
        elif i > 0 and j < self.T and scale_of(self.config, j) > scale_of(self.config, i):
            if self.classification:
                z = F.avg_pool2d(z, 2, stride=2, ceil_mode=True, count_include_pad=False)
            else:
                z = F.max_pool2d(z, 2, stride=2, ceil_mode=True)
        f: Tensor = self.edge[f"{i}_{j}"](z)
        if i == 0 and self.config.stem_stride == 4:
            f = F.max_pool2d(f, 2, stride=2, ceil_mode=True)
        if j == self.T and not self.classification:
            f = upsample(f, self.sizes(x)[0])
        return f

    def classify(self, exit: int, h: Tensor, x: Tensor) -> Tensor:
        targets = () if self.classification else self.sizes(x)[1:]
        logits: Tensor = self.classifier[str(exit)](h, *targets)
        return logits

    def forward(
        self,
        x: Tensor,
        gates: Mapping[Edge, Tensor],
        edges: Set[Edge] | None = None,
        exits: Iterable[int] | None = None,
    ) -> dict[int, Tensor]:
        wanted = set(self.exits if exits is None else exits)
        live = live_edges(self.config, edges, max(wanted))
        h = {0: x}  # at step t: h[j] is the running sample h^j_t; for j <= t it is the map H_j
        logits = {}
        for t in range(1, self.T + 1):
            targets = [j for i, j in live if i == t - 1]  # a missing edge is a gate of zero: h[j] stays
            if targets:
                z = self.initial(t - 1, h[t - 1], targets)
            for j in targets:
                f = self.function(t - 1, j, h[t - 1], z, x)
                if j not in h:
                    h[j] = f  # the base: the oldest input takes what is left
                elif self.config.mixing == "sum":
                    h[j] = f + h[j]
                else:
                    pi = gates[t - 1, j].to(f.dtype).reshape(-1, *[1] * (f.dim() - 1))
                    h[j] = pi * f + (1 - pi) * h[j]
            k, within = divmod(t - 1, self.config.scales)
            if within == 0 and k in wanted:  # all maps of blocks 1..k have been read
                logits[k] = self.classify(k, h[self.T], x)
        return logits


def enumerate_networks(config: Config, exit: int) -> list[tuple[int, ...]]:
    """Every CNN of the mixture at `exit`, as its path of nodes from 0 to T."""
    edges, T = all_edges(config, exit), output_node(config)

    def paths(i: int) -> list[tuple[int, ...]]:
        return [(T,)] if i == T else [(i, *rest) for a, j in edges if a == i for rest in paths(j)]

    return paths(0)


def run_network(reference: ReferenceMixture, x: Tensor, path: tuple[int, ...], exit: int) -> Tensor:
    """That CNN alone, Eq. (cnn_def2): its functions one after the other, then the exit's classifier."""
    h = x
    for i, j in pairwise(path):
        h = reference.function(i, j, h, reference.initial(i, h, [j]), x)
    return reference.classify(exit, h, x)


def literal_macs(config: Config, input_size: int | Size) -> dict[int, int]:
    """Multiply-adds of convolutions and linear layers, per exit, counted while that exit alone runs."""
    size = (input_size, input_size) if isinstance(input_size, int) else input_size
    count = 0

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal count
        assert isinstance(module, (nn.Conv2d, nn.Linear))
        count += module.weight.numel() * output[0, 0].numel()  # each weight once per output position

    macs = {}
    with torch.device("meta"), torch.no_grad():
        reference = ReferenceMixture(config).eval()
        for module in reference.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_hook(hook)
        gates = dict.fromkeys(all_edges(config), torch.tensor(0.5))
        for k in reference.exits:
            count = 0
            reference(torch.empty(1, config.in_chans, *size), gates, exits=[k])
            macs[k] = count
    return macs
