import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cnmm.training.ladder_tuning import Ladder
from cnmm.training.loop import train
from cnmm.training.objective import exit_weights, training_loss
from cnmm.training.recipes import recipe
from cnmm.training.scene_batches import training_task
from cnmm.training.seeds import seeded
from tests.training.helpers import new_model, same, small_config, small_data, weights


def test_exit_weights_are_linear_and_sum_to_one():
    assert exit_weights([1, 2, 3], recipe("cifar10")) == pytest.approx({1: 1 / 6, 2: 2 / 6, 3: 3 / 6})
    assert exit_weights([1, 2], small_config(exit_weights="equal")) == {1: 0.5, 2: 0.5}
    assert exit_weights([6], recipe("cifar10")) == {6: 1.0}  # CNMM-single


def test_the_loss_is_equation_nine():
    model, config = new_model(), recipe("cifar10", group=1)
    x, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    loss = training_loss(model, x, labels, config, at=(0, 3))
    logits = model.forward_exits(x, gates="relaxed", group=1, generator=seeded(0, "gates", 0, 3))
    expected = sum(k * F.cross_entropy(logits[k], labels) for k in (1, 2, 3)) / 6
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_ladder_point_adds_its_loss_and_leaves_statistics_alone():
    model, config = new_model(), small_config(ladder_weight=2.0, ladder_labels=0.25, label_smoothing=0.1)
    x, labels, ladder = torch.randn(6, 1, 28, 28), torch.arange(6), Ladder(model)
    before = training_loss(model, x, labels, config, at=(0, 1)).item()
    after = training_loss(model, x, labels, config, at=(0, 1), ladder=ladder).item()
    best = model.forward_exits(x)[3].detach()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    score = model(x, ladder.draw(seeded(0, "ladder", 0, 1)), update_statistics=False)
    assert same(buffers, dict(model.named_buffers()))
    hard = F.cross_entropy(score, labels, label_smoothing=0.1)
    soft = (best.softmax(1) * (best.log_softmax(1) - score.log_softmax(1))).sum(1).mean()
    assert after == pytest.approx(before + 2 * (0.25 * hard + 0.75 * soft).item(), abs=1e-5)


def test_the_last_exit_teaches_the_others_while_the_ladder_is_tuned():
    model = new_model()
    x, labels, ladder = torch.randn(6, 1, 28, 28), torch.arange(6), Ladder(model)
    alone, taught = (small_config(ladder_weight=0.0, exit_distill=share) for share in (0.0, 0.4))
    score = {exit: logits.detach() for exit, logits in model.forward_exits(x).items()}
    hard = [F.cross_entropy(score[exit], labels) for exit in (1, 2, 3)]
    soft = [F.kl_div(score[exit].log_softmax(1), score[3].softmax(1), reduction="batchmean") for exit in (1, 2)]
    wanted = (0.6 * hard[0] + 0.4 * soft[0]) / 6 + (0.6 * hard[1] + 0.4 * soft[1]) / 3 + hard[2] / 2
    found = training_loss(model, x, labels, taught, at=(0, 1), ladder=ladder)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)
    plain = [training_loss(model, x, labels, config, at=(0, 1)).item() for config in (alone, taught)]
    assert plain[0] == plain[1]  # not before the ladder is tuned


@pytest.mark.parametrize("variant", [{"exits": "last"}, {"mixing": "sum"}, {"gate_init": "uniform"}])
def test_every_variant_of_the_paper_trains(tmp_path, variant):
    trained = train(new_model(**variant), small_data(), small_config(epochs=1), tmp_path)
    assert all(torch.isfinite(tensor).all() for tensor in weights(trained).values())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_balanced_classes_count_the_same_in_all(smoothing):
    """An oracle in numpy: the mean over the images of a batch, each weighted by 1 / (classes * share of its class)."""
    labels = np.repeat([0, 1, 3], [8, 3, 1])
    data = dataclasses.replace(small_data(12), classes=tuple("abcd"))
    data = dataclasses.replace(data, train=dataclasses.replace(data.train, labels=labels))
    kept = np.arange(1, 12)  # the first image of class 0 is held out
    model = new_model(num_classes=4)
    task = training_task(model, data, kept, small_config(class_weights="balanced"))
    shares = np.array([7, 3, 0, 1]) / 11
    expected = np.array([1 / (3 * 7 / 11), 1 / (3 * 3 / 11), 0, 1 / (3 / 11)])
    assert task.class_weights.tolist() == pytest.approx(expected.tolist())
    assert (expected * shares)[[0, 1, 3]] == pytest.approx(1 / 3)
    logits, target = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.from_numpy(labels)
    nll = -logits.double().log_softmax(1).numpy()
    own = expected[labels] * nll[np.arange(12), labels]
    spread = (expected * nll).sum(1) / 4
    wanted = ((1 - smoothing) * own + smoothing * spread).sum() / expected[labels].sum()
    assert task.loss(logits, target, label_smoothing=smoothing).item() == pytest.approx(wanted, rel=1e-5)
    plain = training_task(model, data, kept, small_config())
    assert plain.class_weights is None
    assert torch.equal(plain.loss(logits, target), F.cross_entropy(logits, target))
