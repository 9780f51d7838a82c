"""Early exit against fixed points, the overhead of stages, deadlines, and budgets in milliseconds: on a trained run.

    python -m benchmarks.cascade RUN [--data cifar10:DIR] [--runtime onnx|openvino] [--threads 2]

The run needs its frontier (`cnmm frontier RUN`). Thresholds and points were chosen on held-out images; every accuracy
here is on test images. Macs are those of the written networks, counted from the stages that ran. Run it on a quiet
machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cnmm
from cnmm._machine import machine
from cnmm.budget import parse_budget
from cnmm.export.network import onnx_bytes
from cnmm.export.slim import slim
from cnmm.ladder import NetworkFile
from cnmm.prune import named_point
from cnmm.run import Run
from cnmm.runtime.engines import open_runtime
from cnmm.runtime.latency import p95, percentile

AVERAGES = ("20%", "30%", "40%", "50%", "60%", "70%", "80%")


def p_value(better: int, worse: int) -> float:
    """Exact one-sided paired test (McNemar): so many more images right by chance, where the two disagree?"""
    total = better + worse
    if total > 1000:
        return 0.5 * math.erfc((better - worse - 1) / math.sqrt(2 * total))
    return sum(math.comb(total, k) for k in range(better, total + 1)) / 2**total if total else 1.0


def in_batches(predict: Callable[[np.ndarray], Any], images: np.ndarray, size: int = 500) -> tuple[np.ndarray, float]:
    """Predicted classes of all images, and the average macs."""
    found, macs = [], 0.0
    for start in range(0, len(images), size):
        answer = predict(images[start : start + size])
        found.append(answer.probabilities.argmax(1))
        macs += answer.macs * len(answer.exits)
    return np.concatenate(found), macs / len(images)


def at_every_exit(session: cnmm.Session, images: np.ndarray) -> np.ndarray:
    """Probabilities of all stages: [images, exits, classes]."""
    step = session.chunk
    walks = [session.walk(images[k : k + step]) for k in range(0, len(images), step)]
    return np.concatenate([np.stack([np.array(answers) for answers in walk], 1) for walk in walks])


def one_threshold(answers: np.ndarray, labels: np.ndarray, macs: np.ndarray, spent: float) -> float:
    """Accuracy if all exits ask for the same confidence, the one that spends as much on these very images."""
    sure, right = answers.max(2), answers.argmax(2) == labels[:, None]
    low, high = 0.0, 1.000001
    for _ in range(40):
        middle = (low + high) / 2
        leaves = np.concatenate([sure[:, :-1] >= middle, np.ones((len(sure), 1), bool)], 1).argmax(1)
        low, high = (middle, high) if np.cumsum(macs)[leaves].mean() <= spent else (low, middle)
    leaves = np.concatenate([sure[:, :-1] >= low, np.ones((len(sure), 1), bool)], 1).argmax(1)
    return float(right[np.arange(len(labels)), leaves].mean())


def early_exit(
    session: cnmm.Session, full: int, images: np.ndarray, labels: np.ndarray, averages: Sequence[str]
) -> list[dict[str, Any]]:
    """At the same average macs: the cascade against the best fixed point, image by image; and against one threshold."""
    answers = at_every_exit(session, images)
    macs = np.array(session.cascade.macs)
    print(f"exits alone, %: {' '.join(f'{100 * each:.2f}' for each in (answers.argmax(2) == labels[:, None]).mean(0))}")
    rows = []
    print("\nasked   spent   spent/asked  early exit %   one threshold %   best fixed point      %    p (paired)")
    for average in averages:
        wanted = parse_budget(average)
        budget = wanted.value * (full / 100 if wanted.kind == "percent" else 1)
        try:
            found, spent = in_batches(lambda x, budget=budget: session.predict(x, average_macs=budget), images)
            point = session.choose(spent)
        except ValueError as error:
            print(f"{average:>6}  {error}")
            continue
        fixed, _ = in_batches(lambda x, point=point: session.predict(x, point=point.name), images)
        ours, theirs = found == labels, fixed == labels
        p = p_value(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()))
        row = {"asked": average, "spent": spent / budget, "accuracy": ours.mean(), "fixed": theirs.mean(), "p": p}
        rows.append(row | {"one_threshold": one_threshold(answers, labels, macs, spent)})
        words = f"{100 * ours.mean():10.2f} {100 * rows[-1]['one_threshold']:14.2f}        "
        words += f"{point.name:>8} {point.macs / full:5.1%} {100 * theirs.mean():8.2f}"
        print(f"{average:>6}  {100 * spent / full:5.1f} %  {spent / budget:8.3f}  {words}   {p:.1e}")
    return [{key: value if key == "asked" else float(value) for key, value in row.items()} for row in rows]


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def whole_network(session: cnmm.Session, run: Run, name: str, folder: Path) -> Callable[[np.ndarray], object]:
    """A point as one network on the session's runtime, in passes as large as the session's."""
    point = named_point(run.model, name)
    data = onnx_bytes(slim(run.settled(point), point), run.preprocessing)
    shape = session.preprocessing.image_shape
    runtime = open_runtime(session.runtime, threads=session.threads, precision="float32", image_shape=shape)
    chain = runtime.chain([NetworkFile.write(folder / f"whole_{name}.onnx", data)])
    step = runtime.chunk
    return lambda images: [next(chain.walk(images[k : k + step]))() for k in range(0, len(images), step)]


def batch_ratio(
    session: cnmm.Session, run: Run, full_macs: int, images: np.ndarray, folder: Path, repeats: int = 15
) -> tuple[float, float]:
    """Time of batches of 64 at 40 % average macs over that of the full mixture as one network; and of macs."""
    full = whole_network(session, run, f"e{run.model.config.exit_numbers[-1]}c0", folder)
    starts = range(0, min(64 * repeats, len(images) - 63), 64)
    early, whole, spent = [], [], []
    for batch in (images[start : start + 64] for start in starts):
        early.append(median_ms(lambda batch=batch: session.predict(batch, average_macs="40%"), 3))
        whole.append(median_ms(lambda batch=batch: full(batch), 3))
        spent.append(session.predict(batch, average_macs="40%").macs)
    ratio, part = statistics.mean(early) / statistics.mean(whole), statistics.mean(spent) / full_macs
    words = f"{statistics.mean(early):.1f} ms against {statistics.mean(whole):.1f} ms in full"
    print(f"\nbatch of 64 at 40 % average macs: {words}: {ratio:.3f} of the time, {part:.3f} of the macs")
    return ratio, part


def stage_overhead(session: cnmm.Session, run: Run, image: np.ndarray, folder: Path, rounds: int = 40) -> float:
    """The stages of the cascade one after the other, over the same edges as one network: one image."""
    assert run.frontier.cascade is not None
    whole_call = whole_network(session, run, run.frontier.cascade.point, folder)
    staged, whole = [], []
    for _ in range(rounds):
        staged.append(
            sum(statistics.median(times) for part in session.time_stages(image, repeats=10) for times in part)
        )
        whole.append(median_ms(lambda: whole_call(image), 10))
    ratio = statistics.median(staged) / statistics.median(whole)
    words = f"{statistics.median(staged):.3f} ms against {statistics.median(whole):.3f} ms whole"
    print(f"stages at batch 1: {words}: {ratio:.3f}")
    return ratio


def deadlines(session: cnmm.Session, image: np.ndarray, num: int = 1000) -> tuple[float, bool]:
    """Share of random deadlines that are kept, within a millisecond; and whether too short a one is refused."""
    stages = session.stage_p95_ms
    rng = np.random.default_rng(0)
    kept, exits = 0, []
    for deadline in rng.uniform(stages[0], sum(stages), num):
        start = time.perf_counter()
        answer = session.predict(image, deadline_ms=float(deadline))
        kept += 1e3 * (time.perf_counter() - start) <= deadline + 1
        exits.append(int(answer.exits[0]))
    try:
        session.predict(image, deadline_ms=0.3 * stages[0])
        refused = False
    except ValueError as error:
        refused = True
        print(f"\ndeadline of {0.3 * stages[0]:.3f} ms: {error}")
    print(f"deadlines of {stages[0]:.2f} to {sum(stages):.2f} ms: {kept / num:.1%} of {num} kept within 1 ms")
    print(f"exits: {dict(zip(*np.unique(exits, return_counts=True), strict=True))}")
    return kept / num, refused


def millisecond_budgets(run: Run, image: np.ndarray, arguments: argparse.Namespace) -> list[float]:
    """p95 of 1,000 calls of the point that a budget in ms chooses, over the budget."""
    if not (run.folder / "latency.json").is_file():
        print("\nno latency.json: `cnmm bench RUN` measures it; budgets in ms are left out")
        return []
    ratios = []
    times = sorted(p95(run.folder, runtime=arguments.runtime, threads=arguments.threads).values())
    with run.session(runtime=arguments.runtime, threads=arguments.threads) as session:
        for budget in (times[len(times) // 4], times[len(times) // 2], times[-1]):
            point = session.choose(f"{1.0001 * budget}ms").name
            for _ in range(50):
                session.predict(image, point=point)
            calls = [session.predict(image, point=point).time_ms for _ in range(1000)]
            ratios.append(percentile(calls, 95) / budget)
            print(f"budget {budget:.3f} ms: {point}, p95 of 1,000 calls {percentile(calls, 95):.3f} ms")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--runtime", default="onnx")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=10000, help="test images at most")
    parser.add_argument("--average", nargs="+", default=AVERAGES, help="average budgets: 40%%, 3M")
    arguments = parser.parse_args()
    run = Run(arguments.run, data=arguments.data)
    test = run.images.data.test
    if test is None or run.frontier.cascade is None:
        sys.exit("test images and a measured cascade are needed: cnmm frontier RUN --data ...")
    indices = np.arange(len(test))[: arguments.images]
    images, labels = test.read(indices), test.labels[indices]
    print(f"{machine()}, {run.model.config.name}, {arguments.runtime}, {arguments.threads} threads")
    print(f"cascade {run.frontier.cascade.point}, {len(images):,} test images")
    with tempfile.TemporaryDirectory() as name:
        full = run.export_ladder(Path(name) / "ladder", 16).frontier.full_macs
        with cnmm.Session(Path(name) / "ladder", runtime=arguments.runtime, threads=arguments.threads) as session:
            rows = early_exit(session, full, images, labels, arguments.average)
            ratio, part = batch_ratio(session, run, full, images, Path(name))
            overhead = stage_overhead(session, run, images[:1], Path(name))
            kept, refused = deadlines(session, images[:1])
    budgets = millisecond_budgets(run, images[:1], arguments)
    answer = {
        "rows": rows,
        "largest_deviation": max((abs(row["spent"] - 1) for row in rows), default=None),
        "batch64_time": ratio,
        "batch64_macs": part,
        "stage_overhead": overhead,
        "deadlines_kept": kept,
        "short_deadline_refused": refused,
        "p95_over_budget": budgets,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
