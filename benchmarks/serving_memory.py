"""Does a server's memory grow? Very many requests, good and bad, and what its processes have in memory.

    python -m benchmarks.serving_memory LADDER                 # 200,000 requests

Of every 100 requests, 60 are pixels, 30 are JPEG files, 4 are damaged files, 4 are tensors of a wrong shape, 1 reads
the metrics, and 1 client hangs up before its answer. Printed are the statuses and, after every twentieth of them all,
the memory of the server and its workers. Nothing is timed, so that other work may go on. Exit status 1 if memory
after the first fifth grew by more than `MOST` MB, or if the server failed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving_overhead import SERVE, as_jpeg, server
from cnmm.ladder import read_ladder

MOST = 8.0
"""MB that memory may grow by, all processes together."""
CLIENTS = 4
SAMPLES = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ladder", type=Path)
    parser.add_argument("--requests", type=int, default=200_000)
    args = parser.parse_args()
    ladder = read_ladder(args.ladder)
    image = np.random.default_rng(0).integers(0, 256, (1, *ladder.preprocessing.image_shape), np.uint8)
    core = min(os.sched_getaffinity(0))
    with server(SERVE, args.ladder, "", core) as (port, pid):
        client = Client(port, f"/v2/models/{ladder.frontier.model}/infer", image)
        memory = list(client.all(args.requests, pid))
        alive = client.get("/v2/health/live") == 200
    settled = memory[SAMPLES // 5]
    grown = max(memory[SAMPLES // 5 :]) - settled
    failed = [status for status in client.statuses if status not in ("200", "400", "gone")]
    found = {"statuses": client.statuses, "memory_mb": memory, "grown_mb": round(grown, 1)}
    print(json.dumps({"requests": args.requests, **found}))
    return int(not alive or bool(failed) or grown > MOST)


class Client:
    """Some threads that ask, and what they were told."""

    def __init__(self, port: int, path: str, image: np.ndarray[Any, Any]) -> None:
        file, pixels = as_jpeg(image), image.tobytes()
        binary = {"Inference-Header-Content-Length": "0"}
        self.port, self.statuses, self._lock = port, Counter[str](), threading.Lock()
        self._pixels = (path, pixels, binary)
        self._mix = [
            *[self._pixels] * 60,
            *[("/predict", file, {})] * 30,
            *[("/predict", file[: len(file) // 2], {})] * 4,
            *[(path, pixels[:-1], binary)] * 4,
            None,  # reads the metrics
            ...,  # hangs up
        ]
        random.Random(0).shuffle(self._mix)

    def all(self, num: int, pid: int) -> Iterator[float]:
        """Sends so many requests; yields megabytes at the beginning and after each part."""
        yield self._said(0, pid)
        for part in range(SAMPLES):
            threads = [threading.Thread(target=self._ask, args=(num // SAMPLES // CLIENTS,)) for _ in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            yield self._said((part + 1) * num // SAMPLES, pid)

    def get(self, path: str) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return connection.getresponse().status

    def _said(self, done: int, pid: int) -> float:
        found = megabytes(pid)
        print(f"{done:9,} requests  {found:7.1f} MB  {dict(self.statuses)}", flush=True)
        return found

    def _ask(self, num: int) -> None:
        connection, own = HTTPConnection("127.0.0.1", self.port, timeout=60), Counter[str]()
        for what in itertools.islice(itertools.cycle(self._mix), num):
            if what is ...:
                self._hang_up()
                own["gone"] += 1
                continue
            if what is None:
                connection.request("GET", "/metrics")
            else:
                path, body, headers = what
                connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            own[str(response.status)] += 1
        connection.close()
        with self._lock:
            self.statuses.update(own)

    def _hang_up(self) -> None:
        path, body, headers = self._pixels
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def megabytes(pid: int) -> float:
    """What a process and its children have in memory."""
    total = 0.0
    for each in (pid, *_children(pid)):
        total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    return round(total, 1)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
