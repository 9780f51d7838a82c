"""A server under load, for real: an open loop of requests, and beside it what the simulator and the oracle say.

Times are in milliseconds. Latency counts from the time at which a request was meant to be sent; a run in which the
generator itself lagged is declared invalid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cnmm._errors import UserError
from cnmm.serve.about import About, ask_about, ask_cpu_ms
from cnmm.serve.arrivals import arrival_times
from cnmm.serve.chart import check_chart, draw_trial
from cnmm.serve.infer import infer_request
from cnmm.serve.load_images import Sample, take_images
from cnmm.serve.menu import Floats
from cnmm.serve.open_loop import Outcome, parse_url, run_open_loop
from cnmm.serve.oracle import oracle_quality
from cnmm.serve.policy import parse_policy
from cnmm.serve.simulate import World, run_trial
from cnmm.serve.tally import Tally
from cnmm.serve.trial import Trial

LAG_MS = 1.0
"""The 99th percentile of the generator's lag in a valid run is at most this."""
STEP_DOWN = 2 / 3
"""When the loud part of a step is over, as a part of the whole."""


def loadtest(
    url: str,
    *,
    arrivals: str = "poisson",
    rate: float | None = None,
    load: float | None = None,
    requests: int = 10_000,
    target_ms: float | None = None,
    images: str | Path | None = None,
    data: str | None = None,
    images_per_request: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
) -> tuple[Trial, dict[str, Any]]:
    """Puts a server of `cnmm serve` under load, and says what became of the requests.

    `rate`: requests per second; or `load`, where 1 is what the full mixture can hold. `target_ms`: the deadline of each
    request, the server's own unless told. `images`: a folder of images; or `data`, such as `folder:DIR`, whose labels
    tell how many answers are right; otherwise noise. `out`: a chart over time (.svg). Returns every request, and a
    summary whose field `valid` says whether the generator kept up.
    """
    _check(rate=rate, load=load, requests=requests, target_ms=target_ms, images=images_per_request)
    if images is not None and data is not None:
        raise UserError("images and data cannot be combined; use one of them")
    if out is not None:
        check_chart(Path(out))
    address = parse_url(url)
    about = ask_about(address)
    capacity = about.cores / (about.menu.full_ms * images_per_request)
    times = arrival_times(arrivals, requests, rate / 1e3 if rate else (load or 1.0) * capacity, seed)
    sample = take_images(about, images, data, images_per_request, requests, seed)
    timeout = {} if target_ms is None else {"timeout": round(1e3 * target_ms)}
    asked: dict[str, Any] = {"tensor": about.tensor, "outputs": about.outputs, "parameters": timeout}
    bodies = [infer_request(address, about.model, some, **asked) for some in sample.images]
    tally = Tally(requests, about.menu, images_per_request, sample.labels)
    before_ms = ask_cpu_ms(address)
    outcome = run_open_loop(address, bodies, times / 1e3, tally)
    test = Test(
        about=about,
        times=times,
        outcome=outcome,
        tally=tally,
        target_ms=target_ms or about.target_ms,
        sample=sample,
        cpu_ms=ask_cpu_ms(address) - before_ms,
    )
    if out is not None:
        title = f"{about.menu.model}: {about.policy}, {arrivals}, target {test.target_ms:g} ms, cores {about.cores}"
        draw_trial(Path(out), title if test.valid else f"{title} (INVALID)", test.trial, capacity)
    return test.trial, {
        "arrivals": arrivals,
        "mean_load": float(requests / times[-1] / capacity),
        **test.summary(step=arrivals == "step", seed=seed),
    }


def _check(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}={value}: must be positive")
    if given["rate"] is not None and given["load"] is not None:
        raise UserError("rate and load cannot be combined; use one of them")


@dataclass(frozen=True, kw_only=True, eq=False)
class Test:
    """A load test that is over."""

    about: About
    times: Floats
    outcome: Outcome
    tally: Tally
    target_ms: float
    sample: Sample
    cpu_ms: float = 0.0
    """Of the server's event loop."""

    @property
    def lag_ms(self) -> float:
        """The 99th percentile of the generator's lag."""
        return float(np.nanpercentile(1e3 * self.outcome.lag_s, 99))

    @property
    def valid(self) -> bool:
        return self.lag_ms <= LAG_MS

    @property
    def trial(self) -> Trial:
        """What was lost was late or never came; what was refused has no latency."""
        latency = 1e3 * self.outcome.latency_s
        latency[~self.tally.answered & ~((latency > self.target_ms) & self.lost)] = np.nan
        quality = self.tally.found if self.sample.labels is not None else self.tally.expected
        return Trial(
            arrived_ms=self.times,
            latency_ms=latency,
            quality=np.where(self.tally.answered, quality, 0.0),
            budget_ms=self.tally.compute_ms / self.sample.images.shape[1],
            target_ms=self.target_ms,
        )

    @property
    def lost(self) -> Any:
        """Requests that were sent and have no answer."""
        return self.outcome.status == 0

    @property
    def loop_ms(self) -> float:
        """That the event loop takes from a worker's core for a request: nothing where it has a core of its own."""
        alone = self.about.usable_cores > self.about.cores
        return 0.0 if alone else max(0.0, self.cpu_ms) / len(self.times)

    def world(self) -> World:
        """What was measured of the server besides its decisions."""
        tally, answered = self.tally, self.tally.answered
        if not answered.any():
            return World()
        overhead = 1e3 * self.outcome.latency_s - tally.queue_ms - tally.compute_ms
        ratio = (tally.compute_ms / tally.menu_ms)[answered & (tally.compute_ms > 0) & (tally.menu_ms > 0)]
        if not len(ratio):
            return World(overhead_ms=max(0.0, float(np.median(overhead[answered]))), loop_ms=self.loop_ms)
        work = tally.menu_ms[answered].sum()
        return World(
            overhead_ms=max(0.0, float(np.median(overhead[answered]))),
            loop_ms=self.loop_ms,
            noise=float(np.log(ratio).std()),
            slowdown=float(tally.compute_ms[answered].sum() / work) / float(np.exp(np.log(ratio).var() / 2)),
        )

    def summary(self, *, step: bool, seed: int) -> dict[str, Any]:
        about, tally, trial = self.about, self.tally, self.trial
        refused = self.outcome.status == 503
        lost = int(self.lost.sum())
        errors = len(self.times) - int(tally.answered.sum()) - int(refused.sum()) - lost
        reasons = tally.errors + self.outcome.reasons
        world = self.world()
        late = trial.latency_ms[~np.isnan(trial.latency_ms)]
        expected = float(np.where(trial.in_time & tally.answered, tally.expected, 0.0).mean())
        answer = trial.summary() | {
            "valid": self.valid,
            "lag_p99_ms": self.lag_ms,
            "worst_ms": float(late.max()) if len(late) else None,
            "shed": float(refused.mean()),
            "errors": errors,
            "lost": lost,
            "reasons": dict(reasons.most_common(10)),
            "labelled": self.sample.labels is not None,
            "expected_quality": expected,
            "rate": float(1e3 * len(self.times) / self.times[-1]),
            "images_per_request": self.sample.images.shape[1],
            "connections": self.outcome.connections,
            "target_ms": self.target_ms,
            "cores": about.cores,
            "policy": about.policy,
            "model": about.menu.model,
            "metric": "accuracy" if self.sample.labels is not None else about.menu.metric,
            "best_quality": about.menu.best.quality,
            "overhead_ms": world.overhead_ms,
            "loop_ms": world.loop_ms,
            "slowdown": world.slowdown,
            "noise": world.noise,
            **self._beside(world, expected, seed),
        }
        if step:
            answer["recovery_ms"] = self.recovery_ms()
        return answer

    def _beside(self, world: World, expected: float, seed: int) -> dict[str, Any]:
        """The bound of the oracle; and the simulator, by the menu alone and with what was measured in this run."""
        menu, images = self.about.menu, self.sample.images.shape[1]
        policy = parse_policy(self.about.policy, menu)
        left = max(self.target_ms - world.overhead_ms, 1e-3)
        answer: dict[str, Any] = {
            "oracle_quality": oracle_quality(menu.slower(world.slowdown), self.times, left, self.about.cores, images)
        }
        _, p99 = self._percentiles(self.trial)
        for name, this in (
            ("predicted", World(overhead_ms=world.overhead_ms, loop_ms=world.loop_ms)),
            ("simulated", world),
        ):
            trial = run_trial(
                menu,
                policy,
                self.times,
                target_ms=self.target_ms,
                cores=self.about.cores,
                images=images,
                seed=seed,
                world=this,
            )
            found = trial.summary()
            answer[name] = {key: found[key] for key in ("effective_quality", "attainment", "p50_ms", "p99_ms", "shed")}
            answer[name]["quality_difference"] = expected - found["effective_quality"]
            answer[name]["p99_ratio"] = p99 / found["p99_ms"] if p99 and found["p99_ms"] else None
        return answer

    @staticmethod
    def _percentiles(trial: Trial) -> tuple[float | None, float | None]:
        found = trial.summary()
        return found["p50_ms"], found["p99_ms"]

    def recovery_ms(self) -> float | None:
        """How long after a step down somebody got the best row again; nothing if nobody did."""
        down = STEP_DOWN * self.times[-1]
        again = self.times[self.tally.answered & ~self.tally.degraded & (self.times >= down)]
        return float(again[0] - down) if len(again) else None
