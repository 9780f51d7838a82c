"""A ladder in one process: the budget is chosen per call, images leave early, deadlines are kept. Torch-free.

    with cnmm.Session("ladder/") as session:
        session.predict(images, budget="40M").top(3)
        session.predict(images, average_macs="30%")  # confident images leave early
        session.predict(image, deadline_ms=8.0)  # the last exit that was finished in time

A session is made once: then everything is loaded, compiled and warmed up. Calls change nothing, so any number of
threads may ask for different budgets at once. Macs are per image; times are in milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._machine import usable_cores
from cnmm.budget import Budget, parse_budget
from cnmm.cascade import Cascade, average_budget
from cnmm.frontier import FrontierPoint
from cnmm.ladder import Ladder, NetworkFile, read_ladder
from cnmm.runtime.answers import Answers, ClassAnswers, Finishing, PixelAnswers, Prediction
from cnmm.runtime.early_exit import (
    CascadeRunner,
    MayBegin,
    StageTimes,
    Stream,
    always,
    check_confidence,
    check_deadline,
    time_stages,
)
from cnmm.runtime.engines import Ask, Chain, Floats, Images, Indices, check_threads, open_runtime
from cnmm.runtime.inputs import OneImage, check_array, to_batch, to_pictures
from cnmm.runtime.latency import RuntimeName, p95, percentile

STAGE_REPEATS = 30
"""Timed runs of every stage when a session starts; deadlines go by their 95th percentile."""


class Session:
    """Runs a ladder folder with onnxruntime or OpenVINO; `Run.session()` makes one of a trained run.

    `threads`: all usable cores unless told. `precision`: bfloat16 needs OpenVINO and a CPU that has it. `points`: names
    of those to load, all unless told. `cascade`: load the stages for early exits and deadlines, if the ladder has any.
    `latency`: the folder whose measured latency budgets in ms go by, the ladder's own unless told.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        runtime: RuntimeName = "onnx",
        threads: int | None = None,
        precision: str = "float32",
        points: Sequence[str] | None = None,
        cascade: bool = True,
        latency: str | Path | None = None,
    ) -> None:
        ladder = read_ladder(folder)
        self.folder = Path(latency) if latency else ladder.folder
        self.runtime = runtime
        self.threads = usable_cores() if threads is None else check_threads(threads)
        self.precision = _named_precision(ladder, precision)
        self.task, self.any_size, self.title = ladder.task, ladder.any_size, ladder.title
        self.preprocessing = ladder.preprocessing
        self._load(ladder, precision, points, cascade)
        self._p95_ms, self._no_p95 = self._measured_p95()

    def _load(self, ladder: Ladder, precision: str, names: Sequence[str] | None, cascade: bool) -> None:
        frontier, shape = ladder.frontier, ladder.preprocessing.image_shape
        if isinstance(names, str):
            raise UserError(f"points={names!r}: must be a list of names, for example [{names!r}]")
        for name in names or ():
            frontier[name]  # refuses names that it does not have
        runtime = open_runtime(
            self.runtime, threads=self.threads, precision=precision, image_shape=shape, any_size=ladder.any_size
        )
        self._full_macs = frontier.full_macs
        self.chunk = runtime.chunk
        self._points = {point.name: point for point in frontier.points if names is None or point.name in names}
        self._frontier = replace(frontier, points=tuple(self._points.values()), cascade=None) if self._points else None
        self._chains: dict[str, Chain] = {}
        for name in self._points:
            self._chains[name] = _checked_chain(runtime.chain([ladder.networks[name]]), ladder, [ladder.networks[name]])
        self._runner: CascadeRunner | None = None
        if cascade and ladder.cascade:
            chain = _checked_chain(runtime.chain(ladder.stages), ladder, ladder.stages)
            times = time_stages(chain, np.zeros((1, *shape), np.uint8), len(ladder.stages), repeats=STAGE_REPEATS)
            stages, answers = ([percentile(own, 95) for own in part] for part in times)
            self._runner = CascadeRunner(
                cascade=ladder.cascade,
                chain=chain,
                times=StageTimes(stages, answers),
                first_ms=stages[0] + answers[0],
            )
        segments = ladder.task == "segmentation"
        self._finishing = Finishing.measured(len(self.classes), self.input_size) if segments else None

    def _measured_p95(self) -> tuple[Mapping[str, float], str]:
        try:
            found = p95(self.folder, runtime=self.runtime, precision=self.precision, threads=self.threads, batch=1)
            return found, ""
        except ValueError as error:
            return {}, str(error)

    def close(self) -> None:
        """Gives the networks back; afterwards the session answers nothing."""
        self._chains, self._runner = {}, None
        self._points, self._frontier = {}, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def points(self) -> tuple[FrontierPoint, ...]:
        """The loaded points, cheapest first."""
        return tuple(self._points.values())

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.preprocessing.classes

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.preprocessing.size

    @property
    def channels(self) -> int:
        """Channels of the images: 3 for colours, 1 for grey."""
        return self.preprocessing.channels

    @property
    def cascade(self) -> Cascade | None:
        """Exits, macs and thresholds of the stages for early exits, if they are loaded."""
        return self._runner.cascade if self._runner else None

    @property
    def stage_p95_ms(self) -> tuple[float, ...]:
        """How much longer an answer at each exit takes than one at the exit before it; empty without a cascade.

        One image, 95th percentile, as measured at the start and learned since from what calls with deadlines took.
        """
        return self._runner.times.steps_ms if self._runner else ()

    @property
    def finishing(self) -> Finishing | None:
        """Of segmentation: how long label maps take beside the networks, measured at the start."""
        return self._finishing

    @property
    def finishing_ms(self) -> float:
        """How long the label map of an image of the ladder's size takes; of classification, nothing."""
        return self._finishing.same_ms * math.prod(self.input_size) if self._finishing else 0.0

    def walk(self, images: Images) -> Generator[Floats, Indices | None, None]:
        """The cascade stage by stage, for callers that decide themselves what goes on: at most `chunk` images.

        Yields the probabilities [n, classes] of each stage; is sent the rows that go on, or None for all of them. Close
        the generator to stop early. Of segmentation, one image of the ladder's size, and the scores of its pixels
        [1, classes, H, W], which are lent until the walk goes on.
        """
        keep: Indices | None = None
        with closing(self._loaded_runner().chain.walk(self._fitted(images))) as walk:
            ask: Ask | None = next(walk)
            while ask:
                keep = yield ask()
                try:
                    ask = walk.send(keep)
                except StopIteration:
                    ask = None

    def time_stages(self, image: Images, *, repeats: int) -> tuple[list[list[float]], list[list[float]]]:
        """Times of each stage of the cascade on one image, and of its answer: both [stages][repeats]."""
        runner = self._loaded_runner()
        return time_stages(runner.chain, self._fitted(image)[:1], len(runner.cascade.exits), repeats=repeats)

    def choose(self, budget: str | float | Budget) -> FrontierPoint:
        """The best loaded point within a budget: `60M`, `25ms`, `40%`, `acc:0.92`."""
        wanted = parse_budget(budget)
        if self._frontier is None:
            raise UserError(f"{self.folder}: no point is loaded in this session")
        if wanted.kind == "ms" and self._no_p95:
            raise UserError(f"budget {wanted.text!r}: {self._no_p95}")
        return self._frontier.choose(wanted, self._p95_ms)

    def predict(
        self,
        images: Images | OneImage | Sequence[OneImage],
        *,
        budget: str | float | Budget | None = None,
        point: str | None = None,
        confidence: float | None = None,
        average_macs: str | float | Budget | None = None,
        deadline_ms: float | None = None,
    ) -> Prediction:
        """Classifies images: a uint8 array [N, H, W, C] or [H, W, C] of the ladder's size, or paths, Pillow images or
        arrays of any size, one or a list of them, which are fitted.

        A ladder for segmentation labels the pixels of images of any size, and answers at their own size.

        At most one of the others, otherwise the best point runs. `budget` and `point` choose a point. With `confidence`
        an image leaves at the first exit whose highest probability reaches it; with `average_macs` (such as `30M` or
        `40%`) every exit asks for what pays most where as much is spent on average. With `deadline_ms` one image runs
        until the next stage might not end in time, counted from the call; a deadline shorter than the first exit is
        refused, and one that is missed all the same makes the answer `late`.
        """
        start = time.perf_counter()
        given = {"budget": budget, "point": point, "confidence": confidence}
        check_asked(**given, average_macs=average_macs, deadline_ms=deadline_ms)
        if confidence is not None or average_macs is not None:
            needed = self._needed_confidence(confidence, average_macs)
            return self._leave_early(self._answers(images), needed, start)
        if deadline_ms is not None:
            return self._keep_deadline(self._loaded_runner(), images, float(deadline_ms), start)
        chosen = self._named(point) if point is not None else self._best(budget)
        return self._run(chosen, self._answers(images), start)

    def _run(self, point: FrontierPoint, answers: Answers, start: float) -> Prediction:
        chain = self._chains[point.name]
        for rows, images in answers.passes():
            with closing(chain.walk(images)) as walk:
                found = next(walk)()
                answers.take(rows, found, point.exit, answers.confidence(found))
        return answers.prediction(point=point.name, macs=point.macs * float(answers.work.mean()), start=start)

    def stream(self, average_macs: str | float | Budget) -> Stream:
        """Early exit with an average budget that holds for images of any kind: thresholds follow what is spent.

        `predict(images, average_macs=...)` always asks for the same confidences, and remembers nothing.
        """
        cascade = self._loaded_runner().cascade
        macs = average_budget(average_macs, self._full_macs)
        return Stream(self.leave_early, cascade.row(macs), macs, self._full_macs)

    def leave_early(
        self,
        images: Images | OneImage | Sequence[OneImage],
        confidence: Sequence[float],
        may_begin: MayBegin = always,
    ) -> Prediction:
        """Like `predict`, for schedulers: `confidence` is what each exit of the cascade but the last asks for.

        Images that are not sure enough leave all the same before a stage that may not begin.
        """
        start = time.perf_counter()
        exits = len(self._loaded_runner().cascade.exits)
        if len(confidence) != exits - 1:
            raise UserError(f"confidence of {len(confidence)} exits: must be of {exits - 1}, all but the last")
        return self._leave_early(self._answers(images), confidence, start, may_begin)

    def _leave_early(
        self, answers: Answers, confidence: Sequence[float], start: float, may_begin: MayBegin = always
    ) -> Prediction:
        runner = self._loaded_runner()
        for rows, images in answers.passes():
            runner.leave_early(rows, images, confidence, answers, may_begin)
        return answers.prediction(point=runner.cascade.point, macs=runner.spent(answers, confidence), start=start)

    def _keep_deadline(self, runner: CascadeRunner, images: Any, deadline_ms: float, start: float) -> Prediction:
        answers = self._answers(images)
        if len(answers.exits) != 1:
            raise UserError(f"deadline_ms={deadline_ms}: works for one image, and {len(answers.exits)} were given")
        check_deadline(deadline_ms, runner.first_ms + answers.finishing_ms)
        for _, image in answers.passes():
            runner.keep_deadline(image, start + deadline_ms / 1e3, answers)
        found = answers.prediction(point=runner.cascade.point, macs=runner.spent(answers), start=start)
        return replace(found, deadline_ms=deadline_ms)

    def _named(self, name: str) -> FrontierPoint:
        if name not in self._points:
            raise UserError(f"point {name!r}: must be one of the loaded points: {', '.join(self._points) or 'none'}")
        return self._points[name]

    def _best(self, budget: str | float | Budget | None) -> FrontierPoint:
        if budget is not None:
            return self.choose(budget)
        if self._frontier is None:
            raise UserError(f"{self.folder}: no point is loaded in this session")
        return self._frontier.envelope()[-1]

    def _loaded_runner(self) -> CascadeRunner:
        if self._runner is None:
            raise UserError(f"{self.folder}: no cascade is loaded, so there are no early exits; give a budget instead")
        return self._runner

    def _needed_confidence(
        self, confidence: float | None, average_macs: str | float | Budget | None
    ) -> tuple[float, ...]:
        """Of each early exit."""
        cascade = self._loaded_runner().cascade
        if confidence is not None:
            return (check_confidence(confidence),) * (len(cascade.exits) - 1)
        assert average_macs is not None
        return cascade.confidence(average_macs, self._full_macs)

    def _fitted(self, images: Any) -> Images:
        """At the ladder's size."""
        if isinstance(images, np.ndarray):
            return check_array(images, self.input_size, self.channels)
        return to_batch(images, self.input_size, self.channels)

    def _answers(self, images: Any) -> Answers:
        """Where answers for these images go."""
        if self._finishing is not None:
            return PixelAnswers(
                to_pictures(images, self.channels),
                self.classes,
                self.input_size,
                any_size=self.any_size,
                finishing=self._finishing,
            )
        return ClassAnswers(self._fitted(images), self.classes, self.chunk)


def check_asked(**given: Any) -> None:
    """Refuses what `Session.predict` cannot be asked for, before anything is loaded."""
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} cannot be combined; use one of them")
    for name in asked:
        if name in ("budget", "average_macs"):
            parse_budget(given[name])
        else:
            _fields.checked(given[name], name, _ASKED[name])


_ASKED: dict[str, _fields.Check] = {
    "point": _fields.TEXT,
    "confidence": _fields.SHARE,
    "deadline_ms": _fields.number(above=0),
}


def predict_once(
    folder: str | Path,
    images: Images | OneImage | Sequence[OneImage],
    *,
    runtime: RuntimeName = "onnx",
    threads: int | None = None,
    latency: str | Path | None = None,
    **asked: Any,
) -> Prediction:
    """One call of `Session.predict`, without a session to keep: only what it needs is loaded, which starts faster."""
    with asked_session(folder, runtime=runtime, threads=threads, latency=latency, **asked) as (session, point):
        about = session.preprocessing
        segments = session.task == "segmentation"
        opened: Any = to_pictures(images, about.channels) if segments else to_batch(images, about.size, about.channels)
        return session.predict(opened, **point)


@contextmanager
def asked_session(
    folder: str | Path,
    *,
    runtime: RuntimeName = "onnx",
    threads: int | None = None,
    latency: str | Path | None = None,
    **asked: Any,
) -> Iterator[tuple[Session, dict[str, Any]]]:
    """A session with only what calls need that all ask for the same, and what to ask it for."""
    check_asked(**asked)
    if threads is not None:
        check_threads(threads)
    ladder = read_ladder(folder)
    points: list[str] = []
    if asked.keys() <= {"budget", "point"}:
        points = [asked_point(ladder, runtime, threads, latency or ladder.folder, **asked)]
        asked = {"point": points[0]}
    with Session(
        folder, runtime=runtime, threads=threads, points=points, cascade=not points, latency=latency
    ) as session:
        yield session, asked


def asked_point(
    ladder: Ladder,
    runtime: RuntimeName,
    threads: int | None,
    latency: str | Path,
    budget: str | None = None,
    point: str | None = None,
) -> str:
    """The name of the point that a call asks for; `latency` is the folder that budgets in ms go by."""
    if point is not None or budget is None:
        return point or ladder.frontier.envelope()[-1].name
    times: Mapping[str, float] = {}
    if parse_budget(budget).kind == "ms":
        times = p95(latency, runtime=runtime, precision=ladder.precision, threads=threads or usable_cores())
    return ladder.frontier.choose(budget, times).name


def _checked_chain(chain: Chain, ladder: Ladder, stages: Sequence[NetworkFile]) -> Chain:
    """Walks once: every stage must answer with one number per class, or per class and pixel."""
    about = ladder.preprocessing
    image = np.zeros((1, *about.image_shape), np.uint8)
    shape = (1, len(about.classes), *(about.size if ladder.task == "segmentation" else ()))
    for stage, ask in zip(stages, chain.walk(image), strict=True):
        answers = ask()
        if not np.isfinite(answers).all():
            raise UserError(f"{stage.path}: answers with numbers that are not finite; export the ladder again")
        if answers.shape != shape or answers.dtype != np.float32:
            found = f"{answers.dtype} {list(answers.shape)}"
            raise UserError(f"{stage.path}: answers {found}; it must be float32 {list(shape)}")
    return chain


def _named_precision(ladder: Ladder, precision: str) -> str:
    """int8 is a property of the files, bfloat16 one of the runtime."""
    if ladder.precision == "float32" or precision not in ("float32", "bfloat16"):
        return precision
    if precision != "float32":
        raise UserError(f"precision {precision!r}: {ladder.folder} holds {ladder.precision} networks; remove it")
    return ladder.precision
