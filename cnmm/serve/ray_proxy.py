"""What Ray Serve's processes need of ours: an answer for those whose replica died, and how many replicas are wanted.

Ray imports both by name, in its proxies and in its controller. Nothing here imports Ray, or anything large.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SPARE = 0.1
"""Replicas by which the wanted number may exceed the present one before another is started."""


class AnswerAnyway:
    """Where a replica dies, Ray's proxy says nothing, and its client would get a 500: here it gets a 503 at once."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        started = scope["type"] != "http"

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if started:
                raise
        if started:
            return
        body = json.dumps({"error": "the replica that had this request is gone; send it again", "retry_after_ms": 0})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": body.encode()})


def middlewares() -> list[Any]:
    """For `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    from starlette.middleware import Middleware

    return [Middleware(AnswerAnyway)]


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: as many replicas as have the cores that all of them want together.

    Every replica reports its own `wanted_cores` and `cores` (`record_autoscaling_stats`).
    """
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    reported = context.aggregated_metrics or {}
    wanted, cores = reported.get("wanted_cores") or {}, reported.get("cores") or {}
    if not wanted or not cores:
        return max(least, min(most, context.target_num_replicas)), {}
    return replicas_for(sum(wanted.values()), sum(cores.values()) / len(cores), least, most), {}


def replicas_for(wanted_cores: float, cores: float, least: int, most: int) -> int:
    """Of so many cores each."""
    return max(least, min(most, math.ceil(wanted_cores / cores - SPARE)))
