import pytest
import torch

import cnmm
from cnmm.evaluation.evaluate import quality_of
from cnmm.evaluation.statistics import reestimated
from tests.training.helpers import new_model, same


def test_quality_is_what_torchmetrics_says():
    from torchmetrics.functional.classification import multiclass_accuracy

    torch.manual_seed(0)
    labels, predicted = torch.randint(7, (300,)), torch.randint(7, (300,))
    predicted[:150] = labels[:150]
    quality = quality_of(predicted, labels, 7)
    micro = multiclass_accuracy(predicted, labels, 7, average="micro").item()
    macro = multiclass_accuracy(predicted, labels, 7, average="macro").item()
    assert (quality.accuracy, quality.mean_class_accuracy) == pytest.approx((micro, macro), abs=1e-6)
    assert quality.low < quality.accuracy < quality.high
    half = quality_of(torch.tensor([0, 1] * 50), torch.zeros(100, dtype=torch.long), 2)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # Wilson's interval of 50 in 100
    assert half.mean_class_accuracy == 0.5  # class 1 does not occur


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
