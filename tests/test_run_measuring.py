"""The frontier of a run folder: one that was stopped goes on to the same files, and the old one is whole until then."""

import itertools
import json
import os

import pytest
import torch

import cnmm
from cnmm import run_measuring
from cnmm._errors import Stopped
from cnmm._files import write_atomically
from cnmm.cli import main as cli
from cnmm.evaluation import calibrate
from cnmm.evaluation import kept as kept_module
from cnmm.evaluation.kept import Kept
from cnmm.run import Run
from cnmm.training import batches
from tests.helpers import RUN_CLI, complaint, python, refused

MEASURED = ("frontier.json", "frontier.csv", "orders.json")


def files(run):
    """What a measurement leaves, without times and pictures."""
    names = [*MEASURED, *(path.name for path in run.glob("statistics*"))]
    return {name: (run / name).read_bytes() for name in names}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Two cascades are tried, and nothing is drawn."""
    monkeypatch.setattr(calibrate, "SHARES", (1.0, 0.6))
    monkeypatch.setattr("cnmm.evaluation.measure.SHARES", (1.0, 0.6))
    monkeypatch.setattr(calibrate, "PRICES", (10.0, 0.1, 0.0))
    monkeypatch.setattr(run_measuring, "plot_frontier", lambda *_: None)
    monkeypatch.setattr(run_measuring, "save_picture", lambda _, path: write_atomically(path, b""))


@pytest.fixture
def unmeasured(own_run, monkeypatch):
    """The trained run without its frontier, whose images come in batches of 25."""
    monkeypatch.setattr(batches, "STATISTICS_IMAGES", 75)
    monkeypatch.setattr(batches, "EVALUATION_BATCH", 25)
    for path in (*own_run.glob("frontier.*"), *own_run.glob("statistics*"), own_run / "orders.json"):
        path.unlink()
    return own_run


def stopping_after(num):
    """Says after so many questions that it is time to stop."""
    questions = itertools.count(1)
    return lambda: next(questions) > num


def test_a_measurement_goes_on_from_any_batch(unmeasured, tmp_path):
    """Stopped after every 7 batches: in every kind of sweep, on the way and at its end."""
    options = {"points": 8, "test": True}
    whole = Run(unmeasured).measure(**options)
    expected = files(unmeasured)
    for name in expected:
        (unmeasured / name).unlink()
    stops = 0
    while True:
        try:
            found = Run(unmeasured).measure(**options, should_stop=stopping_after(7))
            break
        except Stopped:
            stops += 1
            assert not (unmeasured / "frontier.json").exists()
            assert len(list((unmeasured / "checkpoints" / "frontier").glob("*/sweep-*"))) >= 1
    assert stops >= 4
    assert found == whole
    assert files(unmeasured) == expected
    assert not (unmeasured / "checkpoints" / "frontier").exists()


def test_what_is_known_is_not_measured_again(unmeasured, monkeypatch):
    """Nor is what was kept of another measurement used: other options, or other weights."""
    seen = []
    forward = cnmm.Mixture.run_stem

    def spy(model, images, **options):
        seen.append(len(images))
        return forward(model, images, **options)

    monkeypatch.setattr(cnmm.Mixture, "run_stem", spy)

    def cost(**options):
        seen.clear()
        Run(unmeasured).measure(points=3, rule="both", **options)
        return sum(seen)

    def stop(num):
        with pytest.raises(Stopped, match="what was measured is kept"):
            Run(unmeasured).measure(points=3, rule="both", should_stop=stopping_after(num))

    whole = cost()
    stop(10)
    assert cost() < whole
    stop(10)
    assert cost(metric="mean_class_accuracy") == whole
    stop(10)
    state = Run(unmeasured).model.state_dict()
    state["gate_logits"] += 1
    model = cnmm.load(unmeasured)
    model.load_state_dict(state)
    cnmm.run_folder.save_weights(model, unmeasured)
    assert cost() == whole


def test_until_the_new_measurement_is_complete_the_old_one_is_whole(own_run, monkeypatch):
    """A process that dies at any of its file operations: one measurement or the other, never parts of both."""
    new = Run(own_run).measure(points=3, images=40)  # measured once, written many times
    Run(own_run).measure(points=4, images=50)
    monkeypatch.setattr(run_measuring, "measure", lambda *_, **options: new)
    before, expected = Run(own_run), {}
    names = [point.name for point in before.frontier.envelope()]
    x = torch.randn(2, 1, 28, 28)
    expected["old"] = before.frontier, before.slim(point=names[0])(x)

    class Killed(BaseException):
        """Like a kill: nothing is cleaned up after it."""

    real, left = os.replace, []

    def replace(source, target):
        if not left.pop():
            raise Killed
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr("cnmm._lock.remove", lambda path: None)
    seen = set()
    for num in range(12):
        left[:] = [False, *[True] * num]
        try:
            Run(own_run).measure(points=3, images=40)
        except Killed:
            after = Run(own_run)
            assert after.frontier in (expected["old"][0], new)
            seen.add(after.frontier == new)
            if after.frontier != new:
                assert torch.equal(after.slim(point=names[0])(x), expected["old"][1])
            assert after.frontier.buffers.keys() >= {point.name for point in after.frontier.envelope()}
        else:
            break
    assert seen == {False, True}
    assert len(list(own_run.glob("statistics*"))) == 1


def test_files_of_another_measurement_are_refused(own_run, tmp_path, capsys):
    fix = f"measure again: cnmm frontier {own_run}"
    (statistics,) = own_run.glob("statistics*")
    (own_run / "orders.json").write_text((own_run / "orders.json").read_text() + " ")
    for verb in (["choose", "--budget", "60%"], ["slim", "--budget", "60%", "-o", tmp_path / "x"], ["report"]):
        words = complaint(capsys, verb[0], own_run, *verb[1:])
        assert "it was measured with another orders.json" in words
        assert fix in words
    statistics.unlink()
    words = complaint(capsys, "export", own_run, "--ladder", 2, "-o", tmp_path / "x")
    assert fix in words
    frontier = json.loads((own_run / "frontier.json").read_text())
    frontier["checksums"] = {"../run/config.json": "0"}
    (own_run / "frontier.json").write_text(json.dumps(frontier))
    assert "plain file name" in complaint(capsys, "choose", own_run, "--budget", "60%")
    assert not (tmp_path / "x").exists()


def test_a_run_that_was_measured_before_checksums_is_read(own_run):
    (statistics,) = own_run.glob("statistics*")
    expected = Run(own_run).frontier
    frontier = json.loads((own_run / "frontier.json").read_text())
    del frontier["checksums"]
    (own_run / "frontier.json").write_text(json.dumps(frontier))
    statistics.rename(own_run / "statistics.safetensors")
    found = Run(own_run).frontier
    assert found == expected
    assert found.buffers.keys() == expected.buffers.keys()
    Run(own_run).measure(points=3, images=40)
    assert not (own_run / "statistics.safetensors").exists()


# What is kept


def test_sweeps_are_saved_when_they_are_due(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now[0])
    total = torch.zeros(1)

    def run(until=None):
        kept = Kept(tmp_path, of="a", every_s=10)
        for _ in range(2):
            total.zero_()
            for count, batch in kept.sweep([1, 2, 3], lambda: {"total": total}, lambda k: total.copy_(k["total"])):
                if (kept.num_sweeps, count) == until:
                    return
                total.add_(batch)
                now[0] += 6
        return total.item()

    run(until=(1, 2))
    assert not list(tmp_path.rglob("sweep-*"))  # 6 of 10 seconds
    run(until=(2, 2))
    assert [path.name for path in sorted(tmp_path.rglob("sweep-*"))] == [
        "sweep-000.safetensors",
        "sweep-001.safetensors",
    ]
    assert run() == 6
    (path,) = tmp_path.rglob("sweep-001.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert f"remove {tmp_path}" in refused(run)


STOPPED = f"""
import itertools, os
from cnmm.evaluation.kept import Kept
from cnmm.training import batches
batches.STATISTICS_IMAGES, batches.EVALUATION_BATCH = 75, 25
real, calls = Kept.note, itertools.count()
def note(kept, *args):
    if next(calls) == 5:
        os.kill(os.getpid(), 15)
    real(kept, *args)
Kept.note = note
{RUN_CLI}
"""


def test_stopping_the_verb_says_how_to_go_on(unmeasured):
    """The signal comes while points are measured; the same command then goes on."""
    done = python(STOPPED, "frontier", unmeasured, "--points", 3)
    assert "what was measured is kept; the same command goes on from there" in done.stderr
    assert done.stderr.endswith("cnmm: terminated\n")
    assert done.returncode == 143
    assert cli.main(["frontier", str(unmeasured), "--points", "3"]) == 0
