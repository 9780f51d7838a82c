"""Ladders whose latency is known."""

from __future__ import annotations

import shutil

import pytest

from cnmm._machine import machine
from cnmm.runtime.latency import Measurement, Timing, runtime_version, store

MS = {"e1c0": 0.1, "e2c3": 0.2, "e3c0": 0.4, "stage 1": 0.1, "stage 2": 0.15, "stage 3": 0.25}


@pytest.fixture(scope="session")
def timed_ladder(hand_made_ladder, tmp_path_factory):
    """A ladder folder with made-up latencies of this machine, for one thread."""
    folder = shutil.copytree(hand_made_ladder, tmp_path_factory.mktemp("ladders") / "timed")
    timings = [Timing(point=name, macs=int(1e4 * ms), median_ms=ms, p95_ms=1.1 * ms, n=9) for name, ms in MS.items()]
    store(
        folder,
        Measurement(
            machine=machine(),
            runtime="onnx",
            runtime_version=runtime_version("onnx"),
            precision="float32",
            threads=1,
            batch=1,
            points=tuple(timings[:3]),
            stages=tuple(timings[3:]),
        ),
    )
    return folder
