"""What nobody can beat: the best effective quality for arrivals that are known beforehand.

Let work flow: up to c cores serve any request at any moment between its arrival and its deadline, and quality is the
concave hull of the menu, begun at (0, 0). The requests are served in the order in which they came, so the time at which
k of them are done lies between the arrival of the next one and the deadline of the last one. Every concave sum is
largest on the shortest path within these bounds, the taut string: its slope is the time that each request gets on all
cores. (He et al., "Tians scheduling", 2011, for one core.) Whole requests on single cores can only do worse.
"""

from __future__ import annotations

import numpy as np

from cnmm.serve.menu import Floats, Menu


def oracle_quality(menu: Menu, arrivals: Floats, target_ms: float, cores: int, images: int = 1) -> float:
    """An upper bound on the mean quality of the answers in time, over all requests of so many images each."""
    share_ms = taut_string(arrivals, arrivals + target_ms) * (cores / images)
    gained = np.interp(share_ms, np.append(0.0, menu.ms), np.append(0.0, menu.quality))
    return float(gained.mean())


def taut_string(arrivals: Floats, deadlines: Floats) -> Floats:
    """The time that each request gets on the shortest path; both must ascend."""
    shares = np.empty(len(arrivals))
    gaps = np.flatnonzero(arrivals[1:] >= deadlines[:-1]) + 1  # nothing is left to do before these
    for part in np.split(np.arange(len(arrivals)), gaps):
        shares[part] = _busy_period(arrivals[part].tolist(), deadlines[part].tolist())
    return shares


def _busy_period(arrivals: list[float], deadlines: list[float]) -> Floats:
    """From a corner of the corridor, as far as one straight line can see, to the corner that it then bends around."""
    num = len(arrivals)
    low, high = [*arrivals, deadlines[-1]], [arrivals[0], *deadlines]
    shares = np.empty(num)
    at, time = 0, arrivals[0]
    while at < num:
        least, most = -np.inf, np.inf
        corner_low = corner_high = at
        for k in range(at + 1, num + 1):
            down, up = (low[k] - time) / (k - at), (high[k] - time) / (k - at)
            if down > most:
                corner, slope = corner_high, most
                break
            if up < least:
                corner, slope = corner_low, least
                break
            if down >= least:
                least, corner_low = down, k
            if up <= most:
                most, corner_high = up, k
        else:
            corner, slope = num, least
        shares[at:corner] = slope
        at, time = corner, time + slope * (corner - at)
    return shares
