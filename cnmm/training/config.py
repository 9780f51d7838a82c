"""How a mixture is trained, as a value: what the library, the flags and config.json share. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cnmm._errors import UserError
from cnmm.config import Device, Gates, is_count

ExitWeights = Literal["linear", "equal"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a mixture is trained. A recipe returns a complete one; flags override its fields."""

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
    statistics: Literal["re-estimated", "raw"] = "re-estimated"
    """Batch statistics of the result: re-estimated in expectation mode, or raw, the running averages (the paper)."""
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
                raise UserError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(allowed)}")
        for field in ("epochs", "batch_size"):
            if not is_count(getattr(self, field)):
                raise UserError(f"{field}={getattr(self, field)!r}: a whole number of at least 1 is needed")
        if self.batch_size < 2:
            raise UserError("batch_size=1: at least 2 images are needed for batch statistics")
        for field in ("lr", "temperature"):
            if not getattr(self, field) > 0:
                raise UserError(f"{field}={getattr(self, field)!r}: a positive number is needed")
        for field in ("warmup", "momentum", "label_smoothing", "ladder_start", "average"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(f"{field}={getattr(self, field)!r}: a number from 0 to 1 is needed")
        for field in ("val", "crop", "weight_decay", "ladder_weight", "clip", "seed"):
            if not getattr(self, field) >= 0:
                raise UserError(f"{field}={getattr(self, field)!r}: zero or a positive number is needed")
        if not (self.workers is None or self.workers == 0 or is_count(self.workers)):
            raise UserError(f"workers={self.workers!r}: zero, a whole number, or None (as many as suit) is needed")

    def to_dict(self) -> dict[str, Any]:
        """What config.json records. Not where it runs: a training may go on with another device or other workers."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("device", "workers")}
