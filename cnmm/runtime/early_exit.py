"""Running a cascade: confident images leave early, and deadlines are kept. Times are in milliseconds."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.cascade import Cascade
from cnmm.runtime.answers import Answers
from cnmm.runtime.engines import Chain, Images, Indices
from cnmm.runtime.latency import percentile

RECENT = 200
"""Stages that ran lately, by which it is judged how fast the machine is now."""


class StageTimes:
    """How long the stages of a cascade take, in milliseconds: as measured at the start, times how the machine is now.

    Whatever else a machine does slows down all stages, so that one factor holds for all of them: the 95th percentile of
    what the stages that ran lately took, relative to their times at the start. The first stage always runs, so what was
    learned in a slow moment is unlearned after it. Threads may learn at the same time.
    """

    def __init__(self, p95_ms: Sequence[float]) -> None:
        self._start = tuple(p95_ms)
        self._ratios: deque[float] = deque((1.0,) * (RECENT // 4), RECENT)
        self._factor = 1.0

    @property
    def p95_ms(self) -> tuple[float, ...]:
        """Of each stage, one image, as it is now."""
        return tuple(self._factor * ms for ms in self._start)

    def learn(self, times_ms: Sequence[float]) -> None:
        """The first stages, of one image, have just taken so long."""
        self._ratios.extend(ms / max(start, 1e-6) for ms, start in zip(times_ms, self._start, strict=False))
        self._factor = percentile(self._ratios.copy(), 95)


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
    p95_ms: tuple[float, ...]
    """Time of each stage at the start, one image."""
    times: StageTimes = field(init=False)
    """What has been learned of them since."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", StageTimes(self.p95_ms))

    def leave_early(
        self,
        rows: Indices,
        images: Images,
        confidence: Sequence[float],
        answers: Answers,
        may_begin: MayBegin = always,
    ) -> None:
        """Runs the stages; who has the confidence that an exit asks for leaves, and the rest of the batch closes ranks.

        `rows` are the images' places among the answers.
        """
        last, part = self.cascade.exits[-1], (int(rows[-1]) + 1) / len(answers.exits)
        with closing(self.chain.walk(images)) as walk:
            found = next(walk)
            for stage, (exit, needed) in enumerate(zip(self.cascade.exits, (*confidence, 0.0), strict=True), start=1):
                sure = answers.confidence(found)
                gone = sure >= needed
                if exit == last or gone.all() or not may_begin(stage, int((~gone).sum()), part):
                    answers.take(rows, found, exit, sure)
                    break
                keep = None
                if gone.any():
                    answers.take(rows[gone], found[gone], exit, sure[gone])
                    keep = np.flatnonzero(~gone)
                    rows = rows[keep]
                found = walk.send(keep)

    def keep_deadline(self, image: Images, end: float, answers: Answers) -> None:
        """Runs stages that should each end before `end` (of perf_counter), and takes the last answer.

        The first stage always runs.
        """
        end -= answers.finishing_ms / 1e3
        p95_ms, marks = self.times.p95_ms, [time.perf_counter()]
        with closing(self.chain.walk(image)) as walk:
            found, done = next(walk), 1
            marks.append(time.perf_counter())
            while done < len(p95_ms) and marks[-1] + p95_ms[done] / 1e3 <= end:
                found, done = walk.send(None), done + 1
                marks.append(time.perf_counter())
            answers.take(np.array([0]), found, self.cascade.exits[done - 1], answers.confidence(found))
        self.times.learn([1e3 * (after - before) for before, after in itertools.pairwise(marks)])

    def spent(self, answers: Answers) -> float:
        """Macs per image, of the stages that ran."""
        passed = dict(zip(self.cascade.exits, np.cumsum(self.cascade.macs).tolist(), strict=True))
        macs = [passed[exit] * work for exit, work in zip(answers.exits.tolist(), answers.work.tolist(), strict=True)]
        return float(sum(macs) / len(macs))


def time_stages(chain: Chain, image: Images, num_stages: int, *, warmup: int = 5, repeats: int) -> list[list[float]]:
    """Times of each stage on one image: [stages][repeats]."""
    times: list[list[float]] = [[] for _ in range(num_stages)]
    for _ in range(warmup + repeats):
        before = time.perf_counter()
        for stage, _ in enumerate(chain.walk(image)):
            now = time.perf_counter()
            times[stage].append(1e3 * (now - before))
            before = now
    return [each[warmup:] for each in times]


def check_confidence(confidence: float) -> float:
    """A confidence is a probability."""
    found: float = _fields.checked(confidence, "confidence", _fields.SHARE)
    return found


def check_deadline(deadline_ms: float, first_ms: float) -> None:
    """Refuses what not even the first exit can keep."""
    if not deadline_ms >= first_ms:
        raise UserError(f"deadline_ms={deadline_ms:g}: the first exit alone takes {first_ms:.3g} ms here (p95)")
