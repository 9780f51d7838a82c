import pytest
import torch

import cnmm
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.statistics import reestimated
from tests.training.helpers import new_model, same


def test_every_exit_is_measured_by_the_metric_that_is_asked_for():
    model = new_model().eval()
    images, labels = torch.randn(40, 1, 28, 28), torch.arange(40) % 10
    batches = [(images[:25], labels[:25]), (images[25:], labels[25:])]
    found = evaluate_exits(model, batches, metric="mean_class_accuracy")
    for exit, scores in model.forward_exits(images).items():
        assert found[exit].metric == "mean_class_accuracy"
        assert found[exit].all["accuracy"] == (scores.argmax(1) == labels).double().mean().item()
    with pytest.raises(ValueError, match="metric 'miou'"):
        evaluate_exits(model, batches, metric="miou")
    with pytest.raises(ValueError, match="no images"):
        evaluate_exits(model, [])


def test_reestimated_statistics_are_those_of_expectation_mode_at_the_point():
    model = new_model().eval()
    point = cnmm.cutting_order(model)[4]
    batches = [torch.randn(50, 1, 28, 28) for _ in range(3)]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    copied = reestimated(model, batches, point)
    assert same(before, dict(model.named_buffers()))  # the model itself is left alone
    by_hand = []
    with torch.no_grad():
        for batch in batches:
            fresh = new_model().train()
            for module in fresh.modules():
                if isinstance(module, cnmm.blocks.Statistics):
                    module.momentum = 1.0
            fresh(batch, point)
            by_hand.append(dict(fresh.named_buffers()))
    for name in ("maps.1.statistics.mean", "maps.1.statistics.var", "outputs.1.statistics.mean"):
        expected = sum(buffers[name] for buffers in by_hand) / 3
        if name.startswith("outputs"):
            expected, found = expected[-1], dict(copied.named_buffers())[name][-1]
        else:
            found = dict(copied.named_buffers())[name]
        assert torch.allclose(found, expected, atol=1e-5), name


def test_every_class_and_which_is_taken_for_which():
    model = new_model().eval()
    images, labels = torch.randn(60, 1, 28, 28), torch.arange(60) % 9  # one class has no images
    batches = [(images[:25], labels[:25]), (images[25:], labels[25:])]
    found = evaluate_exits(model, batches, detailed=True)
    plain = evaluate_exits(model, batches)
    for exit, scores in model.forward_exits(images).items():
        quality, answers = found[exit], scores.argmax(1)
        assert plain[exit].confusion == plain[exit].per_class == ()
        assert (quality.value, quality.low, quality.high) == (plain[exit].value, plain[exit].low, plain[exit].high)
        expected = [[int(((labels == k) & (answers == j)).sum()) for j in range(10)] for k in range(10)]
        assert [list(row) for row in quality.confusion] == expected
        assert quality.per_class[9] is None
        for k in range(9):
            assert quality.per_class[k] == pytest.approx((answers[labels == k] == k).double().mean().item())
        best = scores.topk(5, 1).indices
        share = (best == labels[:, None]).any(1).double().mean().item()
        assert quality.all["top5_accuracy"] == pytest.approx(share)


def test_five_classes_have_no_top_five():
    model = new_model(num_classes=5).eval()
    found = evaluate_exits(model, [(torch.randn(8, 1, 28, 28), torch.arange(8) % 5)], detailed=True)
    assert all("top5_accuracy" not in quality.all for quality in found.values())
