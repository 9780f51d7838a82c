"""The task of labelling pixels, against a literal transcription of the official script, and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

import cnmm
from cnmm.evaluation.calibrate import calibrate
from cnmm.evaluation.segmentation import Segmentation, bootstrap, image_confidence
from cnmm.evaluation.task import task_of
from cnmm.palette import VOID

K = 5


def scenes(num=6, size=(9, 13), seed=0, classes=K):
    """Masks with void, and predictions that are often right."""
    rng = np.random.default_rng(seed)
    masks = rng.integers(0, classes, (num, *size))
    predicted = np.where(rng.uniform(size=masks.shape) < 0.6, masks, rng.integers(0, classes, masks.shape))
    masks[rng.uniform(size=masks.shape) < 0.1] = VOID
    return torch.from_numpy(predicted), torch.from_numpy(masks).to(torch.uint8)


def official(predicted, masks, classes=K):
    """evalPixelLevelSemanticLabeling.py, line by line: a matrix of pixels, then tp / (tp + fp + fn) of each label."""
    matrix = np.zeros((classes + 1, classes + 1), np.int64)
    for p, g in zip(predicted.numpy().ravel(), masks.numpy().ravel(), strict=True):
        matrix[classes if g == VOID else g, p] += 1
    scores = []
    for label in range(classes):
        tp = matrix[label, label]
        fn = matrix[label, :].sum() - tp
        fp = matrix[[other for other in range(classes) if other != label], label].sum()
        denominator = tp + fp + fn
        scores.append(math.nan if denominator == 0 else float(tp) / denominator)
    return scores


def metered(predicted, masks, classes=K):
    meter = Segmentation().meter(classes)
    meter.add(predicted, masks)
    return meter


def test_the_metrics_are_those_of_the_official_script_and_of_torchmetrics():
    predicted, masks = scenes()
    meter = metered(predicted, masks)
    miou, accuracy = meter.quality(), meter.quality("pixel_accuracy")
    scores = official(predicted, masks)
    assert (miou.metric, miou.n) == ("miou", 6)
    assert miou.per_class == pytest.approx(scores, abs=1e-12)
    assert miou.value == pytest.approx(np.nanmean(scores), abs=1e-12)
    target = masks.long()
    jaccard = multiclass_jaccard_index(predicted, target, K, ignore_index=VOID).item()
    assert miou.value == pytest.approx(jaccard, abs=1e-6)
    right = multiclass_accuracy(predicted, target, K, average="micro", ignore_index=VOID).item()
    assert accuracy.value == pytest.approx(right, abs=1e-6)
    assert miou.all == accuracy.all == {"miou": miou.value, "pixel_accuracy": accuracy.value}
    for quality in (miou, accuracy):
        assert 0 <= quality.low < quality.value < quality.high <= 1


def test_all_images_are_counted_together():
    """One global matrix: not the mean over images of each one's mIoU."""
    predicted, masks = scenes()
    meter = Segmentation().meter(K)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        meter.add(predicted[part], masks[part])
    assert meter.quality() == metered(predicted, masks).quality()
    single = [metered(predicted[n : n + 1], masks[n : n + 1]).quality().value for n in range(6)]
    assert np.mean(single) != pytest.approx(meter.quality().value, abs=1e-4)


def test_a_class_with_an_empty_union_is_left_out():
    masks = torch.zeros(1, 2, 4, dtype=torch.uint8)
    masks[0, 1] = 1
    predicted = torch.zeros(1, 2, 4, dtype=torch.long)
    quality = metered(predicted, masks, 3).quality()
    assert quality.per_class == (0.5, 0.0, None)
    assert quality.value == 0.25
    predicted[0, 0, 0] = 2  # predicted, but nowhere: a union of one pixel
    assert metered(predicted, masks, 3).quality().per_class == (3 / 8, 0.0, 0.0)


def test_logits_are_upsampled_to_the_labels_before_the_best_class_is_taken():
    torch.manual_seed(0)
    logits, masks = torch.randn(2, K, 5, 7).bfloat16(), torch.randint(K, (2, 11, 13)).to(torch.uint8)
    whole = F.interpolate(logits.float(), (11, 13), mode="bilinear", align_corners=False).argmax(1)
    assert metered(logits, masks).quality() == metered(whole, masks).quality()


def test_the_interval_is_that_of_images_drawn_again():
    """The interval of fifty images covers the mIoU of a thousand of the same kind, and is no wider than needed."""
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(1000):
        labelled = rng.multinomial(500, [0.5, 0.3, 0.2])
        both = rng.binomial(labelled, rng.uniform(0.4, 0.9))
        counts.append([both, labelled, labelled])
    counts = torch.from_numpy(np.array(counts))
    whole = counts.sum(0).double()
    value = (whole[0] / (whole[1] + whole[2] - whole[0])).mean().item()
    inside, widths = 0, []
    for start in range(0, 1000, 20):
        low, high = bootstrap(counts[start : start + 50], "miou", resamples=200)
        inside += low <= value <= high
        widths.append(high - low)
    assert inside >= 42
    assert np.mean(widths) < 0.15


def test_the_loss_is_weighted_cross_entropy_without_void():
    torch.manual_seed(0)
    _, masks = scenes()
    logits, weights = torch.randn(6, K, 9, 13), torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])
    target = masks.long()
    for weight in (None, weights):
        expected = F.cross_entropy(logits, target, weight, ignore_index=VOID)
        assert Segmentation(weight).loss(logits, masks).item() == pytest.approx(expected.item(), abs=1e-6)
    nothing = torch.full_like(masks, VOID)
    assert Segmentation(weights).loss(logits, nothing).item() == 0


def test_distillation_is_the_divergence_of_a_pixel():
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, K, 3, 4), torch.randn(2, K, 3, 4)
    p, q = teacher.softmax(1), logits.softmax(1)
    expected = (p * (p / q).log()).sum(1).mean().item()
    assert Segmentation().distil(logits, teacher).item() == pytest.approx(expected, abs=1e-6)


def test_leaving_early_is_measured_by_the_metric_of_the_answers_that_count():
    torch.manual_seed(0)
    task, masks = Segmentation(), scenes()[1]
    answers = [
        torch.randn(6, K, 9, 13) + scale * F.one_hot(masks.long().clamp_max(K - 1), K).permute(0, 3, 1, 2)
        for scale in (0.5, 1, 2)
    ]
    for metric in task.metrics:
        choices = task.choices(K, metric)
        choices.add([score[:2] for score in answers], masks[:2])
        choices.add([score[2:] for score in answers], masks[2:])
        assert choices.confidence[:, 1] == pytest.approx(answers[1].softmax(1).max(1).values.mean((1, 2)).numpy())
        leaves = np.array([0, 1, 2, 2, 1, 0])
        taken = torch.stack([answers[exit][n] for n, exit in enumerate(leaves)])
        assert choices.quality(leaves) == metered(taken, masks).quality(metric).value
        one, last = np.array([2, 2, 2, 2, 1, 2]), np.full(6, 2)
        step = choices.quality(one) - choices.quality(last)
        guess = (choices.worth[4, 1] - choices.worth[4, 2]) / 6
        assert guess == pytest.approx(step, rel=0.25)
        rows = calibrate(choices.confidence, choices.worth, (1, 1, 1), choices.quality)
        assert rows[-1].quality == choices.quality(last)


def test_confidence_of_an_image_is_the_mean_of_its_pixels():
    logits = torch.tensor([[0.0, 100.0], [0.0, 0.0]]).view(1, 2, 1, 2)
    assert image_confidence(logits).item() == pytest.approx(0.75)


def test_bad_masks_and_metrics_are_refused():
    task = task_of(cnmm.model_plan("cnmm_seg_tiny").config)
    assert task.metrics == ("miou", "pixel_accuracy")
    with pytest.raises(ValueError, match="metric 'accuracy': must be one of miou, pixel_accuracy"):
        task.check_metric("accuracy")
    predicted, masks = scenes()
    with pytest.raises(ValueError, match=r"targets of shape \(6,\) and type torch.int64: must be masks \[N, H, W\]"):
        task.loss(torch.zeros(6, K), torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"predictions of shape \(6, 8, 13\) for masks of shape \(6, 9, 13\)"):
        metered(predicted[:, :8], masks)
    with pytest.raises(ValueError, match="a mask has the value 9: must be a class from 0 to 4, or 255, void"):
        metered(predicted, torch.full_like(masks, 9))
    with pytest.raises(ValueError, match="no images to evaluate on"):
        task.meter(K).quality()
