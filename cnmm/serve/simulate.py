"""A ladder under load in simulated time: the server's own controller, on times that were measured. In milliseconds."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.runtime.latency import RuntimeName
from cnmm.serve.arrivals import arrival_times
from cnmm.serve.chart import check_chart, draw_trial
from cnmm.serve.controller import STAGE_MARGIN, Controller, Job, Ticket
from cnmm.serve.menu import Floats, Menu, Row, read_menu
from cnmm.serve.oracle import oracle_quality
from cnmm.serve.policy import Policy, parse_policy
from cnmm.serve.trial import Trial


@dataclass(frozen=True, kw_only=True)
class World:
    """What the controller does not decide."""

    overhead_ms: float = 0.0
    """Between a client and a worker and back, besides waiting and computing."""
    loop_ms: float = 0.0
    """That the event loop takes from a worker's core for a request."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a service time."""
    slowdown: float = 1.0
    """Of the machine, against the menu."""


def simulate(
    ladder: str | Path,
    *,
    arrivals: str = "poisson",
    load: float = 1.0,
    target_ms: float = 60.0,
    policy: str = "adaptive",
    cores: int = 1,
    images: int = 1,
    requests: int = 10_000,
    runtime: RuntimeName | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> tuple[Trial, dict[str, Any]]:
    """What a server of a ladder would do under load, by the latencies that `cnmm bench --threads 1` has stored.

    `load`: 1 is what the full mixture can hold. `images`: of each request. `out`: a chart over time (.svg). Returns
    every request, and a summary with the oracle's bound.
    """
    if out is not None:
        check_chart(Path(out))
    if not (0 < load <= 1000 and 0 < target_ms < math.inf and cores >= 1 and images >= 1 and requests >= 1):
        raise UserError(
            f"load={load}, target_ms={target_ms}, cores={cores}, images={images}, requests={requests}: must be positive"
        )
    menu = read_menu(ladder, runtime=runtime)
    capacity = cores / (menu.full_ms * images)
    times = arrival_times(arrivals, requests, load * capacity, seed)
    trial = run_trial(
        menu, parse_policy(policy, menu), times, target_ms=target_ms, cores=cores, images=images, seed=seed
    )
    if out is not None:
        title = f"{menu.model}: {policy}, {arrivals}, load {load:g}, target {target_ms:g} ms, cores {cores}, simulated"
        draw_trial(Path(out), title, trial, capacity)
    return trial, trial.summary() | {
        "oracle_quality": oracle_quality(menu, times, target_ms, cores, images),
        "best_quality": menu.best.quality,
        "metric": menu.metric,
    }


def run_trial(
    menu: Menu,
    policy: Policy,
    times: Floats,
    *,
    target_ms: float,
    cores: int,
    images: int = 1,
    seed: int = 0,
    world: World = World(),
) -> Trial:
    """Arrivals and ends of service in the order of time, through the same calls that the server makes."""
    controller = Controller(menu, policy, target_ms=target_ms, workers=cores)
    run = _Run(controller, _Service(menu, (len(times), images), world, seed), len(times))
    for number, moment in enumerate((times + world.overhead_ms).tolist()):
        run.go_on(moment)
        ticket = Ticket(arrived=moment, deadline=moment + target_ms, images=images)
        if controller.arrive(moment, ticket):
            run.numbers[ticket] = number
            run.dispatch(moment)
    run.go_on(math.inf)
    return Trial(
        arrived_ms=times, latency_ms=run.end_ms - times, quality=run.quality, budget_ms=run.budget, target_ms=target_ms
    )


class _Run:
    """Workers that are busy, and what became of the requests so far."""

    def __init__(self, controller: Controller, service: _Service, num: int) -> None:
        self.controller, self.service = controller, service
        self.numbers: dict[Ticket, int] = {}
        self.end_ms, self.budget, self.quality = np.full(num, math.nan), np.full(num, math.nan), np.zeros(num)
        self._ends: list[tuple[float, int, Job, _Served]] = []

    def go_on(self, moment: float) -> None:
        """All that ends until then, and what begins in its place."""
        while self._ends and self._ends[0][0] <= moment:
            now, number, job, served = heapq.heappop(self._ends)
            self.controller.finish(now, job.worker, measured_ms=served.ms, expected_ms=served.expected_ms)
            self.end_ms[number], self.quality[number], self.budget[number] = now, served.quality, job.row.ms
            self.dispatch(now)

    def dispatch(self, now: float) -> None:
        while job := self.controller.next(now):
            number = self.numbers.pop(job.ticket)
            served = self.service.take(number, job, now)
            heapq.heappush(self._ends, (now + served.ms, number, job, served))


@dataclass(frozen=True, kw_only=True)
class _Served:
    ms: float
    expected_ms: float
    """What the menu says of the stages that ran."""
    quality: float


class _Service:
    """How long a job takes: hard images stay longer in a cascade, and machines have their moods."""

    def __init__(self, menu: Menu, shape: tuple[int, int], world: World, seed: int) -> None:
        generator = np.random.default_rng((seed, 1))
        self._menu, self._world = menu, world
        self._hardness = generator.random(shape)
        self._factor = world.slowdown * np.exp(world.noise * generator.standard_normal(shape[0]))
        self._cascades = {
            id(row): (np.cumsum(row.leaves), menu.passed_ms(row.confidence)) for row in menu.rows if row.leaves
        }

    def take(self, number: int, job: Job, now: float) -> _Served:
        served = self._compute(number, job, now)
        return replace(served, ms=served.ms + self._world.loop_ms)

    def _compute(self, number: int, job: Job, now: float) -> _Served:
        row, factor = job.row, float(self._factor[number])
        if not row.leaves:
            expected = row.ms * job.ticket.images
            return _Served(ms=expected * factor, expected_ms=expected, quality=row.quality)
        left, passed = self._cascades[id(row)]
        exits = np.searchsorted(left, self._hardness[number]).clip(max=len(passed) - 1)
        expected = float(passed[exits].sum())
        if now + expected * max(factor, STAGE_MARGIN * self._world.slowdown) <= job.until:
            return _Served(ms=expected * factor, expected_ms=expected, quality=row.quality)
        return self._stages(row, exits, factor, job.until - now)

    def _stages(self, row: Row, exits: npt.NDArray[np.intp], factor: float, left: float) -> _Served:
        """Stages go on only while the next one will be over in time, as workers do it; the first always runs."""
        _, passed = self._cascades[id(row)]
        spent = 0.0
        for stage in range(len(passed)):
            more = float(passed[np.minimum(exits, stage)].sum()) - spent
            if stage and more and spent * factor + STAGE_MARGIN * self._world.slowdown * more > left:
                break
            spent += more
        else:
            return _Served(ms=spent * factor, expected_ms=spent, quality=row.quality)
        quality = np.interp(spent / len(exits), self._menu.ms, self._menu.quality)
        return _Served(ms=spent * factor, expected_ms=spent, quality=min(row.quality, float(quality)))
