"""Time left: a clock that counts what has not begun yet, on made-up work and on real trainings and measurements."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import cnmm
from benchmarks.time_left import listen, share_right
from cnmm import _progress
from cnmm._progress import Clock, Waiting, reading
from cnmm.cli import terminal
from cnmm.cli.terminal import Bar, duration
from cnmm.training.progress import USUAL, image_work, training_clock
from cnmm.training.recipes import recipe
from tests.helpers import small_sample


@pytest.fixture
def now(monkeypatch):
    """A time that passes only where a test says so."""
    passed = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: passed[0])
    return passed


def test_a_clock_counts_what_has_not_begun(now):
    clock = Clock({"step": 3.0, "evaluation": 1.0}, {"step": 100, "evaluation": 60})
    assert clock.left_s is None
    assert clock.done == 0
    for _ in range(10):
        now[0] += 6.0
        clock.tick("step", 1)
    # 90 steps of 6 s, and 60 evaluations that usually take a third of that
    assert clock.left_s == pytest.approx(90 * 6 + 60 * 2)
    assert clock.done == pytest.approx(60 / (100 * 6 + 60 * 2))
    now[0] += 50.0
    clock.skip()
    now[0] += 4.0
    clock.tick("evaluation", 1)
    assert clock.left_s == pytest.approx(90 * 6 + 59 * 4)


def test_a_clock_follows_the_machine(now):
    clock = Clock({"step": 1.0}, {"step": 1000})
    for seconds in itertools.chain([1.0] * 300, [3.0] * 300):
        now[0] += seconds
        clock.tick("step")
    assert clock.left_s == pytest.approx(400 * 3, rel=0.1)


def test_the_first_time_is_soon_forgotten(now):
    """Memory is allocated, code is compiled, files are read."""
    clock = Clock({"step": 1.0, "evaluation": 1.0}, {"step": 100, "evaluation": 10})
    now[0] += 50.0
    clock.tick("step")
    assert clock.left_s == pytest.approx(109 * 50)
    for _ in range(3):
        now[0] += 2.0
        clock.tick("step")
    assert clock.left_s == pytest.approx(106 * 2)


def test_crops_that_grow_are_planned(tmp_path):
    """Twice the pixels for the last two of four epochs, and whole images twice as large as the first crops."""
    model = cnmm.create_model("cnmm_seg_tiny", input_size=(64, 64))
    config = recipe("street", epochs=4, final_epochs=2, scene_crop=(32, 64), final_crop=(64, 64), batch_size=5)
    images = SimpleNamespace(config=config, num_after_epoch=4, num_for_statistics=8, num_for_damage=4)
    data = SimpleNamespace(palette=((0, 0, 0),) * 2, test=[0] * 7)
    clock = training_clock(model, images, data, (np.arange(50), np.arange(3)), tmp_path, done=5)
    # 40 steps, ladder tuning from the 26th on; five are done
    assert clock.left["step"] == 5 * (15 + 2 * 6)
    assert clock.left["ladder step"] == 5 * 2 * 14
    assert clock.usual["evaluation"] / clock.usual["step"] == pytest.approx(2 * USUAL["evaluation"] / USUAL["step"])
    assert [image_work(data, config, epoch) for epoch in range(4)] == [1, 1, 2, 2]


def test_what_others_have_done_says_nothing_of_this_machine(now):
    clock = Clock({"step": 1.0}, {"step": 10})
    clock.tick("step", 5, fresh=False)
    assert clock.left_s is None
    now[0] += 2.0
    clock.tick("step", 1)
    assert clock.left_s == pytest.approx(4 * 2)


def test_plans_change(now):
    clock = Clock({"a": 1.0, "b": 1.0}, {"a": 10})
    now[0] += 1.0
    clock.tick("a", 5)
    clock.plan("b", 20)
    clock.plan("a", 0)
    assert clock.left_s == pytest.approx(20 * 0.2)
    assert clock.done == pytest.approx(5 / 25)


def test_reading_says_how_many_images_are_read(now):
    seen = []
    report = reading(seen.append)
    now[0] += 10.0
    report(1000, 3000)
    assert seen == [Waiting(what="reading images, 1,000 of 3,000", done=1 / 3, left_s=pytest.approx(20))]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "0:00"), (0.2, "0:01"), (61, "1:01"), (3599.5, "1:00:00"), (3725, "1:02:05")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_a_line_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with Bar() as bar:
        for second in range(100):
            now[0] = 100.0 + second
            bar.show("epoch 1/2", second / 100, 100 - second, "loss 1.0")
        bar.wait(Waiting(what="quiet", done=0.5))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "cnmm: epoch 1/2, 30%  loss 1.0  1:10 left",
        "cnmm: epoch 1/2, 60%  loss 1.0  0:40 left",
        "cnmm: epoch 1/2, 90%  loss 1.0  0:10 left",
    ]


# Real work


def photographs(folder, num):
    """Flat: CLASS/IMAGE, of another size each."""
    rng = np.random.default_rng(0)
    for name, low, high in (("dark", 0, 120), ("bright", 100, 256)):
        (folder / name).mkdir(parents=True)
        for number in range(num):
            size = rng.integers(70, 100, 2)
            pixels = rng.integers(low, high, (*size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("images", ["fashion", "photographs"])
def test_time_left_is_about_right(tmp_path, images, monkeypatch):
    """In seconds of this process, roughly: others work here too. `benchmarks.time_left` is for a quiet machine."""
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=time.process_time))
    options = {"model": "cnmm_tiny", "epochs": 4, "out": tmp_path / "run"}
    data = "fashion" if images == "fashion" else photographs(tmp_path / "photos", 60)
    more = {"size": 64, "batch_size": 8} if images == "photographs" else {}
    with small_sample():
        run, training = listen(lambda say: cnmm.train(data, on_step=say, on_wait=say, **options, **more))
        _, measuring = listen(lambda say: run.measure(test=True, on_progress=say))
    for said in (training, measuring):
        assert len(said) > 10
        assert share_right(said, factor=3) > 0.8, said[:: len(said) // 10]


def test_everything_that_takes_a_while_is_said(tmp_path):
    data, said = photographs(tmp_path / "photos", 20), []
    options = {"model": "cnmm_tiny", "epochs": 2, "batch_size": 4, "size": 32, "ladder_start": 0.6}
    run = cnmm.train(data, tmp_path / "run", on_wait=lambda waiting: said.append(waiting.what.split(",")[0]), **options)
    assert list(dict.fromkeys(said)) == [
        "reading images",
        "epoch 1/2",
        "measuring which cuts do the least damage",
        "epoch 2/2",
        "estimating statistics",
        "evaluating on test images",
    ]
    run.measure()
    said.clear()
    again = cnmm.Run(tmp_path / "run", on_wait=lambda waiting: said.append(waiting.what.split(",")[0]))
    again.evaluate(budget="50%")
    assert list(dict.fromkeys(said)) == ["reading images", "evaluating on test images"]  # statistics are stored
