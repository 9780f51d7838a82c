"""The training loop, readable from top to bottom; what it calls lives in the modules beside this one.

All randomness is a function of (seed, what for, epoch, step): a run that was killed and goes on from its last
checkpoint ends with the same weights, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cnmm import distributed, run_folder
from cnmm._errors import Stopped, UserError
from cnmm._progress import OnWait, no_wait
from cnmm.data import DataSet, divide
from cnmm.evaluation.statistics import reestimated
from cnmm.mixture import Mixture
from cnmm.training.batches import Images, start_workers, steps_per_epoch
from cnmm.training.checkpoint import Checkpoints
from cnmm.training.config import TrainConfig
from cnmm.training.ladder_tuning import Ladder, start_ladder, tunes_ladder
from cnmm.training.objective import batch_loss
from cnmm.training.optim import Average, Optimizer, take_step
from cnmm.training.progress import EpochResult, Meter, Progress, epoch_result, image_work, training_clock
from cnmm.training.recipes import list_recipes, recipe
from cnmm.training.scene_batches import make_images, training_task
from cnmm.training.stem import start_stem, stem_images
from cnmm.training.teacher import teacher_answers

SAVE_EVERY_S = 300.0
"""How often a checkpoint is written within an epoch; there is always one at its end."""


class NotFinite(UserError):
    """The loss is not a finite number; the parameters are those before the step."""


def train(
    model: Mixture,
    data: DataSet,
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    on_step: Callable[[Progress], None] = lambda progress: None,
    on_epoch: Callable[[EpochResult], None] = lambda result: None,
    on_wait: OnWait = no_wait,
    should_stop: Callable[[], bool] = lambda: False,
) -> Mixture:
    """Trains a mixture into a run folder and returns it, in eval mode with its statistics for inference."""
    kept, _ = parts = divide(data, config.val, config.seed)
    steps = steps_per_epoch(config, len(kept))
    device = distributed.pick_device(config.device)
    optimizer = Optimizer(model.to(device).train(), config)
    average = Average(model, config.average)
    checkpoints = Checkpoints(folder, model, optimizer, average.tensors, every_s=SAVE_EVERY_S)
    done = checkpoints.restore() if resume else 0
    start_log(folder, done)

    with start_workers(data, config) as workers:
        images = make_images(data, config, device=device, workers=workers)
        clock = training_clock(model, images, data, parts, folder, done=done)
        meter = Meter(model, total=config.epochs * steps, done=done, clock=clock, on_wait=on_wait)
        task = training_task(model, data, kept, config)
        images.answers = teacher_answers(images, data, kept, folder)
        start_weights(model, average, images, data, kept, done=done)
        clock.skip()
        ladder: Ladder | None = None
        for epoch in range(done // steps, config.epochs):
            meter.begin(checkpoints.notes if done > epoch * steps else {}, image_work(data, config, epoch))
            stop = False
            for batch in images.training_batches(data.train, kept, epoch, first=done - epoch * steps):
                step, part = batch.step, done / meter.total
                if ladder is None and tunes_ladder(model, config, part):
                    ladder = start_ladder(model, images, data, kept, folder, meter.on_damage)
                loss = batch_loss(model, batch, config, epoch=epoch, ladder=ladder, task=task)
                value, stop = agree(loss, should_stop())
                check_finite(value, config, epoch, step)
                take_step(model, optimizer, loss, config, part=part, norms=meter.gradients)
                average.update(model, done)
                done += 1
                on_step(meter.tick(epoch, step, steps, value, config.batch_size, ladder=ladder is not None))
                if step + 1 < steps and (stop or checkpoints.due):
                    checkpoints.save(done, meter.notes())
                    if stop:
                        raise Stopped(f"stopped after epoch {epoch + 1}, step {step + 1}")
            if distributed.rank() == 0:
                result = epoch_result(model, images, data, parts, config, epoch, meter)
                run_folder.append_log(folder, {"step": done, **asdict(result)})
                on_epoch(result)
            checkpoints.save(done)
            if stop and epoch + 1 < config.epochs:
                raise Stopped(f"stopped after epoch {epoch + 1}")
        average.copy_to(model)
        if config.statistics == "re-estimated":
            model = with_statistics(model, images, data, kept, meter)
    return saved(model, folder)


def with_statistics(model: Mixture, images: Images, data: DataSet, kept: np.ndarray, meter: Meter) -> Mixture:
    """The model with statistics of its expectations, on training images."""
    num = min(images.num_for_statistics, len(kept))
    batches = meter.watch("statistics", "estimating statistics", images.statistics_batches(data.train, kept), num)
    with distributed.paused():
        return reestimated(model, batches)


def start_weights(
    model: Mixture, average: Average, images: Images, data: DataSet, kept: np.ndarray, *, done: int
) -> None:
    """What the weights take from the training images before the first step."""
    if not done and images.config.stem_init == "patches":
        start_stem(model, images.some(data.train, kept, stem_images(*data.size), "stem"))
        average.restart(model)


def start_log(folder: Path, done: int) -> None:
    """Process 0 drops the lines of the log that are newer than the checkpoint; the others wait for it."""
    if distributed.rank() == 0:
        run_folder.cut_log(folder, done)
    distributed.wait()


def saved(model: Mixture, folder: Path) -> Mixture:
    """The result, in eval mode. Process 0 writes the weights; the others wait for it."""
    if distributed.rank() == 0:
        run_folder.save_weights(model, folder)
    distributed.wait()
    return model.eval()


def agree(loss: Tensor, stop: bool) -> tuple[float, bool]:
    """The loss over all processes, and whether one of them was asked to stop."""
    sums = distributed.total([loss.detach().double().view(1), loss.new_tensor([stop], dtype=torch.float64)])
    return sums[0].item() / distributed.world_size(), sums[1].item() > 0


def check_finite(loss: float, config: TrainConfig, epoch: int, step: int) -> None:
    """Stops a training that has diverged, before its step."""
    if not math.isfinite(loss):
        names = ("lr", "matrix_lr") if config.optimizer == "muon" else ("lr",)
        usual = recipe(config.recipe) if config.recipe in list_recipes() else config
        lower = {name: min(getattr(config, name) / 2, getattr(usual, name)) for name in names}
        flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in lower.items())
        raise NotFinite(
            f"the loss is {loss} at epoch {epoch + 1}, step {step + 1}; the step was not taken; "
            f"start anew with a lower rate: the same command with --overwrite {flags}"
        )
