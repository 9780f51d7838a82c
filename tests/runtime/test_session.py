import dataclasses
import functools
import gc
import json
import os
import random
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.cascade import NEVER, Cascade, Threshold
from cnmm.cli import main as cli
from cnmm.ladder import read_ladder
from cnmm.runtime import bench, latency
from cnmm.runtime.answers import ClassAnswers
from cnmm.runtime.early_exit import CascadeRunner, StageTimes, Stream
from cnmm.runtime.session import Session
from tests.helpers import RUN_CLI, ask, complaint, python, refused
from tests.runtime.ladders import (
    CLASSES,
    EDGES,
    POINTS,
    SIZE,
    STAGE_EDGES,
    STAGE_MACS,
    make_ladder,
    network,
    write,
    written,
)

RUNTIMES = [name for name in latency.RUNTIMES if latency.runtime_version(name)]
FULL = sum(STAGE_MACS)


@pytest.fixture(scope="module")
def folder(hand_made_ladder):
    return hand_made_ladder


@pytest.fixture(scope="module", params=RUNTIMES)
def session(request, folder):
    with Session(folder, runtime=request.param, threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def images():
    """Of one colour each, so that the networks can tell them apart."""
    generator = np.random.default_rng(0)
    return (generator.integers(0, 256, (70, 1, 1, 3)) * generator.random((70, SIZE, SIZE, 1))).astype(np.uint8)


@pytest.fixture(scope="module")
def picture(tmp_path_factory, images):
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(images[0]).resize((40, 30)).save(path)
    return path


# Points


def test_points_are_those_of_the_manifest(session):
    found = [(p.name, p.exit, p.macs, p.quality) for p in session.points]
    assert found == list(POINTS)
    assert (session.classes, session.input_size, session.channels) == (CLASSES, (SIZE, SIZE), 3)


@pytest.mark.parametrize(
    ("options", "point"),
    [
        ({}, "e3c0"),
        ({"point": "e1c0"}, "e1c0"),
        ({"budget": "2k"}, "e2c3"),
        ({"budget": "40%"}, "e2c3"),
        ({"budget": 1999}, "e1c0"),
        ({"budget": "acc:0.6"}, "e2c3"),
    ],
)
def test_the_point_is_chosen_per_call(session, images, options, point):
    answer = session.predict(images, **options)
    chosen = next(p for p in session.points if p.name == point)
    assert (answer.point, answer.macs) == (point, chosen.macs)
    assert answer.exits.tolist() == [chosen.exit] * len(images)
    assert answer.probabilities.dtype == np.float32
    assert answer.probabilities.sum(1) == pytest.approx(1)


def test_an_answer_does_not_depend_on_the_batch(session, images):
    """70 images are more than one pass takes."""
    for point, *_ in POINTS:
        together = session.predict(images, point=point).probabilities
        alone = np.concatenate([session.predict(image, point=point).probabilities for image in images])
        assert together == pytest.approx(alone, abs=1e-6)
        assert len(np.unique(together.round(5), axis=0)) == len(images)


def test_runtimes_agree(folder, images):
    answers = []
    for name in RUNTIMES:
        with Session(folder, runtime=name, threads=1) as session:
            answers += [(session.predict(images).probabilities, session.predict(images, confidence=0.6))]
    for probabilities, early in answers[1:]:
        assert probabilities == pytest.approx(answers[0][0], abs=1e-5)
        assert early.probabilities == pytest.approx(answers[0][1].probabilities, abs=1e-5)


def test_top(session, images):
    answer = session.predict(images)
    for row, best in zip(answer.probabilities, answer.top(2), strict=True):
        order = sorted(range(len(CLASSES)), key=lambda index: -row[index])
        assert best == tuple((CLASSES[index], float(row[index])) for index in order[:2])
    assert [len(best) for best in answer.top(99)] == [len(CLASSES)] * len(images)
    assert "top=0" in refused(answer.top, 0)


def test_answers_are_not_overwritten_by_later_calls(session, images):
    first = session.predict(images[0])
    before = first.probabilities.copy()
    session.predict(images[1])
    assert np.array_equal(first.probabilities, before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_eight_threads_with_random_points_give_the_serial_answers(folder, images, runtime, threads):
    options = [{"point": name} for name, *_ in POINTS]
    options += [{"confidence": 0.55}, {"confidence": 0.9}, {"average_macs": "60%"}, {"budget": "2k"}]
    work = [(random.Random(seed).choice(options), seed % 7, 1 + seed % 3) for seed in range(160)]
    with Session(folder, runtime=runtime, threads=threads) as session:

        def call(job):
            chosen, first, count = job
            answer = session.predict(images[first : first + count], **chosen)
            return answer.point, answer.macs, answer.exits.tolist(), answer.probabilities

        serial = [call(job) for job in work]
        with ThreadPoolExecutor(8) as pool:
            parallel = list(pool.map(call, work))
    for one, other in zip(serial, parallel, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], abs=1e-6)


def test_only_some_points_are_loaded(folder, images):
    with Session(folder, threads=1, points=["e1c0", "e2c3"], cascade=False) as session:
        assert session.predict(images).point == "e2c3"
        assert [point.name for point in session.points] == ["e1c0", "e2c3"]
        assert "e3c0" in refused(session.predict, images, point="e3c0")
        assert "no cascade" in refused(session.predict, images, confidence=0.5)
    assert "'e9c9'" in refused(Session, folder, points=["e9c9"])


def test_a_ladder_without_a_cascade(tmp_path, images):
    make_ladder(tmp_path, cascade=False)
    with Session(tmp_path, threads=1) as session:
        assert session.cascade is None
        assert session.stage_p95_ms == ()
        for options in ({"confidence": 0.5}, {"average_macs": "2k"}, {"deadline_ms": 10}):
            assert "no cascade" in refused(session.predict, images[0], **options)


def test_a_closed_session_answers_nothing(folder, images):
    session = Session(folder, threads=1)
    with session:
        pass
    assert session.points == ()
    for options in ({}, {"point": "e1c0"}, {"confidence": 0.5}, {"budget": "2k"}):
        assert "loaded" in refused(session.predict, images, **options)


def test_sessions_with_different_threads_live_side_by_side(folder, images):
    answers = []
    for threads in (2, 3, 1, 2):
        with Session(folder, threads=threads) as session:
            answers.append(session.predict(images).probabilities)
    for other in answers[1:]:
        assert other == pytest.approx(answers[0], abs=1e-6)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_one_thread_is_the_callers(folder):
    before = len(os.listdir("/proc/self/task"))
    with Session(folder, threads=1):
        assert len(os.listdir("/proc/self/task")) == before
    with Session(folder, threads=2):
        assert len(os.listdir("/proc/self/task")) > before


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_threads_sleep_between_calls(folder, images, runtime):
    with Session(folder, runtime=runtime, threads=3) as session:
        for point in session.points:
            session.predict(images, point=point.name)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_other_users_of_onnxruntime_are_left_alone(folder, images):
    import onnxruntime

    with Session(folder, threads=2) as session:
        theirs = onnxruntime.InferenceSession(folder / "e1c0.onnx")
        (probabilities,) = theirs.run(None, {"image": images[:2]})
        assert probabilities == pytest.approx(session.predict(images[:2], point="e1c0").probabilities, abs=1e-6)


def test_calls_keep_nothing(session, images):
    def call(times):
        for _ in range(times):
            for options in ({"point": "e1c0"}, {"confidence": 0.6}, {"average_macs": "60%"}, {"budget": "2k"}):
                session.predict(images[:9], **options)
                session.predict(images[0], **options)
        gc.collect()

    tracemalloc.start()
    try:
        call(20)
        before = tracemalloc.get_traced_memory()[0]
        call(100)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50_000  # 800 answers that were kept would be ten times as much


# Early exit


@pytest.mark.parametrize("confidence", [0.0, 0.5, 0.6, 0.75, 0.9, 1.0])
def test_every_image_gets_what_it_gets_alone(session, images, confidence):
    together = session.predict(images, confidence=confidence)
    alone = [session.predict(image, confidence=confidence) for image in images]
    assert together.exits.tolist() == [int(answer.exits[0]) for answer in alone]
    assert together.probabilities == pytest.approx(np.concatenate([a.probabilities for a in alone]), abs=1e-6)
    assert together.macs == pytest.approx(np.mean([answer.macs for answer in alone]))
    assert together.macs == pytest.approx(np.mean(np.cumsum(STAGE_MACS)[together.exits - 1]))


def test_an_image_leaves_at_the_first_confident_exit(session, images):
    """Stages chained are the exits: the points e1c0, e2c3 and e3c0 are the same three networks."""
    exits = np.stack([session.predict(images, point=name).probabilities for name, *_ in POINTS])
    answer = session.predict(images, confidence=0.6)
    sure = exits.max(2) >= 0.6
    sure[-1] = True
    expected = sure.argmax(0)
    assert answer.exits.tolist() == (expected + 1).tolist()
    assert len(set(expected.tolist())) == 3  # all three exits are used
    assert answer.probabilities == pytest.approx(exits[expected, np.arange(len(images))], abs=1e-6)


def test_confidence_is_a_probability(session, images):
    for value in (-0.1, 1.1, float("nan")):
        assert f"confidence={value}" in refused(session.predict, images, confidence=value)


def fake_cascade(chain, p95_ms=(1.0, 1.0, 1.0), thresholds=()):
    cascade = made_up_cascade(thresholds, exits=(1, 2, 3), macs=(10, 100, 1000))
    return CascadeRunner(cascade=cascade, chain=chain, times=StageTimes(p95_ms, (0.0, 0.0, 0.0)), first_ms=p95_ms[0])


def made_up_cascade(thresholds, exits=(1, 2), macs=(4, 5)):
    about = {"metric": "accuracy", "n": 100, "split": "validation"}
    asking = (0,) * (len(exits) - 1)
    return Cascade(point="e3c0", exits=exits, macs=macs, asking=asking, thresholds=thresholds, **about)


class FakeChain:
    """Stage k answers with the k-th column of `sure` as the probability of class 0."""

    def __init__(self, sure, seconds=0.0):
        self.sure, self.seconds = np.asarray(sure, np.float32), seconds
        self.ran, self.asked, self.kept, self.closed = [], [], [], False

    def walk(self, images):
        rows = images[:, 0, 0, 0].astype(int)
        try:
            for stage in range(self.sure.shape[1]):
                time.sleep(self.seconds)
                self.ran.append(rows.tolist())
                keep = yield functools.partial(self._answer, stage, rows)
                self.kept.append(keep)
                rows = rows if keep is None else rows[keep]
        finally:
            self.closed = True

    def _answer(self, stage, rows):
        self.asked.append(stage)
        return np.stack([self.sure[rows, stage], 1 - self.sure[rows, stage]], 1)


def fake_answers(num):
    images = np.arange(num, dtype=np.uint8).reshape(num, 1, 1, 1)
    return ClassAnswers(images, ("a", "b"), num)


def left_early(chain, num):
    """All images in one pass, each exit but the last asking for 0.8."""
    runner, answers = fake_cascade(chain), fake_answers(num)
    for rows, images in answers.passes():
        runner.leave_early(rows, images, (0.8, 0.8), answers)
    return answers.prediction(point="e3c0", macs=runner.spent(answers), start=0.0)


def test_the_batch_closes_ranks():
    chain = FakeChain([[0.9, 0.9, 0.9], [0.6, 0.6, 0.6], [0.6, 0.8, 0.9], [0.7, 0.7, 0.6], [0.95, 0.9, 0.9]])
    answer = left_early(chain, 5)
    assert chain.ran == [[0, 1, 2, 3, 4], [1, 2, 3], [1, 3]]
    assert answer.exits.tolist() == [1, 3, 2, 3, 1]
    assert answer.probabilities[:, 0] == pytest.approx([0.9, 0.6, 0.8, 0.6, 0.95])
    assert answer.confidence == pytest.approx([0.9, 0.6, 0.8, 0.6, 0.95])
    assert answer.macs == (5 * 10 + 3 * 100 + 2 * 1000) / 5
    assert chain.closed


def test_nothing_is_copied_when_all_stay_and_nothing_runs_when_none_does():
    chain = FakeChain([[0.6, 0.9, 0.9], [0.6, 0.9, 0.9]])
    assert left_early(chain, 2).macs == 110
    assert chain.ran == [[0, 1], [0, 1]]
    assert chain.kept == [None]


def test_an_exit_that_nobody_can_leave_is_not_asked():
    chain = FakeChain([[0.9, 0.9, 0.9], [0.6, 0.6, 0.6]])
    runner, answers = fake_cascade(chain), fake_answers(2)
    cascade = dataclasses.replace(runner.cascade, asking=(3, 5))
    runner = dataclasses.replace(runner, cascade=cascade)
    for confidence, asked, exits, macs in (
        ((NEVER, 0.8), [1, 2], [2, 3], (110 + 1110 + 5) / 2),
        ((0.8, NEVER), [0, 2], [1, 3], (10 + 1110 + 3) / 2),
        ((NEVER, NEVER), [2], [3, 3], 1110),
        ((1.0, 1.0), [0, 1, 2], [3, 3], 1118),
    ):
        chain.asked = []
        for rows, images in answers.passes():
            runner.leave_early(rows, images, confidence, answers)
        assert (chain.asked, answers.exits.tolist()) == (asked, exits)
        assert runner.spent(answers, confidence) == macs
    chain.asked = []
    runner.leave_early(np.arange(2), next(answers.passes())[1], (NEVER, NEVER), answers, lambda stage, *_: stage < 2)
    assert (chain.asked, answers.exits.tolist()) == ([1], [2, 2])  # the last stage may not begin: they leave before it
    assert runner.spent(answers) == 110


@pytest.mark.parametrize(
    ("average", "confidence"),
    [(1000, 0.0), (1999, 0.0), (2000, 0.5), (3000, 0.5), ("60%", 0.5), (4500, 0.9), (5000, 1.1), ("200%", 1.1)],
)
def test_thresholds_are_those_of_the_best_row_within(folder, average, confidence):
    cascade = read_ladder(folder).cascade
    assert cascade.confidence(average, 5000) == pytest.approx((confidence, 1.1 * confidence))


def test_average_macs_uses_the_confidence_of_each_exit(session, images):
    for average in (1200, 2200, 3500):
        first, second = session.cascade.confidence(average, 5000)
        expected = []
        for image in images:
            answers = [each.max() for each in session.walk(image[None])]
            expected.append(1 if answers[0] >= first else 2 if answers[1] >= second else 3)
        assert session.predict(images, average_macs=average).exits.tolist() == expected
    assert session.predict(images, average_macs="100%").exits.tolist() == [3] * len(images)


def test_an_average_below_the_cheapest_is_refused(session, images):
    assert "1,000" in refused(session.predict, images, average_macs=999)
    for value in ("20ms", "acc:0.5"):
        assert f"average_macs='{value}'" in refused(session.predict, images, average_macs=value)


def test_thresholds_that_share_an_average():
    rows = [(0.1, 5), (0.2, 5), (0.3, 9), (0.4, 9)]
    table = tuple(Threshold(confidence=(t,), average_macs=a, quality=0.5, exits=(1.0, 0.0)) for t, a in rows)
    cascade = made_up_cascade(table)
    assert [cascade.confidence(value, 9)[0] for value in (5, 7, 9)] == [0.2, 0.2, 0.4]
    assert [cascade.quality_at(value) for value in (4, 5)] == [0.0, 0.5]


def test_more_is_not_spent_where_it_is_worse():
    rows = [(0.1, 5, 0.3), (0.2, 6, 0.44), (0.3, 8, 0.33), (0.4, 9, 0.44)]
    table = tuple(Threshold(confidence=(t,), average_macs=a, quality=q, exits=(1.0, 0.0)) for t, a, q in rows)
    cascade = made_up_cascade(table)
    assert [cascade.confidence(value, 9)[0] for value in (5, 6, 8, 8.9, 9)] == [0.1, 0.2, 0.2, 0.2, 0.4]
    assert [cascade.quality_at(value) for value in (4, 5, 6, 8, 9)] == [0.0, 0.3, 0.44, 0.44, 0.44]


def streamed(sure, row, budget, images=3000):
    """A stream of images of which the first exit, at 100 macs, is as `sure`; the second one costs 900 more."""
    seen = []

    def predict(image, needed):
        seen.append(needed[0])
        early = sure[image % len(sure)] >= needed[0]
        return SimpleNamespace(exits=np.array([1 if early else 2]), macs=100.0 if early else 1000.0)

    stream = Stream(predict, row, budget, 1000)
    for image in range(images):
        stream.predict(image)
    return stream, seen


@pytest.mark.parametrize("shift", [1.0, 0.3, 4.0])
def test_a_stream_keeps_its_average_whatever_the_images_are(shift):
    """Thresholds were found where half of the images leave; now doubt is `shift` times what it was."""
    doubt = np.random.default_rng(0).random(977)
    row = Threshold(confidence=(0.9,), average_macs=550, quality=0.5, exits=(0.5, 0.5))
    sure = 1 - shift * 0.2 * doubt
    fixed = np.where(sure >= 0.9, 100, 1000).mean()
    stream, seen = streamed(sure, row, 550)
    assert stream.average_macs == pytest.approx(550, rel=0.02)
    assert seen[0] == 0.9
    if shift == 1:
        assert np.mean(seen) == pytest.approx(0.9, abs=0.02)
    else:
        assert abs(fixed - 550) > 150
        assert (1 - np.mean(seen[1000:])) == pytest.approx(0.1 * shift, rel=0.1)


def test_a_stream_of_a_session(session, images):
    stream = session.stream(2200)
    assert stream.average_macs == 0
    assert stream.confidence == session.cascade.confidence(2200, 5000)
    answers = [stream.predict(image) for image in images] + [stream.predict(images)]
    assert stream.average_macs == pytest.approx(
        np.average([a.macs for a in answers], weights=[len(a.exits) for a in answers])
    )
    assert "1,000" in refused(session.stream, 999)
    always = session.stream(1000)  # all images leave at the first exit, and nothing can change that
    assert [always.predict(image).exits.tolist() for image in images] == [[1]] * len(images)


# Deadlines


def test_a_deadline_ends_before_the_stage_that_might_be_late():
    image = np.zeros((1, 1, 1, 1), np.uint8)
    for expected, deadline_s in ((1, 0.05), (2, 0.1), (3, 1.0)):
        chain = FakeChain([[0.5, 0.6, 0.7]], seconds=0.02)
        start = time.perf_counter()
        answers = fake_answers(1)
        fake_cascade(chain, p95_ms=(20.0, 45.0, 60.0)).keep_deadline(image, start + deadline_s, answers)
        assert time.perf_counter() - start < deadline_s + 0.5
        # a machine that is busy may stop earlier, never later
        done = answers.exits[0]
        assert 1 <= done <= expected
        found = answers.prediction(point="e3c0", macs=0.0, start=start)
        assert found.probabilities[0, 0] == pytest.approx(0.4 + 0.1 * done)
        assert len(chain.ran) == done
        assert chain.closed
    assert done == 3


def test_deadlines_of_a_session(session, images):
    first, *_ = session.stage_p95_ms
    assert len(session.stage_p95_ms) == 3
    late = session.predict(images[0], deadline_ms=10_000)
    assert late.exits.tolist() == [3]
    assert (late.macs, late.point) == (FULL, "e3c0")
    assert late.probabilities == pytest.approx(session.predict(images[0], point="e3c0").probabilities, abs=1e-6)
    line = refused(session.predict, images[0], deadline_ms=first / 2)
    assert f"{first:.3g} ms" in line
    assert "one image" in refused(session.predict, images[:2], deadline_ms=10_000)


def test_a_late_second_stage_is_not_begun(folder, images):
    with Session(folder, threads=1) as session:
        slow = (0.001, 1e6, 1e6)
        session._runner = dataclasses.replace(session._runner, times=StageTimes(slow, (0.0,) * 3), first_ms=slow[0])
        answer = session.predict(images[0], deadline_ms=50)
        assert (answer.exits.tolist(), answer.macs) == ([1], STAGE_MACS[0])
        alone = session.predict(images[0], point="e1c0").probabilities
        assert answer.probabilities == pytest.approx(alone, abs=1e-6)


def test_stage_times_go_on_being_learned():
    times = StageTimes((10.0, 20.0, 40.0), (4.0, 6.0, 0.0))
    assert times.steps_ms == (14, 22, 34)
    for _ in range(300):
        times.learn([30.0], 12.0)  # the machine is busy: three times as slow, whatever runs
    assert times.steps_ms == pytest.approx((42, 66, 102))
    assert (times.stage(2), times.answer(1)) == pytest.approx((120, 18))
    for _ in range(300):
        times.learn([5.0, 10.0], 3.0)
    assert times.steps_ms == pytest.approx((7, 11, 17))
    few = StageTimes((10.0,), (0.0,))
    few.learn([1000.0], 1.0)  # one slow moment is not the rule
    assert few.steps_ms == (10,)


def test_calls_with_deadlines_teach_the_session(folder, images):
    with Session(folder, threads=1) as session:
        times = StageTimes((1e-3, 1e-3, 1e-3), (0.0, 0.0, 0.0))
        session._runner = dataclasses.replace(session._runner, times=times)
        for _ in range(100):
            session.predict(images[0], deadline_ms=1000)
        assert min(session.stage_p95_ms) > 2e-3


def test_a_missed_deadline_is_said(folder, images, picture, capsys, monkeypatch):
    with Session(folder, threads=1) as session:
        kept = session.predict(images[0], deadline_ms=10_000)
        assert (kept.deadline_ms, kept.late) == (10_000, False)
        assert session.predict(images[0]).late is False
        slow = session._runner.chain.walk
        monkeypatch.setattr(type(session._runner.chain), "walk", lambda self, x: (time.sleep(0.05), slow(x))[1])
        late = session.predict(images[0], deadline_ms=20)
        assert late.late
        assert late.time_ms > 20
    monkeypatch.undo()
    answer = ask(capsys, "predict", folder, picture, "--deadline-ms", 10_000)
    assert answer["late"] is False
    assert "late" not in ask(capsys, "predict", folder, picture)
    monkeypatch.setattr(cnmm.runtime.answers.Prediction, "late", property(lambda self: True))
    assert cli.main(["predict", str(folder), str(picture), "--deadline-ms", "10000"]) == 0
    assert "the deadline of 10000 ms was missed" in capsys.readouterr().err


# What goes in


def test_options_exclude_each_other(session, images):
    assert "budget and confidence" in refused(session.predict, images, budget="2k", confidence=0.5)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.zeros((2, SIZE, SIZE, 3), np.float32), "float32"),
        (np.zeros((2, SIZE, SIZE, 1), np.uint8), "[2, 8, 8, 1]"),
        (np.zeros((SIZE, SIZE), np.uint8), "[8, 8]"),
        (np.zeros((0, SIZE, SIZE, 3), np.uint8), "[0, 8, 8, 3]"),
        (np.zeros((1, 9, SIZE, 3), np.uint8), "[N, 8, 8, 3]"),
        ([], "no images"),
        ([3], "int"),
        ("none.png", "none.png"),
    ],
)
def test_bad_images(session, bad, words):
    assert words in refused(session.predict, bad)


def test_arrays_of_any_strides(session, images):
    wide = np.zeros((3, SIZE, 2 * SIZE, 3), np.uint8)
    wide[:, :, ::2] = images[:3]
    answer = session.predict(wide[:, :, ::2]).probabilities
    assert answer == pytest.approx(session.predict(images[:3]).probabilities, abs=1e-6)


def test_files_are_fitted_as_for_training(session, picture):
    from cnmm.data.images import decode_image

    fitted = decode_image(picture, (SIZE, SIZE))
    expected = session.predict(fitted).probabilities
    for same in (picture, str(picture), [picture], Image.open(picture)):
        assert np.array_equal(session.predict(same).probabilities, expected)
    assert len(session.predict([picture, Image.open(picture)]).probabilities) == 2


def test_lists_of_arrays_of_any_size_are_fitted(session, picture):
    whole = np.asarray(Image.open(picture).convert("RGB"))
    grey = np.asarray(Image.open(picture).convert("L"))
    expected = session.predict(Image.fromarray(whole)).probabilities[0]
    found = session.predict([whole, whole[::2, ::2], picture, grey, grey[..., None]]).probabilities
    assert found.shape == (5, len(CLASSES))
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert np.array_equal(found[3], found[4])
    for bad, words in (
        (whole.astype(np.float32), "float32 in a list"),
        (whole[None], "must be [H, W, 3], [H, W, 1] or [H, W]"),
        (whole[..., :2], "[30, 40, 2]"),
        (whole[:0], "[0, 40, 3]"),
    ):
        assert words in refused(session.predict, [whole, bad])


def test_colours_become_grey_for_a_grey_network(tmp_path, picture):
    make_ladder(tmp_path, channels=1, cascade=False)
    grey = Image.open(picture).convert("L")
    with Session(tmp_path, threads=1) as session:
        from_colours = session.predict(picture).probabilities
        array = np.asarray(Image.open(picture).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        assert session.predict(grey).probabilities == pytest.approx(from_colours, abs=0.05)
        plain = Image.fromarray(np.full((SIZE, SIZE), 77, np.uint8))
        expected = session.predict(np.full((SIZE, SIZE, 1), 77, np.uint8)).probabilities
        assert np.array_equal(session.predict(plain).probabilities, expected)
        assert "[N, 8, 8, 1]" in refused(session.predict, array)


# Budgets in milliseconds


def test_milliseconds_go_by_what_was_measured_here(tmp_path, images):
    make_ladder(tmp_path)
    with Session(tmp_path, threads=1) as session:
        line = refused(session.predict, images, budget="25ms")
        assert "'25ms'" in line
        assert f"cnmm bench {tmp_path}" in line
    times = [
        latency.Timing(point=name, macs=macs, median_ms=ms, p95_ms=ms, n=9)
        for (name, _, macs, _), ms in zip(POINTS, (1, 2, 30), strict=True)
    ]
    store_measurement(tmp_path, times)
    with Session(tmp_path, threads=1) as session:
        assert session.choose("25ms").name == "e2c3"
        assert session.predict(images, budget="1.5ms").point == "e1c0"
        assert "0.5ms" in refused(session.choose, "0.5ms")
    with Session(tmp_path, threads=2) as session:
        assert "2 threads" in refused(session.choose, "25ms")


def store_measurement(folder, times, **changes):
    fields = {"machine": latency.machine(), "runtime": "onnx", "runtime_version": latency.runtime_version("onnx")}
    fields |= {"precision": "float32", "threads": 1, "batch": 1, "points": tuple(times)} | changes
    latency.store(folder, latency.Measurement(**fields))


# Ladders from anywhere


def spoil(tmp_path, change):
    manifest = make_ladder(tmp_path)
    change(manifest)
    write(tmp_path, manifest)


@pytest.mark.parametrize(
    "name",
    ["../x.onnx", "/etc/passwd", "a/b.onnx", "..", "c:x.onnx", "a\\b.onnx", ".hidden.onnx", "", 3, None, "x.txt"],
)
@pytest.mark.parametrize("part", ["point", "stage"])
def test_a_manifest_may_not_name_files_elsewhere(tmp_path, name, part):
    (tmp_path / "x.onnx").write_bytes(network(1))

    def change(manifest):
        entry = manifest["points"][0] if part == "point" else manifest["cascade"]["stages"][0]
        entry["file"] = name

    spoil(tmp_path / "a", change)
    assert "plain name" in refused(Session, tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("format_version"), "format_version"),
        (lambda m: m.update(format_version=99), "99"),
        (lambda m: m.update(kind="run"), "kind"),
        (lambda m: m.update(task="regression"), "task"),
        (lambda m: m.update(task="segmentation"), "'logits'"),
        (lambda m: m.update(precision="float8"), "float8"),
        (lambda m: m.update(points=[]), "points"),
        (lambda m: m["points"][1].pop("macs"), "macs"),
        (lambda m: m["points"][1].update(quality="good"), "quality"),
        (lambda m: m["points"][1].pop("sha256"), "sha256"),
        (lambda m: m.update(classes="cat"), "classes"),
        (lambda m: m.update(classes=["cat", "dog"]), "[1, 2]"),
        (lambda m: m.pop("input"), "input"),
        (lambda m: m["input"].update(height=-1), "input.height"),
        (lambda m: m["input"].update(width=9), ".onnx"),
        (lambda m: m.update(cascade=[]), "cascade"),
        (lambda m: m["cascade"].update(stages=[]), "cascade.stages"),
        (lambda m: m["cascade"]["stages"][0].update(outputs=["h1"]), "outputs"),
        (lambda m: m["cascade"]["stages"].pop(0), "cascade.stages"),
        (lambda m: m["cascade"]["stages"][0].update(outputs=["probabilities"]), "'h1', which no earlier stage makes"),
        (lambda m: m["cascade"].update(exits=[1, 1, 3]), "ascend"),
        (lambda m: m["cascade"].update(macs=[1, 2]), "cascade.macs"),
        (lambda m: m["cascade"]["thresholds"].reverse(), "ascend"),
        (lambda m: m["cascade"]["thresholds"][0].update(confidence=None), "thresholds[0].confidence"),
        (
            lambda m: m["cascade"]["thresholds"][1].update(confidence=[0.5]),
            "confidence=[0.5]: must be a list of 2",
        ),
        (
            lambda m: m["cascade"]["thresholds"][1].update(exits=[1, 0]),
            "exits=[1, 0]: must be a list of 3",
        ),
        (lambda m: m["cascade"].pop("point"), "point"),
        (lambda m: m.update(lattice=[]), "lattice=[]"),
        (lambda m: m["lattice"].pop("blocks"), "lattice.blocks"),
        (lambda m: m["lattice"].update(blocks=257), "lattice.blocks"),
        (lambda m: m["lattice"].update(scales=86), "lattice.scales=86: must be a whole number from 1 to 85"),
        (lambda m: m["lattice"].update(scales=True), "lattice.scales"),
        (lambda m: m["lattice"].update(blocks=2), "lattice.points.e1c0='11': must be 1 hex"),
        (lambda m: m["lattice"]["points"].pop("e2c3"), "lattice.points.e2c3 is missing"),
        (lambda m: m["lattice"]["points"].update(e1c0=11), "lattice.points.e1c0=11"),
        (lambda m: m["lattice"]["points"].update(e1c0="+1"), "2 hexadecimal digits"),
        (lambda m: m["lattice"]["points"].update(e1c0="00"), "on the way to exit 1"),
        (lambda m: m["lattice"]["points"].update(e1c0="19"), "on the way to exit 1"),  # an eighth edge
        (lambda m: m["lattice"]["points"].update(e1c0="32"), "on the way to exit 1"),  # those of exit 2
        (lambda m: m["points"][2].update(exit=4), "on the way to exit 4"),
        (lambda m: m["lattice"].update(cascade=["11"]), "lattice.cascade"),
        (lambda m: m["lattice"]["cascade"].__setitem__(slice(None), ["11", "b7", "b7"]), "lattice.cascade[1]"),
    ],
)
def test_a_corrupt_manifest(tmp_path, change, words):
    spoil(tmp_path, change)
    line = refused(Session, tmp_path, threads=1)
    assert words in line
    assert str(tmp_path) in line


def test_the_lattice_of_a_ladder(tmp_path, hand_made_ladder):
    """Edges by their bits; a ladder of an earlier version has none, and runs all the same."""
    found = read_ladder(hand_made_ladder).lattice
    assert found.full.edges == ((0, 1), (1, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4))
    assert found.points["e2c3"] == {(0, 1), (1, 2), (2, 4)}
    assert found.points["e3c0"] == set(found.full.edges) - {(1, 3), (2, 4)}
    assert [sorted(edges) for edges in found.cascade[:2]] == [[(0, 1), (1, 4)], [(0, 1), (1, 2), (1, 4), (2, 4)]]
    assert found.to_dict() == {"blocks": 3, "scales": 1, "points": EDGES, "cascade": list(STAGE_EDGES)}
    spoil(tmp_path, lambda manifest: manifest.pop("lattice"))
    assert read_ladder(tmp_path).lattice is None
    with Session(tmp_path, threads=1) as session:
        assert len(session.points) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", "[" * 100_000, "\x00"])
def test_a_manifest_that_is_no_manifest(tmp_path, text):
    make_ladder(tmp_path)
    (tmp_path / "ladder.json").write_text(text)
    assert str(tmp_path / "ladder.json") in refused(Session, tmp_path)


def test_no_ladder_at_all(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        assert f"{path}: not a ladder folder" in refused(Session, path)


def test_a_missing_and_a_changed_file(tmp_path):
    make_ladder(tmp_path)
    path = tmp_path / "e2c3.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"{path}: its sha256 differs" in refused(Session, tmp_path)
    path.unlink()
    assert f"{path}: cannot be read" in refused(Session, tmp_path)
    with Session(tmp_path, threads=1, points=["e1c0"]) as session:
        assert len(session.points) == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("content", ["empty", "noise", "cut"])
def test_a_file_that_is_no_network(tmp_path, capfd, runtime, content):
    good = network(2)
    data = {"empty": b"", "noise": bytes(range(256)) * 9, "cut": good[: len(good) // 2]}[content]
    spoil(tmp_path, lambda m: m["points"][1].update(written(tmp_path, "e2c3.onnx", data)))
    assert str(tmp_path / "e2c3.onnx") in refused(Session, tmp_path, runtime=runtime, threads=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_network_with_other_tensors(tmp_path, runtime):
    made = make_ladder(tmp_path / "grey", channels=1)
    content = (tmp_path / "grey" / "stage1.onnx").read_bytes()
    assert made
    spoil(tmp_path / "a", lambda m: m["points"][1].update(written(tmp_path / "a", "e2c3.onnx", content)))
    assert "e2c3.onnx: its tensors are" in refused(Session, tmp_path / "a", runtime=runtime, threads=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "torch"}, ["'torch'", "onnx, openvino"]),
        ({"threads": 0}, ["threads=0"]),
        ({"precision": "float8"}, ["'float8'"]),
        ({"precision": "bfloat16"}, ["bfloat16", "openvino"]),
    ],
)
def test_bad_settings(folder, options, words):
    line = refused(Session, folder, **options)
    for word in words:
        assert word in line


@pytest.mark.skipif("openvino" not in RUNTIMES, reason="needs OpenVINO")
def test_bfloat16_where_the_cpu_has_it(folder, images):
    import openvino

    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        assert "this CPU" in refused(Session, folder, runtime="openvino", precision="bfloat16")
        return
    with Session(folder, runtime="openvino", precision="bfloat16", threads=1) as session:
        exact = Session(folder, runtime="openvino", threads=1).predict(images).probabilities
        assert session.predict(images).probabilities == pytest.approx(exact, abs=0.1)


def test_int8_is_a_property_of_the_ladder(tmp_path):
    spoil(tmp_path, lambda m: m.update(precision="int8"))
    with Session(tmp_path, threads=1) as session:
        assert session.precision == "int8"
    assert "int8" in refused(Session, tmp_path, precision="bfloat16", runtime="openvino")


def test_a_runtime_that_is_not_installed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert 'pip install "cnmm[openvino]"' in refused(Session, folder, runtime="openvino")


# The command line


def test_predict_verb(capsys, folder, picture):
    answer = ask(capsys, "predict", folder, picture, picture, "--budget", "2k", "--top", 2, "--threads", 1)
    assert (answer["point"], answer["macs"]) == ("e2c3", 2000)
    assert answer["time_ms"] > 0
    with Session(folder, threads=1) as session:
        (best,) = session.predict(picture, point="e2c3").top(2)
    expected = [{"label": label, "p": pytest.approx(p, abs=1e-6)} for label, p in best]
    assert [(row["file"], row["top"]) for row in answer["results"]] == [(str(picture), expected)] * 2


@pytest.mark.parametrize(
    ("flags", "point"),
    [
        ([], "e3c0"),
        (["--point", "e1c0"], "e1c0"),
        (["--confidence", "0"], "e3c0"),
        (["--average-macs", "60%"], "e3c0"),
        (["--deadline-ms", "5000"], "e3c0"),
    ],
)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_predict_verb_chooses(capsys, folder, picture, flags, point, runtime):
    answer = ask(capsys, "predict", folder, picture, *flags, "--runtime", runtime, "--threads", 1)
    assert answer["point"] == point
    if flags[:1] == ["--confidence"]:
        assert (answer["results"][0]["exit"], answer["macs"]) == (1, STAGE_MACS[0])


def test_predict_verb_for_people(capsys, folder, picture):
    assert cli.main(["predict", str(folder), str(picture), "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert str(picture) in out
    assert sum(name in out for name in CLASSES) == 3
    assert "point e3c0, 4.00 k macs per image" in err
    assert cli.main(["predict", str(folder), str(picture), "--threads", "1", "--confidence", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert "exit" in out
    assert "cascade e3c0" in err


def test_predict_verb_complains(capsys, folder, picture, tmp_path):
    text, bomb = tmp_path / "a.txt", tmp_path / "bomb.png"
    text.write_text("no image")
    Image.new("1", (20_000, 10_000)).save(bomb)
    for bad in (text, bomb, tmp_path / "none.png", tmp_path):
        line = complaint(capsys, "predict", folder, picture, bad)
        assert str(bad) in line
        assert "skip_bad" not in line
    assert "1,000 macs" in complaint(capsys, "predict", folder, picture, "--budget", "10")
    assert "cnmm bench" in complaint(capsys, "predict", folder, picture, "--budget", "9ms")
    assert "--budget and --point" in complaint(capsys, "predict", folder, picture, "--budget", "9k", "--point", "e1c0")
    assert "'e9c9'" in complaint(capsys, "predict", folder, picture, "--point", "e9c9")
    assert "--top=0" in complaint(capsys, "predict", folder, picture, "--top", 0)
    assert "ladder.json" in complaint(capsys, "predict", tmp_path, picture)
    line = complaint(capsys, "predict", folder, picture, "--deadline-ms", "0.0001")
    assert "first exit alone" in line


def test_bench_verb(capsys, tmp_path, picture):
    make_ladder(tmp_path)
    answer = ask(capsys, "bench", tmp_path, "--seconds", 0, "--threads", 1)
    assert answer["machine"] == latency.machine()
    assert sorted(entry["runtime"] for entry in answer["measurements"]) == sorted(RUNTIMES)  # the fastest first
    fastest = min(answer["measurements"], key=lambda entry: sum(row["median_ms"] for row in entry["points"]))
    assert {name: answer[name] for name in fastest} == fastest
    for entry in answer["measurements"]:
        assert (entry["precision"], entry["threads"], entry["batch"]) == ("float32", 1, 1)
        assert [row["point"] for row in entry["points"]] == [name for name, *_ in POINTS]
        assert [row["point"] for row in entry["stages"]] == ["stage 1", "stage 2", "stage 3"]
        assert all(0 < row["median_ms"] <= row["p95_ms"] and row["n"] >= 20 for row in entry["points"])
    assert len(latency.read(tmp_path)) == len(RUNTIMES)
    ask(capsys, "bench", tmp_path, "--seconds", 0, "--threads", 1, "--runtime", "onnx")
    assert len(latency.read(tmp_path)) == len(RUNTIMES)
    assert ask(capsys, "predict", tmp_path, picture, "--threads", 1, "--budget", "900ms")["point"] == "e3c0"
    ask(capsys, "bench", tmp_path, "--seconds", 0, "--threads", 1, "--runtime", "onnx", "--batch", 3)
    assert [entry.batch for entry in latency.read(tmp_path)].count(3) == 1


@pytest.mark.parametrize(("slow", "spread"), [({7, 8, 9}, 1.2), ({7, 8, 9, 10}, 3.0), ({7, 10, 13, 16}, 3.0)])
def test_slow_moments_of_the_machine_count_for_all_points(session, monkeypatch, slow, spread):
    """Of 60 turns, three slow ones are 5 %."""
    turns = iter(range(60))

    def time_calls(call, *, seconds):
        call()
        number = next(turns)
        median = 1.0 + number % 3
        return median, median * (3.0 if number in slow else 1.2), 10

    monkeypatch.setattr(bench, "ROUNDS", 20)
    monkeypatch.setattr(bench, "time_calls", time_calls)
    found = bench.time_session(session, seconds=0.0)
    assert [point.median_ms for point in found.points] == [1, 2, 3]
    assert [point.p95_ms for point in found.points] == pytest.approx([spread, 2 * spread, 3 * spread])


def test_a_busy_machine_is_said(session, monkeypatch, caplog):
    for spread, seconds, words in ((3.0, 1.0, "3.0 times above the median"), (1.2, 1.0, ""), (3.0, 0.0, "")):
        caplog.clear()
        monkeypatch.setattr(bench, "time_calls", lambda call, *, seconds, spread=spread: (1.0, spread, 10))
        monkeypatch.setattr(bench.logger, "propagate", True)
        bench.time_session(session, seconds=seconds)
        assert words in caplog.text
        assert bool(caplog.text) == bool(words)


def test_choose_and_predict_agree_about_threads(capsys, tmp_path, picture):
    make_ladder(tmp_path)
    for threads, times in ((1, (1, 2, 3)), (latency.usable_cores() + 1, (0.1, 0.2, 0.3))):
        rows = [
            latency.Timing(point=name, macs=macs, median_ms=ms, p95_ms=ms, n=9)
            for (name, _, macs, _), ms in zip(POINTS, times, strict=True)
        ]
        store_measurement(tmp_path, rows, threads=threads)
    for flags in (["--threads", 1], ["--threads", latency.usable_cores() + 1]):
        asked = ["--budget", "2.5ms", *flags]
        point = ask(capsys, "choose", tmp_path, *asked)["point"]
        assert point == ask(capsys, "predict", tmp_path, picture, *asked)["point"]
        assert point == ("e2c3" if flags[1] == 1 else "e3c0")
    asked = ["--budget", "2.5ms", "--threads", 200]
    assert complaint(capsys, "choose", tmp_path, *asked) == complaint(capsys, "predict", tmp_path, picture, *asked)


def test_tables_never_cut_names(capsys, tmp_path):
    make_ladder(tmp_path / "ladder")
    name = "a" * 120
    place = tmp_path / name / name
    place.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(place / f"{name}.png")
    assert cli.main(["predict", str(tmp_path / "ladder"), str(place / f"{name}.png")]) == 0
    assert str(place / f"{name}.png") in capsys.readouterr().out


def test_bench_verb_for_people_and_complaints(capsys, tmp_path):
    make_ladder(tmp_path)
    assert cli.main(["bench", str(tmp_path), "--seconds", "0", "--threads", "1", "--runtime", "onnx"]) == 0
    out, err = capsys.readouterr()
    assert all(name in out for name in ("e1c0", "e2c3", "e3c0", "stage 3", "ms per M macs"))
    assert str(tmp_path / "latency.json") in err
    before = (tmp_path / "latency.json").read_bytes()
    assert "batch=0" in complaint(capsys, "bench", tmp_path, "--batch", 0)
    assert "onnxruntime" in complaint(capsys, "bench", tmp_path, "--runtime", "onnx", "--precision", "bfloat16")
    assert (tmp_path / "latency.json").read_bytes() == before


def test_a_device_without_torch(picture, tmp_path):
    make_ladder(tmp_path / "ladder")
    for args in (["predict", tmp_path / "ladder", picture, "--confidence", "0.5"], ["bench", tmp_path / "ladder"]):
        more = ["--seconds", "0"] if args[0] == "bench" else []
        done = python(RUN_CLI, *args, *more, "--json", missing=("torch", "safetensors", "matplotlib", "onnx"))
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)


def test_the_session_is_a_name_of_the_package():
    assert cnmm.Session is Session
    with pytest.raises(AttributeError, match="Sesion"):
        cnmm.Sesion  # noqa: B018
