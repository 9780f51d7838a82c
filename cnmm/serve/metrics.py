"""What is counted while serving: for Prometheus, Triton's statistics and the page. Times are in milliseconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import prometheus_client as prometheus

from cnmm.serve.asks import Answer

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histograms' buckets."""
RECENT_MS = 10_000.0
"""What the page's percentiles are of."""
MOST_RECENT = 4096
RATE_MS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What has a value at any moment."""

    waiting: Callable[[], float]
    budget_ms: Callable[[], float]
    price: Callable[[], float]
    expected_accuracy: Callable[[], float]
    wanted_cores: Callable[[], float]
    slowdown: Callable[[], float]


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, gauges: Gauges) -> None:
        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)  # CPU time and memory of the event loop, on Linux
        made: dict[str, Any] = {"registry": self._registry}
        self._requests = prometheus.Counter(
            "cnmm_requests", "Requests by what became of them.", ("outcome", "point"), **made
        )
        self._shed = prometheus.Counter("cnmm_shed", "Requests that were refused under load.", ("reason",), **made)
        self._exit = prometheus.Counter("cnmm_exit", "Images by the exit that answered.", ("exit",), **made)
        times = {
            name: prometheus.Histogram(f"cnmm_{name}_seconds", words, buckets=SECONDS, **made)
            for name, words in (
                ("request", "From a complete request to its answer."),
                ("queue", "Waiting for a worker."),
                ("compute", "Decoding and computing."),
            )
        }
        self._request_s, self._queue_s, self._compute_s = times["request"], times["queue"], times["compute"]
        for name, words in _GAUGES.items():
            prometheus.Gauge(f"cnmm_{name}", words, **made).set_function(getattr(gauges, name))
        self._children: dict[tuple[object, ...], prometheus.Counter] = {}
        self.outcomes: Counter[str] = Counter()
        self.points: dict[str, _Sums] = {}
        self.all = _Sums()
        self.last: dict[str, Any] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=MOST_RECENT)
        self._arrived: deque[float] = deque()

    def arrived(self, now: float) -> None:
        self._arrived.append(now)
        while self._arrived[0] < now - RATE_MS:
            self._arrived.popleft()

    def rate(self, now: float) -> float:
        """Requests per second, lately."""
        while self._arrived and self._arrived[0] < now - RATE_MS:
            self._arrived.popleft()
        return len(self._arrived) / (RATE_MS / 1e3)

    def answered(self, now: float, answer: Answer, *, late: bool) -> None:
        outcome = "late" if late else "answered"
        self.outcomes[outcome] += 1
        self._child(self._requests, outcome, answer.point).inc()
        self._request_s.observe(answer.time_ms / 1e3)
        self._queue_s.observe(answer.queue_ms / 1e3)
        self._compute_s.observe(answer.compute_ms / 1e3)
        for exit, num in Counter(answer.exits).items():
            self._child(self._exit, str(exit)).inc(num)
        for sums in (self.all, self.points.setdefault(answer.point, _Sums())):
            sums.add(answer)
        self._recent.append((now, answer.time_ms))
        self.last = {**answer.about(), "time_ms": round(answer.time_ms, 3)}

    def _child(self, counter: prometheus.Counter, *labels: str) -> prometheus.Counter:
        """The counter with these labels; looking it up takes Prometheus longer."""
        key = (counter, *labels)
        if key not in self._children:
            self._children[key] = counter.labels(*labels)
        return self._children[key]

    def refused(self, outcome: str, reason: str = "") -> None:
        """`shed` for a `reason`, `gone` with its client, or an `error`."""
        self.outcomes[outcome] += 1
        self._requests.labels(outcome, "").inc()
        if outcome == "shed":
            self._shed.labels(reason).inc()

    def percentiles(self, now: float) -> tuple[float | None, float | None]:
        """The median and the 99th percentile of the latest answers."""
        times = [ms for moment, ms in self._recent if moment >= now - RECENT_MS]
        if not times:
            return None, None
        p50, p99 = np.percentile(times, (50, 99)).tolist()
        return round(p50, 3), round(p99, 3)

    def exposition(self) -> bytes:
        """For Prometheus."""
        return prometheus.generate_latest(self._registry)


_GAUGES = {
    "waiting": "Requests in the queue.",
    "budget_ms": "Time per image that the policy granted last.",
    "price": "Quality that a millisecond must bring.",
    "expected_accuracy": "Mean quality of the latest rows that were granted.",
    "wanted_cores": "Cores with which everybody would get a quality close to the best.",
    "slowdown": "How many times as long everything takes as was measured.",
}


class _Sums:
    """What Triton's statistics tell: counts and nanoseconds."""

    def __init__(self) -> None:
        self.requests, self.images = 0, 0
        self._ms = {"success": 0.0, "queue": 0.0, "compute_infer": 0.0}

    def add(self, answer: Answer) -> None:
        self.requests += 1
        self.images += len(answer.exits)
        self._ms["success"] += answer.time_ms
        self._ms["queue"] += answer.queue_ms
        self._ms["compute_infer"] += answer.compute_ms

    def to_dict(self, failed: int = 0) -> dict[str, Any]:
        stats = {name: {"count": self.requests, "ns": round(1e6 * ms)} for name, ms in self._ms.items()}
        nothing = {"count": 0, "ns": 0}
        return {
            "inference_count": self.images,
            "execution_count": self.requests,
            "inference_stats": {
                **stats,
                "fail": {"count": failed, "ns": 0},
                "compute_input": nothing,
                "compute_output": nothing,
            },
        }
