"""The verbs that run networks: `predict` and `bench`. They need no torch, unless they are given a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm._machine import machine, usable_cores
from cnmm.budget import parse_budget
from cnmm.cli.terminal import NO_HINT, Bar, Common, print_table, say
from cnmm.cost import short_count
from cnmm.ladder import Ladder, read_ladder
from cnmm.runtime import latency
from cnmm.runtime.latency import RUNTIMES, Measurement, RuntimeName, Timing

if TYPE_CHECKING:
    from cnmm.runtime.engines import Images
    from cnmm.runtime.session import Session

ROUNDS = 5
"""Turns of each point in a measurement."""
Source = Annotated[Positional[Path], arg(metavar="RUN|LADDER", help_behavior_hint="")]
Threads = Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all usable cores)")]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify images at a budget, by confidence, or before a deadline."""

    source: Source
    """A ladder folder, or a run folder where torch is installed."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE...", help_behavior_hint="")]
    """Image files of any size."""
    budget: Annotated[str | None, arg(metavar="B", help_behavior_hint="(default: the best point)")] = None
    """60M (macs), 25ms (p95 measured here), 40% (of the full mixture), acc:0.92 (the cheapest that good)."""
    point: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """An operating point of the ladder such as e5c37."""
    confidence: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Leave at the first exit that is so sure, 0 to 1."""
    average_macs: Annotated[str | None, arg(metavar="B", help_behavior_hint="")] = None
    """Leave early so that an image costs so much on average: 30M or 40%."""
    deadline_ms: Annotated[float | None, arg(metavar="MS", help_behavior_hint="")] = None
    """Answer within so many milliseconds with the last exit that was finished; one image."""
    runtime: Annotated[RuntimeName, NO_HINT] = "onnx"
    """What runs the networks."""
    threads: Threads = None
    """Threads of the runtime."""
    top: Annotated[int, arg(metavar="K", help_behavior_hint="(default: 3)")] = 3
    """Classes to show per image."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        check_runtime(self.runtime)
        if not self.images:
            raise UserError("no images were named; add the paths of image files")
        from cnmm.runtime.inputs import to_batch
        from cnmm.runtime.session import Session, ladder_folder

        with ladder_folder(self.source) as folder:
            ladder = read_ladder(folder)
            batch = to_batch(self.images, ladder.input_size, ladder.channels)
            given = self.given()
            points: list[str] = []
            if given.keys() <= {"budget", "point"}:  # one point is enough, which starts faster
                points = [self.chosen(ladder)]
                given = {"point": points[0]}
            session = Session(folder, runtime=self.runtime, threads=self.threads, points=points, cascade=not points)
        with session:
            answer = session.predict(batch, **given)
        results = [
            {"file": str(path), "top": [{"label": label, "p": p} for label, p in best], "exit": exit}
            for path, best, exit in zip(self.images, answer.top(self.top), answer.exits.tolist(), strict=True)
        ]
        return {"point": answer.point, "macs": answer.macs, "time_ms": answer.time_ms, "results": results}

    def given(self) -> dict[str, Any]:
        names = ("budget", "point", "confidence", "average_macs", "deadline_ms")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(found) > 1:
            flags = " and ".join("--" + name.replace("_", "-") for name in found)
            raise UserError(f"{flags} exclude each other; give one of them")
        return found

    def chosen(self, ladder: Ladder) -> str:
        """The name of the point that the flags ask for."""
        if self.point is not None:
            return self.point
        if self.budget is None:
            return ladder.frontier.envelope()[-1].point
        measured: dict[str, float] = {}
        if parse_budget(self.budget).kind == "ms":
            threads = self.threads or usable_cores()
            measured = latency.p95(self.source, runtime=self.runtime, precision=ladder.precision, threads=threads)
        return ladder.frontier.choose(self.budget, measured).point

    def show(self, answer: dict[str, Any]) -> None:
        by_exit = self.given().keys() - {"budget", "point"}
        rows = [
            (
                row["file"],
                ", ".join(f"{one['label']} {one['p']:.3f}" for one in row["top"]),
                *((row["exit"],) if by_exit else ()),
            )
            for row in answer["results"]
        ]
        print_table(("file", "classes", *(("exit",) if by_exit else ())), rows, left=("file", "classes"))
        name = f"cascade {answer['point']}" if by_exit else f"point {answer['point']}"
        say(f"{name}, {short_count(round(answer['macs']))} macs per image, {answer['time_ms']:.2f} ms")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the latency of every point on this machine; budgets such as 25ms go by it."""

    source: Source
    """A ladder folder, or a run folder where torch is installed."""
    runtime: Annotated[RuntimeName | None, arg(help_behavior_hint="(default: all that are installed)")] = None
    """What runs the networks."""
    threads: Threads = None
    """Threads of the runtime."""
    batch: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1, which budgets go by)")] = 1
    """Images of one call."""
    precision: Annotated[Literal["float32", "bfloat16"], NO_HINT] = "float32"
    """bfloat16: with openvino, where the CPU has it. int8 is a property of the ladder."""
    seconds: Annotated[float, arg(metavar="S", help_behavior_hint="(default: 1)")] = 1.0
    """Time spent on each point."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        if self.batch < 1 or not 0 <= self.seconds <= 3600:
            raise UserError(
                f"--batch {self.batch} --seconds {self.seconds}: at least 1 image and 0 to 3600 s are needed"
            )
        from cnmm.runtime.session import Session, ladder_folder

        measurements = []
        with ladder_folder(self.source) as folder, Bar() as bar:
            for name in self.runtimes():
                bar.show(name, 0)
                with Session(folder, runtime=name, threads=self.threads, precision=self.precision) as session:
                    measurements.append(measure(session, batch=self.batch, seconds=self.seconds, progress=bar.show))
        for measurement in measurements:
            latency.store(self.source, measurement)
        fastest = min(measurements, key=lambda entry: entry.total_ms)
        return fastest.to_dict() | {"measurements": [entry.to_dict() for entry in measurements]}

    def runtimes(self) -> list[RuntimeName]:
        if self.runtime:
            check_runtime(self.runtime)
            return [self.runtime]
        if self.precision == "bfloat16":
            return ["openvino"]
        return [name for name in RUNTIMES if latency.runtime_version(name)]

    def show(self, answer: dict[str, Any]) -> None:
        rows = []
        for entry in answer["measurements"]:
            for row in (*entry["points"], *entry["stages"]):
                per_mega = row["median_ms"] / row["macs"] * 1e6 / (1 if row in entry["stages"] else entry["batch"])
                times = f"{row['median_ms']:.3f}", f"{row['p95_ms']:.3f}", f"{per_mega:.4f}"
                rows.append((entry["runtime"], row["point"], f"{row['macs']:,}", *times))
        columns = ("runtime", "point", "macs", "median ms", "p95 ms", "ms per M macs")
        print_table(columns, rows, left=("runtime", "point"))
        place = f"{answer['machine']['cpu']}, {answer['threads']} of {answer['machine']['cores']} usable cores"
        say(f"{place}, {answer['precision']}, batch {answer['batch']}; stored in {self.source / latency.LATENCY_FILE}")


def measure(session: Session, *, batch: int, seconds: float, progress: Callable[[str, float], None]) -> Measurement:
    """Times every point of a session, as its callers see it, and the stages of its cascade at batch 1.

    All points take their turns, several times, because a machine has slow moments, which last for seconds and slow down
    whatever runs. So the spread, how far a turn's 95th percentile lies above its point's median, is one for all points:
    that of 95 % of all turns. A budget in milliseconds then holds at other moments, too.
    """
    images = noise(session, batch)
    found: dict[str, list[tuple[float, float, int]]] = {point.point: [] for point in session.points}
    for number in range(ROUNDS * len(session.points)):
        point = session.points[number % len(session.points)]
        progress(f"{session.runtime} {point.point}", number / (ROUNDS * len(session.points)))

        def call(name: str = point.point) -> object:
            return session.predict(images, point=name)

        found[point.point].append(latency.time_calls(call, seconds=seconds / ROUNDS))
    medians = {name: latency.percentile([median for median, _, _ in turns], 50) for name, turns in found.items()}
    spread = latency.percentile([p95 / medians[name] for name, turns in found.items() for _, p95, _ in turns], 95)
    points = [
        Timing(
            point=point.point,
            macs=point.macs,
            median_ms=medians[point.point],
            p95_ms=medians[point.point] * spread,
            n=sum(n for _, _, n in found[point.point]),
        )
        for point in session.points
    ]
    return Measurement(
        machine=machine(),
        runtime=session.runtime,
        runtime_version=latency.runtime_version(session.runtime) or "unknown",
        precision=session.precision,
        threads=session.threads,
        batch=batch,
        points=tuple(points),
        stages=measured_stages(session),
    )


def measured_stages(session: Session) -> tuple[Timing, ...]:
    if session.cascade is None:
        return ()
    times = session.time_stages(noise(session, 1), repeats=100)
    return tuple(
        Timing(
            point=f"stage {stage.exit}",
            macs=stage.macs,
            median_ms=latency.percentile(each, 50),
            p95_ms=latency.percentile(each, 95),
            n=len(each),
        )
        for stage, each in zip(session.cascade.stages, times, strict=True)
    )


def noise(session: Session, batch: int) -> Images:
    """Images to time with: which ones does not matter, the work is the same."""
    import numpy as np

    shape = (batch, *session.input_size, session.channels)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def check_runtime(name: str) -> None:
    if latency.runtime_version(name) is None:
        fix = 'pip install "cnmm[openvino]"' if name == "openvino" else "pip install onnxruntime"
        raise UserError(f"--runtime {name}: it is not installed; install it with: {fix}")
