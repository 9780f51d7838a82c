"""Mean class accuracy, the paper's metric, all the way: points, envelope, early exit. On an unbalanced set it matters.

Expected figures are counted here, image by image and class by class.
"""

import itertools

import numpy as np
import pytest
import torch

import cnmm
from cnmm.evaluation.calibrate import calibrate
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.measure import measure
from tests.helpers import refused

METRIC = "mean_class_accuracy"
SIZES = (60, 20, 8, 2)
"""Images of each class; of the other six there are none."""


def mean_over_classes(right, labels):
    shares = []
    for k in sorted(set(labels)):
        mine = [hit for hit, label in zip(right, labels, strict=True) if label == k]
        shares.append(sum(mine) / len(mine))
    return sum(shares) / len(shares)


@pytest.fixture(scope="module")
def model():
    """Random gates, so that points differ; random weights, so that classes are told apart badly."""
    torch.manual_seed(0)
    model = cnmm.create_model("cnmm_tiny", channels=8, scales=1)
    with torch.no_grad():
        model.gate_logits.normal_()
        model.train()(torch.randn(64, 1, 28, 28))
    return model.eval()


@pytest.fixture(scope="module")
def data(model):
    """Images whose labels are the model's own answers here and there, so that its accuracy is neither 0 nor 1."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    images = torch.randn(len(labels), 1, 28, 28, generator=generator) + labels.view(-1, 1, 1, 1) / 3
    with torch.no_grad():
        answers = model(images).argmax(1)
    favourites = torch.bincount(answers, minlength=10).argsort(descending=True)
    return [(part, target) for part, target in zip(images.split(32), favourites[labels].split(32), strict=True)]


def answers(model, data, point):
    """Of every exit that the point reaches: confidence, right or not, and the labels, image by image."""
    with torch.no_grad():
        best = [
            {exit: score.softmax(1).max(1) for exit, score in model.forward_exits(images, point).items()}
            for images, _ in data
        ]
    labels = torch.cat([target for _, target in data])
    confidence = {exit: torch.cat([part[exit].values for part in best]).tolist() for exit in best[0]}
    right = {exit: (torch.cat([part[exit].indices for part in best]) == labels).tolist() for exit in best[0]}
    return confidence, right, labels.tolist()


def test_points_and_envelope(model, data):
    frontier = measure(model, data, metric=METRIC, cascade=False)
    plain = measure(model, data, cascade=False)
    assert (frontier.metric, plain.metric) == (METRIC, "accuracy")
    for point in frontier.points:
        _, right, labels = answers(model, data, cnmm.named_point(model, point.name))
        assert point.quality == pytest.approx(mean_over_classes(right[point.exit], labels), abs=1e-12)
        assert plain[point.name].quality == pytest.approx(sum(right[point.exit]) / len(labels), abs=1e-12)
        assert point.low <= point.quality <= point.high
        assert (point.metric, point.n, point.raw_quality) == (METRIC, sum(SIZES), point.quality)
    assert [point.quality for point in frontier.points] != [plain[point.name].quality for point in frontier.points]
    best, envelope = -1.0, []
    for point in sorted(frontier.points, key=lambda point: (point.macs, -point.quality, point.name)):
        if point.quality > best:
            best = point.quality
            envelope.append(point.name)
    assert [point.name for point in frontier.envelope()] == envelope
    assert frontier.choose(f"mca:{best}").quality == best
    assert f"measured by {METRIC}" in refused(frontier.choose, "acc:0.1")


def test_early_exit(model, data):
    cascade = measure(model, data, metric=METRIC, num_points=2).cascade
    assert (cascade.metric, cascade.n) == (METRIC, sum(SIZES))
    confidence, right, labels = answers(model, data, cnmm.named_point(model, cascade.point))
    assert cascade.exits == tuple(right)
    differs = False
    for row in cascade.thresholds:
        hits, spent = [], 0
        for image in range(len(labels)):
            exit = next(
                (e for e, least in zip(cascade.exits, row.confidence, strict=False) if confidence[e][image] >= least),
                cascade.exits[-1],
            )
            hits.append(right[exit][image])
            spent += sum(macs for e, macs in zip(cascade.exits, cascade.macs, strict=True) if e <= exit)
        assert row.quality == pytest.approx(mean_over_classes(hits, labels), abs=1e-9)
        assert row.average_macs == pytest.approx(spent / len(labels))
        differs |= abs(row.quality - sum(hits) / len(hits)) > 0.01
    assert differs
    for low, high in itertools.pairwise(cascade.thresholds):
        assert all(a <= b for a, b in zip(low.confidence, high.confidence, strict=True))


def test_calibration_by_hand():
    """Three of four images are of one class, one of another: the first exit is right for the large class only."""
    confidence = np.tile([[0.9, 1], [0.8, 1], [0.7, 1], [0.6, 1]], (50, 1))
    right = np.tile(np.array([[1, 1], [1, 0], [1, 1], [0, 1]], bool), (50, 1))
    weights = Classification().weights(torch.tensor([4, 4, 4, 7] * 50), METRIC).numpy()
    assert weights[:4] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])
    rows = calibrate(confidence, right * weights[:, None], (1, 1))
    assert rows[0].quality == pytest.approx(1 / 2)  # (3/3 + 0/1) / 2
    assert rows[-1].quality == pytest.approx(1.0)  # only the last of four goes on; to go on always is worse: 5/6
    assert min(row.average_macs for row in rows if row.quality > 0.99) == pytest.approx(5 / 4)
    plain = calibrate(confidence, right, (1, 1))
    assert (plain[0].quality, plain[-1].quality) == pytest.approx((0.75, 1.0))
