"""Trains a peer on the images, the held-out images and the augmentation that a mixture would get.

    python -m peers.train plain_118m --data cifar10:DIR --out runs/teacher
    python -m peers.train msdnet_12m --data cifar10:DIR --out runs/msdnet --recipe ours --minutes 15 --seed 1

The folder gets config.json, log.jsonl, checkpoints/ (after every epoch; --resume goes on from the last, bit by bit),
model.safetensors, model.onnx (the last exit: `cnmm train --teacher` takes it) and results.json with the figures of
every exit. With --minutes a few steps are timed first, and as many epochs are trained as fit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cnmm import run_folder
from cnmm._errors import UserError
from cnmm._files import to_bytes, write_atomically, write_json
from cnmm._machine import keep_freed_memory, machine
from cnmm.data import DataSet, hold_out, open_data
from cnmm.data.dataset import Split
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.quality import Task
from cnmm.training.batches import Batch, Images, steps_per_epoch, use_bfloat16
from cnmm.training.checkpoint import restore, save_state
from cnmm.training.config import TrainConfig
from cnmm.training.loop import check_finite
from cnmm.training.objective import Lesson
from cnmm.training.stem import stem_images
from cnmm.training.teacher import teacher_answers
from peers.evaluate import Answers, ask, early_exit_rows, exit_rows
from peers.network import Peer, exit_costs, num_params, onnx_bytes
from peers.optim import PeerOptimizer
from peers.recipes import RECIPES, peer_recipe, recorded
from peers.zoo import PEERS, create_peer

RESULTS_FILE, ONNX_FILE = "results.json", "model.onnx"
TIMED_STEPS = 12

Say = Callable[[str], None]


class Training:
    """One peer on its way: network, images, optimizer."""

    def __init__(self, name: str, data: DataSet, config: TrainConfig, folder: Path) -> None:
        self.name, self.data, self.config, self.folder = name, data, config, folder
        self.kept, self.held_out = hold_out(data.train.labels, config.val, config.seed)
        self.steps = steps_per_epoch(config, len(self.kept))
        self.images = Images(data, config)
        torch.manual_seed(config.seed)
        self.network: Peer = create_peer(name, data)
        self.optimizer = PeerOptimizer(self.network, config)
        self.task: Task = Classification()

    def start(self) -> int:
        """Puts the last checkpoint back, or what the weights start from; returns the epochs that are done."""
        run_folder.cut_log(self.folder, done := restore(self.folder, self.network, self.optimizer, {}))
        if not done:
            chosen = self.images.some(self.data.train, self.kept, stem_images(*self.data.size), "stem")
            self.network.start(torch.cat(list(chosen)))
        self.images.answers = teacher_answers(self.images, self.data, self.kept, self.folder)
        return done // self.steps

    def epoch(self, epoch: int) -> float:
        """One pass over the training images; returns the mean loss."""
        self.network.train()
        losses = []
        for batch in self.images.training_batches(self.data.train, self.kept, epoch):
            losses.append(self.step(batch, epoch))
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

    def step_s(self) -> float:
        """Mean seconds of a step, on a copy of the network: CPU time per thread, whatever else the machine does."""
        trial = copy.copy(self)
        trial.network = copy.deepcopy(self.network).train()
        trial.optimizer = PeerOptimizer(trial.network, self.config)
        trial.config = dataclasses.replace(self.config, epochs=10**6)
        start = time.process_time()
        for batch in self.images.training_batches(self.data.train, self.kept, 0):
            if batch.step == 2:  # the first steps find their kernels
                start = time.process_time()
            trial.step(batch, 0)
            if batch.step == 2 + TIMED_STEPS:
                break
        return (time.process_time() - start) / max(batch.step - 1, 1) / torch.get_num_threads()


def train_peer(
    name: str,
    data: str,
    out: str | Path,
    *,
    recipe: str = "own",
    minutes: float | None = None,
    resume: bool = False,
    say: Say = lambda words: None,
    command: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """Trains a peer into a folder and returns what results.json says. `fields` override those of the recipe."""
    keep_freed_memory()
    folder, opened = Path(out), open_data(data)
    config = _config(name, recipe, opened, fields)
    training = Training(name, opened, config, folder)
    if minutes is not None and not resume:
        fitting = int(60 * minutes / (training.step_s() * training.steps))
        training.config = dataclasses.replace(config, epochs=max(fitting, 1))
    _start_folder(training, resume=resume, keep_epochs=minutes is not None)
    for epoch in range(training.start(), training.config.epochs):
        clocks = time.monotonic(), time.process_time()
        loss = training.epoch(epoch)
        clocks = time.monotonic() - clocks[0], time.process_time() - clocks[1]
        quality = [found.value for found in training.ask(training.data.train, training.held_out).qualities]
        line = {"epoch": epoch + 1, "loss": loss, "quality": quality, "seconds": clocks[0], "cpu_seconds": clocks[1]}
        run_folder.append_log(folder, {"step": (epoch + 1) * training.steps, **line})
        save_state(folder, training.network, training.optimizer, {}, (epoch + 1) * training.steps)
        exits = " ".join(f"{100 * value:.2f}" for value in quality)
        say(f"epoch {epoch + 1}/{training.config.epochs}  loss {loss:.3f}  held out {exits}  {clocks[0]:.0f} s")
    return _finish(training, data, command)


def _config(name: str, recipe: str, data: DataSet, fields: dict[str, Any]) -> TrainConfig:
    """The complete training; a small set keeps most of its images, and a run is of one precision."""
    config = peer_recipe(name, recipe, **fields)
    val = config.val if "val" in fields else min(config.val, len(data.train) // 10)
    narrow = use_bfloat16(config.precision)
    return dataclasses.replace(config, val=val, precision="bfloat16" if narrow else "float32", device="cpu")


def _start_folder(training: Training, *, resume: bool, keep_epochs: bool) -> None:
    """Makes a new folder, or checks that an old one holds the same training; it knows how many epochs fitted."""
    path = training.folder / run_folder.CONFIG_FILE
    if path.exists() != resume:
        fix = "go on with --resume, or choose another --out" if path.exists() else "remove --resume to start"
        raise UserError(f"{training.folder}: {'a training is' if path.exists() else 'nothing is'} there; {fix}")
    if resume:
        stored = json.loads(path.read_text("utf-8"))
        if keep_epochs:
            training.config = dataclasses.replace(training.config, epochs=stored["train"]["epochs"])
        if stored != json.loads(json.dumps({"format_version": stored["format_version"], **_about(training)})):
            raise UserError(f"{training.folder}: holds another training; use the same options, or another --out")
    else:
        training.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, _about(training))


def _about(training: Training) -> dict[str, Any]:
    return {"peer": training.name, "data": training.data.spec, "train": recorded(training.config)}


def _finish(training: Training, data: str, command: str) -> dict[str, Any]:
    """Writes the weights, the ONNX file and the results."""
    folder, network = training.folder, training.network.eval()
    write_atomically(folder / run_folder.WEIGHTS_FILE, to_bytes(network.state_dict()))
    write_atomically(folder / ONNX_FILE, onnx_bytes(network, training.data.size, training.data.in_chans))
    lines = [json.loads(line) for line in (folder / run_folder.LOG_FILE).read_text("utf-8").splitlines()]
    results = {
        **_about(training),
        "metric": training.task.metrics[0],
        "command": command,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "minutes": sum(line["seconds"] for line in lines) / 60,
        "cpu_minutes": sum(line["cpu_seconds"] for line in lines) / 60,
        **training.results(),
    }
    write_json(folder / RESULTS_FILE, results)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m peers.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--data", required=True, metavar="KIND:DIR", help="as for cnmm train")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--recipe", choices=RECIPES, default="own", help="the peer's own, or ours where it fits")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int)
    length.add_argument("--minutes", type=float, help="as many epochs as fit into these minutes of steps")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--teacher", metavar="FILE.onnx|RUN", help="teaches all exits, as for cnmm train")
    parser.add_argument("--resume", action="store_true")
    given = vars(parser.parse_args(arguments))
    words = "python -m peers.train " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    fields = {name: given[name] for name in ("epochs", "seed", "teacher") if given[name] is not None}
    try:
        results = train_peer(
            given["peer"],
            given["data"],
            given["out"],
            recipe=given["recipe"],
            minutes=given["minutes"],
            resume=given["resume"],
            say=lambda words: print(words, file=sys.stderr, flush=True),
            command=words,
            **fields,
        )
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"folder": str(given["out"]), "minutes": results["minutes"], "exits": results["exits"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
