"""One peer on its way: its images, its steps, and what it is worth."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cnmm import run_folder
from cnmm._errors import UserError
from cnmm.data import DataSet, Split, divide
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.quality import Task
from cnmm.evaluation.segmentation import Segmentation
from cnmm.training.batches import Batch, steps_per_epoch, use_bfloat16
from cnmm.training.checkpoint import restore, save_state
from cnmm.training.config import TrainConfig
from cnmm.training.loop import check_finite
from cnmm.training.objective import Lesson
from cnmm.training.optim import Average
from cnmm.training.scene_batches import class_weights, make_images
from cnmm.training.stem import stem_images
from cnmm.training.teacher import teacher_answers
from peers.evaluate import Answers, ask, early_exit_rows, exit_rows
from peers.network import Peer, exit_costs, num_params
from peers.optim import PeerOptimizer
from peers.zoo import create_peer

TIMED_STEPS = 12


class Training:
    """A peer, its images, and what moves it."""

    def __init__(self, name: str, data: DataSet, config: TrainConfig, folder: Path) -> None:
        self.name, self.data, self.config, self.folder = name, data, config, folder
        self.kept, self.held_out = divide(data, config.val, config.seed)
        self.steps = steps_per_epoch(config, len(self.kept))
        self.images = make_images(data, config)
        torch.manual_seed(config.seed)
        self.network: Peer = create_peer(name, data)
        self.optimizer = PeerOptimizer(self.network, config)
        self.average = Average(self.network, config.average)
        self.task: Task = (Segmentation if data.palette else Classification)(class_weights(data, self.kept, config))

    def start(self) -> int:
        """Puts the last checkpoint back, or what the weights start from; returns the epochs that are done."""
        done = restore(self.folder, self.network, self.optimizer, self.average.tensors)
        run_folder.cut_log(self.folder, done)
        if not done:
            self.network.start(self.images.some(self.data.train, self.kept, stem_images(*self.data.size), "stem"))
            self.average.restart(self.network)
        self.images.answers = teacher_answers(self.images, self.data, self.kept, self.folder)
        return done // self.steps

    def epoch(self, epoch: int) -> float:
        """One pass over the training images; returns the mean loss."""
        self.network.train()
        losses = []
        for batch in self.images.training_batches(self.data.train, self.kept, epoch):
            losses.append(self.step(batch, epoch))
            self.average.update(self.network, epoch * self.steps + batch.step)
        return sum(losses) / len(losses)

    def step(self, batch: Batch, epoch: int) -> float:
        part = (epoch * self.steps + batch.step) / (self.config.epochs * self.steps)
        loss = self.loss(batch, distilled=part >= self.config.ladder_start)
        value = loss.item()
        check_finite(value, self.config, epoch, batch.step)
        self.optimizer.step(loss, part)
        return value

    def loss(self, batch: Batch, *, distilled: bool) -> Tensor:
        """The sum of all exits' losses; the last exit may teach the others."""
        narrow = use_bfloat16(self.config.precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            scores = list(self.network.exits(batch.images.contiguous(memory_format=torch.channels_last)))
        lesson = Lesson(self.task, self.config, batch.labels, scores[-1].detach(), batch.answers)
        share = self.config.exit_distill if distilled else 0.0
        losses = [lesson.loss(score, share) for score in scores[:-1]]
        return torch.stack([*losses, lesson.loss(scores[-1], 0.0)]).sum()

    def save(self, epochs: int) -> None:
        """A checkpoint after so many epochs."""
        save_state(self.folder, self.network, self.optimizer, self.average.tensors, epochs * self.steps)

    def finish(self) -> Peer:
        """The network as it is used: averaged if it was to be, with its statistics for inference."""
        self.average.copy_to(self.network)
        if self.config.statistics == "re-estimated":
            reestimate(self.network, self.images.statistics_batches(self.data.train, self.kept))
        return self.network.eval()

    def ask(self, split: Split, chosen: np.ndarray) -> Answers:
        """What all exits say about some images."""
        return ask(self.network, self.images.batches(split, chosen), self.task, len(self.data.classes))

    def results(self) -> dict[str, Any]:
        """Figures of every exit, and of early exit where exits are nested, on held-out and test images."""
        splits = {"validation": self.ask(self.data.train, self.held_out)}
        if self.data.test is not None:
            splits["test"] = self.ask(self.data.test, np.arange(len(self.data.test)))
        costs = exit_costs(self.network, self.data.size, self.data.in_chans)
        found: dict[str, Any] = {"params": num_params(self.network), "exits": exit_rows(costs, splits)}
        if self.network.nested:
            test = splits["test"].choices if "test" in splits else None
            found["early_exit"] = early_exit_rows(costs, splits["validation"].choices, test)
        return found

    def epoch_s(self) -> float:
        """Seconds of an epoch on one thread, by a few steps of the first one and of the last one."""
        first = self.steps * self.step_s(0)
        if not self.config.final_epochs:
            return first
        share = self.config.final_epochs / self.config.epochs
        return (1 - share) * first + share * self.steps * self.step_s(self.config.epochs - 1)

    def step_s(self, epoch: int) -> float:
        """CPU seconds of a step of an epoch, on a copy and on one thread: the same whatever else the machine does."""
        trial = copy.copy(self)
        trial.network = copy.deepcopy(self.network).train()
        trial.optimizer = PeerOptimizer(trial.network, self.config)
        threads, start, num = torch.get_num_threads(), time.process_time(), 0
        torch.set_num_threads(1)  # several wait for each other, which counts as well
        try:
            for batch in self.images.training_batches(self.data.train, self.kept, epoch):
                if batch.step == 2:  # the first steps find their kernels
                    start, num = time.process_time(), 0
                trial.step(batch, 0)
                num += 1
                if num == TIMED_STEPS:
                    break
        finally:
            torch.set_num_threads(threads)
        return (time.process_time() - start) / num


@torch.no_grad()
def reestimate(network: Peer, batches: Iterable[Tensor]) -> None:
    """Batch statistics anew, as plain averages over batches of images."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
    network.train()
    for images in batches:
        for _ in network.exits(images.contiguous(memory_format=torch.channels_last)):
            pass
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def complete(config: TrainConfig, data: DataSet, *, asked: bool) -> TrainConfig:
    """A recipe for a data set: how many images are held out, as for a mixture, and in which precision it runs.

    `asked`: the number of held-out images was.
    """
    if config.teacher and data.palette:
        raise UserError(f"teacher {config.teacher!r}: it labels images, {data.spec} labels pixels; remove --teacher")
    val = config.val if asked else min(config.val, len(data.train) // 10)
    val = len(data.held_out) if config.val and data.held_out else val
    narrow = use_bfloat16(config.precision)
    return dataclasses.replace(config, val=val, precision="bfloat16" if narrow else "float32", device="cpu")
