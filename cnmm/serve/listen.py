"""The server as a command: it listens, survives hostile clients, and leaves without losing anybody.

uvicorn does the talking. Here is what it leaves open: headers that never end or never come, too many connections, and
a shutdown in steps: not ready at once, serving for a while, then no more, and gone when everybody has an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cnmm._errors import UserError
from cnmm.runtime.latency import RuntimeName
from cnmm.serve.app import create_app
from cnmm.serve.clients import HANGUP, Hangups
from cnmm.serve.engine import Engine

logger = logging.getLogger("cnmm")

HEADER_S = 10.0
"""Within which the head of a request must have come."""
MOST_HEADER = 2**16
"""Bytes of it."""
KEEP_S = 30
"""That a connection may be idle between requests."""
MOST_CONNECTIONS = 4096
LEAVE_S = 60
"""Within which admitted requests finish."""


def serve(
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
    on_ready: Callable[[str, Engine], None] = lambda url, engine: None,
) -> dict[str, Any]:
    """Serves a ladder until SIGINT or SIGTERM, and returns what became of the requests.

    `drain_s`: after SIGTERM, serving goes on for so long, while `/v2/health/ready` already says no. `port` 0 takes any
    that is free. `on_ready` is told the address.
    """
    listener = _listener(host, port)
    with listener:
        app = create_app(ladder, target_ms=target_ms, runtime=runtime, cores=cores, policy=policy, latency=latency)
        place = listener.getsockname()
        url = f"http://{f'[{place[0]}]' if ':' in place[0] else place[0]}:{place[1]}"
        server = _Server(app, drain_s, lambda: on_ready(url, app.state.engine))
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(server.serve(sockets=[listener]))
        except SystemExit:  # how uvicorn ends when the workers cannot start
            raise app.state.failure from None
        if server.force_exit:
            raise KeyboardInterrupt
        return {"url": url, "requests": dict(app.state.engine.metrics.outcomes)}


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{host}:{port}: cannot listen there ({reason}); choose another --port or --host") from None
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _raise_file_limit() -> None:
    """A connection is a file; many systems allow 1,024 unless asked."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_CONNECTIONS + 256 if most == resource.RLIM_INFINITY else min(most, MOST_CONNECTIONS + 256)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class _Server(uvicorn.Server):
    """Leaves in steps."""

    def __init__(self, app: Starlette, drain_s: float, on_ready: Callable[[], None]) -> None:
        _raise_file_limit()
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_S,
            timeout_graceful_shutdown=LEAVE_S,
            backlog=2048,
        )
        super().__init__(config)
        self._engine: Engine = app.state.engine
        self._drain_s, self._on_ready = drain_s, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there stays: to look through all of it takes longer than a request may wait
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain (Ctrl-C does not wait), the second ends it."""
        if self._engine.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._engine.draining = True
        wait = 0.0 if sig == signal.SIGINT else self._drain_s
        self._loop.call_soon_threadsafe(self._loop.call_later, wait, self._stop)

    def _stop(self) -> None:
        self._engine.closed = True
        self.should_exit = True


class Protocol(HttpToolsProtocol):
    """uvicorn's own, with limits: how many connections, how long a head may take, and how long it may be."""

    _timer: asyncio.TimerHandle | None = None
    _head = 0
    """Bytes of a head so far."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._hangups = Hangups(self.flow.resume_reading)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse("503 Service Unavailable", f"more than {MOST_CONNECTIONS} connections")
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        in_head = self._timer is not None
        super().data_received(data)
        if in_head and self._timer is not None:
            self._head += len(data)
            if self._head > MOST_HEADER:
                self._refuse("431 Request Header Fields Too Large", f"a head of more than {MOST_HEADER:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANGUP: {"call": self._hangups}}
        if self._timer is None:
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)
        self._hangups.end()

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEADER_S, self._too_slow)

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._head = None, 0

    def _too_slow(self) -> None:
        self._refuse("408 Request Timeout", f"the head of a request did not come within {HEADER_S:g} s")

    def _refuse(self, status: str, words: str) -> None:
        self._forget_head()
        if not self.transport.is_closing():
            body = json.dumps({"error": words}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()
