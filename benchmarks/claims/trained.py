"""Training what a declaration says, into a folder, so that a training that was stopped goes on; and opening it
again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cnmm
from benchmarks.claims.store import JSON, fingerprint
from benchmarks.claims.trainings import Training
from cnmm._errors import UserError
from cnmm._files import read_json, write_json
from cnmm.cost import CostTable
from cnmm.data import open_data
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.pretrained import pretrained
from cnmm.prune import cutting_order
from cnmm.run import Run
from cnmm.run_folder import CONFIG_FILE, WEIGHTS_FILE, has_steps, start_run
from cnmm.run_held_out import save_held_out
from cnmm.run_training import describe_data
from cnmm.training.batches import use_bfloat16
from cnmm.training.loop import train as run_loop
from cnmm.training.recipes import recipe
from peers.train import RESULTS_FILE, train_peer

MARK = "claims.json"
"""In a run's folder: which declaration it is of, and the time that was spent on it."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training and its images."""

    training: Training
    folder: Path
    data: str
    other: str | None = None
    """Images whose classes it does not know, if there are such."""
    other_title: str = "its test images, negated and upside down"

    @cached_property
    def run(self) -> Run:
        return Run(self.folder, data=self.data)

    @cached_property
    def peer(self) -> JSON:
        """What a peer's trainer found."""
        return read_json(self.folder / RESULTS_FILE)

    @cached_property
    def point(self) -> OperatingPoint | None:
        """Of a slim architecture: its edges."""
        mark = read_json(self.folder / MARK) if self.training.how == "slim" else {}
        return point_of(mark["point"]) if mark else None


def point_of(about: JSON) -> OperatingPoint:
    edges = frozenset((i, j) for i, j in about["edges"])
    return OperatingPoint(exit=about["exit"], edges=edges, name=about["name"])


def given_folder(training: Training) -> Path:
    """Of a trained model that the repository has."""
    return pretrained(training.network)


def is_finished(training: Training, folder: Path) -> bool:
    """Is this declaration trained to its end, and still here?"""
    if training.how == "given":
        return True
    last = RESULTS_FILE if training.how == "peer" else WEIGHTS_FILE
    return _mark(folder).get("fingerprint") == fingerprint(training.declared()) and (folder / last).is_file()


def _mark(folder: Path) -> JSON:
    return read_json(folder / MARK) if (folder / MARK).is_file() else {}


class Stopwatch:
    """The time that is spent on a run, over all processes that worked on it; kept in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, (time.monotonic(), time.process_time())
        self.before = _mark(folder)

    def note(self, *_: object) -> None:
        wall, cpu = time.monotonic() - self.started[0], time.process_time() - self.started[1]
        spent = {"seconds": self.before["seconds"] + wall, "cpu_seconds": self.before["cpu_seconds"] + cpu}
        write_json(self.folder / MARK, {**self.before, **spent})


def train(
    training: Training, folder: Path, data: str, *, source: Trained | None, say: Say, should_stop: Callable[[], bool]
) -> JSON:
    """Trains, or goes on training; returns what is to be recorded of it."""
    wanted = fingerprint(training.declared())
    mark = _mark(folder)
    if folder.exists() and mark.get("fingerprint") != wanted:
        if any(folder.iterdir()) and not mark:
            raise UserError(f"{folder} is not a run of this benchmark; choose another folder with --runs")
        shutil.rmtree(folder)
        mark = {}
    if not mark:
        folder.mkdir(parents=True)
        write_json(folder / MARK, {"fingerprint": wanted, "seconds": 0.0, "cpu_seconds": 0.0})
    watch = Stopwatch(folder)
    ways = {"mixture": _train_mixture, "peer": _train_peer, "slim": _train_slim}
    about = ways[training.how](training, folder, data, source, watch, say, should_stop)
    watch.note()
    mark = _mark(folder)
    return {**about, "minutes": mark["seconds"] / 60, "cpu_minutes": mark["cpu_seconds"] / 60}


def _train_mixture(
    training: Training, folder: Path, data: str, source: None, watch: Stopwatch, say: Say, should_stop: Any
) -> JSON:
    if not (folder / WEIGHTS_FILE).is_file():
        cnmm.train(
            data,
            folder,
            model=training.network,
            recipe=training.recipe,
            resume=True,
            seed=training.seed,
            on_epoch=_saying(watch, say),
            should_stop=should_stop,
            **training.fields,
        )
    return _about_run(folder)


def _about_run(folder: Path) -> JSON:
    about = Run(folder).about
    return {"model": about["model"], "train": about["train"]}


def _saying(watch: Stopwatch, say: Say) -> Callable[[Any], None]:
    def report(result: Any) -> None:
        watch.note()
        exits = " ".join(f"{100 * value:.1f}" for value in result.quality.values())
        say(f"epoch {result.epoch}, loss {result.loss:.3f}, held out {exits}")

    return report


def _train_peer(
    training: Training, folder: Path, data: str, source: None, watch: Stopwatch, say: Say, should_stop: Any
) -> JSON:
    if not (folder / RESULTS_FILE).is_file():
        words = f"python -m peers.train {training.network} --recipe {training.recipe} --seed {training.seed}"
        fields = dict(training.fields)

        def noting(line: str) -> None:
            watch.note()
            say(line)

        train_peer(
            training.network,
            data,
            folder,
            recipe=training.recipe,
            resume=(folder / CONFIG_FILE).exists(),
            onnx=False,
            say=noting,
            command=words,
            seed=training.seed,
            **fields,
        )
    found = read_json(folder / RESULTS_FILE)
    return {"peer": found["peer"], "params": found["params"], "train": found["train"]}


class Slim(Mixture):
    """A mixture of which only the edges of one operating point ever run: an architecture that cutting has found."""

    kept: OperatingPoint

    def forward_exits(self, x: Tensor, point: OperatingPoint | None = None, **options: Any) -> dict[int, Tensor]:
        return super().forward_exits(x, point or self.kept, **options)


def _train_slim(
    training: Training, folder: Path, data: str, source: Trained | None, watch: Stopwatch, say: Say, should_stop: Any
) -> JSON:
    """The edges and gates are those of the run that was cut; every other weight starts anew."""
    assert source is not None
    mark = _mark(folder)
    if "point" not in mark:
        found = slim_point(source.run.model, training.share)
        edges = sorted(list(edge) for edge in found.edges)
        watch.before["point"] = {"exit": found.exit, "name": found.name, "edges": edges}
        watch.note()
    point = point_of(_mark(folder)["point"])
    if not (folder / WEIGHTS_FILE).is_file():
        _learn_slim(training, folder, data, source, point, _saying(watch, say), should_stop)
    return {**_about_run(folder), "point": point.name}


def slim_point(model: Mixture, share: float) -> OperatingPoint:
    """What the paper's rule leaves of the last exit within a share of its macs."""
    costs = CostTable.of(model.config)
    limit = share * costs.exit().macs
    return next(point for point in cutting_order(model) if costs.point(point).macs <= limit)


def _learn_slim(
    training: Training, folder: Path, data: str, source: Trained, point: OperatingPoint, on_epoch: Any, should_stop: Any
) -> None:
    about = source.run.config
    images, config = (
        open_data(data),
        dataclasses.replace(
            recipe(training.recipe, **training.fields),
            seed=training.seed,
            val=about.val,
            batch_size=about.batch_size,
            ladder_start=1.0,
            exit_distill=0.0,
        ),
    )
    narrow = use_bfloat16(config.precision)
    config = dataclasses.replace(config, precision="bfloat16" if narrow else "float32")
    torch.manual_seed(config.seed)
    model = Slim(dataclasses.replace(source.run.model.config, exits="last"))
    model.kept = point
    with torch.no_grad():
        model.gate_logits.copy_(source.run.model.gate_logits)
    going_on = has_steps(folder)
    start_run(folder, model, resume=True, train=config.to_dict(), data=json.loads(json.dumps(describe_data(images))))
    if not going_on:
        save_held_out(folder, images, config.val, config.seed)
    run_loop(model, images, config, folder, resume=going_on, on_epoch=on_epoch, should_stop=should_stop)
