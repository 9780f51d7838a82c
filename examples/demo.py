"""A tour of one mixture on real images, in seconds: `make demo`, or `python examples/demo.py`.

It builds a small mixture, draws it, runs Fashion-MNIST images (the sample that comes with the package) through it in
every mode, and cuts it down to a single network. The mixture is not trained: this shows the mechanics, not accuracy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cnmm
from cnmm.cost import short_count
from cnmm.data import fashion_sample
from cnmm.draw import draw_lattice, save_picture
from cnmm.mixture import Mixture

FOLDER = Path("demo")
NUM_IMAGES = 256
NUM_SAMPLES = 5

T = TypeVar("T")

out = Console(highlight=False)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    model = build()
    show_info(model)
    files = draw(model)
    train, test, labels = read_images()
    settle_statistics(model, train)
    model.eval()
    show_passes(model, test, labels)
    show_points(model, test)
    show_next(files, time.perf_counter() - start)


def progress(words: str) -> None:
    print(f"... {words}", file=sys.stderr, flush=True)


def build() -> Mixture:
    progress("building cnmm_tiny for 28x28 grey images and ten classes")
    return cnmm.create_model("cnmm_tiny", num_classes=10, in_chans=1, input_size=(28, 28))


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


def read_images() -> tuple[Tensor, Tensor, Tensor]:
    """Training and test images [N, 1, 28, 28], normalised with the training sample's mean and deviation, and labels."""
    progress("reading the Fashion-MNIST sample")
    train, _ = fashion_sample("train")
    test, labels = fashion_sample("test")
    mean, deviation = float(train.mean()), float(train.std())
    x_train, x_test = (
        (torch.from_numpy(images).permute(0, 3, 1, 2).float() - mean) / deviation for images in (train[:1024], test)
    )
    return x_train, x_test[:NUM_IMAGES], torch.from_numpy(labels[:NUM_IMAGES])


@torch.no_grad()
def settle_statistics(model: Mixture, images: Tensor) -> None:
    """Batch-norm statistics of real images: passes in train mode, with the gates sampled as training does."""
    progress(f"estimating the batch-norm statistics on {len(images):,} training images")
    model.train()
    for batch in images.split(128):
        model.forward_exits(batch, gates="relaxed", group=16)


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
    table = Table(title=f"{len(images)} test images, UNTRAINED: accuracies are chance")
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
def show_points(model: Mixture, images: Tensor) -> None:
    """From the whole mixture to one network: an operating point is an argument of the pass."""
    progress("cutting the last exit, edge by edge")
    order = cnmm.cutting_order(model)
    costs = cnmm.CostTable.of(model.config)
    table = Table(title=f"The last exit, cut by least flow: {len(order)} operating points")
    for column in ("point", "macs", "networks left", f"time of {len(images)} images"):
        table.add_column(column, justify="left" if column == "point" else "right")
    num = min(len(order), 6)
    for point in [order[round(k * (len(order) - 1) / (num - 1))] for k in range(num)]:
        _, elapsed = timed(partial(model, images, point=point))
        networks = model.chain.count(point.exit, point.edges)
        table.add_row(point.name, short_count(costs.point(point).macs), str(networks), elapsed)
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
    out.print(f"\nWrote in {seconds:.0f} s:")
    for file in files:
        out.print(f"  {file}")
    out.print("\nNext:")
    out.print("  look at the pictures; an edge is as thick as many networks use it")
    out.print("  cnmm models                                    the zoo")
    out.print("  cnmm info cnmm_b6s3 --num-classes 100          costs, exit by exit")
    out.print("  cnmm draw cnmm_b6s3 --point e6c50 -o cut.svg   a point as a picture")


if __name__ == "__main__":
    main()
