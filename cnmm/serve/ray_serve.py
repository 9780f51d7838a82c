"""The same application as a Ray Serve deployment: replicas on one machine or on many, behind Ray's own proxy.

Each replica keeps its own queue, controller and cores, and bends its quality within milliseconds. Ray spreads requests,
starts replicas again that died and, if it may, follows `wanted_cores` within seconds.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cnmm._errors import UserError
from cnmm._machine import usable_cores
from cnmm.runtime.latency import RuntimeName
from cnmm.serve.served import open_served

NAME = "cnmm"
"""Of the application and of its deployment."""
MOST_ONGOING = 1000
"""Requests at a replica. Ray's default of 5 would hold the rest back, where our queue cannot see them."""
OBJECT_STORE = 200 * 2**20
"""Bytes. Requests do not go through it."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # On a busy machine Ray kills a proxy that is not ready within its default, and starts another, for ever.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cnmm.serve.ray_proxy.middlewares",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_RECORD_INTERVAL_S": "0.5",
}
"""Of the environment, unless it says otherwise: what starts a cluster elsewhere should set them there."""
REPORT_S, LOOK_BACK_S, UP_S, DOWN_S = 1.0, 3.0, 2.0, 60.0
"""Replicas report so often, averages are over so long, and more or fewer of them must be wanted for so long."""


def serve_with_ray(
    ladder: str | Path,
    *,
    target_ms: float = 60.0,
    runtime: RuntimeName | None = None,
    cores: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    policy: str = "adaptive",
    drain_s: float = 5.0,
    latency: str | Path | None = None,
    replicas: str = "2",
    on_ready: Callable[[str], None] = lambda url: None,
) -> dict[str, Any]:
    """Serves a ladder with Ray until SIGINT or SIGTERM. `cores`: of each replica, 1 unless told.

    `replicas`: how many, such as `2`, or a range such as `1-8`, within which Ray follows the wanted cores. A cluster
    that RAY_ADDRESS names is used; otherwise one is started on this machine.
    """
    least, most = parse_replicas(replicas)
    settings = {"target_ms": target_ms, "runtime": runtime, "cores": cores or 1, "policy": policy, "latency": latency}
    open_served(ladder, runtime=runtime, latency=latency)  # what is wrong with it is said here, and measured once
    ray, ray_serve = _import_ray()
    _start(ray, most * (cores or 1))
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray_serve.start(http_options={"host": host, "port": port})
        made = deployment(ray_serve, Path(ladder).resolve(), settings, least, most, drain_s)
        ray_serve.run(made.bind(), name=NAME, route_prefix="/")
        on_ready(f"http://{host}:{port}")
        stop.wait()
        return {"url": f"http://{host}:{port}", "replicas": replicas}
    finally:
        ray_serve.shutdown()
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def parse_replicas(text: str) -> tuple[int, int]:
    """`2`, or a range such as `1-8`."""
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"replicas {text!r}: must be a number such as 2, or a range such as 1-8")
    return least, most


def deployment(ray_serve: Any, ladder: Path, settings: Mapping[str, Any], least: int, most: int, drain_s: float) -> Any:
    """A Ray Serve deployment whose replicas each run the application."""

    def build() -> Any:  # on the replica
        from cnmm.serve.app import create_app

        return create_app(ladder, **settings)

    @ray_serve.ingress(build)
    class Replica:
        """One server of `cnmm`."""

        app: Any

        def record_autoscaling_stats(self) -> dict[str, float]:
            """What `wanted_replicas` goes by."""
            return {"wanted_cores": self.app.state.engine.wanted_cores(), "cores": float(settings["cores"])}

    options: dict[str, Any] = {"num_replicas": least}
    if most > least:
        options = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "metrics_interval_s": REPORT_S,
                "look_back_period_s": LOOK_BACK_S,
                "upscale_delay_s": UP_S,
                "downscale_delay_s": DOWN_S,
                "policy": {"policy_function": "cnmm.serve.ray_proxy:wanted_replicas"},
            }
        }
    return ray_serve.deployment(
        Replica,
        name=NAME,
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=drain_s + 10,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": settings["cores"]},
        **options,
    )


def _import_ray() -> tuple[Any, Any]:
    for name, value in SETTINGS.items():  # Ray reads some of them when it is imported
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve as ray_serve
    except ImportError as error:
        raise UserError(f'--engine ray needs ray[serve] ({error}); install it with: pip install "cnmm[ray]"') from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray, ray_serve


def _start(ray: Any, num_cpus: int) -> None:
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    # Logical cores: as many as the replicas ask for, even where the machine has fewer.
    num = max(num_cpus, usable_cores())
    ray.init(
        num_cpus=num,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
