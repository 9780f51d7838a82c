"""What must not happen to a server, done to it: nothing admitted is lost or answered twice, and it stays up."""

import contextlib
import gzip
import json
import os
import random
import re
import resource
import signal
import socket
import threading
import time

import httpx
import numpy as np
import pytest

import cnmm
from tests.runtime.ladders import SIZE
from tests.serve.servers import read_all, read_response, served

NUM = 2000
"""Images of a request that keeps a worker busy for a while."""
SHORT = """
from cnmm.serve import bodies, listen
bodies.BODY_S = listen.HEADER_S = 0.5
"""
NEVER_HUNG = "from cnmm.serve import engine; engine.HUNG_MS = 1e9"
LONG_TARGET = ("--runtime", "onnx", "--target-ms", 20_000)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(2).integers(0, 256, (NUM, SIZE, SIZE, 3), np.uint8)


@pytest.fixture(scope="module")
def expected(timed_ladder, images):
    with cnmm.Session(timed_ladder, threads=1) as session:
        return session.predict(images, point="e3c0").probabilities


def body_of(images, **parameters):
    tensor = {"name": "image", "shape": list(images.shape), "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": images.size}
    outputs = [{"name": "probabilities", "parameters": {"binary_data": True}}]
    text = json.dumps({"inputs": [tensor], "outputs": outputs, "parameters": parameters}).encode()
    return text + images.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


def infer(client, images, point="e3c0", **parameters):
    body, headers = body_of(images, **parameters)
    return client.post(f"/v2/models/by_hand/versions/{point}/infer", content=body, headers=headers)


def probabilities(response, num=NUM):
    return np.frombuffer(response.content[-16 * num :], "<f4").reshape(num, 4)


def raw_post(images):
    body, headers = body_of(images)
    lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": len(body)}.items()]
    head = "\r\n".join(["POST /v2/models/by_hand/versions/e3c0/infer HTTP/1.1", "Host: x", *lines])
    return head.encode() + b"\r\n\r\n" + body


def outcomes(said):
    """What the server says at its end."""
    words = re.search(r"requests: (.*)", said)[1]
    return {name: int(count.replace(",", "")) for count, name in re.findall(r"(\d[\d,]*) (\w+)", words)}


def in_threads(num, work):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    return threads


def test_killed_workers_lose_nothing(timed_ladder, images, expected):
    with served(timed_ladder, "--cores", 2, *LONG_TARGET) as server:
        found, done = [], threading.Event()

        def ask(number):
            with httpx.Client(base_url=server.url, timeout=60) as client:
                while not done.is_set():
                    found.append(infer(client, images))

        threads = in_threads(4, ask)
        for number in range(4):
            before = len(found)
            while len(found) < before + 4:
                time.sleep(0.01)
            for worker in server.workers()[: number % 2 + 1]:  # one of them, then both
                os.kill(worker, signal.SIGKILL)
        done.set()
        for thread in threads:
            thread.join()
        right = [r for r in found if r.status_code == 200]
        assert all(np.allclose(probabilities(r), expected, atol=1e-6) for r in right)
        assert len(right) == len(found)
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
        _, said = server.end()
        assert "is gone; it is started again" in said
        assert outcomes(said).get("answered", 0) + outcomes(said).get("late", 0) == len(right)


def test_sigterm_is_not_ready_serves_refuses_and_leaves(timed_ladder, images, expected):
    with served(timed_ladder, "--drain-s", 2, *LONG_TARGET) as server, httpx.Client(base_url=server.url) as watcher:
        answered, refused, moments = [], [], []
        part = images[:200]

        def ask(number):
            with httpx.Client(base_url=server.url, timeout=60) as client, contextlib.suppress(httpx.TransportError):
                while True:
                    response = infer(client, part)
                    (answered if response.status_code == 200 else refused).append(response)
                    moments.append(time.monotonic())

        threads = in_threads(4, ask)
        time.sleep(0.5)
        assert watcher.get("/v2/health/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        wait_until(lambda: watcher.get("/v2/health/ready").status_code == 503)
        assert watcher.get("/v2/health/live").status_code == 200
        for thread in threads:
            thread.join()
        assert server.process.wait(30) == 0
        server.reader.join()
        assert max(moments) - start > 1.8, "it went on serving for a while"
        assert all(np.allclose(probabilities(r, 200), expected[:200], atol=1e-6) for r in answered)
        assert {r.status_code for r in refused} <= {503}
        assert outcomes("".join(server.said))["answered"] == len(answered)
        with pytest.raises(ConnectionRefusedError):
            server.connect()


def test_a_second_signal_ends_it(timed_ladder):
    with served(timed_ladder, "--drain-s", 60, *LONG_TARGET) as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 503)
        assert server.process.poll() is None
        status, _ = server.end(signal.SIGTERM)
        assert status != 0


def test_workers_do_not_outlive_a_killed_server(timed_ladder):
    with served(timed_ladder, "--cores", 2, *LONG_TARGET) as server:
        workers = server.workers()
        assert len(workers) == 2
        server.process.kill()
        for worker in workers:
            wait_until(lambda worker=worker: not os.path.exists(f"/proc/{worker}") or "Z" in state(worker))


def state(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return "Z"


def test_who_goes_away_leaves_the_queue(timed_ladder, images, expected):
    """The worker is held back, so that nobody is answered before the others have gone."""
    with served(timed_ladder, "--cores", 1, *LONG_TARGET, patch=NEVER_HUNG) as server:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        first = [server.connect() for _ in range(2)]
        for connection in first:
            connection.sendall(raw_post(images))
        wait_until(lambda: metric(server, "cnmm_waiting") == 1)
        gone = [server.connect() for _ in range(10)]
        for connection in gone:
            connection.sendall(raw_post(images))
        wait_until(lambda: metric(server, "cnmm_waiting") == 11)
        for connection in gone:
            connection.close()
        wait_until(lambda: metric(server, "cnmm_waiting") == 1)
        os.kill(worker, signal.SIGCONT)
        for connection in first:
            status, _, body = read_response(connection)
            assert status == 200
            assert np.allclose(np.frombuffer(body[-16 * NUM :], "<f4").reshape(NUM, 4), expected, atol=1e-6)
            connection.close()
        _, said = server.end()
        assert outcomes(said)["gone"] == 10


def metric(server, name):
    return float(re.search(rf"^{name} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)[1])


def wait_until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_overload_is_503_with_a_time_to_come_back(timed_ladder, images):
    with served(timed_ladder, "--cores", 1, "--runtime", "onnx", "--target-ms", 300) as server:
        found = []

        def ask(number):
            with httpx.Client(base_url=server.url, timeout=60) as client:
                found.extend(infer(client, images[:1000]) for _ in range(3))

        for thread in in_threads(12, ask):
            thread.join()
        shed = [r for r in found if r.status_code == 503]
        assert {r.status_code for r in found} == {200, 503}
        for response in shed:
            assert "cheapest" in response.json()["error"]
            assert response.json()["retry_after_ms"] > 0
            assert int(response.headers["retry-after"]) >= 1
        text = httpx.get(f"{server.url}/metrics").text
        assert f'cnmm_shed_total{{reason="late"}} {len(shed)}.0' in text


@pytest.fixture(scope="module")
def usual(timed_ladder):
    with served(timed_ladder, "--cores", 1, *LONG_TARGET) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(timed_ladder):
    with served(timed_ladder, "--cores", 1, *LONG_TARGET, patch=SHORT) as server:
        yield server


@pytest.fixture
def alive(usual, images):
    """Whatever a test does to the server, others are served as before."""
    yield usual
    assert_serves(usual, images)


@pytest.fixture
def hasty(impatient, images):
    """The same with a server that waits for half a second only."""
    yield impatient
    assert_serves(impatient, images)


def assert_serves(server, images):
    with httpx.Client(base_url=server.url) as client:
        assert infer(client, images[:1]).status_code == 200
        assert client.get("/v2/health/live").status_code == 200


HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /pre",
        HEAD,
        HEAD + b"Content-Length: 500\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
)
def test_slow_clients(hasty, sent):
    assert_refused(hasty, sent, 408)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: 99999999999\r\n\r\nabc", 413),
        (HEAD + b"Content-Length: 9999999999999999999999999\r\n\r\nabc", 400),
        (HEAD + b"Content-Length: -5\r\n\r\nabc", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde", 400),
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nXYZ\r\n", 400),
        (HEAD + b"X: \x00\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (HEAD + b"A: " + b"a" * 2**18, 431),
        (HEAD + b"Content-Encoding: br\r\nContent-Length: 3\r\n\r\nabc", 415),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 400),
    ],
)
def test_lying_clients(alive, sent, status):
    assert_refused(alive, sent, status)


def assert_refused(server, sent, status):
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        found = read_response(connection)
        assert found is not None
        assert found[0] == status
        assert json.loads(found[2])["error"]


def test_a_client_that_dribbles_is_cut_off(hasty):
    """Not each byte has half a second: the whole head has."""
    with hasty.connect() as connection:
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD * 10:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - start < 5
        assert b"408" in read_all(connection)


def test_a_body_without_an_end_is_413(alive):
    with alive.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + bytes(2**20) + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(80):
                connection.sendall(piece)
        assert b"413" in read_all(connection)


def test_more_than_is_declared_ends_the_connection(alive):
    """The rest would be another request, which makes no sense."""
    with alive.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 3\r\n\r\nabcdefgh\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400")


def test_noise_is_survived(alive):
    generator = random.Random(1)
    good = raw_post(np.zeros((1, SIZE, SIZE, 3), np.uint8))
    for _ in range(150):
        sent = bytearray(good)
        for _ in range(generator.randint(1, 20)):
            sent[generator.randrange(min(len(sent), 400))] = generator.randrange(256)
        if generator.random() < 0.3:
            sent = sent[: generator.randrange(len(sent))]
        with alive.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            found = read_all(connection)
            assert b"HTTP/1.1 5" not in found


def test_a_bomb_takes_no_memory(alive):
    bomb = gzip.compress(bytes(2**27))
    before = memory(alive.process.pid)
    with httpx.Client(base_url=alive.url, timeout=60) as client:
        for body in (bomb, gzip.compress(bomb), bomb):
            found = client.post("/predict", content=body, headers={"content-encoding": "gzip"})
            assert found.status_code == (413 if body is bomb else 400)
    assert memory(alive.process.pid) - before < 2**27 - 2**24


def memory(pid):
    """Bytes that a process has in memory."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_thousand_connections(alive, images):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2500:
        pytest.skip("this system allows too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2500, most))
    with contextlib.ExitStack() as stack:
        request = raw_post(images[:1])
        connections = []
        for _ in range(1000):
            connections.append(stack.enter_context(alive.connect()))
            connections[-1].sendall(request)
        assert {read_response(connection)[0] for connection in connections} == {200}
