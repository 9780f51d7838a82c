"""What serving costs beside computing: from a request to its answer, minus what the networks take.

    python -m benchmarks.serving_overhead LADDER

One client, one request after the other, against `cnmm serve` and against a bare Starlette handler that calls the same
network in its own process. Then a stub instead of networks, and many connections: what the event loop alone can hold.
Server and client have different cores where there are two. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cnmm._machine import machine
from cnmm.ladder import read_ladder
from cnmm.runtime.latency import percentile

BARE = """
import asyncio, sys, time
import numpy as np, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from cnmm.runtime.session import Session

folder, point, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = Session(folder, threads=1, points=[point], cascade=False)
shape = session.preprocessing.image_shape

async def infer(request):
    body = await request.body()
    start = time.perf_counter()
    found = session.predict(np.frombuffer(body, np.uint8).reshape(-1, *shape), point=point)
    spent = 1e3 * (time.perf_counter() - start)
    return Response(found.probabilities.tobytes(), headers={"compute-ms": str(spent)})

uvicorn.run(Starlette(routes=[Route("/", infer, methods=["POST"])]), port=port, log_level="critical", http="httptools")
"""
SERVE = """
import sys
from cnmm.cli.main import main
sys.exit(main(["serve", sys.argv[1], "--cores", "1", "--port", sys.argv[3]]))
"""
STUB = """
import sys
import numpy as np
from cnmm.serve import engine, listen
from cnmm.ladder import read_ladder

class Stub:
    def __init__(self, num, settings, *, on_reply, on_lost, on_ready):
        self.num, self.on_reply, self.on_ready = num, on_reply, on_ready
        ladder = read_ladder(settings["folder"])
        self.exit, self.macs = ladder.frontier.points[0].exit, ladder.frontier.points[0].macs
        self.answer = np.full(len(ladder.preprocessing.classes), 0.1, np.float32).tobytes()
    async def start(self):
        import asyncio
        self.loop = asyncio.get_running_loop()
        for worker in range(self.num):
            self.on_ready(worker, {"decode_ms": 0.0, "finishing_ms": 0.0})
    async def close(self): ...
    def pids(self): return []
    def received(self, worker, sizes): return [self.answer]
    def send(self, worker, words, parts):
        about = {"exits": [self.exit], "macs": self.macs, "confidence": [0.5], "shapes": [], "sizes": [0], "cut": False}
        self.loop.call_soon(self.on_reply, worker, {"id": words["id"], "decode_ms": 0.0, "compute_ms": 0.0, **about})

engine.Pool = Stub
listen.serve(sys.argv[1], cores=1, port=int(sys.argv[3]), target_ms=10_000)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ladder", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=16)
    args = parser.parse_args()
    ladder = read_ladder(args.ladder)
    point = ladder.frontier.points[0].name
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    print(f"{machine()['cpu']}, cores {len(cores)}, {ladder.frontier.model} at {point}, {args.requests} requests each")
    image = np.random.default_rng(0).integers(0, 256, (1, *ladder.preprocessing.image_shape), np.uint8)
    rows: list[tuple[str, list[float]]] = []
    with server(BARE, args.ladder, point, cores[0]) as (port, _):
        rows.append(("bare handler, pixels", bare(port, image, args.requests)))
    with server(SERVE, args.ladder, point, cores[0]) as (port, _):
        path = f"/v2/models/{ladder.frontier.model}/versions/{point}/infer"
        rows.append(("cnmm serve, raw binary", raw_binary(port, path, image, args.requests)))
        rows.append(("cnmm serve, tritonclient", by_triton(port, ladder.frontier.model, point, image, args.requests)))
        rows.append(("cnmm serve, JPEG", jpeg(port, point, image, args.requests)))
    for name, times in rows:
        print(f"{name:28} median {percentile(times, 50):7.3f} ms   p99 {percentile(times, 99):7.3f} ms")
    with server(STUB, args.ladder, point, cores[0]) as (port, _):
        rate = hold(port, path, image, args.requests, args.connections)
        print(f"the loop with a stub holds {rate:.0f} requests/s from {args.connections} connections")


@contextmanager
def server(code: str, folder: Path, point: str, core: int) -> Iterator[tuple[int, int]]:
    """A process on a core of its own; yields its port when it answers, and its number."""
    port = free_port()
    command = ["taskset", "-c", str(core), sys.executable, "-c", code, str(folder), point, str(port)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        for _ in range(600):
            try:
                connection = HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/v2/health/ready")
                connection.getresponse().read()
                break
            except OSError:
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        time.sleep(0.2)
        process.kill()
        process.wait()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def timed(num: int, call: Callable[[], float]) -> list[float]:
    """Milliseconds of each call beside those that it says were computing; the first ones warm up."""
    times = []
    for number in range(num + 50):
        start = time.perf_counter()
        computing = call()
        if number >= 50:
            times.append(1e3 * (time.perf_counter() - start) - computing)
    return times


def post(connection: HTTPConnection, path: str, body: bytes, **headers: str) -> tuple[Any, bytes]:
    connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {data[:300]!r}")
    return response, data


def bare(port: int, image: np.ndarray[Any, Any], num: int) -> list[float]:
    connection = HTTPConnection("127.0.0.1", port)
    body = image.tobytes()
    return timed(num, lambda: float(post(connection, "/", body)[0].headers["compute-ms"]))


def computed(data: bytes) -> float:
    found = re.search(rb'"compute_ms":([\d.]+)', data)
    assert found
    return float(found[1])


def raw_binary(port: int, path: str, image: np.ndarray[Any, Any], num: int) -> list[float]:
    connection = HTTPConnection("127.0.0.1", port)
    body = image.tobytes()
    return timed(num, lambda: computed(post(connection, path, body, Inference_Header_Content_Length="0")[1]))


def by_triton(port: int, model: str, point: str, image: np.ndarray[Any, Any], num: int) -> list[float]:
    import tritonclient.http as triton

    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("image", image.shape, "UINT8")
    tensor.set_data_from_numpy(image)

    def call() -> float:
        found = client.infer(model, [tensor], model_version=point)
        return float(found.get_response()["parameters"]["compute_ms"])

    return timed(num, call)


def jpeg(port: int, point: str, image: np.ndarray[Any, Any], num: int) -> list[float]:
    connection, body = HTTPConnection("127.0.0.1", port), as_jpeg(image)
    path = f"/predict?operating_point={point}"
    return timed(num, lambda: computed(post(connection, path, body)[1]))


def as_jpeg(image: np.ndarray[Any, Any]) -> bytes:
    """A file of the first image."""
    file = io.BytesIO()
    Image.fromarray(image[0] if image.shape[-1] == 3 else image[0, ..., 0]).save(file, "jpeg")
    return file.getvalue()


def hold(port: int, path: str, image: np.ndarray[Any, Any], num: int, connections: int) -> float:
    """Requests per second when each connection sends the next as soon as it has an answer."""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "image",
                    "shape": image.shape,
                    "datatype": "UINT8",
                    "parameters": {"binary_data_size": image.size},
                }
            ]
        }
    ).encode()

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", port)
        for _ in range(num // connections):
            post(connection, path, head + image.tobytes(), Inference_Header_Content_Length=str(len(head)))

    threads = [threading.Thread(target=ask) for _ in range(connections)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num // connections * connections / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
