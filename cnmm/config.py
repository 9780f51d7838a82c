"""What a mixture is, as a value: one frozen tree that the library, the flags and config.json share. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

FORMAT_VERSION = 1

Task = Literal["classification", "segmentation"]
Exits = Literal["all", "last"]
Mixing = Literal["gates", "sum"]
GateInit = Literal["half", "uniform"]
Gates = Literal["expectation", "relaxed", "hard"]
"""How a pass gets its gates: the learned probabilities, or one relaxed or hard sample of them."""
ExitWeights = Literal["linear", "equal"]
Precision = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
"""Where tensors live; auto: on the GPU if there is one."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "task": ("classification", "segmentation"),
    "stem_stride": (1, 2, 4),
    "exits": ("all", "last"),
    "mixing": ("gates", "sum"),
    "gate_init": ("half", "uniform"),
}


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
    in_chans: int = 3
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
        object.__setattr__(self, "input_size", tuple(self.input_size))  # JSON has no tuples
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field}={value!r}: allowed are {', '.join(repr(a) for a in allowed)}")
        for field in ("blocks", "scales", "channels", "num_classes", "in_chans"):
            value = getattr(self, field)
            if not _is_count(value):
                raise ValueError(f"{field}={value!r}: a whole number of at least 1 is needed")
        if self.channels % 4:
            near = max(4, round(self.channels / 4) * 4)
            raise ValueError(f"channels={self.channels}: a multiple of 4 is needed, for example channels={near}")
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
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(
                f"unknown field {unknown[0]!r} in the model's config; known are {', '.join(sorted(known))}"
            )
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a mixture is trained. A recipe (`cnmm.recipes`) returns a complete one; flags override its fields."""

    recipe: str
    epochs: int
    batch_size: int
    lr: float
    """Learning rate at its highest; it falls to zero along a half cosine, step by step."""
    warmup: float = 0.0
    """Part of the training over which the rate rises linearly to `lr`."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_all: bool = True
    """Weight decay on everything (the paper); False: not on gates, normalisation, slopes and biases."""
    gates: Gates = "relaxed"
    """What the mixture trains with: relaxed samples of the gates (the paper), or their expectations."""
    group: int | None = 1
    """Images that share one sample of the gates; None: the whole batch."""
    temperature: float = 2.0
    exit_weights: ExitWeights = "linear"
    """Loss of exit k: in proportion to k (the paper), or equal. The weights sum to one."""
    label_smoothing: float = 0.0
    ladder_start: float = 1.0
    """Part of the training after which ladder tuning begins (each step also runs one random point); 1: never."""
    ladder_weight: float = 1.0
    """Weight of that point's loss, half cross-entropy and half distillation from the full mixture's last exit."""
    clip: float = 0.0
    """Largest norm of a step's gradient, longer ones are shortened to it; 0: no limit."""
    average: float = 0.0
    """Weight of the past in the moving average of the parameters that the result is taken from; 0: no averaging."""
    crop: int = 4
    """Pixels of black padding before a random crop."""
    flip: bool = True
    """Mirror images at random."""
    val: int = 5000
    """Images held out of the training set, to choose points and thresholds; test data is only for reporting."""
    seed: int = 0
    precision: Precision = "float32"
    device: Device = "auto"
    workers: int | None = None
    """Processes that decode image files ahead of the training; None: as many as suit the machine, 0: none."""

    def __post_init__(self) -> None:
        for field, allowed in {
            "gates": get_args(Gates),
            "exit_weights": get_args(ExitWeights),
            "precision": get_args(Precision),
            "device": get_args(Device),
        }.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(allowed)}")
        for field in ("epochs", "batch_size"):
            if not _is_count(getattr(self, field)):
                raise ValueError(f"{field}={getattr(self, field)!r}: a whole number of at least 1 is needed")
        if self.batch_size < 2:
            raise ValueError("batch_size=1: at least 2 images are needed for batch statistics")
        for field in ("lr", "temperature"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: a positive number is needed")
        for field in ("warmup", "momentum", "label_smoothing", "ladder_start", "average"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)!r}: a number from 0 to 1 is needed")
        for field in ("val", "crop", "weight_decay", "ladder_weight", "clip", "seed"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: zero or a positive number is needed")
        if not (self.workers is None or self.workers == 0 or _is_count(self.workers)):
            raise ValueError(f"workers={self.workers!r}: zero, a whole number, or None (as many as suit) is needed")

    def to_dict(self) -> dict[str, Any]:
        """What config.json records. Not where it runs: a training may go on with another device or other workers."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("device", "workers")}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_input_size(config: MixtureConfig, size: Sequence[int]) -> None:
    """Refuses images so small that a scale would have nothing left to halve."""
    if len(size) != 2 or not all(_is_count(side) for side in size):
        raise ValueError(f"input_size={size!r}: two whole numbers (height, width) of at least 1 are needed")
    least = config.stem_stride * 2 ** (config.scales - 1)
    if min(size) < least:
        raise ValueError(
            f"input_size={size[0]}x{size[1]} is too small for stem_stride={config.stem_stride} and "
            f"{config.scales} scales: at least {least}x{least} is needed; use larger images or fewer scales"
        )
