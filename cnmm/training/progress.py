"""What a training reports: after every step, and after every epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from cnmm import distributed
from cnmm._progress import Clock, OnWait, Waiting, no_wait
from cnmm.data import DataSet
from cnmm.evaluation.damage import damage_passes
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.statistics import reestimated
from cnmm.evaluation.task import task_of
from cnmm.frontier import RE_ESTIMATED
from cnmm.mixture import Mixture
from cnmm.orders import load_orders
from cnmm.training.batches import Images
from cnmm.training.config import TrainConfig
from cnmm.training.optim import GradientNorms, learning_rate
from cnmm.training.scene_batches import crop_size

USUAL = {"step": 3.0, "ladder step": 4.5, "statistics": 1.2, "evaluation": 0.9, "damage": 0.5}
"""How long an image takes in each part of a training, relative to one another, until it is known."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the loop reports after a step."""

    epoch: int
    epochs: int
    """All epochs of the training."""
    step: int
    """Steps done in this epoch."""
    steps: int
    """Steps of an epoch."""
    loss: float
    images_per_s: float
    left_s: float
    """Estimated time to the end of the training."""


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """One line of log.jsonl."""

    epoch: int
    loss: float
    lr: float
    images_per_s: float
    entropy: float
    """Mean entropy of the gates, in bits."""
    metric: str
    quality: dict[int, float]
    """By that metric, per exit, on the held-out images; empty if none are held out, or it was not measured."""
    statistics: str
    """Batch statistics that it was measured with: re-estimated on a few training images, or raw, running averages."""
    gradients: dict[str, float]
    """Root mean square over the steps of the norm of the gradient before clipping: of the stem, every block, ..."""


class Meter:
    """Images per second and time left of all that a training does, also of what comes after its last step."""

    def __init__(self, model: Mixture, *, total: int, done: int, clock: Clock, on_wait: OnWait = no_wait) -> None:
        self.total, self.done, self.clock, self.on_wait = total, done, clock, on_wait
        self.loss_sum, self.num_steps = 0.0, 0
        self.gradients = GradientNorms(model)
        """All of the steps of this epoch."""
        self.kind, self.damage, self.damage_done = "step", clock.left["damage"], 0.0
        self.work = 1.0
        """Of an image, relative to the first epoch's."""

    @property
    def images_per_s(self) -> float:
        return 1 / (self.work * (self.clock.rate(self.kind) or math.inf))

    def begin(self, notes: Mapping[str, float], work: float = 1.0) -> None:
        """An epoch begins, or goes on where `notes` were taken."""
        self.work = work
        self.loss_sum, self.num_steps = notes.get("loss", 0.0), int(notes.get("steps", 0))
        self.gradients.restart({name: value for name, value in notes.items() if name not in ("loss", "steps")})

    def notes(self) -> dict[str, float]:
        """Sums over the steps of this epoch."""
        return {"loss": self.loss_sum, "steps": self.num_steps, **self.gradients.sums()}

    def tick(self, epoch: int, step: int, steps: int, loss: float, batch: int, *, ladder: bool) -> Progress:
        self.kind = "ladder step" if ladder else "step"
        self.clock.tick(self.kind, batch * self.work)
        self.done += 1
        self.loss_sum, self.num_steps = self.loss_sum + loss, self.num_steps + 1
        return Progress(
            epoch=epoch,
            epochs=self.total // steps,
            step=step + 1,
            steps=steps,
            loss=loss,
            images_per_s=self.images_per_s,
            left_s=self.clock.left_s or 0.0,
        )

    def watch(self, kind: str, what: str, batches: Iterable[T], num: int) -> Iterator[T]:
        """The batches, of `num` images in all; whoever waits for what is done with them is told."""
        done = 0
        self.tell(what, 0.0)
        for batch in batches:
            yield batch
            size = len(batch if isinstance(batch, Tensor) else batch[1])  # type: ignore[index]  # images, or also labels
            done += size
            self.clock.tick(kind, size)
            self.tell(what, min(1.0, done / num))

    def on_damage(self, done: float) -> None:
        """So much of measuring damage is done."""
        self.clock.tick("damage", self.damage * (done - self.damage_done))
        self.damage_done = done
        self.tell("measuring which cuts do the least damage", done)

    def tell(self, what: str, done: float) -> None:
        self.on_wait(Waiting(what=what, done=done, left_s=self.clock.left_s))


def training_clock(
    model: Mixture, images: Images, data: DataSet, parts: tuple[np.ndarray, np.ndarray], folder: Path, *, done: int
) -> Clock:
    """The clock of a training that has taken `done` steps: what is left of it, evaluation and all.

    `parts`: images trained on, and held out; `folder` may have cutting orders by damage already.
    """
    config, (kept, held_out) = images.config, parts
    steps = len(kept) // config.batch_size
    total = steps * config.epochs
    tuned = math.ceil(config.ladder_start * total) if model.config.mixing == "gates" else total
    ends = (
        sum(is_measured(data, config, epoch) for epoch in range(done // steps, config.epochs)) if len(held_out) else 0
    )
    estimated = config.statistics == RE_ESTIMATED
    after_epoch, after_all = (min(num, len(kept)) for num in (images.num_after_epoch, images.num_for_statistics))
    tested = len(held_out) if data.test is None else len(data.test)
    whole = math.prod(model.config.input_size) / math.prod(config.scene_crop) if data.palette else 1.0
    usual = {kind: seconds * (1.0 if "step" in kind else whole) for kind, seconds in USUAL.items()}

    def units(first: int, last: int) -> float:
        """Of the steps from one to another."""
        ends = ((epoch * steps, (epoch + 1) * steps) for epoch in range(config.epochs))
        parts = (max(0, min(last, end) - max(first, start)) for start, end in ends)
        return config.batch_size * sum(num * image_work(data, config, epoch) for epoch, num in enumerate(parts))

    measures_damage = tuned < total and config.ladder_rule != "flow" and load_orders(folder, model.config) is None
    return Clock(
        usual,
        {
            "step": units(done, tuned),
            "ladder step": units(max(tuned, done), total),
            "statistics": (ends * after_epoch + after_all) * estimated,
            "evaluation": ends * len(held_out) + tested,
            "damage": damage_passes(model.config) * min(images.num_for_damage, len(kept)) * measures_damage,
        },
    )


def image_work(data: DataSet, config: TrainConfig, epoch: int) -> float:
    """What an image of an epoch takes, relative to one of the first: crops of scenes may grow."""
    return math.prod(crop_size(config, epoch)) / math.prod(config.scene_crop) if data.palette else 1.0


def epoch_result(
    model: Mixture,
    images: Images,
    data: DataSet,
    parts: tuple[np.ndarray, np.ndarray],
    config: TrainConfig,
    epoch: int,
    meter: Meter,
) -> EpochResult:
    """Quality of every exit on the held-out images, and the state of the gates; `parts`: trained on, and held out.

    The running averages of training are far behind after a few steps, and are not what the result will have. So the
    statistics are estimated anew, on a few images and of a copy: the training does not notice.
    """
    metric = task_of(model.config).check_metric()
    quality: dict[int, float] = {}
    kept, held_out = parts
    speed, what = meter.images_per_s, f"epoch {epoch + 1}/{config.epochs}, measuring on held-out images"
    if len(held_out) and is_measured(data, config, epoch):
        settled = model
        if config.statistics == RE_ESTIMATED:
            num = images.num_after_epoch
            batches = images.statistics_batches(data.train, kept, num)
            with distributed.paused():
                settled = reestimated(model, meter.watch("statistics", what, batches, min(num, len(kept))))
        shown = meter.watch("evaluation", what, images.batches(data.train, held_out), len(held_out))
        quality = {exit: found.value for exit, found in evaluate_exits(settled, shown, metric=metric).items()}
    return EpochResult(
        epoch=epoch + 1,
        loss=meter.loss_sum / meter.num_steps,
        lr=learning_rate(config, (epoch + 1) / config.epochs),
        images_per_s=speed,
        entropy=gate_entropy(model),
        metric=metric,
        quality=quality,
        statistics=config.statistics,
        gradients=meter.gradients.means(meter.num_steps),
    )


def is_measured(data: DataSet, config: TrainConfig, epoch: int) -> bool:
    """Is quality measured after this epoch? Whole scenes are dear: only after every twentieth part of the training."""
    return not data.palette or (epoch + 1) % max(1, config.epochs // 20) == 0 or epoch + 1 == config.epochs


def gate_entropy(model: Mixture) -> float:
    """Mean entropy of the gates that decide something, in bits: 1 at the start, 0 when all are open or closed."""
    if model.config.mixing == "sum":
        return 0.0
    base = {(sources[0], j) for j, sources in enumerate(model.lattice.inputs) if sources}
    bits = [_bits(p) for edge, p in model.chain.detach().gates().items() if edge not in base]
    return sum(bits) / len(bits) if bits else 0.0


def _bits(p: float) -> float:
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
