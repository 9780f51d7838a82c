"""Label maps at every budget: wall clock against macs and against the literal export, switching, early exit, deadlines.

    python -m benchmarks.segmentation                          # cnmm_seg_b5s5, 11 classes, 360x480, untrained
    python -m benchmarks.segmentation --run RUN [--data camvid:DIR]    # a trained run: also early exit and deadlines

Run it on a quiet machine. Contenders take turns in one process; times are medians over all rounds, from an image in
memory to its label map, at batch 1. Points and thresholds of a run were chosen on held-out images; every mIoU here is
on test images. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cnmm
from benchmarks.latency import RUNTIMES, choose_points, file_call, literal_call, literal_file, medians
from benchmarks.switching import make_ladder, switching_cost
from cnmm._machine import machine
from cnmm.cascade import NEVER
from cnmm.config import Preprocessing
from cnmm.evaluation.segmentation import Segmentation
from cnmm.export.network import onnx_bytes
from cnmm.export.slim import slim
from cnmm.prune import named_point
from cnmm.run import Run
from cnmm.runtime.latency import runtime_version
from cnmm.runtime.pixels import label_map
from tests.matching import reference_of

SIZE, CLASSES = (360, 480), 11


class Literal(torch.nn.Module):
    """The literal transcription with its gates: the scores of every pixel at the last exit."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.network = reference_of(model).eval()
        values = model.gate_logits.detach().sigmoid().unbind(-1)
        self.gates = dict(zip(model.lattice.edges, values, strict=True))
        self.last = model.config.exit_numbers[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(x, self.gates, exits=[self.last])[self.last]
        return scores


def make_model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    if arguments.run:
        return cnmm.load(arguments.run).eval()
    model = cnmm.create_model(arguments.model, num_classes=CLASSES, input_size=SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def noise(config: Any, num: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, *config.input_size, config.in_chans), dtype=np.uint8)


def labelled(call: Callable[[], Any], size: tuple[int, int]) -> Callable[[], object]:
    """A call that answers with scores, followed by the label map."""
    return lambda: label_map(np.asarray(call()).reshape(-1, *size), size)


def compare(model: Any, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The full network: ours, in float32 and int8, against the literal one through torch's own exporter."""
    image, size = noise(model.config, 1), model.config.input_size
    x = torch.from_numpy(image).permute(0, 3, 1, 2).float().contiguous()
    path = literal_file(Literal(model), x, folder)
    network, about = slim(model), Preprocessing.plain(model.config)
    files = {
        "slim": onnx_bytes(network, about),
        "any size": onnx_bytes(network, about, any_size=True),
        "int8": onnx_bytes(network, about, precision="int8", calibration=noise(model.config, 8)),
    }
    calls = {}
    for runtime in RUNTIMES:
        literal = literal_call(path, runtime, arguments.threads, x)
        calls[f"literal {runtime}"] = labelled(lambda call=literal: _first(call()), size)
        for name, data in files.items():
            how = {"task": "segmentation", "any_size": name == "any size"}
            ours = file_call(data, runtime, arguments.threads, image, folder, **how)
            calls[f"{name} {runtime}"] = labelled(lambda call=ours: _first(call()), size)
    times = medians(calls, arguments.rounds, arguments.seconds)
    print(f"\nfull network, {network.cost.macs:,} macs, {size[0]}x{size[1]}, {arguments.threads} thread(s)")
    for name, value in sorted(times.items(), key=lambda item: -item[1]):
        print(f"  {name:20} {value:8.2f} ms")
    return times


def _first(answer: Any) -> Any:
    """The first output, however a runtime hands it out."""
    return next(iter(answer.values())) if hasattr(answer, "values") else answer[0]


def fit(model: Any, runtime: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """A straight line through time against macs: over the best points of a run, or some from cheapest to dearest."""
    image, size = noise(model.config, 1), model.config.input_size
    if arguments.run:
        chosen = [named_point(model, point.name) for point in Run(arguments.run).frontier.envelope()]
    else:
        chosen = choose_points(model, arguments.points)
    networks = {point.name: slim(model, point) for point in chosen}
    about = Preprocessing.plain(model.config)
    calls = {}
    for name, network in networks.items():
        data = onnx_bytes(network, about)
        call = file_call(data, runtime, arguments.threads, image, folder, task="segmentation")
        calls[name] = labelled(lambda call=call: _first(call()), size)
    times = medians(calls, arguments.rounds, arguments.seconds)
    macs = np.array([networks[name].cost.macs for name in calls])
    found = np.array([times[name] for name in calls])
    slope, intercept = np.polyfit(macs, found, 1)
    r2 = 1 - ((found - slope * macs - intercept) ** 2).sum() / ((found - found.mean()) ** 2).sum()
    print(f"\n{runtime}: {len(calls)} points")
    for name in calls:
        print(f"  {name:8} {networks[name].cost.macs / 1e6:8.1f} M macs {times[name]:8.2f} ms")
    print(f"  fit: {intercept:.2f} ms + {1e6 * slope:.4f} ms per M macs, R2 {r2:.4f}")
    return {"r2": float(r2), "intercept_fraction": float(intercept / found.max()), "times_ms": times}


def switching(model: Any, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Time of calls at points in random order over the same calls point by point."""
    make_ladder(folder / "ladder", model)
    ratios = {}
    for runtime in RUNTIMES:
        with cnmm.Session(folder / "ladder", runtime=runtime, threads=arguments.threads) as session:
            ratios[runtime] = switching_cost(session, noise(model.config, 1), 3)
    return ratios


def test_scenes(run: Run, num: int) -> list[Any]:
    part, indices = run.images.split("test")
    scenes: list[Any] = part.scenes(indices[:num])  # type: ignore[attr-defined]
    return scenes


def miou(session: cnmm.Session, scenes: list[Any], average: float | None = None, **asked: Any) -> tuple[float, float]:
    """On these scenes, and the macs per image; with an average budget, as a stream."""
    meter, macs = Segmentation().meter(len(session.classes)), 0.0
    predict = session.predict if average is None else session.stream(average).predict
    for scene in scenes:
        answer = predict(scene.image, **asked)
        labels = torch.from_numpy(label_at(answer.labels[0], scene.mask.shape)).long()
        meter.add(labels[None], torch.from_numpy(scene.mask)[None])
        macs += answer.macs / len(scenes)
    return meter.quality("miou").value, macs


def label_at(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A label map at the size of the mask, where the data set reads images smaller than they are."""
    if labels.shape == size:
        return labels
    rows, columns = (np.arange(new) * old // new for old, new in zip(labels.shape, size, strict=True))
    return labels[rows][:, columns]


def early_exit(session: cnmm.Session, run: Run, scenes: list[Any], averages: list[str]) -> list[dict[str, Any]]:
    """The cascade at an average budget against the best fixed point within what it spent."""
    full, rows = run.frontier.full_macs, []
    print(f"\n{len(scenes)} test images; last, thresholds that do not follow what is spent")
    print(" asked  spent/asked   early exit mIoU   fixed point   its mIoU   spent/asked   mIoU")
    for average in averages:
        budget = float(average.rstrip("%")) / 100 * full
        try:
            plain, unheld = miou(session, scenes, average_macs=budget)
            ours, spent = miou(session, scenes, budget)
            point = session.choose(spent)
        except cnmm.UserError as error:
            print(f"{average:>6}  {error}")
            continue
        theirs, _ = miou(session, scenes, point=point.name)
        words = f"{point.name:>15} {100 * theirs:12.2f} {unheld / budget:15.3f} {100 * plain:6.2f}"
        print(f"{average:>6} {spent / budget:9.3f} {100 * ours:15.2f} {words}")
        row = {"asked": average, "spent": spent / budget, "miou": ours, "fixed": theirs, "point": point.name}
        rows.append(row | {"spent_by_fixed_thresholds": unheld / budget, "miou_by_fixed_thresholds": plain})
    return rows


def deadlines(session: cnmm.Session, image: np.ndarray, num: int = 500) -> float:
    """Share of random deadlines, from the first exit's time to that of all, that are kept within a millisecond."""
    first = deadline_of(session, image)
    rng, kept, exits = np.random.default_rng(0), 0, []
    for deadline in rng.uniform(first, first + sum(session.stage_p95_ms[1:]), num):
        start = time.perf_counter()
        answer = session.predict(image, deadline_ms=float(deadline))
        kept += 1e3 * (time.perf_counter() - start) <= deadline + 1
        exits.append(int(answer.exits[0]))
    counts = dict(zip(*np.unique(exits, return_counts=True), strict=True))
    print(f"deadlines from {first:.1f} ms on: {kept / num:.1%} of {num} kept within 1 ms; exits {counts}")
    return kept / num


def asking(session: cnmm.Session, image: np.ndarray, rounds: int = 20) -> dict[str, float]:
    """Time of an image that goes to the last exit, if no other exit is asked and if all are; medians, taking turns."""
    assert session.cascade is not None
    early = len(session.cascade.exits) - 1
    ways = {"last": (NEVER,) * early, "all": (1.0,) * early}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, confidence in ways.items():
            times[name].append(session.leave_early(image, confidence).time_ms)
    found = {name: float(np.median(own)) for name, own in times.items()}
    print(f"to the last exit: {found['last']:.1f} ms if it alone is asked, {found['all']:.1f} ms if all are")
    return found


def deadline_of(session: cnmm.Session, image: np.ndarray) -> float:
    """The shortest deadline that is accepted, within a tenth of a millisecond."""
    low, high = 0.0, 10_000.0
    while high - low > 0.1:
        middle = (low + high) / 2
        try:
            session.predict(image, deadline_ms=middle)
            high = middle
        except cnmm.UserError:
            low = middle
    return high


def measured_run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What needs trained weights."""
    run = Run(arguments.run, data=arguments.data)
    run.export_ladder(folder / "trained", 16)
    scenes, answer = test_scenes(run, arguments.images), {}
    for runtime in RUNTIMES:
        with cnmm.Session(folder / "trained", runtime=runtime, threads=arguments.threads) as session:
            rows = early_exit(session, run, scenes, arguments.average) if runtime == RUNTIMES[0] else []
            answer |= {"early_exit": rows} if rows else {}
            answer[f"asking_{runtime}"] = asking(session, scenes[0].image)
            answer[f"deadlines_kept_{runtime}"] = deadlines(session, scenes[0].image)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnmm_seg_b5s5")
    parser.add_argument("--run", help="a run folder")
    parser.add_argument("--data", help="where its images are, if not where it says")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each contender in each round")
    parser.add_argument("--points", type=int, default=12, help="of a model without a frontier")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=1000, help="test images at most")
    parser.add_argument("--average", nargs="+", default=["30%", "40%", "50%", "60%", "75%"], help="average budgets")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    versions = {runtime: runtime_version(runtime) for runtime in RUNTIMES}
    print(f"{machine()}, Python {platform.python_version()}, torch {torch.__version__}, {versions}")
    model = make_model(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = compare(model, folder, arguments)
        answer: dict[str, Any] = {"model": model.config.name, "input_size": model.config.input_size}
        answer |= {"threads": arguments.threads, "times_ms": times}
        for runtime in RUNTIMES:
            ours = times[f"slim {runtime}"]
            answer[f"vs_literal_export_{runtime}"] = times[f"literal {runtime}"] / ours
            answer[f"int8_vs_float32_{runtime}"] = ours / times[f"int8 {runtime}"]
            answer[f"any_size_vs_one_size_{runtime}"] = times[f"any size {runtime}"] / ours
            answer[f"fit_{runtime}"] = fit(model, runtime, folder, arguments)
        answer["switching"] = switching(model, folder, arguments)
        if arguments.run:
            answer |= measured_run(arguments, folder)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
