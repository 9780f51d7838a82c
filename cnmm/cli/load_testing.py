"""The verb that puts a running server under load: `loadtest`. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from cnmm.cli.serving import Arrivals, show_trial
from cnmm.cli.terminal import NO_HINT, Common, percent, print_table, say


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """Put a running server under load, and compare it with the simulator and with the best that anybody could do."""

    url: Annotated[Positional[str], arg(metavar="URL", help_behavior_hint="")]
    """Of a server that `cnmm serve` started, such as http://127.0.0.1:8080."""
    arrivals: Arrivals = "poisson"
    """poisson, gamma:CV2 (burstier, such as gamma:8), step, ramp, burst, or trace:FILE (seconds, one per line)."""
    load: Annotated[
        float | None, arg(metavar="X", help_behavior_hint="(default: 1, what the full mixture can hold)")
    ] = None
    """Mean load; of a step, ramp or burst, the highest."""
    rate: Annotated[float | None, arg(metavar="R", help_behavior_hint="")] = None
    """Requests per second, instead of --load."""
    requests: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 10,000)")] = 10_000
    """Requests in all."""
    target_ms: Annotated[float | None, arg(metavar="MS", help_behavior_hint="(default: the server's)")] = None
    """Deadline of each request."""
    images: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: noise)")] = None
    """A folder of images to send."""
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="")] = None
    """Labelled images instead, such as folder:DIR or cifar10:DIR: then accuracy is found, not expected."""
    images_per_request: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1)")] = 1
    """Images of a request."""
    seed: Annotated[int, NO_HINT] = 0
    """Of arrivals and images."""
    out: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw load, compute, latency and accuracy over time."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        from cnmm.serve.loadtest import loadtest

        return loadtest(
            self.url,
            arrivals=self.arrivals,
            rate=self.rate,
            load=self.load,
            requests=self.requests,
            target_ms=self.target_ms,
            images=self.images,
            data=self.data,
            images_per_request=self.images_per_request,
            seed=self.seed,
            out=self.out,
        )[1]

    def show(self, answer: dict[str, Any]) -> None:
        show_trial(answer)
        words = "found with labels" if answer["labelled"] else "expected by the server"
        rate = f"{answer['rate']:.4g} requests/s, mean load {answer['mean_load']:.3g}, policy {answer['policy']}"
        say(f"accuracy is {words}; {rate}; worst {_ms(answer['worst_ms'])}")
        say(f"errors {answer['errors']}, lost {answer['lost']}")
        for reason, num in answer["reasons"].items():
            say(f"{num} x {reason}")
        columns = ("beside it", "effective %", "in time %", "p50 ms", "p99 ms", "shed %")
        print_table(columns, [_row(name, answer[name]) for name in ("predicted", "simulated")], left=("beside it",))
        say("predicted: by the server's menu; simulated: with the service times and the overhead of this run")
        bound, best = percent(answer["oracle_quality"]), percent(answer["best_quality"])
        say(f"nobody could do better than {bound}; the best row has {best}")
        if "recovery_ms" in answer:
            say(f"back at the best row {_ms(answer['recovery_ms'])} after the step down")
        if self.out:
            say(f"written: {self.out}")
        if not answer["valid"]:
            lag = f"{answer['lag_p99_ms']:.2f}"
            say(f"INVALID: the generator lagged by {lag} ms (p99, at most 1 is allowed); give it a core of its own")


def _row(name: str, found: dict[str, Any]) -> list[str]:
    times = ["" if found[key] is None else f"{found[key]:.2f}" for key in ("p50_ms", "p99_ms")]
    return [name, percent(found["effective_quality"]), percent(found["attainment"]), *times, percent(found["shed"])]


def _ms(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} ms"
