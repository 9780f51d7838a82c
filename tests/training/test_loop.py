import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cnmm
from cnmm import run_folder
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.training.batches import Images
from cnmm.training.loop import NotFinite, Stopped, train
from cnmm.training.progress import gate_entropy
from tests.training.helpers import folder, lines, new_model, same, small_config, small_data, weights


def test_training_learns_and_writes_a_run(tmp_path):
    data, config = small_data(400), small_config(epochs=6, val=100, ladder_start=0.5)
    model = new_model()
    run_folder.start_run(tmp_path, model, train=config.to_dict())
    steps, epochs = [], []
    trained = train(model, data, config, tmp_path, on_step=steps.append, on_epoch=epochs.append)
    assert len(steps) == 6 * (300 // 16)
    assert 0 < steps[-1].left_s < steps[0].left_s  # measuring is still to come
    assert all(progress.images_per_s > 0 for progress in steps)
    assert epochs[-1].quality[3] > 0.3  # ten classes
    assert epochs[0].loss > epochs[2].loss  # before the ladder adds its own
    assert [line["epoch"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert same(weights(cnmm.load(tmp_path)), weights(trained))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert 0 < gate_entropy(trained) < 1
    measured = evaluate_exits(trained, Images(data, config).batches(data.test, np.arange(50)))
    assert measured[3].value > 0.3
    assert measured[3].n == 50


@pytest.mark.parametrize(("after", "average"), [(1, 0.0), (5, 0.0), (8, 0.9)])
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, after, average):
    """Bit by bit, wherever it was stopped: in an epoch, at its end, and with ladder tuning under way."""
    data, config = small_data(), small_config(ladder_start=0.4, gates="relaxed", group=4, average=average)
    whole = train(new_model(), data, config, folder(tmp_path / "whole"))
    count = []
    with pytest.raises(Stopped, match="stopped after epoch"):
        train(
            new_model(),
            data,
            config,
            folder(tmp_path / "parts"),
            on_step=count.append,
            should_stop=lambda: len(count) == after,
        )
    resumed = train(new_model(seed=99), data, config, tmp_path / "parts", resume=True)
    assert same(weights(whole), weights(resumed))
    assert [line["epoch"] for line in lines(tmp_path / "parts")] == [1, 2]


def test_different_seeds_give_different_weights(tmp_path):
    data = small_data()
    runs = [train(new_model(), data, small_config(seed=s), folder(tmp_path / str(s))) for s in (0, 1)]
    assert not same(weights(runs[0]), weights(runs[1]))


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path):
    model, config = new_model(), small_config()
    with torch.no_grad():
        model.classifiers["3"].bias.fill_(float("nan"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NotFinite, match="the loss is nan at epoch 1, step 1; the step was not taken"):
        train(model, small_data(), config, tmp_path)
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before if name != "classifiers.3.bias")


def test_raw_statistics_are_the_running_averages_of_training(tmp_path):
    """Those of the last step, with nothing re-estimated; the weights are the same either way."""
    data, models, running = small_data(), {}, []
    for kind in ("raw", "re-estimated"):
        config = small_config(gates="relaxed", statistics=kind)
        model = new_model()

        def keep(_, model=model):
            running[:] = [{name: buffer.clone() for name, buffer in model.named_buffers()}]

        models[kind] = train(model, data, config, folder(tmp_path / kind), on_step=keep)
        assert not models[kind].training
        assert same(dict(models[kind].named_buffers()), running[0]) == (kind == "raw")
        assert same(load_file(tmp_path / kind / "model.safetensors"), weights(models[kind]))
    raw, estimated = (dict(models[kind].named_parameters()) for kind in ("raw", "re-estimated"))
    assert same(raw, estimated)
