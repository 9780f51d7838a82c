"""Running a cascade: confident images leave early, and deadlines are kept. Times are in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.cascade import Cascade
from cnmm.runtime.engines import Chain, Floats, Images


@dataclass(frozen=True, kw_only=True)
class CascadeRunner:
    """A cascade that is ready to run."""

    cascade: Cascade
    chain: Chain
    p95_ms: tuple[float, ...]
    """Time of each stage, one image."""

    def leave_early(
        self, images: Images, confidence: Sequence[float], probabilities: Floats, exits: npt.NDArray[np.int64]
    ) -> int:
        """Runs the stages; who has the confidence that an exit asks for leaves, and the rest of the batch closes ranks.

        Fills in `probabilities` and `exits`, and returns the macs that were spent on all images.
        """
        cascade, last = self.cascade, self.cascade.exits[-1]
        rows = np.arange(len(images))
        spent = 0
        with closing(self.chain.walk(images)) as walk:
            answers = next(walk)
            for exit, macs, needed in zip(cascade.exits, cascade.macs, (*confidence, 0.0), strict=True):
                spent += macs * len(rows)
                gone = answers.max(axis=1) >= needed
                if exit == last or gone.all():
                    probabilities[rows], exits[rows] = answers, exit
                    break
                keep = None
                if gone.any():
                    probabilities[rows[gone]], exits[rows[gone]] = answers[gone], exit
                    keep = np.flatnonzero(~gone)
                    rows = rows[keep]
                answers = walk.send(keep)
        return spent

    def keep_deadline(self, image: Images, end: float) -> tuple[Floats, int]:
        """Runs stages that should each end before `end` (of perf_counter): the last answer, and how many ran.

        The first stage always runs.
        """
        with closing(self.chain.walk(image)) as walk:
            answers, done = next(walk), 1
            while done < len(self.p95_ms) and time.perf_counter() + self.p95_ms[done] / 1e3 <= end:
                answers, done = walk.send(None), done + 1
        return answers, done


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
    if not 0 <= confidence <= 1:
        raise UserError(f"confidence={confidence}: must be a probability between 0 and 1")
    return confidence


def check_deadline(deadline_ms: float, first_ms: float) -> None:
    """Refuses what not even the first exit can keep."""
    if not deadline_ms >= first_ms:
        raise UserError(f"deadline_ms={deadline_ms}: the first exit alone takes {first_ms:.3g} ms here (p95)")
