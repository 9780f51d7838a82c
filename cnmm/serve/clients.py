"""When a client hangs up: told by the connection, where it is our own server's, else found out by waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request

Hangup = Callable[[Callable[[], None]], Callable[[], object]]
"""Takes what is to be called when the client has gone; returns what ends the interest in that."""
HANGUP = "cnmm.hangup"
"""The extension of ASGI's scope by which our server offers one. Others cost a task for every request that waits."""


def hangup_of(request: Request) -> Hangup:
    """That of the client who sent a request, whose body has been read."""
    own: Hangup | None = request.scope.get("extensions", {}).get(HANGUP, {}).get("call")
    return own or _Watch(request)


class _Watch:
    """ASGI's own way: a client has gone when there is nothing more to receive."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, call: Callable[[], None]) -> Callable[[], object]:
        return asyncio.ensure_future(self._wait(call)).cancel

    async def _wait(self, call: Callable[[], None]) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        call()


class Hangups:
    """What is to be called when a connection ends.

    `listen` makes the connection read on: large bodies pause it, and then it would not notice.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._calls: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._over = False

    def __call__(self, call: Callable[[], None]) -> Callable[[], object]:
        self._listen()
        if self._over:
            call()
            return lambda: None
        self._number = number = self._number + 1
        self._calls[number] = call
        return lambda: self._calls.pop(number, None)

    def end(self) -> None:
        """The connection has ended."""
        self._over = True
        for call in list(self._calls.values()):
            call()
