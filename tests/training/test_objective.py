import pytest
import torch
from torch.nn import functional as F

from cnmm.training.loop import train
from cnmm.training.objective import exit_weights, training_loss
from cnmm.training.recipes import recipe
from cnmm.training.seeds import seeded
from tests.training.helpers import new_model, small_config, small_data, weights


def test_exit_weights_are_linear_and_sum_to_one():
    assert exit_weights([1, 2, 3], recipe("cifar10")) == pytest.approx({1: 1 / 6, 2: 2 / 6, 3: 3 / 6})
    assert exit_weights([1, 2], small_config(exit_weights="equal")) == {1: 0.5, 2: 0.5}
    assert exit_weights([6], recipe("cifar10")) == {6: 1.0}  # CNMM-single


def test_the_loss_is_equation_nine():
    model, config = new_model(), recipe("cifar10", group=1)
    x, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    loss = training_loss(model, x, labels, config, part=0.0, at=(0, 3))
    logits = model.forward_exits(x, gates="relaxed", group=1, generator=seeded(0, "gates", 0, 3))
    expected = sum(k * F.cross_entropy(logits[k], labels) for k in (1, 2, 3)) / 6
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("variant", [{"exits": "last"}, {"mixing": "sum"}, {"gate_init": "uniform"}])
def test_every_variant_of_the_paper_trains(tmp_path, variant):
    trained = train(new_model(**variant), small_data(), small_config(epochs=1), tmp_path)
    assert all(torch.isfinite(tensor).all() for tensor in weights(trained).values())
