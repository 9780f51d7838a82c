"""How a mixture is trained, as a value: what the library, the flags and config.json share. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.config import Device, Gates

ExitWeights = Literal["linear", "equal"]
OptimizerName = Literal["sgd", "muon"]
Schedule = Literal["cosine", "linear", "cyclic"]
CycleLr = Literal["lowest", "highest"]
ClassWeights = Literal["equal", "balanced", "inverse_log"]
StemInit = Literal["random", "patches"]
Padding = Literal["black", "reflect"]
Flips = Literal["random", "alternating"]
LadderRule = Literal["flow", "damage", "all"]
Precision = Literal["auto", "float32", "bfloat16"]
Statistics = Literal["re-estimated", "raw"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a mixture is trained. A recipe returns a complete one; flags override its fields."""

    recipe: str
    """The recipe that the other fields are from, or were changed from."""
    epochs: int
    """Passes over the training images."""
    batch_size: int
    """Images per step."""
    lr: float
    """Highest learning rate, of SGD or Adam; it falls to zero step by step."""
    warmup: float = 0.0
    """Part of the training over which the learning rate rises linearly."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after that: along half a cosine (the paper), a line, or in cycles of five epochs that
    are halved again and again (cyclic: the paper, for Cityscapes)."""
    cycle_lr: CycleLr = "lowest"
    """What lr is in a cyclic schedule: the lowest rate of the first cycles, or the highest."""
    optimizer: OptimizerName = "sgd"
    """sgd (the paper), or muon: each edge's matrix turns by the same angle in every step, Adam moves the rest."""
    matrix_lr: float = 0.03
    """Highest learning rate of Muon: the length of a step relative to the matrix."""
    shift_lr: float = 1.0
    """Learning rate of the shifts in front of activations, as a multiple of the others'."""
    freeze_out: bool = False
    """True: leave the last scale and shift of every edge into a map at 1 and 0; its gate is its scale."""
    momentum: float = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Nesterov's momentum for SGD; Muon always has it."""
    weight_decay: float = 1e-4
    """Weight decay."""
    decay_all: bool = True
    """True: weight decay on everything (the paper); False: not on gates, normalisation, slopes and biases."""
    stem_init: StemInit = "random"
    """How the stem starts: random, or patches, the leading eigenvectors of the training images' patches."""
    gates: Gates = "relaxed"
    """What the mixture trains with: samples of the gates (relaxed: the paper), or their expectations."""
    group: int | None = 1
    """Images that share one sample of the gates; 1: each image has its own (the paper)."""
    temperature: float = 2.0
    """Temperature of relaxed samples."""
    exit_weights: ExitWeights = "linear"
    """Weight of an exit's loss: proportional to its number (linear: the paper), or equal for all."""
    exits_per_step: int | None = None
    """Exits that a step learns from: the last and random others, which then count for those left out; None: all."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    ladder_start: float = 1.0
    """Part of the training after which ladder tuning begins: each step also runs one random point; 1: never."""
    ladder_weight: float = 1.0
    """Weight of that point's loss: cross-entropy, and distillation from the full mixture's last exit."""
    ladder_rule: LadderRule = "flow"
    """How that point is cut: by flow or flow per mac, by damage (measured when the tuning begins), or by all three."""
    ladder_labels: float = 0.5
    """Share of cross-entropy in that loss."""
    exit_distill: float = 0.0
    """Share of distillation from the last exit in the losses of the other exits while the ladder is tuned."""
    teacher: str | None = None
    """A classifier of the same classes that teaches all exits and ladder points: an ONNX file, or a trained run."""
    teacher_weight: float = 0.5
    """Share of its answers where labels are learned; it is asked once, and its answers are stored in the run folder."""
    teacher_temperature: float = 2.0
    """Temperature at which answers are compared with the teacher's."""
    clip: float = 0.0
    """Largest norm of a step's gradient, but for what Muon moves; 0: no limit."""
    average: float = 0.0
    """Weight of the past in a moving average of the parameters, less at first; it becomes the result. 0: none."""
    statistics: Statistics = "re-estimated"
    """Batch statistics of the result: estimated anew by expectation, or the running averages of training (raw: the
    paper)."""
    crop: int = 4
    """Pixels of padding before a random crop."""
    padding: Padding = "black"
    """What the padding shows: black, or reflect, the image mirrored at its border."""
    area: tuple[float, float] = (1.0, 1.0)
    """Of images: the least and the greatest share of its area that a random part shows, which is scaled to the size of
    the image. 1 1: the whole image, padded and cropped instead. Photographs get 0.35 1, unless told."""
    scene_crop: tuple[int, int] = (240, 320)
    """Of scenes: height and width of random crops; where one exceeds the image, it is the mean colour and void."""
    final_crop: tuple[int, int] | None = None
    """Of scenes: another size of crops in the last epochs, how many final_epochs says."""
    final_epochs: int = 0
    """Epochs at the end of the training that see crops of the size final_crop."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Of scenes: the least and the greatest random scale, before they are cropped."""
    colour: float = 0.0
    """How much brightness, contrast and saturation may change, as a share. Photographs get 0.3, unless told."""
    loss_stride: int = 1
    """Of scenes: the loss sees every so many-th pixel of every so many-th row; which ones, changes with the steps."""
    class_weights: ClassWeights = "equal"
    """What images of a class, or pixels of scenes, count in the loss: all equal; balanced, every class the same in all;
    or inverse_log, 1 / ln(1.1 + the share of the class)."""
    flip: bool = True
    """Mirror images."""
    flips: Flips = "random"
    """When an image is mirrored: at random, or alternating, in every second epoch."""
    val: int = 5000
    """Training images held out to choose points and thresholds; test images are for reporting only."""
    seed: int = 0
    """Seed of all randomness."""
    precision: Precision = "float32"
    """Type of activations in training; auto: bfloat16 where the device has instructions for it."""
    device: Device = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    workers: int | None = None
    """Processes that decode image files ahead of the training; 0: none. The result is the same."""

    def __post_init__(self) -> None:
        _fields.settle(self, CHECKS)
        self._check_scenes()
        if self.average and self.statistics == "raw":
            raise UserError(
                f"average={self.average} with statistics='raw': running averages are not those of averaged parameters; "
                "use statistics='re-estimated'"
            )

    def _check_scenes(self) -> None:
        for field in ("area", "scene_crop", "final_crop", "zoom"):  # JSON has no tuples
            value = getattr(self, field)
            object.__setattr__(self, field, value if value is None else tuple(value))
        for field in ("area", "zoom"):
            low, high = getattr(self, field)
            if low > high:
                raise UserError(f"{field}={(low, high)!r}: must be two positive numbers, the smaller first")
        if self.final_epochs > self.epochs:
            raise UserError(f"final_epochs={self.final_epochs!r}: must be 0 to epochs={self.epochs}")

    def to_dict(self) -> dict[str, Any]:
        """What config.json records. Not where it runs: a training may go on with another device or other workers."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("device", "workers")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """From JSON; `where` is its path there. What an earlier version did not know has its default."""
        _fields.refuse_unknown(data, CHECKS, where)
        return _fields.read(cls, data, CHECKS, where)


_POSITIVE = _fields.number(above=0, most=1e6)
_WEIGHT = _fields.number(0, 1e6)
_PART = _fields.number(0, below=1)
_SIZE = _fields.list_of(_fields.whole(1, 2**14), 2)
MOST_WORKERS = 256
CHECKS: dict[str, _fields.Check] = {
    "recipe": _fields.TEXT,
    "epochs": _fields.whole(1, 10**6),
    "batch_size": _fields.whole(2, 10**6),  # batch statistics need two images
    "lr": _POSITIVE,
    "warmup": _PART,
    "schedule": _fields.one_of(*get_args(Schedule)),
    "cycle_lr": _fields.one_of(*get_args(CycleLr)),
    "optimizer": _fields.one_of(*get_args(OptimizerName)),
    "matrix_lr": _POSITIVE,
    "shift_lr": _POSITIVE,
    "freeze_out": _fields.TRUTH,
    "momentum": _PART,
    "nesterov": _fields.TRUTH,
    "weight_decay": _WEIGHT,
    "decay_all": _fields.TRUTH,
    "stem_init": _fields.one_of(*get_args(StemInit)),
    "gates": _fields.one_of(*get_args(Gates)),
    "group": _fields.or_null(_fields.whole(1, 10**6)),
    "temperature": _POSITIVE,
    "exit_weights": _fields.one_of(*get_args(ExitWeights)),
    "exits_per_step": _fields.or_null(_fields.whole(1, 10**6)),
    "label_smoothing": _fields.SHARE,
    "ladder_start": _fields.SHARE,
    "ladder_weight": _WEIGHT,
    "ladder_rule": _fields.one_of(*get_args(LadderRule)),
    "ladder_labels": _fields.SHARE,
    "exit_distill": _fields.SHARE,
    "teacher": _fields.or_null(_fields.PATH),
    "teacher_weight": _fields.SHARE,
    "teacher_temperature": _POSITIVE,
    "clip": _WEIGHT,
    "average": _PART,
    "statistics": _fields.one_of(*get_args(Statistics)),
    "crop": _fields.whole(0, 256),
    "padding": _fields.one_of(*get_args(Padding)),
    "area": _fields.list_of(_fields.number(above=0, most=1), 2),
    "scene_crop": _SIZE,
    "final_crop": _fields.or_null(_SIZE),
    "final_epochs": _fields.whole(0, 10**6),
    "zoom": _fields.list_of(_fields.number(above=0, most=100), 2),
    "colour": _fields.SHARE,
    "loss_stride": _fields.whole(1, 64),
    "class_weights": _fields.one_of(*get_args(ClassWeights)),
    "flip": _fields.TRUTH,
    "flips": _fields.one_of(*get_args(Flips)),
    "val": _fields.whole(0, 10**9),
    "seed": _fields.whole(0, 2**63 - 1),
    "precision": _fields.one_of(*get_args(Precision)),
    "device": _fields.one_of(*get_args(Device)),
    "workers": _fields.or_null(_fields.whole(0, MOST_WORKERS)),
}
"""What the fields of a `TrainConfig` may be, wherever they come from."""
