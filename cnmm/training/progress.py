"""What a training reports: after every step, and after every epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cnmm import distributed
from cnmm.data import DataSet
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.statistics import reestimated
from cnmm.evaluation.task import task_of
from cnmm.frontier import RE_ESTIMATED
from cnmm.mixture import Mixture
from cnmm.training.batches import Images
from cnmm.training.config import TrainConfig
from cnmm.training.optim import GradientNorms, learning_rate


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
    """Images per second and time left, from a moving average of the time of a step."""

    def __init__(self, model: Mixture, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.step_s: float | None = None
        self.images_per_s = 0.0
        self.loss_sum, self.num_steps = 0.0, 0
        self.gradients = GradientNorms(model)
        """All of the steps of this epoch."""
        self.last = time.monotonic()

    def begin(self, notes: Mapping[str, float]) -> None:
        """An epoch begins, or goes on where `notes` were taken."""
        self.loss_sum, self.num_steps = notes.get("loss", 0.0), int(notes.get("steps", 0))
        self.gradients.restart({name: value for name, value in notes.items() if name not in ("loss", "steps")})

    def notes(self) -> dict[str, float]:
        """Sums over the steps of this epoch."""
        return {"loss": self.loss_sum, "steps": self.num_steps, **self.gradients.sums()}

    def tick(self, epoch: int, step: int, steps: int, loss: float, batch: int) -> Progress:
        now = time.monotonic()
        elapsed, self.last = now - self.last, now
        self.step_s = elapsed if self.step_s is None else 0.95 * self.step_s + 0.05 * elapsed
        self.done += 1
        self.loss_sum, self.num_steps = self.loss_sum + loss, self.num_steps + 1
        self.images_per_s = batch / self.step_s
        return Progress(
            epoch=epoch,
            epochs=self.total // steps,
            step=step + 1,
            steps=steps,
            loss=loss,
            images_per_s=self.images_per_s,
            left_s=(self.total - self.done) * self.step_s,
        )


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
    if len(held_out) and is_measured(data, config, epoch):
        settled = model
        if config.statistics == RE_ESTIMATED:
            with distributed.paused():
                settled = reestimated(model, images.statistics_batches(data.train, kept, images.num_after_epoch))
        exits = evaluate_exits(settled, images.batches(data.train, held_out), metric=metric)
        quality = {exit: found.value for exit, found in exits.items()}
        meter.last = time.monotonic()
    return EpochResult(
        epoch=epoch + 1,
        loss=meter.loss_sum / meter.num_steps,
        lr=learning_rate(config, (epoch + 1) / config.epochs),
        images_per_s=meter.images_per_s,
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
