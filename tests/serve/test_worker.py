"""A worker without its process: what it answers, when it stops, and that the simulator stops where it does."""

import io
import math
import mmap
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.runtime.inputs import sent_size
from cnmm.serve import worker as module
from cnmm.serve.controller import STAGE_MARGIN, Job, Ticket
from cnmm.serve.simulate import World, _Service
from cnmm.serve.worker import Worker
from tests.serve.menus import cascade_menu

NEVER = (1.0, 1.0)


@pytest.fixture(scope="module")
def session(timed_ladder):
    with cnmm.Session(timed_ladder, threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(4).integers(0, 256, (300, 8, 8, 3), np.uint8)


def job(images, memory, **more):
    memory[: images.size] = images.tobytes()
    asked = {"id": 1, "shape": images.shape, "sizes": [images.size], "point": "e3c0", "confidence": None}
    return {**asked, "until": None, "slowdown": 1.0, "want": "probabilities", **more}


def answers(memory, reply):
    return np.frombuffer(memory[: reply["sizes"][0]], np.float32).reshape(-1, 4)


@pytest.fixture
def memory():
    return mmap.mmap(-1, 2**20)


def test_points_and_cascades_are_those_of_a_session(session, images, memory):
    worker = Worker(session, memory, (0.1, 0.15, 0.25))
    reply = worker.answer(job(images, memory, point="e2c3"))
    assert np.array_equal(answers(memory, reply), session.predict(images, point="e2c3").probabilities)
    level = float(np.median(session.predict(images, point="e1c0").confidence))
    reply = worker.answer(job(images, memory, confidence=(level, level)))
    expected = session.predict(images, confidence=level)
    assert reply["exits"] == expected.exits.tolist()
    assert np.array_equal(answers(memory, reply), expected.probabilities)
    assert len(set(reply["exits"])) > 1
    assert not reply["cut"]


def test_a_stage_that_might_not_end_in_time_is_not_begun(session, images, memory):
    worker = Worker(session, memory, (0.1, 0.15, 0.25))
    late = worker.answer(job(images, memory, confidence=NEVER, until=module.now_ms() - 1))
    assert set(late["exits"]) == {1}
    assert late["cut"]
    assert np.array_equal(answers(memory, late), session.predict(images, point="e1c0").probabilities)
    early = worker.answer(job(images, memory, confidence=NEVER, until=module.now_ms() + 1e6))
    assert set(early["exits"]) == {3}
    assert not early["cut"]
    slow = Worker(session, memory, (0.1, 0.1, 1e6)).answer(
        job(images, memory, confidence=NEVER, until=module.now_ms() + 1e6)
    )
    assert set(slow["exits"]) == {2}


def test_images_in_later_passes_keep_their_part_of_the_time(session, images, memory, monkeypatch):
    """256 images of 8x8 run together, so 300 are two passes; the clock stands still."""
    monkeypatch.setattr(module, "now_ms", lambda: 0.0)
    needed = STAGE_MARGIN * 0.1 * 256
    worker = Worker(session, memory, (0.1, 0.1, 0.1))
    just = worker.answer(job(images, memory, confidence=NEVER, until=needed * 300 / 256 + 1e-6))
    assert set(just["exits"]) == {3}
    less = worker.answer(job(images, memory, confidence=NEVER, until=needed * 300 / 256 - 1e-6))
    assert less["exits"][:256] == [1] * 256
    assert less["exits"][256:] == [3] * 44


@pytest.mark.parametrize("slowdown", [1.0, 1.7])
def test_the_simulator_stops_where_a_worker_does(slowdown, monkeypatch):
    """The same images, times and limits through both, stage by stage."""
    menu, cut = cascade_menu(), 0
    row, service = menu.rows[-2], _Service(menu, (200, 5), World(slowdown=slowdown), 0)
    hardness = np.random.default_rng((0, 1)).random((200, 5))
    for number in range(200):
        exits = np.searchsorted(np.cumsum(row.leaves), hardness[number]).clip(max=2)
        until = float(np.random.default_rng(number).uniform(0, 60))
        ticket = Ticket(arrived=0.0, deadline=60.0, images=5)
        served = service.take(number, Job(ticket=ticket, worker=0, row=row, plan=None, expected_ms=1, until=until), 0.0)
        clock = [0.0]
        monkeypatch.setattr(module, "now_ms", lambda clock=clock: clock[0])
        worker = Worker(SimpleNamespace(finishing_ms=0.0), None, menu.stage_ms)
        may_begin = worker._until(until, slowdown)
        spent = 5 * menu.stage_ms[0]
        for stage in (1, 2):
            clock[0] = spent * slowdown
            left = int((exits >= stage).sum())
            if not left or not may_begin(stage, left, 1.0):
                break
            spent += left * menu.stage_ms[stage]
        assert served.expected_ms == pytest.approx(spent)
        assert served.ms == pytest.approx(spent * slowdown)
        cut += worker._cut
    assert 20 < cut < 180


def test_bad_images_and_bugs_end_no_worker(session, images, memory, capfd):
    worker = Worker(session, memory, ())
    broken = {**job(images[:1], memory), "shape": None, "sizes": [40]}
    reply = worker.answer(broken)
    assert reply["status"] == 400
    assert "not a known image format" in reply["error"]
    reply = worker.answer(job(images[:1], memory, confidence=NEVER, until=math.inf))
    assert (reply["status"], reply["error"]) == (500, "a worker failed: IndexError")
    assert "IndexError" in capfd.readouterr().err


def test_a_network_that_answers_nonsense_is_no_fault_of_the_client(session, images, memory, monkeypatch):
    right = session.predict(images[:1])
    monkeypatch.setattr(session, "predict", lambda *_, **__: replace(right, confidence=np.array([np.nan])))
    reply = Worker(session, memory, ()).answer(job(images[:1], memory))
    assert reply["status"] == 500
    assert "numbers that are not finite" in reply["error"]


def test_the_size_of_a_sent_image_is_known_without_decoding_it(monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "png")
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("decoded"))
    assert sent_size(file.getvalue()) == ("PNG", 60_000)
