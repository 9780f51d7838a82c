"""Worker processes as the event loop sees them: started, given one job at a time, and started again when they die.

A process can be killed by anything, also by the system when memory runs out; a thread would take the server with it.
Images and answers pass through memory that a worker and the server share; the socket only carries a line for each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from cnmm._errors import UserError

logger = logging.getLogger("cnmm")

MEMORY = 2**26
"""Bytes that a worker and the server share: what a request, or its answer, may have. Unused pages take no memory."""
START_S = 120.0
"""Within which a worker is ready."""
PAUSE_S = 1.0
"""Before a worker that could not start is tried again."""

Said = dict[str, Any]


class Pool:
    """Some workers. `on_reply(worker, words)` is told what they say, `on_lost` and `on_ready` when they go and come."""

    def __init__(
        self,
        num: int,
        settings: dict[str, Any],
        *,
        on_reply: Callable[[int, Said], None],
        on_lost: Callable[[int], None],
        on_ready: Callable[[int, Said], None],
    ) -> None:
        if os.name != "posix":
            raise UserError("the server needs Linux or macOS: its workers inherit sockets and memory")
        self._settings = settings
        self._on_reply, self._on_lost, self._on_ready = on_reply, on_lost, on_ready
        self._workers = [_Process(number) for number in range(num)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """All of them at once; the first complaint of one is raised."""
        await asyncio.gather(*(self._begin(worker) for worker in self._workers))

    async def close(self) -> None:
        """They end when their sockets do."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.hang_up()
        await asyncio.gather(*(worker.ended() for worker in self._workers))
        for worker in self._workers:
            worker.forget()

    def send(self, number: int, words: Said, parts: Sequence[bytes | memoryview]) -> None:
        """A job for a worker that is free."""
        self._workers[number].send(words, parts)

    def received(self, number: int, sizes: Sequence[int]) -> list[bytes]:
        """The parts of the answer of a worker, which it may overwrite with the next job's."""
        return self._workers[number].received(sizes)

    def kill(self, number: int) -> None:
        """Ends a worker that does not answer; it comes back."""
        self._workers[number].kill()

    def pids(self) -> list[int]:
        """Of the processes that can be given jobs."""
        return [worker.pid for worker in self._workers if worker.was_ready and not worker.gone]

    async def _begin(self, worker: _Process) -> None:
        words = await worker.begin(self._settings, self._heard, self._hung_up)
        if "failed" in words:
            raise UserError(words["failed"])
        self._on_ready(worker.number, words)

    def _heard(self, worker: _Process, words: Said) -> None:
        self._on_reply(worker.number, words)

    def _hung_up(self, worker: _Process) -> None:
        """It died, or never came to life; the latter `_begin` sees."""
        if self._closing or not worker.was_ready:
            return
        logger.warning("worker %d (process %d) is gone; it is started again", worker.number, worker.pid)
        self._on_lost(worker.number)
        task = asyncio.get_running_loop().create_task(self._again(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, worker: _Process) -> None:
        while True:
            try:
                worker.kill()
                await worker.ended()
                return await self._begin(worker)
            except (UserError, OSError) as error:
                logger.error("worker %d cannot start: %s", worker.number, error)
                await asyncio.sleep(PAUSE_S)


class _Process(asyncio.Protocol):
    """One worker: its process, its socket and its memory, which outlives it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.gone, self.was_ready = True, False
        self._file = _memory_file()
        self._memory = mmap.mmap(self._file, MEMORY)
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    async def begin(
        self,
        settings: dict[str, Any],
        on_said: Callable[[_Process, Said], None],
        on_hung_up: Callable[[_Process], None],
    ) -> Said:
        """Starts the process; returns the first thing that it says."""
        self._on_said, self._on_hung_up, self._rest = on_said, on_hung_up, b""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Said] = loop.create_future()
        self.was_ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            words = json.dumps({**settings, "socket": theirs.fileno(), "memory": self._file})
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cnmm.serve.worker", words],
                pass_fds=(theirs.fileno(), self._file),
                env=_environment(),
                stdin=subprocess.DEVNULL,
            )
        self.pid, self.gone = self._process.pid, False
        await loop.create_connection(lambda: self, sock=ours)
        try:
            return await asyncio.wait_for(self.ready, START_S)
        except TimeoutError:
            self.kill()
            raise UserError(f"a worker was not ready within {START_S:g} s") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of classes of their own

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = json.loads(line)
            if self.ready.done():
                self._on_said(self, words)
            else:
                self.was_ready = "ready" in words
                self.ready.set_result(words)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if not self.ready.done():
            self.ready.set_result({"failed": "a worker process ended before it was ready"})
        self._on_hung_up(self)

    def send(self, words: Said, parts: Sequence[bytes | memoryview]) -> None:
        place = 0
        for part in parts:
            self._memory[place : place + len(part)] = part
            place += len(part)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(json.dumps(words).encode() + b"\n")

    def received(self, sizes: Sequence[int]) -> list[bytes]:
        parts, place = [], 0
        for size in sizes:
            parts.append(self._memory[place : place + size])
            place += size
        return parts

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def forget(self) -> None:
        """Gives the memory back."""
        self._memory.close()
        os.close(self._file)

    async def ended(self) -> None:
        """When the process is gone; one that does not go is killed."""
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)


def _memory_file() -> int:
    """A file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("cnmm")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, MEMORY)
    return file


def _environment() -> dict[str, str]:
    """One thread each, and this package, wherever it was imported from."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
