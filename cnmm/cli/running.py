"""The verbs that run networks: `predict` and `bench`. They need no torch, unless they are given a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm.cli.terminal import NO_HINT, Bar, Common, print_table, say
from cnmm.cost import short_count
from cnmm.ladder import is_ladder
from cnmm.plan import require_torch
from cnmm.pretrained import resolve
from cnmm.run_folder import is_run
from cnmm.runtime.latency import LATENCY_FILE, RuntimeName, check_runtime

Source = Annotated[Positional[Path], arg(metavar="RUN|LADDER", help_behavior_hint="")]
Threads = Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all usable cores)")]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify images, or label their pixels, at a budget, by confidence, or before a deadline."""

    source: Source
    """A ladder folder, a trained model such as fashion, or a run folder where torch is installed."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE...", help_behavior_hint="")]
    """Image files of any size, or folders of them."""
    out: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE.jsonl|FILE.csv|DIR", help_behavior_hint="")] = None
    """A file for the answers, written as they come; the same command leaves out what the file has, and goes on. Of
    segmentation also a folder: NAME.png (classes as pixel values) and NAME_overlay.png of every image."""
    shard: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="")] = None
    """With a file: only every N-th image, by sorted path, from number I on (0/4 to 3/4 share the work of four)."""
    budgets: Annotated[str | None, arg(metavar="B,B,...", help_behavior_hint="")] = None
    """Segmentation: budgets such as 25%,50%,100% to compare; writes NAME_strip.png of every image to the folder."""
    budget: Annotated[str | None, arg(metavar="B", help_behavior_hint="(default: the best point)")] = None
    """60M (macs), 25ms (p95 measured here), 40% (of the full mixture), acc:0.92 (at least that accurate)."""
    point: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """An operating point of the ladder such as e5c37."""
    confidence: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """Stop at the first exit whose top probability reaches P, 0 to 1."""
    average_macs: Annotated[str | None, arg(metavar="B", help_behavior_hint="")] = None
    """Stop early so that an image costs this much on average: 30M or 40%."""
    deadline_ms: Annotated[float | None, arg(metavar="MS", help_behavior_hint="")] = None
    """Answer within this many milliseconds, with the last exit that was finished; one image."""
    runtime: Annotated[RuntimeName, NO_HINT] = "onnx"
    """Inference engine."""
    threads: Threads = None
    """Number of threads."""
    top: Annotated[int, arg(metavar="K", help_behavior_hint="(default: 3)")] = 3
    """Classes to show per image."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        check_runtime(self.runtime)
        if not self.images:
            raise UserError("no images given; add the paths of image files")
        from cnmm.runtime.inputs import image_paths

        recorded = self.out is not None and self.out.suffix in (".jsonl", ".csv")
        if self.shard is not None and not recorded:
            raise UserError(f"--shard {self.shard}: give a file for the answers, too: --out FILE.jsonl or FILE.csv")
        with ladder_of(self.source) as folder:
            files = image_paths(self.images)
            if recorded and not self.budgets:
                return self._recorded(folder, files)
            return self._compared(folder, files) if self.budgets else self._predicted(folder, files)

    def _recorded(self, folder: Path, files: tuple[Path, ...]) -> dict[str, Any]:
        from cnmm.runtime.records import parse_shard, predict_to_file
        from cnmm.runtime.session import asked_session

        assert self.out is not None
        if self.shard is not None:
            parse_shard(self.shard)
        options: dict[str, Any] = {"runtime": self.runtime, "threads": self.threads, "latency": self.source}
        with Bar() as bar, asked_session(folder, **options, **self.given()) as (session, asked):
            done = predict_to_file(session, files, self.out, top=self.top, shard=self.shard, on_wait=bar.wait, **asked)
        return {"file": str(done.file), "new": done.num_new, "known": done.num_known, "bad": done.num_bad}

    def _predicted(self, folder: Path, files: tuple[Path, ...]) -> dict[str, Any]:
        from cnmm.runtime.drawing import draw_labels
        from cnmm.runtime.session import predict_once

        answer = predict_once(
            folder, files, runtime=self.runtime, threads=self.threads, latency=self.source, **self.given()
        )
        drawn: list[dict[str, str]] = [{} for _ in files]
        if self.out:
            pictures = draw_labels(folder, files, answer, self.out)
            drawn = [{"labels": str(labels), "overlay": str(overlay)} for labels, overlay in pictures]
        found = zip(files, answer.top(self.top), answer.exits.tolist(), answer.confidence.tolist(), drawn, strict=True)
        results = [
            {"file": str(path), "top": [{"label": label, "p": p} for label, p in best], "exit": exit, **pictures}
            | {"confidence": sure}
            for path, best, exit, sure, pictures in found
        ]
        about = {"point": answer.point, "macs": answer.macs, "time_ms": answer.time_ms}
        return {**about, **({"late": answer.late} if self.deadline_ms else {}), "results": results}

    def _compared(self, folder: Path, files: tuple[Path, ...]) -> dict[str, Any]:
        if self.given() or not self.out:
            raise UserError("--budgets compares points in pictures: give a folder with -o, and no other budget")
        from cnmm.runtime.drawing import compare_budgets

        budgets = [budget.strip() for budget in str(self.budgets).split(",")]
        compared = compare_budgets(
            folder, files, budgets, self.out, runtime=self.runtime, threads=self.threads, latency=self.source
        )
        results = [
            {
                "file": str(found.file),
                "strip": str(found.strip),
                "answers": [
                    {"budget": budget, "point": answer.point, "macs": answer.macs, "time_ms": answer.time_ms}
                    | {"confidence": float(answer.confidence[0])}
                    for budget, answer in zip(budgets, found.answers, strict=True)
                ],
            }
            for found in compared
        ]
        return {"results": results}

    def given(self) -> dict[str, Any]:
        names = ("budget", "point", "confidence", "average_macs", "deadline_ms")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(found) > 1:
            flags = " and ".join("--" + name.replace("_", "-") for name in found)
            raise UserError(f"{flags} cannot be combined; use one of them")
        return found

    def show(self, answer: dict[str, Any]) -> None:
        if "new" in answer:
            bad = f"; {answer['bad']:,} of these could not be read, and say why" if answer["bad"] else ""
            before = f", beside {answer['known']:,} that were there" if answer["known"] else ""
            say(f"written: {answer['file']}, {answer['new']:,} new answers{before}{bad}")
            return
        if self.budgets:
            rows = []
            for one in answer["results"]:
                for row in one["answers"]:
                    times = short_count(round(row["macs"])), f"{row['time_ms']:.2f}", f"{row['confidence']:.3f}"
                    rows.append((one["file"], row["budget"], row["point"], *times))
            columns = ("file", "budget", "point", "macs", "ms", "confidence")
            print_table(columns, rows, left=("file", "budget", "point"))
            say(f"written: {self.out}, one strip for each image")
            return
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
        if answer.get("late"):
            say(f"the deadline of {self.deadline_ms:g} ms was missed: the machine was busy")
        if self.out:
            say(f"written: {self.out}, the label map and an overlay of each image")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the latency of every point on this machine, for budgets such as 25ms."""

    source: Source
    """A ladder folder, a trained model such as fashion, or a run folder where torch is installed."""
    runtime: Annotated[RuntimeName | None, arg(help_behavior_hint="(default: every installed engine)")] = None
    """Inference engine."""
    threads: Threads = None
    """Number of threads."""
    batch: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1, as used by budgets)")] = 1
    """Images per call."""
    precision: Annotated[Literal["float32", "bfloat16"], NO_HINT] = "float32"
    """bfloat16 needs openvino and CPU support. int8 is chosen when the ladder is exported."""
    seconds: Annotated[float, arg(metavar="S", help_behavior_hint="(default: 1)")] = 1.0
    """Time spent on each point."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        from cnmm.runtime.bench import bench

        with ladder_of(self.source) as folder, Bar() as bar:
            measurements = bench(
                folder,
                runtime=self.runtime,
                threads=self.threads,
                batch=self.batch,
                precision=self.precision,
                seconds=self.seconds,
                out=resolve(self.source, ladder=True),
                on_progress=bar.show,
            )
        return measurements[0].to_dict() | {"measurements": [entry.to_dict() for entry in measurements]}

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
        stored = resolve(self.source, ladder=True) / LATENCY_FILE
        say(f"{place}, {answer['precision']}, batch {answer['batch']}; stored in {stored}")


@contextmanager
def ladder_of(source: Path) -> Iterator[Path]:
    """A ladder folder as it is; a run folder, which needs torch, as a ladder that is gone afterwards."""
    if is_ladder(source) or not is_run(source):
        yield source
        return
    require_torch()
    from cnmm.run import Run

    with Run(source).as_ladder() as folder:
        yield folder
