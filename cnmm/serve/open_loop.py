"""An open loop of HTTP requests: each is sent at its own time, whether or not earlier ones were answered.

A client that waits for an answer before it sends the next request stops asking while the server stalls, and so never
sees what a stall costs. Here all times are fixed beforehand, and latency counts from the time at which a request was
meant to be sent. The generator measures its own lag as well, since a figure is worth nothing where it lagged.

Requests are bytes that were built before. A connection carries one request at a time, as many connections are opened as
it takes, and nothing is ever sent twice. Times are seconds of the loop's clock, so that a test may bring its own.
"""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm.serve.http_answer import Answer, AnswerReader
from cnmm.serve.menu import Floats

PATIENCE_S = 60.0
"""After the last request was due; what is not answered by then is lost."""
IDLE_S = 2.0
"""A connection that was idle for longer is not used again: servers close such connections, often after 5 s."""
FIRST_CONNECTIONS = 16
"""Opened before the first request is due."""
LOST, NOT_SENT = 0, -1
"""In the place of a status: a request without an answer, and one for which there was no connection."""

Digest = Callable[[int, Answer], None]
"""Takes what is worth keeping of the answer to a request."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    secure: bool
    prefix: str
    """Of every path."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What became of every request, by number."""

    lag_s: Floats
    """How long after its time the generator turned to it."""
    latency_s: Floats
    """From its time to its answer; of one that was lost, as long as it was waited for."""
    status: npt.NDArray[np.int64]
    """Of HTTP; or LOST, or NOT_SENT."""
    reasons: Counter[str]
    """Of those that were lost or not sent."""
    connections: int


def parse_url(url: str) -> Address:
    """`http://HOST:PORT`, perhaps with a path before those of the server."""
    words = f"{url!r}: must be the address of a server, such as http://127.0.0.1:8080"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(words) from None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise UserError(words)
    secure = parts.scheme == "https"
    return Address(
        host=parts.hostname, port=port or (443 if secure else 80), secure=secure, prefix=parts.path.rstrip("/")
    )


def run_open_loop(address: Address, requests: Sequence[bytes], times_s: Floats, digest: Digest) -> Outcome:
    """Sends request k at times_s[k], counted from the start; there may be fewer requests than times, which then repeat.

    Bytes that go out are exactly `requests`; `digest` is called with every answer that is complete.
    """
    _allow_connections()
    with asyncio.Runner(loop_factory=fine_loop) as runner:
        return runner.run(send_all(address, requests, times_s, digest))


async def send_all(address: Address, requests: Sequence[bytes], times_s: Floats, digest: Digest) -> Outcome:
    """The same within a loop that runs."""
    run = _Run(address, requests, times_s, digest)
    await run.open_some(min(FIRST_CONNECTIONS, len(times_s)))
    with _no_garbage():
        try:
            return await run.to_the_end()
        finally:
            run.close()


def fine_loop() -> asyncio.AbstractEventLoop:
    """A loop whose timers do not wait for whole milliseconds, as epoll's do."""
    return asyncio.SelectorEventLoop(_FineSelector())


class _FineSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        number = getattr(self, "fileno", lambda: -1)()
        if timeout is not None and timeout > 0 and 0 <= number < 1024:  # what the system call below can hold
            select.select([number], [], [], timeout)
            timeout = 0
        return super().select(timeout)


class _Run:
    """Requests under way, and what became of the others."""

    def __init__(self, address: Address, requests: Sequence[bytes], times_s: Floats, digest: Digest) -> None:
        self.loop = asyncio.get_running_loop()
        self.answered = digest
        self._address, self._requests, self._times = address, requests, times_s.tolist()
        self._ssl = ssl.create_default_context() if address.secure else None
        num = len(times_s)
        self._lag, self._latency = np.full(num, np.nan), np.full(num, np.nan)
        self._status = np.full(num, LOST)
        self._reasons: Counter[str] = Counter()
        self._begin, self._next, self._left = 0.0, 0, num
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._opened = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._all_done = asyncio.Event()

    async def open_some(self, num: int) -> None:
        """So that the first requests need not wait for it; a server that cannot be reached is the user's to mend."""
        for _ in range(num):
            try:
                self.free(await self._open())
            except OSError as error:
                raise UserError(
                    f"{self._address.authority}: no connection ({error}); start `cnmm serve` there"
                ) from None

    async def to_the_end(self) -> Outcome:
        self._begin = self.loop.time() + 0.01
        self.loop.call_at(self._begin + self._times[0], self._send_due)
        end = self._begin + self._times[-1] + PATIENCE_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await self._all_done.wait()
        for connection in list(self._connections):
            if connection.number is not None:
                self.lose(connection, f"no answer {PATIENCE_S:g} s after the last request")
        return Outcome(
            lag_s=self._lag,
            latency_s=self._latency,
            status=self._status,
            reasons=self._reasons,
            connections=self._opened,
        )

    def close(self) -> None:
        for connection in list(self._connections):
            connection.transport.abort()
        for task in self._opening:
            task.cancel()

    def _send_due(self) -> None:
        while self._next < len(self._times):
            number, due = self._next, self._begin + self._times[self._next]
            now = self.loop.time()
            if due > now + 1e-6:
                self.loop.call_at(due, self._send_due)
                return
            self._next += 1
            self._lag[number] = now - due
            connection = self._idle_connection(now)
            if connection:
                connection.send(number, self._bytes(number))
            else:
                task = self.loop.create_task(self._send_on_new(number))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    def _bytes(self, number: int) -> bytes:
        return self._requests[number % len(self._requests)]

    def _idle_connection(self, now: float) -> _Connection | None:
        """The one that was used last: the others may rest until they are too old."""
        while self._idle:
            connection = self._idle.pop()
            if connection in self._connections and now - connection.idle_since <= IDLE_S:
                return connection
            connection.transport.abort()
        return None

    async def _send_on_new(self, number: int) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            self._over(number, NOT_SENT, np.nan)
            self._reasons[f"no connection: {error.strerror or error}"] += 1
            return
        connection.send(number, self._bytes(number))

    async def _open(self) -> _Connection:
        _, connection = await self.loop.create_connection(
            lambda: _Connection(self), self._address.host, self._address.port, ssl=self._ssl
        )
        self._connections.add(connection)
        self._opened += 1
        return connection

    # What connections report

    def free(self, connection: _Connection) -> None:
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def take(self, number: int, answer: Answer) -> None:
        self._over(number, answer.status, self._since(number))
        self.answered(number, answer)

    def lose(self, connection: _Connection, reason: str) -> None:
        assert connection.number is not None
        self._over(connection.number, LOST, self._since(connection.number))
        self._reasons[reason] += 1
        connection.number = None

    def gone(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _since(self, number: int) -> float:
        return self.loop.time() - self._begin - float(self._times[number])

    def _over(self, number: int, status: int, latency: float) -> None:
        self._status[number], self._latency[number] = status, latency
        self._left -= 1
        if not self._left:
            self._all_done.set()


class _Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    transport: asyncio.Transport

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._reader = AnswerReader()
        self.number: int | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, number: int, request: bytes) -> None:
        self.number = number
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except UserError as error:
            self._give_up(str(error))
            return
        if self.number is None:
            self._give_up("an answer that nobody asked for")
        elif answer:
            self._take(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.gone(self)
        if self.number is None:
            return
        answer = self._reader.end()
        if answer:
            self._take(answer)
        else:
            self._run.lose(self, "the connection was closed before the answer")

    def _take(self, answer: Answer) -> None:
        number, self.number = self.number, None
        assert number is not None
        self._run.take(number, answer)
        if answer.last:
            self.transport.abort()
        else:
            self._run.free(self)

    def _give_up(self, reason: str) -> None:
        if self.number is not None:
            self._run.lose(self, reason)
        self.transport.abort()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A collection of garbage takes longer than a request may lag."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _allow_connections() -> None:
    """As many open files as this process may have."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
