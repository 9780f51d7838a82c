"""Switching between the points of a ladder in one process: its cost, its memory, and its answers from many threads.

    python -m benchmarks.switching                   # 16 points of an untrained cnmm_b6s3
    python -m benchmarks.switching --ladder DIR      # a ladder that `cnmm export RUN --ladder 16` made

Run it on a quiet machine. The same calls are made in random order and sorted by point, in turns; the ratio of their
times is the cost of switching. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import cnmm
from cnmm._machine import machine

NUM_POINTS = 16


def make_ladder(folder: Path, model: Any) -> None:
    """A ladder of a model, trained or not; its qualities only order the points by macs."""
    from benchmarks.latency import choose_points
    from cnmm.frontier import Frontier, FrontierPoint

    model.preprocessing = cnmm.Preprocessing.plain(model.config)
    costs = cnmm.CostTable.of(model.config)
    full = costs.exit().macs
    points = []
    for point in {point.name: point for point in choose_points(model, NUM_POINTS)}.values():
        cost = costs.point(point)
        order = cost.macs / full
        shape = {"rule": point.rule, "cuts": point.cuts, "exit": point.exit, "macs": cost.macs, "params": cost.params}
        known = {"n": 1, "split": "none", "statistics": "raw", "metric": "accuracy"}
        quality = {"quality": order, "low": order, "high": order, **known}
        points.append(FrontierPoint(name=point.name, **shape, **quality))
    cnmm.export_ladder(
        model, Frontier(model=model.config.name, full_macs=full, points=tuple(points)), folder, NUM_POINTS
    )


def memory_mb() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def switching_cost(session: cnmm.Session, image: np.ndarray, rounds: int) -> float:
    """The same calls in random order over the same sorted by point."""
    names = [point.name for point in session.points] * 6
    rng = np.random.default_rng(0)
    mixed, sorted_ = [], []
    for _ in range(rounds):
        for order, times in ((list(rng.permutation(names)), mixed), (sorted(names), sorted_)):
            start = time.perf_counter()
            for name in order:
                session.predict(image, point=name)
            times.append(1e3 * (time.perf_counter() - start) / len(order))
    ratio = statistics.median(mixed) / statistics.median(sorted_)
    print(f"switching: {statistics.median(mixed):.3f} ms a call, staying {statistics.median(sorted_):.3f} ms")
    return ratio


def from_threads(session: cnmm.Session, images: np.ndarray, calls: int = 400) -> bool:
    """Do eight threads with random points give the serial answers?"""
    rng = np.random.default_rng(1)
    names = [point.name for point in session.points]
    work = [(str(rng.choice(names)), int(rng.integers(len(images)))) for _ in range(calls)]
    alone = {job: session.predict(images[job[1]], point=job[0]).probabilities for job in set(work)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: session.predict(images[job[1]], point=job[0]).probabilities, work))
    return all(np.array_equal(alone[job], answer) for job, answer in zip(work, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ladder", type=Path)
    parser.add_argument("--model", default="cnmm_b6s3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    answer: dict[str, object] = {"machine": machine(), "threads": arguments.threads}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.ladder or Path(name) / "ladder"
        if not arguments.ladder:
            make_ladder(folder, cnmm.create_model(arguments.model).eval())
        for runtime in ("onnx", "openvino"):
            before, start = memory_mb(), time.perf_counter()
            with cnmm.Session(folder, runtime=runtime, threads=arguments.threads) as session:
                ready, loaded = time.perf_counter() - start, memory_mb()
                shape = (32, *session.input_size, session.channels)
                images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
                for point in session.points:
                    session.predict(images[0], point=point.name)
                warm = memory_mb()
                ratio = switching_cost(session, images[:1], arguments.rounds)
                same = from_threads(session, images)
                after = memory_mb()
                words = f"{len(session.points)} points ready in {ready:.2f} s, {loaded - before:.0f} MB"
                print(
                    f"{runtime}: {words}, {after - warm:+.1f} MB after all calls; threads give serial answers: {same}"
                )
                answer[runtime] = {
                    "points": len(session.points),
                    "switching": ratio,
                    "threads_equal_serial": same,
                    "memory_mb": loaded - before,
                    "growth_mb": after - warm,
                    "ready_s": ready,
                }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
