"""Running a cascade: confident images leave early, and deadlines are kept. Times are in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.cascade import Cascade
from cnmm.runtime.answers import Answers
from cnmm.runtime.engines import Chain, Images, Indices

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
    """Time of each stage, one image."""

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
        with closing(self.chain.walk(image)) as walk:
            found, done = next(walk), 1
            while done < len(self.p95_ms) and time.perf_counter() + self.p95_ms[done] / 1e3 <= end:
                found, done = walk.send(None), done + 1
            answers.take(np.array([0]), found, self.cascade.exits[done - 1], answers.confidence(found))

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
