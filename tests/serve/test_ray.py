"""Ray: what its processes need of ours, and, where it is installed, replicas and batches for real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from cnmm.runtime.latency import measurement, store
from cnmm.serve.loadtest import loadtest
from cnmm.serve.ray_proxy import AnswerAnyway, middlewares, replicas_for, wanted_replicas
from cnmm.serve.ray_serve import SETTINGS, parse_replicas
from tests.helpers import ROOT, complaint, in_new_process, refused

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
QUIET = {
    "RAY_AUTH_MODE": "disabled",  # or it writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


# Without Ray


@pytest.mark.parametrize(
    ("wanted", "cores", "expected"), [(0.0, 2, 1), (1.9, 2, 1), (2.1, 2, 1), (2.3, 2, 2), (7.0, 2, 4), (99.0, 2, 5)]
)
def test_replicas_follow_the_wanted_cores(wanted, cores, expected):
    assert replicas_for(wanted, cores, 1, 5) == expected


def test_the_policy_adds_up_what_replicas_report():
    context = SimpleNamespace(
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        target_num_replicas=3,
        aggregated_metrics={"wanted_cores": {"a": 3.0, "b": 2.5}, "cores": {"a": 2.0, "b": 2.0}},
    )
    assert wanted_replicas(context) == (3, {})
    context.aggregated_metrics = {}
    assert wanted_replicas(context) == (3, {})
    context.target_num_replicas = 20
    assert wanted_replicas(context) == (8, {})


@pytest.mark.parametrize(("text", "expected"), [("2", (2, 2)), ("1-8", (1, 8))])
def test_replicas(text, expected):
    assert parse_replicas(text) == expected


@pytest.mark.parametrize("text", ["0", "two", "8-1", "1-", "-3", "", "1-99999", "²"])
def test_replicas_that_are_none(text):
    assert "such as 1-8" in refused(parse_replicas, text)


def test_replicas_belong_to_ray(capsys, timed_ladder):
    assert "--engine ray" in complaint(capsys, "serve", timed_ladder, "--replicas", "2")


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray(capsys, timed_ladder):
    assert 'pip install "cnmm[ray]"' in complaint(capsys, "serve", timed_ladder, "--engine", "ray")


def answered_by(app):
    """The messages that a client gets."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    asyncio.run(AnswerAnyway(app)({"type": "http"}, receive, send))
    return sent


def test_who_loses_its_replica_gets_a_503():
    async def silent(scope, receive, send):
        pass

    async def broken(scope, receive, send):
        raise RuntimeError("the actor died")

    async def fine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})

    for app in (silent, broken):
        start, body = answered_by(app)
        headers = dict(start["headers"])
        assert start["status"] == 503
        assert headers[b"retry-after"] == b"0"
        assert int(headers[b"content-length"]) == len(body["body"])
        assert "send it again" in json.loads(body["body"])["error"]
    assert [message.get("status") for message in answered_by(fine)] == [200, None]
    assert middlewares()[0].cls is AnswerAnyway
    assert SETTINGS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == f"{middlewares.__module__}.middlewares"


# With Ray


@pytest.fixture
def slow_ladder(timed_ladder, tmp_path):
    """It says that an image takes over a second: few requests want many cores, and cost the tests nothing."""
    folder = shutil.copytree(timed_ladder, tmp_path / "slow")
    timed = measurement(folder, runtime="onnx", precision="float32", threads=1)

    def slower(timings):
        return tuple(
            replace(each, median_ms=12_000 * each.median_ms, p95_ms=13_000 * each.median_ms) for each in timings
        )

    store(folder, replace(timed, points=slower(timed.points), stages=slower(timed.stages)))
    return folder


class Cluster:
    """`cnmm serve --engine ray` in a process of its own."""

    def __init__(self, folder, home):
        import socket

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.mark, self.seen = f"cnmm_test_{os.getpid()}", set()
        command = [sys.executable, "-m", "cnmm", "serve", folder, "--engine", "ray", "--replicas", "1-2"]
        command += ["--port", port, "--target-ms", 5000, "--runtime", "onnx"]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **QUIET, "HOME": str(home), "PYTHONPATH": str(ROOT), "CNMM_TEST": self.mark},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def get(self, path):
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name):
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.M))

    def answering(self):
        """Replicas that have answered some requests: each has its own metrics, and we see those of any one."""
        text = self.get("/metrics")
        made, count = (
            re.search(rf"^cnmm_request_seconds_{name} (\S+)$", text, re.M)[1] for name in ("created", "count")
        )
        if float(count) >= 5:
            self.seen.add(made)
        return self.seen

    def replicas(self):
        """Process ids; Ray gives its processes names."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mine = self.mark.encode() in (folder / "environ").read_bytes()
                if mine and (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:cnmm"):
                    found.append(int(folder.name))
            except OSError:  # not ours, or gone
                continue
        return found

    def until(self, what, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.stderr.read().decode()
            try:
                if what():
                    return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        raise AssertionError(f"not within {seconds} s")

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            with_mark = self.replicas()
            for number in with_mark:
                os.kill(number, signal.SIGKILL)


class Load(threading.Thread):
    """Load tests, one after the other, until they are stopped."""

    def __init__(self, url):
        super().__init__()
        self.url, self.answers, self.over = url, [], threading.Event()

    def run(self):
        while (
            not self.over.is_set()
        ):  # with a deadline of its own: the server sees rates over its target, which is short
            settings = {"rate": 4.0, "requests": 40, "target_ms": 60_000.0, "seed": len(self.answers)}
            self.answers.append(loadtest(self.url, **settings)[1])

    def total(self, name):
        return sum(answer[name] for answer in self.answers)


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_for_real(slow_ladder, tmp_path):
    """One replica, then two since the load wants them; then one of them is killed, and nobody loses a request."""
    cluster = Cluster(slow_ladder, tmp_path)
    load = Load(cluster.url)
    try:
        cluster.until(lambda: '"ready":true' in cluster.get("/v2/health/ready"), 180)
        assert len(cluster.replicas()) == 1
        assert cluster.metric("cnmm_wanted_cores") == 0
        load.start()
        cluster.until(lambda: cluster.metric("cnmm_wanted_cores") > 1.5, 60)
        cluster.until(lambda: len(cluster.replicas()) == 2, 180)
        cluster.until(lambda: len(cluster.answering()) == 2, 180)
        victim = cluster.replicas()[0]
        os.kill(victim, signal.SIGSTOP)  # so that it has requests when it dies
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)
        cluster.until(lambda: len(set(cluster.replicas()) - {victim}) == 2, 180)
        load.over.set()
        load.join(180)
        assert (load.total("errors"), load.total("lost")) == (0, 0), load.answers
        assert load.total("shed") > 0, "nobody was told to come again"
        assert load.total("attainment") > 0.9 * len(load.answers), load.answers
    finally:
        load.over.set()
        cluster.end()
    assert cluster.process.returncode == 0


RAY_DATA = """
import sys
import numpy as np, ray
from cnmm.runtime.batches import BatchPredictor
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
images = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
data = ray.data.from_items([{"number": n, "image": image} for n, image in enumerate(images)])
settings = {"ladder": sys.argv[1], "average_macs": "60%"}
rows = data.map_batches(BatchPredictor, fn_constructor_kwargs=settings, concurrency=2, batch_size=5).take_all()
rows.sort(key=lambda row: row["number"])
here = BatchPredictor(**settings)({"image": images})
assert [row["label"] for row in rows] == here["label"].tolist()
assert [row["exit"] for row in rows] == here["exit"].tolist()
assert {row["error"] for row in rows} == {""}
assert sorted(rows[0]) == ["confidence", "error", "exit", "label", "number"]
print(len(rows), "rows")
"""


@with_ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyarrow") is None, reason="Ray Data needs pyarrow")
def test_batches_with_ray_data(hand_made_ladder, tmp_path):
    environment = {**QUIET, "HOME": str(tmp_path)}
    result = in_new_process(sys.executable, "-c", RAY_DATA, hand_made_ladder, env=environment, timeout=240)
    assert "24 rows" in result.stdout, result.stderr
