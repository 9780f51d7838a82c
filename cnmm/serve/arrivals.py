"""When requests arrive: fixed beforehand, from a seed. Times are in milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cnmm._errors import UserError
from cnmm._files import read_regular
from cnmm.serve.menu import Floats

KINDS = "poisson, gamma:CV2 (such as gamma:8), step, ramp, burst, or trace:FILE (one time in seconds per line)"
_MOST_TRACE = 2**28
QUIET = 0.1
"""Load before and after a step, a ramp or a burst, as a part of that within."""
KNOTS = 2000
BURSTS = 10


def arrival_times(spec: str, num: int, per_ms: float, seed: int = 0) -> Floats:
    """`num` ascending times; `per_ms` arrive on average, or within a step, a burst, or at the top of a ramp.

    A step is quiet, loud and quiet for equal times; a ramp goes up and down; there are ten bursts, a tenth of the time
    each. A trace is squeezed or stretched until as many arrive on average.
    """
    kind, _, value = spec.partition(":")
    generator = np.random.default_rng(seed)
    if kind == "trace" and value:
        return _trace(Path(value), num, per_ms)
    if kind == "gamma":
        return _gamma(generator, spec, value, num) / per_ms
    shapes = {"poisson": np.ones(2), "step": _step(), "ramp": _ramp(), "burst": _burst()}
    if spec not in shapes:
        raise UserError(f"arrivals {spec!r}: must be {KINDS}")
    loud = shapes[spec]
    done = np.concatenate([[0.0], np.cumsum((loud[1:] + loud[:-1]) / 2)])
    time = np.arange(len(loud)) * (num / done[-1])
    ticks = np.cumsum(generator.exponential(size=num))
    times: Floats = np.interp(ticks * (num / ticks[-1]), done * (num / done[-1]), time) / per_ms
    return times


def _step() -> Floats:
    return np.where((np.arange(KNOTS) // (KNOTS / 3)) == 1, 1.0, QUIET)


def _ramp() -> Floats:
    return QUIET + (1 - QUIET) * (1 - np.abs(np.linspace(-1, 1, KNOTS)))


def _burst() -> Floats:
    return np.where(np.arange(KNOTS) * BURSTS % KNOTS >= 0.9 * KNOTS, 1.0, QUIET)


def _gamma(generator: np.random.Generator, spec: str, value: str, num: int) -> Floats:
    """Gaps with a squared coefficient of variation: 1 is Poisson, more is burstier."""
    try:
        spread = float(value)
    except ValueError:
        spread = 0.0
    if not 0 < spread < 1000:
        raise UserError(f"arrivals {spec!r}: the squared coefficient of variation must be positive, such as gamma:8")
    return np.cumsum(generator.gamma(1 / spread, spread, num))


def _trace(path: Path, num: int, per_ms: float) -> Floats:
    try:
        lines = read_regular(path, _MOST_TRACE).splitlines()
        seconds = np.sort(np.array([line for line in lines if line.strip() and line[:1] != b"#"], np.float64))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a trace, one time in seconds per line: {error}") from None
    if len(seconds) < 2 or not np.isfinite(seconds).all() or seconds[-1] <= seconds[0]:
        raise UserError(f"{path}: must have at least two different times")
    gaps = np.diff(seconds, prepend=seconds[0])
    gaps[0] = gaps.mean()
    times: Floats = np.cumsum(np.resize(gaps, num))
    return times * float(num / per_ms / times[-1])
