"""A worker: a process with one thread that answers one request at a time. `python -m cnmm.serve.worker` is one.

It and the server share a piece of memory, where images come in and answers go out, and a socket with one line of JSON
for each. When the socket closes, the server is gone and the worker ends; signals are the server's business. Times are
in milliseconds, moments those of the monotonic clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cnmm._errors import UserError
from cnmm._files import checksum
from cnmm.frontier import LADDER_FILE
from cnmm.pictures import index_png
from cnmm.runtime.answers import NotFinite, Prediction
from cnmm.runtime.early_exit import MayBegin, always
from cnmm.runtime.inputs import read_sent
from cnmm.runtime.session import Session
from cnmm.serve.controller import STAGE_MARGIN

DECODED_SIZE = (480, 640)
"""Of the image whose decoding is timed when a worker starts."""


def now_ms() -> float:
    """The monotonic clock, in milliseconds."""
    return 1e3 * time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker is told when it starts."""

    folder: str
    runtime: str
    socket: int
    memory: int
    """File descriptors that it inherits."""
    stage_ms: tuple[float, ...]
    """Of each stage with its answer, by the menu."""
    checksum: str
    """Of the ladder's manifest."""


class Worker:
    """A session, and the memory that it shares with the server."""

    def __init__(self, session: Session, memory: mmap.mmap, stage_ms: Sequence[float]) -> None:
        self._session, self._memory, self._stage_ms = session, memory, stage_ms
        self._cut = False

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """One job. What is wrong with its images is the client's to mend; anything else is a bug, and others wait."""
        start, self._cut = now_ms(), False
        try:
            images = self._images(job)
            decoded = now_ms()
            found = self._predict(images, job)
            reply = self._written(found, job["want"])
        except UserError as error:
            status = 500 if isinstance(error, NotFinite) else 400
            return {"id": job["id"], "status": status, "error": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"id": job["id"], "status": 500, "error": f"a worker failed: {type(error).__name__}"}
        return reply | {"id": job["id"], "decode_ms": decoded - start, "compute_ms": now_ms() - decoded}

    def _images(self, job: dict[str, Any]) -> Any:
        """Pixels as they lie in the shared memory, or files decoded one after the other: a worker has one core."""
        if job["shape"] is not None:
            return np.frombuffer(self._memory, np.uint8, math.prod(job["shape"])).reshape(job["shape"])
        session, images, place = self._session, [], 0
        size = None if session.task == "segmentation" else session.input_size
        for length in job["sizes"]:
            images.append(read_sent(self._memory[place : place + length], size, session.channels))
            place += length
        return images if size is None else np.stack(images)

    def _predict(self, images: Any, job: dict[str, Any]) -> Prediction:
        if job["confidence"] is None:
            return self._session.predict(images, point=job["point"])
        may_begin = always if job["until"] is None else self._until(job["until"], job["slowdown"])
        return self._session.leave_early(images, job["confidence"], may_begin)

    def _until(self, until: float, slowdown: float) -> MayBegin:
        """A stage begins if it will be over in time; images in later passes keep their part of the time."""
        start = now_ms()

        def may_begin(stage: int, num: int, part: float) -> bool:
            needed = STAGE_MARGIN * slowdown * (self._stage_ms[stage] * num + self._session.finishing_ms)
            in_time = now_ms() + needed <= start + part * (until - start)
            self._cut |= not in_time
            return in_time

        return may_begin

    def _written(self, found: Prediction, want: str) -> dict[str, Any]:
        """Puts an answer where the images were, and describes it."""
        reply: dict[str, Any] = {
            "exits": found.exits.tolist(),
            "macs": found.macs,
            "cut": self._cut,
            "confidence": [round(float(value), 6) for value in found.confidence],
            "shapes": [labels.shape for labels in found.labels],
        }
        parts = [found.probabilities.tobytes()]
        if want == "png":
            parts += [index_png(labels, self._session.preprocessing.palette) for labels in found.labels]
        elif want == "labels":
            parts += [labels.tobytes() for labels in found.labels]
        reply["sizes"] = self._put(parts)
        return reply

    def _put(self, parts: Sequence[bytes]) -> list[int]:
        sizes = [len(part) for part in parts]
        if sum(sizes) > len(self._memory):
            raise UserError("the answer is too large; send fewer or smaller images")
        self._memory[: sum(sizes)] = b"".join(parts)
        return sizes


def decode_ms() -> float:
    """How long a pixel of a JPEG takes to decode here."""
    import io

    from PIL import Image

    height, width = DECODED_SIZE
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)).save(file, "jpeg")
    times = []
    for _ in range(3):
        start = now_ms()
        read_sent(file.getvalue(), (32, 32), 3)
        times.append(now_ms() - start)
    return min(times) / (height * width)


def main(argv: Sequence[str]) -> int:
    """Says when it is ready, or why it cannot be, and answers until the server hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, they are meant for the server
        signal.signal(number, signal.SIG_IGN)
    settings = Settings(**json.loads(argv[0]))
    line = socket.socket(fileno=settings.socket)

    def say(words: dict[str, Any]) -> None:
        line.sendall(json.dumps(words).encode() + b"\n")

    try:
        if checksum(Path(settings.folder) / LADDER_FILE) != settings.checksum:
            raise UserError(f"{settings.folder}: the ladder was replaced since the server started; start it again")
        session = Session(settings.folder, runtime=settings.runtime, threads=1)  # type: ignore[arg-type]  # checked
        worker = Worker(session, mmap.mmap(settings.memory, 0), settings.stage_ms)
        finishing = session.finishing.other_ms if session.finishing else 0.0
        say({"ready": os.getpid(), "decode_ms": decode_ms(), "finishing_ms": finishing})
        for job in line.makefile("rb"):
            say(worker.answer(json.loads(job)))
    except (BrokenPipeError, ConnectionResetError):
        pass
    except (UserError, OSError) as error:
        say({"failed": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
