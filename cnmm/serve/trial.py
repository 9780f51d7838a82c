"""What became of the requests of a trial, simulated or real. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm.serve.menu import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """What became of every request, simulated or real: one array each, by arrival."""

    arrived_ms: Floats
    latency_ms: Floats
    """From arrival to answer; not a number where a request was refused or failed."""
    quality: Floats
    """Of its answer: expected, or found with labels."""
    budget_ms: Floats
    """Compute per image that its row was expected to take."""
    target_ms: float

    @property
    def in_time(self) -> npt.NDArray[np.bool_]:
        return self.latency_ms <= self.target_ms

    def summary(self) -> dict[str, Any]:
        """Effective quality is what was right and in time, over all requests."""
        answered = self.latency_ms[~np.isnan(self.latency_ms)]
        p50, p99 = np.percentile(answered, (50, 99)).tolist() if len(answered) else (None, None)
        return {
            "requests": len(self.arrived_ms),
            "effective_quality": float(np.where(self.in_time, self.quality, 0.0).mean()),
            "attainment": float(self.in_time.mean()),
            "p50_ms": p50,
            "p99_ms": p99,
            "shed": float(np.isnan(self.latency_ms).mean()),
        }
