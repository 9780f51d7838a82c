"""The engine: the controller with a real clock, real workers and people who wait. All of it runs in one event loop.

A request is admitted or refused at once. An admitted one is answered once: by the worker that it was given to, or, if
that one dies, by another. Times are in milliseconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cnmm import _fields
from cnmm._machine import usable_cores
from cnmm.runtime.latency import RuntimeName
from cnmm.serve.asks import Answer, Ask, Pictures, Refusal
from cnmm.serve.clients import Hangup
from cnmm.serve.controller import Controller, Job, Ticket
from cnmm.serve.menu import Row
from cnmm.serve.metrics import Gauges, Metrics
from cnmm.serve.policy import parse_policy
from cnmm.serve.pool import Pool, Said
from cnmm.serve.served import Served, open_served
from cnmm.serve.worker import now_ms

logger = logging.getLogger("cnmm")

MOST_BYTES = 2**28
"""Of all requests that are being read, wait, or run."""
MOST_UNPACKED = 2
"""Bodies that are unpacked at once: how large they become is known only then."""
MOST_TRIES = 3
"""Workers that a request may take with it, before it counts as the culprit."""
MOST_TARGETS = 10.0
"""What the cheapest answer to one request may take: others wait meanwhile."""
FILE_MS = 0.2
"""To open any image file."""
TELLING_PIXELS = 2**16
"""Files with fewer say little about the time that a pixel takes."""
WEIGHT = 0.1
"""Of the newest value in moving averages."""
MOST_REMEMBERED = 256
"""Thresholds of cascades whose costs are kept: those of the menu, and some of what clients ask for."""
TICK_S = 0.25
HUNG_MS, HUNG_TIMES = 10_000.0, 20.0
"""A worker that takes longer than both is killed."""
CLOSE_S = 60.0
"""That admitted requests have to finish when the server closes, should no worker be left to answer them."""
DEAD_MS = 30_000.0
"""Without any worker for so long, the server says that it is not alive."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """An admitted request and who waits for it."""

    ask: Ask
    ticket: Ticket
    future: asyncio.Future[Answer]
    tries: int = 0


@dataclass(eq=False, slots=True)
class _Running:
    job: Job
    waiting: _Waiting
    began: float
    number: int


class Engine:
    """Admission, dispatch, answers and what is known of them. `start` and `close` belong to the event loop."""

    def __init__(
        self,
        ladder: str | Path,
        *,
        target_ms: float = 60.0,
        runtime: RuntimeName | None = None,
        cores: int | None = None,
        policy: str = "adaptive",
        latency: str | Path | None = None,
    ) -> None:
        self.target_ms = float(_fields.checked(target_ms, "target_ms", _fields.number(above=0, most=1e9)))
        self.cores = usable_cores() if cores is None else _fields.checked(cores, "cores", _fields.whole(1, 1024))
        self.policy = policy
        self.served: Served = open_served(ladder, runtime=runtime, latency=latency)
        self.menu = self.served.menu
        self.controller = Controller(
            self.menu, parse_policy(policy, self.menu), target_ms=self.target_ms, workers=self.cores
        )
        gauges = Gauges(
            waiting=lambda: self.controller.waiting,
            budget_ms=lambda: self.budget()["budget_ms"],
            price=lambda: self.budget()["price"],
            expected_accuracy=lambda: self.expected_accuracy,
            wanted_cores=self.wanted_cores,
            slowdown=lambda: self.controller.slowdown,
        )
        self.metrics = Metrics(gauges)
        self.expected_accuracy = self.menu.best.quality
        self.bytes = 0
        self.started = self.draining = self.closed = False
        self._pool: Pool | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._waiting: dict[Ticket, _Waiting] = {}
        self._running: dict[int, _Running] = {}
        self._jobs = 0
        self._passed_by: dict[tuple[float, ...], dict[int, tuple[float, float]]] = {}
        self._decode_ms: dict[str, float] = {}
        self._first_decode_ms = self._finishing_ms = 0.0
        self._absent_since: dict[int, float] = {}
        self._start_ms = 0.0
        self._idle = asyncio.Event()
        self.unpacking = asyncio.Semaphore(MOST_UNPACKED)

    # Life

    async def start(self) -> None:
        """Starts the workers; a ladder that they cannot load is a UserError."""
        began = now_ms()
        settings = {
            "folder": str(self.served.ladder.folder.resolve()),
            "runtime": self.served.timed.runtime,
            "stage_ms": self.menu.going_on_ms,
            "checksum": self.served.checksum,
        }
        self._pool = Pool(self.cores, settings, on_reply=self._replied, on_lost=self._lost, on_ready=self._joined)
        self._absent_since = dict.fromkeys(range(self.cores), began)
        try:
            await self._pool.start()
        except BaseException:
            await self._pool.close()
            raise
        self._start_ms = now_ms() - began
        self.started = True
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Refuses new requests, lets admitted ones finish, and ends the workers."""
        self.draining = self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._waiting:
                    self._idle.clear()
                    await self._idle.wait()
        if self._ticking:
            self._ticking.cancel()
        if self._pool:
            await self._pool.close()

    @property
    def ready(self) -> bool:
        return self.started and not self.draining

    @property
    def live(self) -> bool:
        """Is there a worker, or was there one not long ago?"""
        return len(self._absent_since) < self.cores or now_ms() - max(self._absent_since.values()) < DEAD_MS

    def pids(self) -> list[int]:
        """Processes of the workers."""
        return self._pool.pids() if self._pool else []

    # Requests

    def take(self, size: int) -> None:
        """Counts memory of a request, or refuses it."""
        if self.bytes + size > MOST_BYTES:
            self._shed("memory")
        self.bytes += size

    def give_back(self, size: int) -> None:
        self.bytes -= size

    async def answer(self, ask: Ask, hangup: Hangup | None = None) -> Answer:
        """Queues a request and waits for its answer; it leaves the queue when its client has gone."""
        now = now_ms()
        if self.closed or not self.started:
            self._shed("draining")
        ticket = self._ticket(now, ask)
        self.metrics.arrived(now)
        if not self.controller.arrive(now, ticket):
            self._shed("late")
        waiting = _Waiting(ask, ticket, asyncio.get_running_loop().create_future())
        self._waiting[ticket] = waiting
        self._dispatch()
        forget = hangup(lambda: self._gone(waiting)) if hangup else None
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            if forget:
                forget()

    def _gone(self, waiting: _Waiting) -> None:
        if not waiting.future.done() and self._leave(waiting):
            waiting.future.set_exception(Refusal(499, "the client is gone"))

    def _leave(self, waiting: _Waiting) -> bool:
        """Takes a request out of the queue; False if it runs already, or is done."""
        if not self.controller.cancel(waiting.ticket):
            return False
        self._forget(waiting)
        self.metrics.refused("gone")
        return True

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.ticket]
        if not self._waiting:
            self._idle.set()

    def _ticket(self, now: float, ask: Ask) -> Ticket:
        """With its deadline: its own, else the target, or twice what it takes at least if that is longer."""
        pictures, knobs = ask.pictures, ask.knobs
        extra = self.extra_ms(pictures)
        least = extra + pictures.images * (knobs.row.ms if knobs.row else self.menu.cheapest.ms)
        what = f"{pictures.images} image{'s' * (pictures.images > 1)}"
        if least > max(MOST_TARGETS * self.target_ms, 1000.0):
            raise Refusal(413, f"{what}: would take {least:.0f} ms at least; send fewer at once, or smaller ones")
        planned = self.controller.policy.settings.planned
        if knobs.timeout_ms is not None and knobs.timeout_ms * planned < least:
            needed = f"{what} of this kind take {least:.3g} ms at least"
            raise Refusal(400, f"a deadline of {knobs.timeout_ms:g} ms: {needed}; allow {least / planned:.3g} ms")
        timeout = knobs.timeout_ms or max(self.target_ms, 2 * least)
        return Ticket(
            arrived=now,
            deadline=now + timeout,
            images=pictures.images,
            weight=knobs.weight,
            row=knobs.row,
            extra_ms=extra,
        )

    def extra_ms(self, pictures: Pictures) -> float:
        """What images take besides the networks: decoding, and label maps at another size."""
        extra = 0.0
        if pictures.shape is None:
            per_pixel = self._decode_ms.get(pictures.format, self._first_decode_ms)
            extra = FILE_MS * pictures.images + per_pixel * pictures.pixels
        own = pictures.images * math.prod(self.served.ladder.preprocessing.size)
        return extra + self._finishing_ms * max(0, pictures.pixels - own)

    def _shed(self, reason: str) -> NoReturn:
        now, controller = now_ms(), self.controller
        images = sum(waiting.ask.pictures.images for waiting in self._waiting.values())
        after = max(10.0, images * self.menu.cheapest.ms * controller.slowdown / self.cores)
        self.metrics.arrived(now)
        self.metrics.refused("shed", reason)
        raise Refusal(503, _SHED[reason], retry_after_ms=round(after, 1))

    # Workers

    def _dispatch(self) -> None:
        now = now_ms()
        while job := self.controller.next(now):
            waiting = self._waiting[job.ticket]
            self._jobs += 1
            self._running[job.worker] = _Running(job, waiting, now, self._jobs)
            pictures, row = waiting.ask.pictures, job.row
            words = {
                "id": self._jobs,
                "shape": pictures.shape,
                "sizes": [len(part) for part in pictures.parts],
                "point": row.point,
                "confidence": row.confidence or None,
                "until": None if math.isinf(job.until) else job.until,
                "slowdown": self.controller.slowdown,
                "want": waiting.ask.want,
            }
            if job.plan:
                self.expected_accuracy += WEIGHT * (row.quality - self.expected_accuracy)
            assert self._pool is not None
            self._pool.send(job.worker, words, pictures.parts)
            now = now_ms()

    def _replied(self, worker: int, words: Said) -> None:
        now, running = now_ms(), self._running.pop(worker)
        assert self._pool is not None
        assert words["id"] == running.number, "a worker answers what it was asked"
        if "error" in words:
            self.controller.finish(now, worker)
            self._settle(running.waiting, Refusal(words["status"], words["error"]))
        else:
            parts = self._pool.received(worker, words["sizes"])
            expected = self._expected_ms(running, words)
            self.controller.finish(now, worker, measured_ms=now - running.began, expected_ms=expected)
            self._learn(running.waiting.ask.pictures, words)
            answer = self._answer(now, running, words, parts)
            self.metrics.answered(now, answer, late=now > running.job.ticket.deadline)
            self._settle(running.waiting, answer)
        self._dispatch()

    def _settle(self, waiting: _Waiting, found: Answer | Exception) -> None:
        self._forget(waiting)
        if waiting.future.done():  # cancelled: nobody waits any more
            return
        if isinstance(found, Exception):
            self.metrics.refused("error")
            waiting.future.set_exception(found)
        else:
            waiting.future.set_result(found)

    def _expected_ms(self, running: _Running, words: Said) -> float:
        """What the menu says of the work that was done: of a cascade, of the stages that ran."""
        row = running.job.row
        exits, macs = words["exits"], float(words["macs"])
        ms, full_macs = self._passed(row, exits) if row.confidence else (row.ms * len(exits), row.macs)
        return running.job.ticket.extra_ms + ms * (macs / full_macs if full_macs else 1.0)

    def _passed(self, row: Row, exits: list[int]) -> tuple[float, float]:
        """Time of images that left a cascade at these exits, all together, and their macs on average."""
        passed = self._passed_by.get(row.confidence)
        if passed is None:
            cascade = self.menu.cascade
            assert cascade is not None
            costs = zip(self.menu.passed_ms(row.confidence).tolist(), cascade.passed(row.confidence), strict=True)
            passed = dict(zip(cascade.exits, costs, strict=True))
            if len(self._passed_by) < MOST_REMEMBERED:
                self._passed_by[row.confidence] = passed
        ms, macs = zip(*(passed[exit] for exit in exits), strict=True)
        return sum(ms), sum(macs) / len(exits)

    def _learn(self, pictures: Pictures, words: Said) -> None:
        if pictures.shape is None and pictures.pixels >= TELLING_PIXELS:
            measured = words["decode_ms"] / pictures.pixels
            known = self._decode_ms.setdefault(pictures.format, measured)
            self._decode_ms[pictures.format] = known + WEIGHT * (measured - known)

    def _answer(self, now: float, running: _Running, words: Said, parts: list[bytes]) -> Answer:
        job, ticket = running.job, running.job.ticket
        quality = job.row.quality
        if words["cut"]:  # some stages were left out: as good as what the same time buys
            spent = self._passed(job.row, words["exits"])[0] / len(words["exits"])
            quality = min(quality, float(np.interp(spent, self.menu.ms, self.menu.quality)))
        return Answer(
            probabilities=np.frombuffer(parts[0], np.float32).reshape(ticket.images, -1),
            maps=parts[1:],
            shapes=[tuple(shape) for shape in words["shapes"]],
            exits=words["exits"],
            confidence=words["confidence"],
            point=job.row.point,
            macs=words["macs"],
            queue_ms=running.began - ticket.arrived,
            compute_ms=words["decode_ms"] + words["compute_ms"],
            time_ms=now - ticket.arrived,
            quality=quality,
            degraded=ticket.row is None and quality < self.menu.best.quality - 1e-9,
        )

    def _lost(self, worker: int) -> None:
        """Its request waits again, with the deadline that it has, unless it has ended several workers."""
        now = now_ms()
        self._absent_since[worker] = now
        running = self._running.pop(worker, None)
        self.controller.lose(now, worker, back=now + self._start_ms)
        if running is not None:
            running.waiting.tries += 1
            if running.waiting.tries >= MOST_TRIES and self.controller.cancel(running.waiting.ticket):
                self._settle(running.waiting, Refusal(500, "workers end whenever they are given this request"))
        self._dispatch()

    def _joined(self, worker: int, words: Said) -> None:
        self._first_decode_ms, self._finishing_ms = words["decode_ms"], words["finishing_ms"]
        self._absent_since.pop(worker, None)
        self.controller.join(now_ms(), worker)
        if self.started:
            self._dispatch()

    async def _tick(self) -> None:
        """Looks after workers that do not answer."""
        while True:
            await asyncio.sleep(TICK_S)
            now = now_ms()
            for worker, running in list(self._running.items()):
                if now - running.began > max(HUNG_MS, HUNG_TIMES * running.job.expected_ms):
                    logger.warning("worker %d does not answer; it is ended", worker)
                    assert self._pool is not None
                    self._pool.kill(worker)

    # What is known

    def wanted_cores(self) -> float:
        """Cores with which everybody would get a quality close to the best."""
        return self.controller.wanted_cores(now_ms())

    def budget(self) -> dict[str, float]:
        """What the policy grants at the moment: time per image, and its price."""
        plan = self.controller.last_plan
        if plan is None or not (self.controller.waiting or self.controller.running):
            return {"budget_ms": self.menu.best.ms, "price": 0.0}
        price = plan.price if math.isfinite(plan.price) else float(self.menu.slope[0])
        return {"budget_ms": min(plan.ms, self.menu.best.ms), "price": price}

    def now(self) -> dict[str, Any]:
        """A moment of the server, for the page."""
        moment = now_ms()
        p50, p99 = self.metrics.percentiles(moment)
        outcomes: Counter[str] = self.metrics.outcomes
        return {
            "t": round(moment / 1e3, 3),
            "rate": round(self.metrics.rate(moment), 2),
            "waiting": self.controller.waiting,
            **{name: round(value, 6) for name, value in self.budget().items()},
            "p50_ms": p50,
            "p99_ms": p99,
            "expected_accuracy": round(self.expected_accuracy, 5),
            "wanted_cores": round(self.wanted_cores(), 3),
            "slowdown": round(self.controller.slowdown, 3),
            "shed": outcomes["shed"],
            "answered": outcomes["answered"] + outcomes["late"],
            "late": outcomes["late"],
            "last": self.metrics.last,
        }

    def holds(self) -> dict[str, float]:
        """Requests per second of one image each that the cores can hold at the best and at the cheapest row."""
        return {
            name: 1e3 * self.cores / row.ms
            for name, row in (("best", self.menu.best), ("cheapest", self.menu.cheapest))
        }

    def about(self) -> dict[str, Any]:
        """For JSON."""
        return self.served.to_dict() | {
            "target_ms": self.target_ms,
            "policy": self.policy,
            "cores": self.cores,
            "usable_cores": usable_cores(),
            "holds": {name: round(value, 1) for name, value in self.holds().items()},
        }


_SHED = {
    "late": "too many requests: not even the cheapest answer would be in time",
    "memory": "too many requests: no memory for another one",
    "draining": "the server is shutting down",
}
