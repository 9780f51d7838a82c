"""The load generator against servers that are made up, mostly in virtual time."""

import asyncio
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from cnmm.cli import main as cli
from cnmm.serve.arrivals import arrival_times
from cnmm.serve.http_answer import MOST_HEAD, AnswerReader
from cnmm.serve.infer import infer_answer, infer_request
from cnmm.serve.loadtest import loadtest
from cnmm.serve.menu import Menu
from cnmm.serve.open_loop import LOST, NOT_SENT, fine_loop, parse_url, send_all
from tests.helpers import ROOT, complaint, refused
from tests.serve.menus import cascade_menu, point_menu
from tests.serve.stub import SIZE, Stub, VirtualLoop

IMAGES = np.zeros((1, *SIZE), np.uint8)


def asked(address, model, images, **parameters):
    return infer_request(address, model, images, tensor="image", outputs=["probabilities"], parameters=parameters)


def sent(stub, times_s, *, loop=VirtualLoop, beside=None, digest=lambda number, answer: None):
    """What became of requests at these times, with the server in the same loop."""

    async def run():
        address = parse_url(f"http://127.0.0.1:{await stub.start()}")
        task = asyncio.create_task(beside()) if beside else None
        outcome = await send_all(address, [asked(address, "made_up", IMAGES)], times_s, digest)
        if task:
            task.cancel()
        stub.server.close()
        return outcome

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run())


@pytest.fixture
def server():
    """Starts stubs in processes of their own; gives their URLs."""
    started = []

    def start(*args):
        command = [sys.executable, "-m", "tests.serve.stub", *map(str, args)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT))
        return f"http://127.0.0.1:{int(started[-1].stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.wait()


# Does it measure what it says?


def test_a_stall_of_a_second_in_ten_shows():
    """A generator that waits for answers would report a p99 of nothing."""
    outcome = sent(Stub(stall=(5.0, 1.0)), np.arange(1000) / 100)
    assert (outcome.status == 200).all()
    assert np.percentile(outcome.latency_s, 99) == pytest.approx(0.9, abs=0.02)
    assert np.percentile(outcome.latency_s, 50) < 0.001


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_wait_of_a_queue_with_fixed_service(load):
    """Poisson arrivals, one server: the mean wait is load / (2 (1 - load)) services. And each one, by recursion."""
    service = 0.02
    times = arrival_times("poisson", 12_000, load / service, seed=3)
    outcome = sent(Stub(service_s=service), times)
    wait = outcome.latency_s - service
    ends = np.empty(len(times))
    end = 0.0
    for number, moment in enumerate(times):
        end = ends[number] = max(moment, end) + service
    assert wait.mean() == pytest.approx(service * load / (2 * (1 - load)), rel=0.1)
    assert np.abs(outcome.latency_s - (ends - times)).max() < 1e-3
    assert outcome.lag_s.max() < 1e-3


def test_in_real_time(server):
    """The same in another process, by the real clock, loosely: 0.2 s of 2 s."""
    trial, answer = loadtest(server(1, 1.0, 0.2), rate=100, arrivals="poisson", requests=200)
    assert answer["errors"] == answer["lost"] == answer["shed"] == 0
    assert 120 < answer["p99_ms"] < 400
    assert len(trial.arrived_ms) == 200
    assert trial.latency_ms.min() > 1
    assert answer["loop_ms"] == pytest.approx(0.5)


def test_a_generator_that_lags_is_found_out():
    async def in_the_way():
        while True:
            time.sleep(0.004)
            await asyncio.sleep(0.004)

    times = arrival_times("poisson", 300, 0.5, seed=1) / 1e3
    assert np.percentile(sent(Stub(), times, loop=fine_loop, beside=in_the_way).lag_s, 99) > 0.001


def test_a_run_with_lag_is_invalid(server, capsys, monkeypatch):
    monkeypatch.setattr("cnmm.serve.loadtest.LAG_MS", -1.0)
    url = server(1)
    assert cli.main(["loadtest", url, "--requests", "20", "--rate", "200", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False
    assert cli.main(["loadtest", url, "--requests", "20", "--rate", "200"]) == 1
    assert "INVALID" in capsys.readouterr().err


# What becomes of requests


def test_nothing_is_sent_twice_and_nothing_is_forgotten():
    """Some are refused, some fail, some are cut off, and some never answered."""
    answers = {1: ("503 Busy", {"error": "busy"}), 2: ("500 Oh", {"error": "oh"}), 3: "close", 4: "silence"}
    stub = Stub(answer=lambda number: answers.get(number % 10))
    outcome = sent(stub, np.arange(1, 101) / 100)
    assert len(stub.arrived) == 100
    assert np.bincount(outcome.status)[[LOST, 200, 500, 503]].tolist() == [20, 60, 10, 10]
    assert sum(outcome.reasons.values()) == 20
    assert (outcome.latency_s[3::10] < 0.001).all()
    assert (outcome.latency_s[4::10] > 60).all()


def test_as_many_connections_as_it_takes():
    outcome = sent(Stub(service_s=0.01), np.full(300, 0.01))
    assert (outcome.status == 200).all()
    assert outcome.connections == 300
    assert outcome.latency_s.max() == pytest.approx(3.0, abs=0.01)


def test_idle_connections_are_not_trusted():
    outcome = sent(Stub(), np.array([0.0, 1.0, 2.0, 10.0]))
    assert (outcome.status == 200).all()
    assert outcome.connections == 5


def test_a_server_that_goes_away():
    stub = Stub(headers="connection: close\r\n")

    async def leave():
        await asyncio.sleep(1.0)
        stub.server.close()

    outcome = sent(stub, np.arange(200) / 100, beside=leave)
    assert set(outcome.status.tolist()) == {200, NOT_SENT}
    assert any("no connection" in reason for reason in outcome.reasons)


# The verb


def test_the_verb(server, capsys, tmp_path):
    url = server(2)
    answer = ask_loosely(
        capsys, "loadtest", url, "--rate", 100, "--requests", 100, "--images-per-request", 3, "-o", tmp_path / "a.svg"
    )
    assert answer["requests"] == 100
    assert answer["effective_quality"] == answer["expected_quality"] == pytest.approx(0.92 * answer["attainment"])
    assert 0.6 < answer["oracle_quality"] < 0.92  # by the times that the stub claims, not by those that it takes
    assert answer["labelled"] is False
    assert answer["errors"] == answer["lost"] == 0
    assert answer["rate"] == pytest.approx(100)
    assert answer["mean_load"] == pytest.approx(3)
    assert answer["policy"] == "fixed:e4c0"
    assert answer["slowdown"] == pytest.approx(1)
    assert answer["noise"] == pytest.approx(0)
    assert {"effective_quality", "p99_ms", "quality_difference", "p99_ratio"} <= set(answer["predicted"])
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert cli.main(["loadtest", url, "--rate", "200", "--requests", "20", "--arrivals", "step"]) in (0, 1)
    out, err = capsys.readouterr()
    assert "effective accuracy %" in out
    assert "errors 0, lost 0" in err
    assert "after the step down" in err


def ask_loosely(capsys, *args):
    """The JSON, though a busy machine may have made the generator lag."""
    assert cli.main([*map(str, args), "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_labels_tell_what_is_right(server, capsys, tmp_path):
    """The stub takes everything for a cat."""
    from PIL import Image

    for name, num in (("cat", 6), ("dog", 2)):
        (tmp_path / "test" / name).mkdir(parents=True)
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(num):
            for split in ("train", "test"):
                Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / split / name / f"{number}.png")
    url = server(1)
    answer = ask_loosely(capsys, "loadtest", url, "--rate", 100, "--requests", 40, "--data", f"folder:{tmp_path}")
    assert answer["labelled"] is True
    if answer["attainment"] == 1:
        assert answer["effective_quality"] == pytest.approx(0.75)
        assert answer["expected_quality"] == pytest.approx(0.92)
    answer = ask_loosely(capsys, "loadtest", url, "--rate", 100, "--requests", 9, "--images", tmp_path / "test" / "cat")
    assert answer["labelled"] is False
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "yak")
    (tmp_path / "train" / "cat").rename(tmp_path / "train" / "yak")
    assert "'yak'" in complaint(capsys, "loadtest", url, "--data", f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ftp://a"], "such as http://127.0.0.1:8080"),
        (["127.0.0.1:8080"], "such as http://127.0.0.1:8080"),
        (["http://127.0.0.1:99999"], "such as http://127.0.0.1:8080"),
        (["http://127.0.0.1:1"], "start `cnmm serve` there"),
        (["http://127.0.0.1:1", "--rate", "1", "--load", "2"], "rate and load cannot be combined"),
        (["http://127.0.0.1:1", "--rate", "0"], "--rate=0.0: must be"),
        (["http://127.0.0.1:1", "--images", "a", "--data", "b"], "images and data cannot be combined"),
        (["http://127.0.0.1:1", "-o", "a.png"], "charts are written as .svg"),
        (["http://127.0.0.1:1\r\nx"], "such as http://127.0.0.1:8080"),
    ],
)
def test_complaints(capsys, args, words):
    assert words in complaint(capsys, "loadtest", *args)


def test_strangers_are_refused(server, capsys):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    stranger = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=stranger.serve_forever, daemon=True).start()
    try:
        line = complaint(capsys, "loadtest", f"http://127.0.0.1:{stranger.server_port}")
        assert "is it a server of `cnmm serve`?" in line
    finally:
        stranger.shutdown()
        stranger.server_close()


# Bytes


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", 200, b"abc", False),
    (b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n", 503, b"", False),
    (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", 200, b"a", True),
    (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
        200,
        b"abcde",
        False,
    ),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", 204, b"", False),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", 200, b"a", True),
]


@pytest.mark.parametrize(("data", "status", "body", "last"), ANSWERS)
def test_answers_in_pieces(data, status, body, last):
    for cut in range(len(data)):
        reader = AnswerReader()
        answer = reader.feed(data[:cut]) or reader.feed(data[cut:])
        assert (answer.status, answer.body, answer.last) == (status, body, last)
    reader = AnswerReader()
    found = [reader.feed(bytes([byte])) for byte in data]
    assert found[-1].body == body
    assert not any(found[:-1])


def test_an_answer_that_ends_with_its_connection():
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") is None
    assert reader.end().body == b"abc"
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc") is None
    assert reader.end() is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -3\r\n\r\n", "of length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n", "at most"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", "more bytes than one answer"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "the header"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "a chunk of size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n", "at most"),
        (b"x" * (MOST_HEAD + 1), "at most"),
    ],
)
def test_answers_that_lie(data, words):
    assert words in refused(AnswerReader().feed, data)


def test_a_request_byte_by_byte():
    address = parse_url("http://[::1]:8080/at/")
    images = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    head, _, body = asked(address, "m", images, timeout=60000).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    header = (
        '{"inputs":[{"name":"image","datatype":"UINT8","shape":[1,2,4,3],"parameters":{"binary_data_size":24}}],'
        '"outputs":[{"name":"probabilities","parameters":{"binary_data":true}}],"parameters":{"timeout":60000}}'
    )
    assert lines[:2] == ["POST /at/v2/models/m/infer HTTP/1.1", "Host: [::1]:8080"]
    assert f"Inference-Header-Content-Length: {len(header)}" in lines
    assert f"Content-Length: {len(header) + 24}" in lines
    assert body == header.encode() + images.tobytes()


def test_answers_with_binary_tensors():
    header = json.dumps(
        {
            "outputs": [
                {"name": "a", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
                {"name": "b", "datatype": "INT64", "shape": [2], "data": [3, 4]},
                {"name": "c", "datatype": "UINT8", "shape": [1], "parameters": {"binary_data_size": 1}},
            ],
            "parameters": {"exit": 3},
        }
    ).encode()
    body = header + np.array([0.5, 2.0], "<f4").tobytes() + b"\7"
    head = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    found = infer_answer(AnswerReader().feed(head.encode() + body))
    assert found.parameters == {"exit": 3}
    assert {name: array.tolist() for name, array in found.tensors.items()} == {"a": [[0.5, 2.0]], "b": [3, 4], "c": [7]}
    short = AnswerReader().feed(head.replace(str(len(body)), str(len(body) - 9)).encode() + body[:-9])
    assert "binary_data_size=8" in refused(infer_answer, short)


def test_a_menu_survives_json():
    for menu in (point_menu(), cascade_menu()):
        again = Menu.from_dict(json.loads(json.dumps(menu.to_dict())))
        assert (again.rows, again.points, again.stage_ms, again.full_ms) == (
            menu.rows,
            menu.points,
            menu.stage_ms,
            menu.full_ms,
        )
    data = point_menu().to_dict()
    assert "rows[0].ms" in refused(Menu.from_dict, {**data, "rows": [{**data["rows"][0], "ms": -1}]})
    assert "must be a hull" in refused(Menu.from_dict, {**data, "rows": data["rows"][::-1]})


def test_a_real_trace_has_comments():
    times = arrival_times(f"trace:{ROOT}/benchmarks/data/arrivals_azure_llm_2023.txt", 1000, 0.05)
    assert len(times) == 1000
    assert times[-1] == pytest.approx(20_000)
