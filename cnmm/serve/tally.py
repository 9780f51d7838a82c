"""What is kept of the answers to a load test: a few numbers of each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import parse_json
from cnmm.serve.http_answer import Answer
from cnmm.serve.infer import InferAnswer, infer_answer
from cnmm.serve.menu import Menu

_MS = _fields.number(0, 1e12)


class Tally:
    """One array each, by number of the request; `labels` [bodies, images] repeat as the bodies do."""

    def __init__(self, num: int, menu: Menu, images: int, labels: npt.NDArray[np.int64] | None) -> None:
        self.answered, self.degraded = np.zeros(num, bool), np.zeros(num, bool)
        self.expected = np.zeros(num)
        """Quality that the server expects of its answer."""
        self.found = np.zeros(num)
        """Part of the images whose answer is right, where there are labels."""
        self.queue_ms, self.compute_ms = np.full(num, np.nan), np.full(num, np.nan)
        self.menu_ms = np.full(num, np.nan)
        """What the menu says of the work that was done."""
        self.errors: Counter[str] = Counter()
        self._images, self._labels = images, labels
        rows = (*menu.rows, *menu.points.values())
        self._curves = {
            name: np.array(sorted({(row.macs, row.ms) for row in rows if row.point == name}))
            for name in {row.point for row in rows}
        }

    def __call__(self, number: int, answer: Answer) -> None:
        if answer.status == 503:
            return
        try:
            if answer.status != 200:
                raise UserError(f"status {answer.status}: {_error(answer)}")
            self._take(number, infer_answer(answer))
        except UserError as error:
            self.errors[str(error)[:200]] += 1

    def _take(self, number: int, answer: InferAnswer) -> None:
        given = answer.parameters
        quality = _fields.get(given, "expected_accuracy", _fields.SHARE)
        queue, compute = _fields.get(given, "queue_ms", _MS), _fields.get(given, "compute_ms", _MS)
        macs = _fields.get(given, "macs", _MS)
        point = _fields.get(given, "operating_point", _fields.one_of(*self._curves))
        if self._labels is not None:
            self.found[number] = self._right(answer, self._labels[number % len(self._labels)])
        self.answered[number] = True
        self.degraded[number] = _fields.get(given, "degraded", _fields.TRUTH)
        self.expected[number], self.queue_ms[number], self.compute_ms[number] = quality, queue, compute
        curve = self._curves[point]
        self.menu_ms[number] = np.interp(macs, curve[:, 0], curve[:, 1]) * self._images

    @staticmethod
    def _right(answer: InferAnswer, labels: npt.NDArray[np.int64]) -> float:
        scores = answer.tensors.get("probabilities")
        if scores is None or scores.ndim != 2 or len(scores) != len(labels):
            raise UserError(f"an answer without probabilities of {len(labels)} images")
        return float((scores.argmax(1) == labels).mean())


def _error(answer: Answer) -> str:
    try:
        data = parse_json(answer.body)
    except UserError:
        return "no JSON"
    return str(data.get("error", "")) if isinstance(data, dict) else ""
