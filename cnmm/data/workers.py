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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from cnmm._errors import UserError
from cnmm._machine import usable_cores
from cnmm.data.dataset import Images, Indices, Split
from cnmm.data.images import FileSplit, decode_image
from cnmm.data.masks import MaskRule
from cnmm.data.scenes import FileScenes, Pair, Scene, SceneSplit, decode_scene

T = TypeVar("T")

MOST = 16
"""Workers that are started when nobody says how many."""
_AHEAD = 2  # batches per worker that are decoded, or being decoded, before they are asked for
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cnmm.data.workers import serve; serve()"
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def num_workers(asked: int | None, split: Split, processes: int = 1) -> int:
    """How many workers read a split: as many as asked for, or one less than the cores, at least one.

    `processes`: how many processes share the cores of this machine. Images in memory are read without workers.
    """
    if not isinstance(split, FileSplit | FileScenes):
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
        yield from self._ahead(
            lambda worker, indices: worker.read([os.fspath(split.paths[index]) for index in indices], split.size),
            batches,
        )

    def scenes(self, split: SceneSplit, batches: Iterable[Indices]) -> Iterator[list[Scene]]:
        """The scenes of each batch of indices, in order, exactly as `split.scenes` gives them."""
        if not self.num or not isinstance(split, FileScenes):
            yield from map(split.scenes, batches)
            return
        yield from self._ahead(
            lambda worker, indices: worker.scenes([split.pairs[index] for index in indices], split.rule, split.longest),
            batches,
        )

    def _ahead(self, ask: Callable[[_Worker, Indices], T], batches: Iterable[Indices]) -> Iterator[T]:
        """What workers answer, in order, some batches before it is wanted."""
        waiting: deque[Future[T]] = deque()
        try:
            for indices in batches:
                waiting.append(self._start().submit(self._ask, ask, indices))
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

    def _ask(self, ask: Callable[[_Worker, Indices], T], indices: Indices) -> T:
        """Runs in a thread: there are as many threads as workers, so one of them is idle."""
        worker = self._idle.get()
        try:
            return ask(worker, indices)
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
        self._ask({"paths": paths, "size": size}, lambda answer: [images])
        return images

    def scenes(self, pairs: Sequence[Pair], rule: MaskRule, longest: int) -> list[Scene]:
        files = [[os.fspath(path) for path in pair] for pair in pairs]
        arrays = self._ask(
            {"pairs": files, "rule": rule.to_json(), "longest": longest},
            lambda answer: [np.empty(shape, np.uint8) for shape in answer["shapes"]],
        )
        return [Scene(image, mask) for image, mask in zip(arrays[::2], arrays[1::2], strict=True)]

    def _ask(self, request: dict[str, Any], make: Callable[[dict[str, Any]], list[Images]]) -> list[Images]:
        """The arrays of an answer, which `make` makes room for."""
        try:
            _send(self.requests, request)
            line = self.answers.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            answer = json.loads(line)
            arrays = [] if answer["problem"] is not None else make(answer)
            if any(self.answers.readinto(array.data) < array.nbytes for array in arrays):
                raise EOFError
        except (BrokenPipeError, EOFError):
            raise ChildProcessError(self._epitaph()) from None
        if answer["problem"] is not None:
            raise UserError(answer["problem"])
        return arrays

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


def _send(pipe: io.BufferedWriter, message: dict[str, Any], arrays: Iterable[Images] = ()) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    for array in arrays:
        pipe.write(array.data)
    pipe.flush()


def serve() -> None:
    """The worker's side: answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints is no answer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            arrays = _decode_scenes(request) if "pairs" in request else [_decode(request["paths"], request["size"])]
        except ValueError as error:
            _answer(answers, {"problem": str(error)})
        else:
            _answer(answers, {"problem": None, "shapes": [array.shape for array in arrays]}, arrays)


def _answer(pipe: io.BufferedWriter, message: dict[str, Any], arrays: Iterable[Images] = ()) -> None:
    try:
        _send(pipe, message, arrays)
    except BrokenPipeError:  # nobody is left to read it
        os._exit(0)


def _decode(paths: Sequence[str], size: Sequence[int]) -> Images:
    height, width = size
    images = np.empty((len(paths), height, width, 3), np.uint8)
    for path, image in zip(paths, images, strict=True):
        image[:] = decode_image(Path(path), (height, width))
    return images


def _decode_scenes(request: dict[str, Any]) -> list[Images]:
    """Image, mask, image, mask, ..."""
    rule = MaskRule.from_json(request["rule"])
    pairs = [Pair(*map(Path, files)) for files in request["pairs"]]
    scenes = (decode_scene(pair, rule, request["longest"]) for pair in pairs)
    return [np.ascontiguousarray(array) for scene in scenes for array in scene]
