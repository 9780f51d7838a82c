"""Comparisons: image by image, of seeds, of budgets."""

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.claims import evidence
from benchmarks.claims.measures import leave, one_threshold
from benchmarks.claims.store import Store, pack, rounded, unpack_counts, unpack_truths
from benchmarks.claims.uncertainty import auroc, calibration_error, disagreement, fitted_temperature
from cnmm.evaluation.segmentation import metric_values

RNG = np.random.default_rng(0)


def point(macs, held_out, test=None, exit=1, cuts=0, rule="flow", **more):
    return {"macs": macs, "held_out": held_out, "test": test, "exit": exit, "cuts": cuts, "rule": rule, **more}


def measured(*points, n=1000, split="test", metric="accuracy"):
    most = max(each["macs"] for each in points)
    return {"points": list(points), "n": n, "held_out_n": 500, "split": split, "metric": metric, "full_macs": most}


def test_answers_survive_a_file():
    truths, counts = RNG.random(1003) < 0.3, RNG.integers(0, 90_000, (7, 3, 5))
    assert (unpack_truths(pack(truths), 1003) == truths).all()
    assert (unpack_counts(pack(counts), 7) == counts).all()
    assert rounded({"a": [0.123456789, (1, True)]}) == {"a": [0.1234568, [1, True]]}


def test_two_answers_to_the_same_images_are_compared_image_by_image():
    ours, theirs = np.ones(100, bool), np.ones(100, bool)
    theirs[:8] = False
    found = evidence.paired(pack(ours), pack(theirs), 100)
    assert found["difference"] == pytest.approx(0.08)
    assert found["p"] == pytest.approx(2 / 2**8)  # eight of eight, either way
    assert found["low"] > 0
    same = evidence.paired(pack(ours), pack(ours), 100)
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)


def test_scenes_are_compared_by_a_bootstrap_over_images():
    labelled = RNG.integers(50, 99, (20, 3))
    good, bad = np.minimum(labelled, 60), np.minimum(labelled, 30)
    answers = [np.stack([both, labelled, labelled], 1) for both in (good, bad)]
    found = evidence.paired(*(pack(each) for each in answers), 20, "miou")
    wanted = [metric_values(torch.from_numpy(each).sum(0))["miou"].item() for each in answers]
    assert found["difference"] == pytest.approx(wanted[0] - wanted[1])
    assert found["low"] < found["difference"] < found["high"]
    assert found["p"] == pytest.approx(1 / 1000)
    assert evidence.opposite(found)["high"] == -found["low"]


def test_without_answers_two_shares_are_compared():
    one, two = measured(point(1, 0.5, 0.6)), measured(point(1, 0.5, 0.5))
    found = evidence.difference((one, one["points"][0]), (two, two["points"][0]))
    assert found["difference"] == pytest.approx(0.1)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * math.sqrt(0.24 / 1000 + 0.25 / 1000), rel=0.02)
    assert (found["split"], found["n"], found["paired"]) == ("test", 1000, False)
    held = measured(point(1, 0.4), split="held out")
    assert evidence.difference((one, one["points"][0]), (held, held["points"][0]))["split"] == "held out"


def test_seeds_that_disagree_widen_the_interval():
    def seed(middle):
        return {
            "difference": middle,
            "low": middle - 0.01,
            "high": middle + 0.01,
            "n": 9,
            "split": "test",
            "paired": True,
        }

    near, far = (evidence.pooled([seed(0.02), seed(other)]) for other in (0.021, 0.1))
    assert near["high"] - near["low"] == pytest.approx(0.02 / math.sqrt(2))
    assert far["low"] <= 0.02
    assert far["high"] >= 0.1
    wide = evidence.sum_of(seed(0.01), seed(0.02))
    assert (wide["difference"], wide["high"]) == (pytest.approx(0.03), pytest.approx(0.03 + 0.01 * math.sqrt(2)))
    assert evidence.averaged([seed(0.0), seed(0.02)])["low"] == pytest.approx(0.0)


def test_points_are_chosen_on_held_out_images():
    found = measured(point(10, 0.5, 0.9), point(20, 0.7, 0.1, exit=2), point(30, 0.6, 0.8, exit=2))
    assert evidence.within(found, 25)["macs"] == 20
    assert evidence.within(found, 30)["macs"] == 20
    assert evidence.within(found, 5) is None
    assert [each["macs"] for each in evidence.envelope(found)] == [10, 20]
    assert evidence.full(found)["macs"] == 30
    assert evidence.full(found, 1)["macs"] == 10


def test_what_is_cut_to_a_share_is_near_it():
    found = measured(point(100, 0.9, exit=2), point(49, 0.7, exit=2, cuts=3), point(30, 0.6, exit=2, cuts=5))
    assert evidence.cut_to(found, 0.5, exit=2)["macs"] == 49
    assert evidence.cut_to(found, 0.45, exit=2) is None
    assert evidence.cut_to(found, 0.5, rule="damage") is None
    assert evidence.select(found, rule="damage")[0]["macs"] == 100  # nothing cut belongs to all rules


def test_pairs_of_equal_cost_have_different_exits():
    found = measured(point(100, 0.5), point(98, 0.6, exit=2), point(99, 0.6, exit=2), point(90, 0.6, exit=3))
    pairs = [(a["macs"], b["macs"]) for a, b in evidence.equal_cost_pairs(found)]
    assert pairs == [(100, 98), (100, 99)]
    assert evidence.rank_correlation([(1, 1), (2, 5), (3, 9)]) == pytest.approx(1)
    assert evidence.rank_correlation([(1, 9), (2, 5), (3, 1)]) == pytest.approx(-1)


def test_auroc_is_the_share_of_pairs_in_the_right_order():
    doubt, deserved = RNG.integers(0, 9, 60) / 9, RNG.random(60) < 0.4
    pairs = [
        (a > b) + 0.5 * (a == b)
        for (a, yes), (b, no) in itertools.product(zip(doubt, deserved, strict=True), repeat=2)
        if yes and not no
    ]
    assert auroc(doubt, deserved) == pytest.approx(np.mean(pairs))
    assert auroc(doubt, np.zeros(60, bool)) == 0.5


def test_calibration():
    labels = torch.tensor([0] * 80 + [1] * 20)
    sure = torch.tensor([[0.8, 0.2]]).repeat(100, 1)
    assert calibration_error(sure, labels) == pytest.approx(0, abs=1e-6)
    assert calibration_error(torch.tensor([[1.0, 0.0]]).repeat(100, 1), labels) == pytest.approx(0.2)
    logits = 3 * torch.log(sure)
    assert fitted_temperature(logits, labels) == pytest.approx(3, rel=0.05)


def test_who_says_the_same_does_not_disagree():
    same = torch.tensor([[[0.7, 0.3]]]).repeat(4, 5, 1)
    assert disagreement(same).abs().max() < 1e-6
    other = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert disagreement(other).item() == pytest.approx(math.log(2))


def test_one_threshold_spends_no_more():
    confidence, passed = RNG.random((200, 3)), np.array([1.0, 3.0, 6.0])
    for macs in (1.0, 2.5, 6.0):
        leaves = one_threshold(confidence, passed, macs)
        assert passed[leaves].mean() <= macs
        assert (leave(confidence, np.array([0.0, 0.0])) == 0).all()
    assert passed[one_threshold(confidence, passed, 2.5)].mean() > 2.4
    assert leave(np.array([[0.1, 0.9, 0.0]]), np.array([0.5, 0.5])).tolist() == [1]


def test_a_stale_result_is_none(tmp_path):
    store = Store(tmp_path / "cpu")
    path = store.measurement("curves", "a_0")
    assert store.read(path, "x") is None
    store.write(path, {"fingerprint": "x", "found": 0.5})
    assert store.read(path, "x")["found"] == 0.5
    assert store.read(path, "y") is None
    assert store.read(path)["fingerprint"] == "x"
