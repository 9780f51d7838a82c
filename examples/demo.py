"""A tour of one mixture on real images, in about a minute: `make demo`, or `python examples/demo.py`.

It trains a small mixture on Fashion-MNIST images (the sample that comes with the package), draws it, runs test images
through it in every mode, and cuts it down to a single network.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cnmm
from cnmm.checkpoint import start_run
from cnmm.config import TrainConfig
from cnmm.cost import short_count
from cnmm.data import DataSet, hold_out, open_data
from cnmm.draw import draw_lattice, save_picture
from cnmm.evaluate import evaluate_exits, reestimated
from cnmm.mixture import Mixture
from cnmm.recipes import recipe
from cnmm.train import Images, train
from cnmm.verbs import TrainingBar, describe

FOLDER = Path("demo")
NUM_IMAGES = 256
NUM_SAMPLES = 5
MODEL = "cnmm_tiny"
EPOCHS = 10

T = TypeVar("T")

out = Console(highlight=False)


def main() -> None:
    start = time.perf_counter()
    data = open_data("fashion")
    config = recipe("quick", epochs=EPOCHS, val=600, seed=0)
    torch.manual_seed(config.seed)
    model = build(data)
    show_info(model)
    model = train_it(model, data, config)
    files = draw(model)
    images = Images(data, config)
    test, labels = next(images.batches(data.test, np.arange(NUM_IMAGES)))
    show_passes(model, test, labels)
    show_points(model, data, images, config)
    show_next(files, time.perf_counter() - start)


def progress(words: str) -> None:
    print(f"... {words}", file=sys.stderr, flush=True)


def build(data: DataSet) -> Mixture:
    progress(f"building {MODEL} for images of {data.size[0]}x{data.size[1]} and {len(data.classes)} classes")
    return cnmm.create_model(MODEL, num_classes=len(data.classes), in_chans=data.in_chans, input_size=data.size)


def train_it(model: Mixture, data: DataSet, config: TrainConfig) -> Mixture:
    """The same as `cnmm train --data fashion --model cnmm_tiny --epochs ... --out demo/run`."""
    run = FOLDER / "run"
    progress(f"training on {len(data.train):,} images into {run}/, with ladder tuning in the last 40 %")
    shutil.rmtree(run, ignore_errors=True)
    start_run(run, model, resume=False, train=config.to_dict(), data=describe(data))
    with TrainingBar(config) as bar:
        return train(model, data, config, run, on_step=bar.step, on_epoch=bar.epoch)


def show_info(model: Mixture) -> None:
    """The same numbers as `cnmm info cnmm_tiny`."""
    table = Table(title=f"{model.config.name}: one mixture, {model.chain.count()} networks")
    costs = cnmm.CostTable.of(model.config)
    for column in ("exit", "networks", "macs", "params"):
        table.add_column(column, justify="right")
    for exit in model.config.exit_numbers:
        cost = costs.exit(exit)
        table.add_row(str(exit), f"{model.chain.count(exit):,}", f"{cost.macs:,}", f"{cost.params:,}")
    out.print(table)


def draw(model: Mixture) -> list[Path]:
    """The full lattice and one cut point, each as .svg and .png."""
    progress(f"drawing into {FOLDER}/")
    FOLDER.mkdir(exist_ok=True)
    order = cnmm.cutting_order(model)
    files = []
    for name, point in (("full", None), ("cut", order[len(order) // 2])):
        figure = draw_lattice(model, point)
        for suffix in (".svg", ".png"):
            files.append(FOLDER / f"{name}{suffix}")
            save_picture(figure, files[-1])
    return files


@torch.no_grad()
def show_passes(model: Mixture, images: Tensor, labels: Tensor) -> None:
    """One mixture, many ways to run it."""
    progress(f"running {len(images)} test images in every mode")
    passes: list[tuple[str, Callable[[], Tensor]]] = [
        ("expectation, last exit", lambda: model(images)),
        ("one network per image, sampled", lambda: model(images, gates="hard", group=1, generator=seeded(1))),
        ("another draw", lambda: model(images, gates="hard", group=1, generator=seeded(2))),
        (f"Monte-Carlo, {NUM_SAMPLES} samples", lambda: model.monte_carlo(images, NUM_SAMPLES, generator=seeded(3))),
        (
            f"Monte-Carlo, {NUM_SAMPLES} networks",
            lambda: model.monte_carlo(images, NUM_SAMPLES, hard=True, generator=seeded(4)),
        ),
    ]
    table = Table(title=f"{len(images)} test images")
    for column in ("pass", "time", "agrees", "accuracy"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    expected = model(images).argmax(1)

    def add(name: str, elapsed: str, scores: Tensor) -> None:
        predicted = scores.argmax(1)
        accuracy = (predicted == labels).float().mean()
        table.add_row(name, elapsed, f"{(predicted == expected).float().mean():.0%}", f"{accuracy:.0%}")

    exits, elapsed = timed(lambda: model.forward_exits(images))
    for exit, scores in exits.items():
        add(f"exit {exit} (all exits in one pass)", elapsed if exit == 1 else '"', scores)
    for name, function in passes:
        scores, elapsed = timed(function)
        add(name, elapsed, scores)
    out.print(table)
    out.print("agrees: with the class that the expectation gives at the last exit")


@torch.no_grad()
def show_points(model: Mixture, data: DataSet, images: Images, config: TrainConfig) -> None:
    """From the whole mixture to one network: an operating point is an argument of the pass."""
    progress("cutting the last exit, edge by edge, with the statistics of each point estimated anew")
    order = cnmm.cutting_order(model)
    costs = cnmm.CostTable.of(model.config)
    kept, held_out = hold_out(data.train.labels, config.val, config.seed)
    x, _ = next(images.batches(data.test, np.arange(NUM_IMAGES)))
    table = Table(title=f"The last exit, cut by least flow: {len(order)} operating points")
    for column in ("point", "macs", "networks left", f"accuracy, {len(held_out)} held out", f"time of {len(x)} images"):
        table.add_column(column, justify="left" if column == "point" else "right")
    num = min(len(order), 6)
    for point in [order[round(k * (len(order) - 1) / (num - 1))] for k in range(num)]:
        settled = reestimated(model, images.statistics_batches(data.train, kept), point)
        quality = evaluate_exits(settled, images.batches(data.train, held_out), point)[point.exit]
        _, elapsed = timed(partial(settled, x, point=point))
        networks = model.chain.count(point.exit, point.edges)
        macs = short_count(costs.point(point).macs)
        table.add_row(point.name, macs, str(networks), f"{quality.accuracy:.1%}", elapsed)
    out.print(table)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def timed(function: Callable[[], T], repeats: int = 5, enough_s: float = 0.3) -> tuple[T, str]:
    """The last result of a call, and the median time of a few calls; a busy machine gets fewer of them."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < enough_s:
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return result, f"{1000 * statistics.median(times):.1f} ms"


def show_next(files: list[Path], seconds: float) -> None:
    out.print(f"\nWrote in {seconds:.0f} s, beside the run folder demo/run:")
    for file in files:
        out.print(f"  {file}")
    out.print("\nNext:")
    out.print("  look at the pictures; an edge is as thick as many networks use it")
    out.print("  cnmm evaluate demo/run --point e3c5            any point of what you have just trained")
    out.print("  cnmm models                                    the zoo")
    out.print("  cnmm info cnmm_b6s3 --num-classes 100          costs, exit by exit")
    out.print("  cnmm draw cnmm_b6s3 --point e6c50 -o cut.svg   a point as a picture")


if __name__ == "__main__":
    main()
