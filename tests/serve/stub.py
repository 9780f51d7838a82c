"""A server that is made up: it says what a menu says, and takes as long as it is told by the clock of its loop.

`python -m tests.serve.stub SERVICE_MS [STALL_AT_S STALL_S]` starts one and prints its port.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import sys

from tests.serve.menus import point_menu

CLASSES = ["cat", "dog", "emu", "fox"]
SIZE = (4, 4, 3)
LOOP_S = 0.0005
"""That its event loop says it computes for a request."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes at once where nothing else is to be done: hours take seconds, and no machine is too slow."""

    def __init__(self):
        self.now = 0.0
        loop = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                events = super().select(0)
                if not events and timeout:
                    loop.now += timeout
                elif not events and timeout is None:
                    return super().select(0.01)
                return events

        super().__init__(Selector())

    def time(self):
        return self.now


class Stub:
    """First come, first served, by one server with a fixed service time and, perhaps, one stall."""

    def __init__(self, *, service_s=0.0, stall=None, point="e4c0", answer=None, headers="", cores=1):
        self.service_s, self.stall, self.point, self.cores = service_s, stall, point, cores
        self.answer = answer
        self.headers = headers
        self.menu = point_menu()
        self.free = 0.0
        self.begin = None
        self.arrived = []
        self.requests = []

    def about(self):
        menu = self.menu.to_dict()
        return {
            **menu,
            "points": [{**point, "name": point["point"]} for point in menu["points"]],
            "task": "classification",
            "classes": CLASSES,
            "input": {"height": SIZE[0], "width": SIZE[1], "channels": SIZE[2]},
            "target_ms": 60.0,
            "cores": self.cores,
            "policy": f"fixed:{self.point}",
        }

    def describe(self):
        return {"name": "made_up", "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, *SIZE]}]}

    def infer_body(self, images):
        row = self.menu.points[self.point]
        return {
            "model_name": "made_up",
            "outputs": [
                {"name": "probabilities", "datatype": "FP32", "shape": [images, 4], "data": [1, 0, 0, 0] * images}
            ],
            "parameters": {
                "operating_point": self.point,
                "macs": row.macs,
                "queue_ms": 0.0,
                "compute_ms": row.ms * images,
                "expected_accuracy": row.quality,
                "degraded": False,
            },
        }

    async def start(self):
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=2000)
        return self.server.sockets[0].getsockname()[1]

    def due(self, now):
        """When the request that arrives now is answered."""
        self.begin = now if self.begin is None else self.begin
        self.arrived.append(now)
        start = max(now, self.free)
        if self.stall and self.begin + self.stall[0] <= start < self.begin + sum(self.stall):
            start = self.begin + sum(self.stall)
        self.free = start + self.service_s
        return self.free


class _Connection(asyncio.Protocol):
    def __init__(self, stub):
        self.stub, self.data = stub, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data
        head, end, rest = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        first, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(fields.get("content-length", 0))
        if len(rest) < length:
            return
        self.data = rest[length:]
        self.answer(first, fields, rest[:length])

    def answer(self, first, fields, body):
        stub, loop = self.stub, asyncio.get_running_loop()
        if first.startswith("GET /about "):
            return self.write(stub.about())
        if first.startswith("GET /v2/models/made_up "):
            return self.write(stub.describe())
        if first.startswith("GET /metrics "):
            return self.write(f"# HELP ...\nprocess_cpu_seconds_total {LOOP_S * len(stub.arrived):.6g}\n".encode())
        header = json.loads(body[: int(fields["inference-header-content-length"])])
        stub.requests.append(header)
        images = header["inputs"][0]["shape"][0]
        number = len(stub.arrived)
        due = stub.due(loop.time())
        answer = stub.answer(number) if stub.answer else None
        if answer == "close":
            return self.transport.abort()
        if answer == "silence":
            return None
        status, content = answer or ("200 OK", stub.infer_body(images))
        loop.call_at(due, self.write, content, status)
        return None

    def write(self, content, status="200 OK"):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if self.transport.is_closing():
            return
        self.transport.write(
            f"HTTP/1.1 {status}\r\n{self.stub.headers}content-length: {len(body)}\r\n\r\n".encode() + body
        )


async def main():
    service_ms, *stall = map(float, sys.argv[1:])
    stub = Stub(service_s=service_ms / 1e3, stall=tuple(stall) or None)
    print(await stub.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    from cnmm.serve.open_loop import fine_loop

    with asyncio.Runner(loop_factory=fine_loop) as runner:
        runner.run(main())
