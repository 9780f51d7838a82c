"""What a mixture is, as a value: one frozen tree that the library, the flags and config.json share. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.palette import default_palette

Task = Literal["classification", "segmentation"]
Exits = Literal["all", "last"]
Mixing = Literal["gates", "sum"]
GateInit = Literal["half", "uniform"]
Gates = Literal["expectation", "relaxed", "hard"]
"""How a pass gets its gates: the learned probabilities, or one relaxed or hard sample of them."""
Device = Literal["auto", "cpu", "cuda"]
"""Where tensors live; auto: on the GPU if there is one."""
MOST_MAPS = 256
"""Blocks times scales."""

SIZE = _fields.list_of(_fields.whole(1, 2**14), 2)
"""Height and width of images."""
CHECKS: dict[str, _fields.Check] = {
    "name": _fields.TEXT,
    "task": _fields.one_of(*get_args(Task)),
    "blocks": _fields.whole(1, 64),
    "scales": _fields.whole(1, 8),
    "channels": _fields.whole(1, 4096),
    "num_classes": _fields.whole(1, 100_000),
    "in_chans": _fields.whole(1, 1024),
    "input_size": SIZE,
    "stem_stride": _fields.one_of(1, 2, 4),
    "exits": _fields.one_of(*get_args(Exits)),
    "mixing": _fields.one_of(*get_args(Mixing)),
    "gate_init": _fields.one_of(*get_args(GateInit)),
}
"""What the fields of a `MixtureConfig` may be, wherever they come from."""

VARIANT = ("blocks", "scales", "channels", "stem_stride", "exits", "mixing", "gate_init")
"""Fields of a model that a training may choose: the paper's variants. The data decides the others."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The shape of a mixture (paper, section 4.1, "Base architecture")."""

    name: str
    """The zoo model it was made from."""
    task: Task = "classification"
    blocks: int = 6
    """B: blocks of computation, each with an exit at its end."""
    scales: int = 3
    """S: feature maps per block, each at half the resolution and with twice the channels of the one before."""
    channels: int = 64
    """C: channels of the finest maps; a multiple of 4."""
    num_classes: int = 10
    """Number of classes."""
    in_chans: int = 3
    """Channels of the images."""
    input_size: tuple[int, int] = (32, 32)
    """Height and width that macs and pictures refer to; the network takes any size that its scales allow."""
    stem_stride: int = 1
    """1, 2 or 4: how much smaller the first map is than the image."""
    exits: Exits = "all"
    """"all": a classifier at the end of every block; "last": one final classifier only (CNMM-single)."""
    mixing: Mixing = "gates"
    """"gates": the mixture; "sum": the deterministic variant of the ablation, all weights one."""
    gate_init: GateInit = "half"
    """"half": every gate starts at 1/2; "uniform": at 1/k, so that every input of a map starts with equal weight."""

    def __post_init__(self) -> None:
        _fields.settle(self, CHECKS)
        object.__setattr__(self, "input_size", tuple(self.input_size))  # JSON has no tuples
        if self.channels % 4:
            near = max(4, round(self.channels / 4) * 4)
            raise UserError(f"channels={self.channels}: must be a multiple of 4, for example channels={near}")
        if self.blocks * self.scales > MOST_MAPS:
            maps = self.blocks * self.scales
            raise UserError(f"blocks={self.blocks}, scales={self.scales}: {maps} maps, must be at most {MOST_MAPS}")
        check_input_size(self, self.input_size)

    @property
    def out_channels(self) -> int:
        """Channels of the output H_T: 512 for classification, those of H_1 for segmentation."""
        return 512 if self.task == "classification" else self.channels

    @property
    def exit_numbers(self) -> tuple[int, ...]:
        """The exits that have a classifier, numbered from 1."""
        return tuple(range(1, self.blocks + 1)) if self.exits == "all" else (self.blocks,)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """From JSON; `where` is its path there."""
        _fields.refuse_unknown(data, CHECKS, where)
        return _fields.read(cls, data, CHECKS, where)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What stands between an image file and the network; it travels with the weights."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of each channel, in units of 255: between 0 and 1."""
    size: tuple[int, int]
    """Height and width."""
    palette: tuple[tuple[int, int, int], ...] = ()
    """Of a model that labels pixels: red, green and blue of each class, from 0 to 255."""

    def __post_init__(self) -> None:
        _fields.settle(self, _PREPROCESSING)
        for name in _PREPROCESSING:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "palette", tuple(map(tuple, self.palette)))
        if len(self.mean) != len(self.std):
            raise UserError(f"mean has {len(self.mean)} values and std {len(self.std)}: must be one per channel")

    def check_fits(self, config: MixtureConfig) -> None:
        """Refuses what is not about the images of such a model."""
        if len(self.classes) != config.num_classes:
            raise UserError(f"classes has {len(self.classes)} names: must be {config.num_classes}, as the model has")
        if len(self.palette) not in (0, config.num_classes):
            raise UserError(f"palette has {len(self.palette)} colours: must be {config.num_classes}, as the model has")
        if self.channels != config.in_chans:
            raise UserError(f"mean and std have {self.channels} values: must be {config.in_chans}, one per channel")

    @classmethod
    def plain(cls, config: MixtureConfig) -> Self:
        """For a model that was not trained on images: classes by number, values from 0 to 1."""
        channels = config.in_chans
        classes = tuple(str(number) for number in range(config.num_classes))
        palette = default_palette(config.num_classes) if config.task == "segmentation" else ()
        return cls(
            classes=classes, mean=(0.0,) * channels, std=(1.0,) * channels, size=config.input_size, palette=palette
        )

    @property
    def channels(self) -> int:
        """Channels of the images: 3 for colours, 1 for grey."""
        return len(self.mean)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels, as arrays of images have them."""
        return (*self.size, self.channels)

    def to_dict(self) -> dict[str, Any]:
        """As ladder.json has it; the classes stand beside it."""
        height, width = self.size
        about = {"height": height, "width": width, "channels": self.channels, "mean": self.mean, "std": self.std}
        return {**about, "palette": self.palette} if self.palette else about


_PREPROCESSING: dict[str, _fields.Check] = {
    "classes": _fields.list_of(_fields.TEXT, least=1),
    "mean": _fields.list_of(_fields.NUMBER, least=1),
    "std": _fields.list_of(_fields.number(above=0), least=1),
    "size": SIZE,
    "palette": _fields.list_of(_fields.COLOUR),
}


def check_input_size(config: MixtureConfig, size: Sequence[int]) -> None:
    """Refuses images so small that a scale would have nothing left to halve."""
    size = _fields.checked(size, "input_size", SIZE)
    least = config.stem_stride * 2 ** (config.scales - 1)
    if min(size) < least:
        raise UserError(
            f"input_size={size[0]}x{size[1]} is too small for stem_stride={config.stem_stride} and "
            f"{config.scales} scales: must be at least {least}x{least}; use larger images or fewer scales"
        )
