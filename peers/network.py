"""What all peers share: exits, their cost, and how they become an ONNX file."""

from __future__ import annotations

import copy
import itertools
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class Peer(nn.Module):
    """A network with one or more exits, cheapest first.

    An exit may be a classifier on the way through one network, or one of the widths of a slimmable network.
    """

    nested: bool = True
    """Does an exit go on from where the one before it stopped?"""
    classifiers: nn.ModuleList
    """One for each exit, where exits are nested."""

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Scores of every exit. What an exit alone needs is computed when its scores are asked for."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the last exit."""
        *_, last = self.exits(x)
        return last

    def start(self, batches: Iterable[Tensor]) -> None:
        """What the weights take from prepared training images before the first step."""


@dataclass(frozen=True)
class ExitCost:
    """Macs of one exit."""

    macs: int
    """Of an image that is meant for this exit: no other exit's classifier."""
    stage: int
    """What it adds to the exits before it when they have all been asked first."""


def exit_costs(network: Peer, size: tuple[int, int], in_chans: int = 3) -> list[ExitCost]:
    """Macs of every exit for one image, counted on the way: multiply-adds of convolutions and linear layers."""
    shapes = copy.deepcopy(network).to("meta").eval()  # tensors without values
    reached, passed = [], []  # macs in all before a classifier, and after it
    with FlopCounterMode(display=False) as counter, torch.no_grad():

        def note(*_: object) -> None:
            reached.append(counter.get_total_flops() // 2)

        for classifier in shapes.classifiers if shapes.nested else ():
            classifier.register_forward_pre_hook(note)
        for _ in shapes.exits(torch.zeros(1, in_chans, *size, device="meta")):
            passed.append(counter.get_total_flops() // 2)
    stages = [after - before for before, after in itertools.pairwise([0, *passed])]
    if not network.nested:
        return [ExitCost(macs, macs) for macs in stages]
    own = [after - before for before, after in zip(reached, passed, strict=True)]
    return [ExitCost(passed[k] - sum(own[:k]), stage) for k, stage in enumerate(stages)]


def num_params(network: nn.Module) -> int:
    """Parameters in all."""
    return sum(parameter.numel() for parameter in network.parameters())


def onnx_bytes(network: Peer, size: tuple[int, int], in_chans: int = 3) -> bytes:
    """The last exit as an ONNX file: normalised float images [N, C, H, W] in, scores out; any number of images."""
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)  # it speaks of torchvision
    x = torch.zeros(2, in_chans, *size)
    was_training = network.training
    network.eval()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            network,
            (x,),
            path,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=["image"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("N")},),
        )
        data = path.read_bytes()
    network.train(was_training)
    return data


def convolution(c_in: int, c_out: int, kernel: int = 3, *, stride: int = 1) -> nn.Sequential:
    """Conv-BN-ReLU that keeps the size, but for the stride."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))
