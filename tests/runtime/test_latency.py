import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from cnmm import _machine
from cnmm._machine import machine
from cnmm.runtime import latency
from cnmm.runtime.latency import Measurement, Timing, p95, percentile, read, store, time_calls
from tests.helpers import refused

HERE = machine()
VERSION = latency.runtime_version("onnx")


def timing(name="e1c0", ms=1.0):
    return Timing(point=name, macs=1000, median_ms=ms / 2, p95_ms=ms, n=20)


def measurement(*points, **changes):
    fields = {"machine": HERE, "runtime": "onnx", "runtime_version": VERSION, "precision": "float32"}
    fields |= {"threads": 1, "batch": 1, "points": points or (timing(),)}
    return Measurement(**fields | changes)


def test_this_machine():
    assert HERE["cpu"]
    assert 1 <= HERE["cores"] <= (os.cpu_count() or 1)
    assert machine() == HERE


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_quota_of_a_container(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(_machine, "Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else Path(path))
    assert _machine._quota() == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (2.0, 2), (math.inf, 3)])
def test_usable_cores(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(_machine, "_quota", lambda: quota)
    assert _machine.usable_cores() == cores


def test_percentile_is_a_value_that_occurred():
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([3.0], 95) == 3
    assert percentile([1.0, 2.0, 9.0], 95) == 9


def test_time_calls(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(latency.time, "perf_counter", lambda: next(clock))
    calls = []
    median, p95_ms, n = time_calls(lambda: calls.append(1), warmup=3, repeats=7)
    assert (median, p95_ms, n, len(calls)) == (1000, 1000, 7, 10)
    assert time_calls(lambda: None, warmup=0, repeats=1, seconds=30)[2] > 5


def test_what_is_stored_is_read(tmp_path):
    assert read(tmp_path) == ()
    first = measurement(timing("e1c0", 1), timing("e2c0", 3), stages=(timing("stage 1"),))
    store(tmp_path, first)
    assert read(tmp_path) == (first,)
    data = json.loads((tmp_path / "latency.json").read_text())
    assert data["format_version"] == 1
    assert data["measurements"][0]["machine"] == HERE
    assert data["measurements"][0]["points"][0] == {
        "point": "e1c0",
        "macs": 1000,
        "median_ms": 0.5,
        "p95_ms": 1,
        "n": 20,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {"cpu": "another", "cores": 4}},
        {"runtime": "openvino"},
        {"runtime_version": "0.1"},
        {"precision": "int8"},
        {"threads": 2},
        {"batch": 64},
    ],
)
def test_a_measurement_replaces_its_like_only(tmp_path, change):
    store(tmp_path, measurement(timing("old")))
    store(tmp_path, measurement(timing("other"), **change))
    store(tmp_path, measurement(timing("new")))
    assert [entry.points[0].point for entry in read(tmp_path)] == ["other", "new"]


def test_p95_of_this_machine(tmp_path):
    store(tmp_path, measurement(timing("e1c0", 1), timing("e2c0", 3)))
    store(tmp_path, measurement(timing("e1c0", 0.1), machine={"cpu": "another", "cores": 64}))
    assert p95(tmp_path) == {"e1c0": 1, "e2c0": 3}


def test_the_fastest_counts_unless_told(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "runtime_version", lambda name: VERSION)
    store(tmp_path, measurement(timing(ms=3)))
    store(tmp_path, measurement(timing(ms=2), runtime="openvino"))
    store(tmp_path, measurement(timing(ms=1), threads=2))
    store(tmp_path, measurement(timing(ms=9), batch=8))
    assert p95(tmp_path) == {"e1c0": 1}
    assert p95(tmp_path, threads=1) == {"e1c0": 2}
    assert p95(tmp_path, threads=1, runtime="onnx") == {"e1c0": 3}
    assert p95(tmp_path, batch=8) == {"e1c0": 9}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": {"cpu": "Abacus 3", "cores": 4}}, "measured on Abacus 3 with 4 usable cores, not here"),
        ({"machine": {**HERE, "cores": HERE["cores"] + 1}}, f"{HERE['cores'] + 1} usable cores, not here"),
        ({"runtime_version": "0.1"}, "onnxruntime 0.1"),
        ({"precision": "int8"}, "float32"),
        ({"batch": 64}, "batch 1"),
        ({"threads": 7}, "1 threads"),
        ({"runtime": "openvino"}, "onnx"),
    ],
)
def test_nothing_is_guessed(tmp_path, change, words):
    store(tmp_path, measurement(**change))
    line = refused(p95, tmp_path, runtime="onnx", threads=1)
    assert words in line
    assert line.endswith(f"run: cnmm bench {tmp_path} --runtime onnx --threads 1")


def test_nothing_was_measured(tmp_path):
    line = refused(p95, tmp_path)
    assert "not measured" in line
    assert f"cnmm bench {tmp_path}" in line


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "{}", '{"format_version": 99, "measurements": []}'),
        *('{"format_version": 1}', '{"format_version": 1, "measurements": [3]}'),
        '{"format_version": 1, "measurements": [{"machine": {}}]}',
    ],
)
def test_a_corrupt_file(tmp_path, text):
    (tmp_path / "latency.json").write_text(text)
    for function in (read, p95):
        line = refused(function, tmp_path)
        assert str(tmp_path / "latency.json") in line
        assert "cnmm bench" in line


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "measurements[0].points[0].p95_ms=None: must be a number between 0 and 1e+09"),
        ("fast", "measurements[0].points[0].p95_ms='fast'"),
        (-1, "measurements[0].points[0].p95_ms=-1"),
        (math.nan, "NaN is no finite number"),
    ],
)
def test_a_corrupt_time(tmp_path, value, words):
    store(tmp_path, measurement(dataclasses.replace(timing(), p95_ms=value)))
    assert words in refused(read, tmp_path)
