import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy

import cnmm
from cnmm.evaluation.classification import Classification, mean_interval
from cnmm.evaluation.task import task_of

METRICS = ("accuracy", "mean_class_accuracy")


def metered(predicted, labels, num_classes):
    meter = Classification().meter(num_classes)
    meter.add(predicted, labels)
    return meter


def answers():
    torch.manual_seed(0)
    labels, predicted = torch.randint(7, (300,)), torch.randint(7, (300,))
    predicted[:150] = labels[:150]
    return predicted, labels


def test_metrics_are_what_torchmetrics_says():
    predicted, labels = answers()
    meter = metered(predicted, labels, 7)
    for metric, average in zip(METRICS, ("micro", "macro"), strict=True):
        quality = meter.quality(metric)
        expected = multiclass_accuracy(predicted, labels, 7, average=average).item()
        assert (quality.metric, quality.n) == (metric, 300)
        assert quality.value == pytest.approx(expected, abs=1e-6)
        assert quality.low < quality.value < quality.high
        assert quality.all == {name: meter.quality(name).value for name in METRICS}
    assert meter.quality() == meter.quality("accuracy")


def test_mean_class_accuracy_is_computed_in_float64():
    predicted, labels = answers()
    shares = [np.mean(predicted[labels == k].numpy() == k) for k in range(7)]
    assert metered(predicted, labels, 7).quality("mean_class_accuracy").value == pytest.approx(
        np.mean(shares), abs=1e-15
    )


def test_a_class_without_images_is_left_out_of_the_mean():
    half = metered(torch.tensor([0, 1] * 50), torch.zeros(100, dtype=torch.long), 2)
    assert half.quality("mean_class_accuracy").value == 0.5
    quality = half.quality("accuracy")
    assert (quality.low, quality.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # Wilson's interval of 50 in 100


def test_batches_add_up_and_scores_are_as_good_as_predictions():
    predicted, labels = answers()
    scores = F.one_hot(predicted, 7).bfloat16()
    meter = Classification().meter(7)
    for part in (slice(0, 100), slice(100, 101), slice(101, 300)):
        meter.add(scores[part], labels[part].to(torch.uint8))
    for metric in METRICS:
        assert meter.quality(metric) == metered(predicted, labels, 7).quality(metric)


def test_the_interval_of_a_mean_over_classes_covers_it():
    """Classes of a hundred images each, and of very different sizes: 95 % of the intervals, within noise."""
    rng = np.random.default_rng(0)
    for sizes in ([100] * 10, [20, 50, 80, 200, 400, 400, 1000, 1000, 3000]):
        total = np.array(sizes)
        shares = rng.uniform(0.5, 0.98, len(total))
        covered = 0
        for _ in range(1000):
            low, high = mean_interval(torch.tensor(rng.binomial(total, shares)).double(), torch.tensor(total).double())
            covered += low <= shares.mean() <= high
        assert 930 <= covered <= 975
    low, high = mean_interval(torch.tensor([5.0, 5.0]), torch.tensor([5.0, 5.0]))
    assert low < 0.9  # ten right answers prove little
    assert high == 1


@pytest.mark.parametrize("metric", METRICS)
def test_weights_make_a_share_of_right_answers_the_metric(metric):
    predicted, labels = answers()
    weights = Classification().weights(labels, metric)
    assert weights.mean().item() == pytest.approx(1)
    share = (weights * (predicted == labels)).mean().item()
    assert share == pytest.approx(metered(predicted, labels, 7).quality(metric).value)


def test_losses_are_cross_entropy_and_divergence():
    torch.manual_seed(0)
    logits, teacher, target = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    task = Classification()
    assert torch.equal(
        task.loss(logits, target.int(), label_smoothing=0.1), F.cross_entropy(logits, target, label_smoothing=0.1)
    )
    p, q = teacher.softmax(1), logits.softmax(1)
    assert task.distil(logits, teacher).item() == pytest.approx((p * (p / q).log()).sum(1).mean().item(), abs=1e-6)
    assert task.distil(teacher, teacher).item() == pytest.approx(0, abs=1e-6)


def test_bad_targets_metrics_and_tasks_are_refused():
    task = task_of(cnmm.model_plan("cnmm_b6s3").config)
    assert task.check_metric() == "accuracy"
    with pytest.raises(ValueError, match="metric 'miou': must be one of accuracy, mean_class_accuracy"):
        task.check_metric("miou")
    with pytest.raises(ValueError, match=r"targets of shape \(2, 3\) and type torch.int64: must be integers \[N\]"):
        task.loss(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="no images to evaluate on"):
        task.meter(3).quality()
    assert task_of(cnmm.model_plan("cnmm_seg_tiny").config).check_metric() == "miou"
