"""Worker processes that decode image files ahead of whoever reads them. Images in memory need none.

A worker is a plain Python process without torch (numpy and Pillow, about 40 MB). It is asked through its pipes: a line
of JSON each way, then the pixels. It ends when its input does, so none is left behind, however this process ends.
It has Pillow as it comes: limits that this process sets in `PIL.Image` are not known to it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from cnmm._errors import UserError
from cnmm._machine import usable_cores
from cnmm.data.dataset import Images, Indices, Split
from cnmm.data.images import FileSplit, decode_image

MOST = 16
"""Workers that are started when nobody says how many."""
_AHEAD = 2  # batches per worker that are decoded, or being decoded, before they are asked for
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cnmm.data.workers import serve; serve()"
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def num_workers(asked: int | None, split: Split, processes: int = 1) -> int:
    """How many workers read a split: as many as asked for, or one less than the cores, at least one.

    `processes`: how many processes share the cores of this machine. Images in memory are read without workers.
    """
    if not isinstance(split, FileSplit):
        if asked:
            warnings.warn(f"workers={asked} has no effect: these images are in memory", stacklevel=2)
        return 0
    if asked is not None:
        return asked
    return max(1, min(MOST, usable_cores() // processes - 1))


class Workers:
    """Reads batches of images, those of files ahead of time in `num` processes. They start with the first batch."""

    def __init__(self, num: int = 0) -> None:
        self.num = num
        self.processes: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, split: Split, batches: Iterable[Indices]) -> Iterator[Images]:
        """The images of each batch of indices, in order, exactly as `split.read` gives them."""
        if not self.num or not isinstance(split, FileSplit):
            yield from map(split.read, batches)
            return
        waiting: deque[Future[Images]] = deque()
        try:
            for indices in batches:
                waiting.append(self._start().submit(self._ask, split, indices))
                if len(waiting) > _AHEAD * self.num:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the processes; what they were decoding is lost."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self.processes:
                worker.end()
            self._threads.shutdown()  # its threads end now that nothing answers them
            for worker in self.processes:
                worker.close()
        self.processes, self._idle, self._threads = [], queue.SimpleQueue(), None

    def _start(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.num, "cnmm-workers")
            for _ in range(self.num):
                self.processes.append(_Worker())
                self._idle.put(self.processes[-1])
        return self._threads

    def _ask(self, split: FileSplit, indices: Indices) -> Images:
        """Runs in a thread: there are as many threads as workers, so one of them is idle."""
        worker = self._idle.get()
        try:
            return worker.read([os.fspath(split.paths[index]) for index in indices], split.size)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, from outside."""

    def __init__(self) -> None:
        # In a process group of its own: Ctrl-C is for this process, which says when its workers end.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps([os.path.abspath(folder) for folder in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0 if os.name == "posix" else None,
            env={**os.environ, **_SINGLE},
        )
        self.requests = cast(io.BufferedWriter, self.process.stdin)
        self.answers = cast(io.BufferedReader, self.process.stdout)

    def read(self, paths: Sequence[str], size: tuple[int, int]) -> Images:
        images = np.empty((len(paths), *size, 3), np.uint8)
        try:
            _send(self.requests, {"paths": paths, "size": size})
            problem = self._receive(images)
        except (BrokenPipeError, EOFError):
            raise ChildProcessError(self._epitaph()) from None
        if problem is not None:
            raise UserError(problem)
        return images

    def _receive(self, images: Images) -> str | None:
        """Fills the images, or returns what is wrong with one of them."""
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        problem: str | None = json.loads(line)["problem"]
        if problem is None and self.answers.readinto(images.data) < images.nbytes:
            raise EOFError
        return problem

    def _epitaph(self) -> str:
        status = self.process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return (
            f"worker process {self.process.pid}, which decodes images, {how}; "
            "if memory was short, use fewer: --workers 1, or 0 to decode in the main process"
        )

    def end(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.wait()
        self.answers.close()
        with contextlib.suppress(BrokenPipeError):  # a request that was never read
            self.requests.close()


def _send(pipe: io.BufferedWriter, message: dict[str, Any], pixels: Images | None = None) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    if pixels is not None:
        pipe.write(pixels.data)
    pipe.flush()


def serve() -> None:
    """The worker's side: answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints is no answer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            images = _decode(request["paths"], request["size"])
        except ValueError as error:
            _answer(answers, {"problem": str(error)})
        else:
            _answer(answers, {"problem": None}, images)


def _answer(pipe: io.BufferedWriter, message: dict[str, Any], pixels: Images | None = None) -> None:
    try:
        _send(pipe, message, pixels)
    except BrokenPipeError:  # nobody is left to read it
        os._exit(0)


def _decode(paths: Sequence[str], size: Sequence[int]) -> Images:
    height, width = size
    images = np.empty((len(paths), height, width, 3), np.uint8)
    for path, image in zip(paths, images, strict=True):
        image[:] = decode_image(Path(path), (height, width))
    return images
