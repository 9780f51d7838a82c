"""The whole story on real images, in about two minutes: `make demo`, or `python examples/demo.py`.

It trains one small mixture on Fashion-MNIST images (the sample that comes with the package), measures its operating
points, exports a ladder of them, and classifies images at three budgets and by confidence, without torch. Then the same
for scenes of garments whose pixels are labelled, with one strip drawn. Where demo/ is there already, `python
examples/demo.py light` only classifies once more: a light install is enough.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from garments import SIZE, write_scenes  # beside this file
from rich.console import Console
from rich.table import Table

import cnmm
from cnmm.cli.budgets import MeasuringBar
from cnmm.cli.training import TrainingBar
from cnmm.cost import short_count
from cnmm.data import fashion_sample
from cnmm.draw import draw_lattice, save_picture
from cnmm.runtime.drawing import compare_budgets

FOLDER = Path("demo")
MODEL = "cnmm_tiny"
EPOCHS = 10
BUDGETS = ("100%", "50%", "25%")
SCENE_EPOCHS = 8
NUM_SCENES = 200
SCENE_BUDGETS = ("75%", "90%", "100%")

out = Console(highlight=False)


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    run = train()
    trace(run)
    export(run)
    classify(FOLDER / "ladder", "the ladder just made")
    classify("fashion", "the model in the package, trained on all of Fashion-MNIST")
    export_pixels(train_pixels())
    label_pixels()
    show_next(time.perf_counter() - start)


def progress(words: str) -> None:
    print(f"... {words}", file=sys.stderr, flush=True)


def train() -> cnmm.Run:
    """The same as `cnmm train --data fashion --model cnmm_tiny --epochs 10 --out demo/run`."""
    networks = cnmm.model_plan(MODEL).chain.count()
    progress(f"training {MODEL}, one mixture of {networks} networks, on the embedded sample of Fashion-MNIST")
    with TrainingBar() as bar:
        return cnmm.train("fashion", FOLDER / "run", model=MODEL, epochs=EPOCHS, on_step=bar.step, on_epoch=bar.epoch)


def trace(run: cnmm.Run) -> None:
    """The same as `cnmm frontier demo/run --test`, and two drawings of `cnmm draw`."""
    progress("measuring operating points on held-out images: every exit, many cuts, no retraining")
    with MeasuringBar() as bar:
        frontier = run.measure(test=True, on_progress=bar.update)
    table = Table(title=f"{len(frontier.points)} operating points measured; the best for every budget")
    for column in ("point", "macs", "of full", f"{frontier.metric}, held out", f"{frontier.metric}, test"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for point in frontier.envelope():
        share = f"{point.macs / frontier.full_macs:.0%}"
        table.add_row(point.name, short_count(point.macs), share, f"{point.quality:.1%}", f"{point.test_quality:.1%}")
    out.print(table)
    for name, budget in (("full", "100%"), ("cut", "50%")):
        save_picture(draw_lattice(run.model, run.find(budget=budget)), FOLDER / f"{name}.svg")


def export(run: cnmm.Run) -> None:
    """The same as `cnmm export demo/run --ladder 6 -o demo/ladder`."""
    progress("exporting a ladder: ONNX files with the preprocessing inside, checked against torch")
    run.export_ladder(FOLDER / "ladder", 6)


def classify(ladder: str | Path, what: str) -> None:
    """What `cnmm predict demo/ladder IMAGE --budget 50%` does, for all test images at once and one by one."""
    images, labels = fashion_sample("test")
    table = Table(title=f"{len(images):,} test images through {what} (onnxruntime, no torch)")
    for column in ("asked for", "runs", "macs per image", "accuracy", "time of one image"):
        table.add_column(column, justify="right" if column not in ("asked for", "runs") else "left")
    with cnmm.Session(ladder) as session:
        for words, asked in (
            *((f"budget {budget}", {"budget": budget}) for budget in BUDGETS),
            ("confidence 0.8", {"confidence": 0.8}),
            ("50% on average", {"average_macs": "50%"}),
        ):
            answer = session.predict(images, **asked)  # type: ignore[arg-type]
            accuracy = (answer.probabilities.argmax(1) == labels).mean()
            times = [session.predict(image, **asked).time_ms for image in images[:200]]  # type: ignore[arg-type]
            early = f"cascade {answer.point}" if "budget" not in asked else f"point {answer.point}"
            table.add_row(words, early, short_count(round(answer.macs)), f"{accuracy:.1%}", f"{np.mean(times):.2f} ms")
    out.print(table)


def train_pixels() -> cnmm.Run:
    """The same as `cnmm train --recipe street --data masks:demo/scenes --out demo/pixels` with the options below."""
    progress("training cnmm_seg_tiny to label the pixels of made-up scenes: garments of the sample on coloured ground")
    scenes = write_scenes(FOLDER / "scenes", NUM_SCENES, NUM_SCENES // 5)
    options = {"model": "cnmm_seg_tiny", "channels": 24, "recipe": "street", "epochs": SCENE_EPOCHS}
    rates = {"lr": 0.01, "matrix_lr": 0.06}
    steps = {"scene_crop": SIZE, "final_epochs": 0, "zoom": (1.0, 1.0), "colour": 0.0, "loss_stride": 1}
    with TrainingBar() as bar:
        how: dict[str, Any] = {**options, **rates, **steps, "on_step": bar.step, "on_epoch": bar.epoch}
        return cnmm.train(f"masks:{scenes}", FOLDER / "pixels", **how)


def export_pixels(run: cnmm.Run) -> None:
    """The same as `cnmm frontier demo/pixels` and `cnmm export demo/pixels --ladder 4 -o demo/pixels_ladder`."""
    with MeasuringBar() as bar:
        run.measure(on_progress=bar.update)
    run.export_ladder(FOLDER / "pixels_ladder", 4)


def label_pixels() -> None:
    """What `cnmm predict demo/pixels_ladder IMAGE --budgets 50%,75%,100% -o demo/strips` does."""
    shutil.rmtree(FOLDER / "strips", ignore_errors=True)
    image = FOLDER / "scenes" / "test" / "images" / "003.png"
    (found,) = compare_budgets(FOLDER / "pixels_ladder", [image], SCENE_BUDGETS, FOLDER / "strips")
    with cnmm.Session(FOLDER / "pixels_ladder") as session:
        quality = {point.name: f"{point.quality:.1%}" for point in session.points}
    table = Table(title="A scene labelled at three budgets")
    for column in ("budget", "point", "macs", "mIoU, held out"):
        table.add_column(column, justify="right" if column in ("macs", "mIoU, held out") else "left")
    for budget, answer in zip(SCENE_BUDGETS, found.answers, strict=True):
        table.add_row(budget, answer.point, short_count(round(answer.macs)), quality[answer.point])
    out.print(table)


def show_next(seconds: float) -> None:
    out.print(f"\nWrote in {seconds:.0f} s:")
    out.print("  demo/run/             the trained mixture and its frontier: look at frontier.svg")
    out.print("  demo/ladder/          what a device needs: pip install cnmm, no torch")
    out.print("  demo/full.svg cut.svg the lattice at full cost and at half of it")
    out.print("  demo/strips/          one scene labelled at three budgets")
    out.print("\nNext:")
    out.print("  make serve                                      a server whose quality bends under load, and a page")
    out.print("  cnmm report demo/run                            one page about all of it")
    out.print("  cnmm choose demo/run --budget acc:0.75          the cheapest point that is good enough")
    out.print("  cnmm bench demo/ladder                          its latency here; then --budget 1ms works")
    out.print("  cnmm slim demo/run --budget 50% -o small        a plain network of one point")
    out.print("  cnmm train --data folder:DIR --out runs/mine    your own images")


if __name__ == "__main__":
    classify(FOLDER / "ladder", "the ladder in demo/") if sys.argv[1:] == ["light"] else main()
