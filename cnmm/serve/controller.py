"""The controller: one queue for all workers, and who gets which row when. It runs in the server and in the simulator.

It reads no clock: every call is told what time it is, in milliseconds. Decisions are pure functions (`policy`) of a
snapshot; here are the queue, what is known of the arrivals, and how slow the machine is at the moment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np

from cnmm.serve.menu import Floats, Menu, Row
from cnmm.serve.policy import Plan, Policy, Snapshot, admits, plan

SHORT, LONG = 4.0, 16.0
"""The rate of the arrivals is the smaller one of those over so many targets."""
SLOWDOWN_WEIGHT = 0.1
"""Of the newest measurement in the moving average of measured / expected time."""
SLOWDOWNS = (0.5, 4.0)
WANTED_LOSS = 0.005
"""`wanted_cores` is what the cheapest row needs whose quality is at most this below the best."""
WANTED_USE = 0.95
"""And the part of these cores that it may take."""
STAGE_MARGIN = 1.1
"""The 95th percentile of a stage's time over its median: what is set aside before a stage begins."""
MOST_WAITING = 10_000
"""Requests in the queue, whatever their deadlines."""


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """A request in the eyes of the controller."""

    arrived: float
    deadline: float
    images: int = 1
    weight: float = 1.0
    row: Row | None = None
    """The row that the request asks for; without one it is adaptive."""
    extra_ms: float = 0.0
    """What it takes besides, such as decoding."""

    @property
    def pinned_ms(self) -> float:
        return self.extra_ms + (self.row.ms * self.images if self.row else 0.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request on its way to a worker."""

    ticket: Ticket
    worker: int
    row: Row
    plan: Plan | None
    """Of an adaptive request."""
    expected_ms: float
    until: float
    """When a cascade must end: a stage that might not be over by then is not begun."""


class Controller:
    """Queue, workers and what is known of the load."""

    def __init__(self, menu: Menu, policy: Policy, *, target_ms: float, workers: int) -> None:
        self.menu, self.policy, self.target_ms = menu, policy, target_ms
        self.slowdown = 1.0
        self.last_plan: Plan | None = None
        self._wanted_ms = menu.good_enough(WANTED_LOSS).ms
        self._queue = _Queue(1 - policy.settings.reserve if policy.rule == "adaptive" else 1.0)
        self._load = _Load(target_ms)
        self._free = np.zeros(workers)
        self._busy: dict[int, Job] = {}
        self._absent: set[int] = set()

    # What comes

    def arrive(self, now: float, ticket: Ticket) -> bool:
        """Lets a request in, or not; one that stays out leaves no trace but in the rate."""
        self._load.arrive(now, ticket)
        self._queue.insert(ticket)
        if len(self._queue) <= MOST_WAITING and admits(self._snapshot(now), self.menu, self.policy):
            return True
        self._queue.remove(ticket)
        return False

    def cancel(self, ticket: Ticket) -> bool:
        """Takes a request out of the queue whose client went away; False if it does not wait any more."""
        return self._queue.remove(ticket)

    # What goes

    def next(self, now: float) -> Job | None:
        """The first request in the queue for a worker that is free, if there are both; work is never held back."""
        worker = self._idle_worker()
        if worker is None or not len(self._queue):
            return None
        chosen = None
        ticket = self._queue.first
        row, until = ticket.row, math.inf
        if row is None:
            chosen = self.last_plan = plan(self.snapshot(now), self.menu, self.policy, ticket.weight)
            row, until = chosen.row, now + chosen.limit
        self._queue.pop()
        expected = (ticket.extra_ms + row.ms * ticket.images) * self.slowdown
        job = Job(ticket=ticket, worker=worker, row=row, plan=chosen, expected_ms=expected, until=until)
        self._busy[worker] = job
        self._free[worker] = now + expected
        return job

    def finish(self, now: float, worker: int, *, measured_ms: float = 0.0, expected_ms: float = 0.0) -> None:
        """A worker is free again; what it measured, and what the menu says of that work."""
        del self._busy[worker]
        self._free[worker] = now
        if expected_ms > 0:
            ratio = min(max(measured_ms / expected_ms, SLOWDOWNS[0]), SLOWDOWNS[1])
            self.slowdown += SLOWDOWN_WEIGHT * (ratio - self.slowdown)

    def lose(self, now: float, worker: int, back: float) -> Ticket | None:
        """A worker died and will be back; its request waits again, with the deadline that it has."""
        self._absent.add(worker)
        self._free[worker] = back
        job = self._busy.pop(worker, None)
        if job is None:
            return None
        self._queue.insert(job.ticket)
        return job.ticket

    def join(self, now: float, worker: int) -> None:
        """A worker is there, or there again."""
        self._absent.discard(worker)
        self._free[worker] = now

    # What is known

    def snapshot(self, now: float) -> Snapshot:
        """The queue and the load, as a policy sees them."""
        rate, pinned_rate = self._load.rates(now)
        return self._snapshot(now, rate, pinned_rate)

    def _snapshot(self, now: float, rate: float = 0.0, pinned_rate: float = 0.0) -> Snapshot:
        deadline, images, pinned = self._queue.columns
        return Snapshot(
            now=now,
            target=self.target_ms,
            deadline=deadline,
            images=images,
            pinned=pinned,
            free=np.sort(self._free),
            rate=rate,
            pinned_rate=pinned_rate,
            slowdown=self.slowdown,
            credit=self.last_plan.credit if self.last_plan else 0.0,
        )

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._busy)

    def wanted_cores(self, now: float) -> float:
        """Cores with which everybody would get a quality close to the best."""
        rate, pinned_rate = self._load.rates(now)
        return (rate * self._wanted_ms + pinned_rate) * self.slowdown / WANTED_USE

    def retry_ms(self, now: float) -> float:
        """When a request that was refused may come again: when the queue is gone with the cheapest row."""
        _, images, pinned = self._queue.columns
        work = float(pinned.sum()) + self.menu.cheapest.ms * float(images.sum())
        ahead = float(np.maximum(self._free - now, 0.0).mean())
        return ahead + work * self.slowdown / len(self._free)

    def _idle_worker(self) -> int | None:
        for worker in range(len(self._free)):
            if worker not in self._busy and worker not in self._absent:
                return worker
        return None


class _Queue:
    """Requests by deadline, ties by arrival: numbers in columns, for the policy, and the requests beside them.

    `kept`: the part of the time between arrival and deadline that the policy knows of.
    """

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._tickets: list[Ticket] = []
        self._deadlines: list[float] = []
        self._table = np.zeros((3, 64))
        self._first = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def first(self) -> Ticket:
        return self._tickets[0]

    @property
    def columns(self) -> Floats:
        """Deadlines, adaptive images, pinned time: [3, requests]."""
        return self._table[:, self._first : self._first + len(self._tickets)]

    def insert(self, ticket: Ticket) -> None:
        deadline = ticket.arrived + self._kept * (ticket.deadline - ticket.arrived)
        place = bisect_right(self._deadlines, deadline)
        self._deadlines.insert(place, deadline)
        self._tickets.insert(place, ticket)
        end = self._first + len(self._tickets)
        if end > self._table.shape[1]:
            kept = self._table[:, self._first : end - 1]
            self._table = np.zeros((3, 2 * len(self._tickets) + 64))
            self._table[:, : kept.shape[1]] = kept
            self._first, end = 0, len(self._tickets)
        at = self._first + place
        self._table[:, at + 1 : end] = self._table[:, at : end - 1].copy()
        self._table[:, at] = deadline, 0 if ticket.row else ticket.images, ticket.pinned_ms

    def pop(self) -> None:
        del self._tickets[0], self._deadlines[0]
        self._first += 1

    def remove(self, ticket: Ticket) -> bool:
        try:
            place = self._tickets.index(ticket)
        except ValueError:
            return False
        del self._tickets[place], self._deadlines[place]
        at, end = self._first + place, self._first + len(self._tickets)
        self._table[:, at:end] = self._table[:, at + 1 : end + 1].copy()
        return True


class _Load:
    """What arrives per millisecond: slow to rise, since deadlines and backlog answer a surge, and quick to fall."""

    def __init__(self, target_ms: float) -> None:
        self._windows = _Window(SHORT * target_ms), _Window(LONG * target_ms)
        self._start = math.inf
        self._target_ms = target_ms

    def arrive(self, now: float, ticket: Ticket) -> None:
        self._start = min(self._start, now)
        for window in self._windows:
            window.add(now, 0 if ticket.row else ticket.images, ticket.pinned_ms)

    def rates(self, now: float) -> tuple[float, float]:
        """Adaptive images, and work that is pinned."""
        age = max(now - self._start, self._target_ms)
        images, work = zip(*(window.rates(now, age) for window in self._windows), strict=True)
        return min(images), min(work)


class _Window:
    """Sums over the last so many milliseconds."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._recent: deque[tuple[float, int, float]] = deque()
        self._images, self._work = 0, 0.0

    def add(self, now: float, images: int, work: float) -> None:
        self._forget(now)
        self._recent.append((now, images, work))
        self._images += images
        self._work += work

    def rates(self, now: float, age: float) -> tuple[float, float]:
        self._forget(now)
        length = min(self._length, age)
        return self._images / length, self._work / length

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - self._length:
            _, images, work = self._recent.popleft()
            self._images -= images
            self._work -= work
        if not self._recent:
            self._work = 0.0  # and so no rounding stays
