"""The verbs that serve a ladder under load: `serve`, `simulate`. They need no torch, unless given a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm.cli.running import Source, ladder_of
from cnmm.cli.terminal import NO_HINT, Common, percent, print_table, say
from cnmm.frontier import metric_words
from cnmm.pretrained import resolve
from cnmm.runtime.latency import RuntimeName

if TYPE_CHECKING:
    from cnmm.serve.engine import Engine

LadderFolder = Annotated[Positional[Path], arg(metavar="LADDER", help_behavior_hint="")]
Arrivals = Annotated[str, arg(metavar="KIND", help_behavior_hint="(default: poisson)")]
TargetMs = Annotated[float, arg(metavar="MS", help_behavior_hint="(default: 60)")]
PolicyName = Annotated[str, arg(metavar="NAME", help_behavior_hint="(default: adaptive)")]


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a ladder over HTTP: quality bends before latency breaks."""

    source: Source
    """A ladder folder, a trained model such as fashion, or a run folder where torch is installed."""
    target_ms: TargetMs = 60.0
    """Latency that requests are promised."""
    runtime: Annotated[RuntimeName | None, arg(help_behavior_hint="(default: the fastest that was measured)")] = None
    """Inference engine."""
    cores: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all usable cores)")] = None
    """Workers, of one core each."""
    host: Annotated[str, arg(metavar="ADDRESS", help_behavior_hint="(default: 127.0.0.1, this machine only)")] = (
        "127.0.0.1"
    )
    """Address to listen at; 0.0.0.0 is every network."""
    port: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 8080)")] = 8080
    """Port to listen at; 0 takes any that is free."""
    policy: PolicyName = "adaptive"
    """adaptive, slackfit (spends the slack of the earliest deadline), or fixed:POINT."""
    drain_s: Annotated[float, arg(metavar="S", help_behavior_hint="(default: 5)")] = 5.0
    """After SIGTERM, go on serving for so long, while the server already says that it is not ready."""
    engine: Annotated[Literal["uvicorn", "ray"], arg(help_behavior_hint="(default: uvicorn)")] = "uvicorn"
    """uvicorn: a server with its own workers. ray: replicas of it behind Ray Serve, on one machine or on many."""
    replicas: Annotated[str | None, arg(metavar="N|N-M", help_behavior_hint="(default: 2)")] = None
    """Of --engine ray: how many, or a range within which Ray follows the load; --cores is for each, default 1."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        if self.replicas is not None and self.engine != "ray":
            raise UserError(f"--replicas {self.replicas}: works with --engine ray only; leave it out, or use both")
        try:
            from cnmm.serve.listen import serve
            from cnmm.serve.ray_serve import serve_with_ray
        except ModuleNotFoundError as error:
            raise UserError(f'serving needs {error.name}; install it with: pip install "cnmm[serve]"') from None
        names = ("target_ms", "runtime", "cores", "host", "port", "policy", "drain_s")
        settings = {name: getattr(self, name) for name in names} | {"latency": resolve(self.source, ladder=True)}
        with ladder_of(self.source) as folder:
            if self.engine == "ray":
                return serve_with_ray(folder, **settings, replicas=self.replicas or "2", on_ready=say_address)
            return serve(folder, **settings, on_ready=say_ready)

    def show(self, answer: dict[str, Any]) -> None:
        if self.engine == "ray":
            return
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in answer["requests"].items())
        say(f"requests: {counts or 'none'}")


def say_address(url: str) -> None:
    """Where Ray serves."""
    say(f"{url} is served by Ray; Ctrl-C ends it")
    say(f"try: curl --data-binary @cat.jpg {url}/predict")


def say_ready(url: str, engine: Engine) -> None:
    """Where to click, what to type, and what to expect."""
    menu, holds = engine.menu, engine.holds()
    words = [
        f"{url} serves {menu.model}, target {engine.target_ms:g} ms, cores {engine.cores}, "
        f"{engine.served.timed.runtime}; Ctrl-C ends it",
        f"try: curl --data-binary @cat.jpg {url}/predict",
    ]
    for name, row in (("best", menu.best), ("cheapest", menu.cheapest)):
        quality = f"{metric_words(menu.metric)} {percent(row.quality)} %"
        words.append(f"holds about {holds[name]:,.0f} images/s at its {name} ({quality}, {row.ms:.3g} ms per image)")
    for line in words:
        say(line)


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate a server of a ladder under load, with its own controller and measured latencies."""

    source: LadderFolder
    """A ladder folder, with latencies measured by `cnmm bench LADDER --threads 1`."""
    arrivals: Arrivals = "poisson"
    """poisson, gamma:CV2 (burstier, such as gamma:8), step, ramp, burst, or trace:FILE (seconds, one per line)."""
    load: Annotated[float, arg(metavar="X", help_behavior_hint="(default: 1, what the full mixture can hold)")] = 1.0
    """Mean load; of a step, ramp or burst, the highest."""
    target_ms: TargetMs = 60.0
    """Latency that requests are promised."""
    policy: PolicyName = "adaptive"
    """adaptive, slackfit (spends the slack of the earliest deadline), or fixed:POINT."""
    cores: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1)")] = 1
    """Workers, of one core each."""
    images: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 1)")] = 1
    """Images of a request."""
    requests: Annotated[int, arg(metavar="N", help_behavior_hint="(default: 10,000)")] = 10_000
    """Requests in all."""
    runtime: Annotated[RuntimeName | None, arg(help_behavior_hint="(default: the fastest that was measured)")] = None
    """Inference engine whose latencies count."""
    seed: Annotated[int, NO_HINT] = 0
    """Of arrivals and images."""
    out: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw load, budget, latency and accuracy over time."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        from cnmm.serve.simulate import simulate

        return simulate(
            self.source,
            arrivals=self.arrivals,
            load=self.load,
            target_ms=self.target_ms,
            policy=self.policy,
            cores=self.cores,
            images=self.images,
            requests=self.requests,
            runtime=self.runtime,
            seed=self.seed,
            out=self.out,
        )[1]

    def show(self, answer: dict[str, Any]) -> None:
        show_trial(answer)
        best, bound = percent(answer["best_quality"]), percent(answer["oracle_quality"])
        say(f"nobody could do better than {bound}; the best row has {best}")
        if self.out:
            say(f"written: {self.out}")


def show_trial(answer: dict[str, Any]) -> None:
    """One line of figures."""
    columns = (f"effective {metric_words(answer['metric'])} %", "in time %", "p50 ms", "p99 ms", "shed %")
    row = [percent(answer["effective_quality"]), percent(answer["attainment"])]
    row += ["" if answer[name] is None else f"{answer[name]:.2f}" for name in ("p50_ms", "p99_ms")]
    print_table(columns, [(*row, percent(answer["shed"]))])
