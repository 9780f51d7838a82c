"""Running a cascade: confident images leave early, and deadlines are kept. Times are in milliseconds."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.cascade import NEVER, Cascade, Threshold, is_asked
from cnmm.runtime.answers import Answers, Prediction
from cnmm.runtime.engines import Chain, Images, Indices
from cnmm.runtime.latency import percentile

GAIN, MOST_DOUBT = 0.2, 5.0
"""Of a stream: how fast doubt grows, and how far, as logarithms."""
TELLING_MS = 0.05
"""Answers that take longer tell how fast the machine is."""
RECENT = 200
"""Stages that ran lately, by which it is judged how fast the machine is now."""


class StageTimes:
    """How long stages and answers of a cascade take, in milliseconds: as at the start, times how the machine is now.

    Whatever else a machine does slows down all stages, so that one factor holds for all of them: the 95th percentile of
    what ran lately took, relative to its time at the start. The first stage always runs, so what was learned in a slow
    moment is unlearned after it. Threads may learn at the same time.
    """

    def __init__(self, stages_ms: Sequence[float], answers_ms: Sequence[float]) -> None:
        self._stages, self._answers = tuple(stages_ms), tuple(answers_ms)
        self._ratios: deque[float] = deque((1.0,) * (RECENT // 4), RECENT)
        self._factor = 1.0

    def stage(self, number: int) -> float:
        """Of a stage, one image, as it is now."""
        return self._factor * self._stages[number]

    def answer(self, number: int) -> float:
        """Of an exit's answer after its stage."""
        return self._factor * self._answers[number]

    @property
    def steps_ms(self) -> tuple[float, ...]:
        """How much longer an answer at each exit takes than one at the exit before it."""
        return tuple(self._factor * ms for ms in steps(self._stages, self._answers))

    def learn(self, stages_ms: Sequence[float], answer_ms: float) -> None:
        """The first stages, of one image, and the answer of the last of them have just taken so long."""
        self._ratios.extend(ms / max(start, 1e-6) for ms, start in zip(stages_ms, self._stages, strict=False))
        usual = self._answers[len(stages_ms) - 1]
        if usual > TELLING_MS:
            self._ratios.append(answer_ms / usual)
        self._factor = percentile(self._ratios.copy(), 95)


def steps(stages_ms: Sequence[float], answers_ms: Sequence[float]) -> tuple[float, ...]:
    """How much longer an answer at each exit takes than one at the exit before it, if that was not asked."""
    return tuple(
        max(1e-6, stage + own - before)
        for stage, own, before in zip(stages_ms, answers_ms, (0.0, *answers_ms), strict=False)
    )


MayBegin = Callable[[int, int, float], bool]
"""May a stage, counted from 0, begin with so many images? The third is the part of all images of the call that has
answers when those that are together now have them."""


def always(stage: int, num: int, part: float) -> bool:
    """Every stage may begin."""
    return True


@dataclass(frozen=True, kw_only=True)
class CascadeRunner:
    """A cascade that is ready to run."""

    cascade: Cascade
    chain: Chain
    times: StageTimes
    first_ms: float
    """Of an answer at the first exit, one image, at the start."""

    def leave_early(
        self,
        rows: Indices,
        images: Images,
        confidence: Sequence[float],
        answers: Answers,
        may_begin: MayBegin = always,
    ) -> None:
        """Runs the stages; who has the confidence that an exit asks for leaves, and the rest of the batch closes ranks.

        `rows` are the images' places among the answers. An exit that nobody can leave is not asked, unless the next
        stage may not begin.
        """
        last, part = self.cascade.exits[-1], (int(rows[-1]) + 1) / len(answers.exits)
        with closing(self.chain.walk(images)) as walk:
            ask = next(walk)
            for stage, (exit, needed) in enumerate(zip(self.cascade.exits, (*confidence, 0.0), strict=True), start=1):
                if not is_asked(needed) and may_begin(stage, len(rows), part):
                    ask = walk.send(None)
                    continue
                found = ask()
                sure = answers.confidence(found)
                gone = sure >= (needed if is_asked(needed) else 0.0)
                if exit == last or gone.all() or not may_begin(stage, int((~gone).sum()), part):
                    answers.take(rows, found, exit, sure)
                    break
                keep = None
                if gone.any():
                    answers.take(rows[gone], found[gone], exit, sure[gone])
                    keep = np.flatnonzero(~gone)
                    rows = rows[keep]
                ask = walk.send(keep)

    def keep_deadline(self, image: Images, end: float, answers: Answers) -> None:
        """Runs stages that should each end, and answer, before `end` (of perf_counter); only the last one is asked.

        The first stage always runs.
        """
        end -= answers.finishing_ms / 1e3
        times, marks, exits = self.times, [time.perf_counter()], self.cascade.exits
        with closing(self.chain.walk(image)) as walk:
            ask, done = next(walk), 1
            marks.append(time.perf_counter())
            while done < len(exits) and marks[-1] + (times.stage(done) + times.answer(done)) / 1e3 <= end:
                ask, done = walk.send(None), done + 1
                marks.append(time.perf_counter())
            found = ask()
            answered = time.perf_counter()
            answers.take(np.array([0]), found, exits[done - 1], answers.confidence(found))
        self.times.learn(
            [1e3 * (after - before) for before, after in itertools.pairwise(marks)], 1e3 * (answered - marks[-1])
        )

    def spent(self, answers: Answers, confidence: Sequence[float] | None = None) -> float:
        """Macs per image of what ran, where exits asked for these confidences; None: only who left was asked."""
        if confidence is None:
            confidence = (NEVER,) * (len(self.cascade.exits) - 1)
        passed = dict(zip(self.cascade.exits, self.cascade.passed(confidence), strict=True))
        macs = [passed[exit] * work for exit, work in zip(answers.exits.tolist(), answers.work.tolist(), strict=True)]
        return float(sum(macs) / len(macs))


class Stream:
    """Early exit whose average holds whatever the images are: `Session.stream` makes one.

    Thresholds are found on held-out images. Of images from elsewhere networks may be less sure, and too many would go
    on. So as the account of macs is overdrawn, exits ask for less, and for more while it is in credit: the doubt that
    they allow (one minus the confidence) grows by `GAIN` for every full network that was spent too much. What is
    spent too much in all is bounded then, and its average vanishes. Threads may share a stream.
    """

    def __init__(
        self, predict: Callable[[Any, Sequence[float]], Prediction], row: Threshold, macs: float, full_macs: int
    ) -> None:
        """`predict` runs images with what each exit asks for; `row` is that of the budget of `macs` on average."""
        self._predict, self._row, self._macs, self._full_macs = predict, row, macs, full_macs
        self._lock = threading.Lock()
        self._images, self._spent = 0, 0.0

    @property
    def average_macs(self) -> float:
        """What was spent per image so far."""
        with self._lock:
            return self._spent / max(1, self._images)

    @property
    def confidence(self) -> tuple[float, ...]:
        """What exits ask for now."""
        with self._lock:
            overdrawn = (self._spent - self._images * self._macs) / self._full_macs
        doubt = math.exp(min(max(GAIN * overdrawn, -MOST_DOUBT), MOST_DOUBT))
        return tuple(
            max(0.0, 1 - doubt * (1 - needed)) if needed > 0 and is_asked(needed) else needed
            for needed in self._row.confidence
        )

    def predict(self, images: Any) -> Prediction:
        """Like `Session.predict`; the images of one call are asked for the same confidence."""
        found = self._predict(images, self.confidence)
        with self._lock:
            self._images += len(found.exits)
            self._spent += found.macs * len(found.exits)
        return found


def time_stages(
    chain: Chain, image: Images, num_stages: int, *, warmup: int = 5, repeats: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Times of each stage on one image, and of its answer: both [stages][repeats]."""
    stages: list[list[float]] = [[] for _ in range(num_stages)]
    answers: list[list[float]] = [[] for _ in range(num_stages)]
    for _ in range(warmup + repeats):
        before = time.perf_counter()
        for stage, ask in enumerate(chain.walk(image)):
            ran = time.perf_counter()
            ask()
            now = time.perf_counter()
            stages[stage].append(1e3 * (ran - before))
            answers[stage].append(1e3 * (now - ran))
            before = now
    return [each[warmup:] for each in stages], [each[warmup:] for each in answers]


def check_confidence(confidence: float) -> float:
    """A confidence is a probability."""
    found: float = _fields.checked(confidence, "confidence", _fields.SHARE)
    return found


def check_deadline(deadline_ms: float, first_ms: float) -> None:
    """Refuses what not even the first exit can keep."""
    if not deadline_ms >= first_ms:
        raise UserError(f"deadline_ms={deadline_ms:g}: the first exit alone takes {first_ms:.3g} ms here (p95)")
