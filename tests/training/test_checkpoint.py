import dataclasses
import os

import pytest
import torch

import cnmm
from cnmm import run_folder
from cnmm.training import checkpoint
from cnmm.training.config import TrainConfig
from cnmm.training.optim import Optimizer
from tests.training.helpers import lines, new_model, same, small_config, weights


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    for step in (5, 10, 15):
        run_folder.append_log(tmp_path, {"step": step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2')  # the power failed here
    run_folder.cut_log(tmp_path, 10)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    model, config = new_model(), small_config()
    optimizer = Optimizer(model, config)
    checkpoint.save_state(tmp_path, model, optimizer, {}, 1)
    expected = {name: tensor.clone() for name, tensor in weights(model).items()}
    with torch.no_grad():
        model.stem.add_(1)
    for step in (2, 3):
        checkpoint.save_state(tmp_path, model, optimizer, {}, step)
    newest = tmp_path / "checkpoints" / "step-00000003" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    fresh = new_model(seed=5)
    assert checkpoint.restore(tmp_path, fresh, Optimizer(fresh, config), {}) == 2
    assert same(weights(fresh), weights(model))
    assert not same(weights(fresh), expected)
    older = tmp_path / "checkpoints" / "step-00000002" / "state.safetensors"
    older.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        checkpoint.restore(tmp_path, fresh, Optimizer(fresh, config), {})


def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    model, config = new_model(), small_config()
    optimizer = Optimizer(model, config)
    checkpoint.save_state(tmp_path, model, optimizer, {}, 1)

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_state(tmp_path, model, optimizer, {}, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_folder_with_another_run_is_refused(tmp_path):
    model, config = new_model(), small_config()
    run_folder.start_run(tmp_path, model, train=config.to_dict())
    run_folder.start_run(tmp_path, model, train=config.to_dict())  # no step was taken: nothing is lost
    checkpoint.save_state(tmp_path, model, Optimizer(model, config), {}, 1)
    with pytest.raises(ValueError, match="already holds a run; go on with --resume"):
        run_folder.start_run(tmp_path, model, train=config.to_dict())
    run_folder.start_run(tmp_path, model, resume=True, train=config.to_dict())
    other = dataclasses.replace(config, lr=0.3)
    with pytest.raises(ValueError, match=r"train\.lr is 0\.05 there, 0\.3 now"):
        run_folder.start_run(tmp_path, model, resume=True, train=other.to_dict())
    with pytest.raises(ValueError, match="its training has not ended"):
        cnmm.load(tmp_path)


def test_a_run_goes_on_with_another_device_and_other_workers(tmp_path):
    model, config = new_model(), small_config(device="cpu", workers=0)
    run_folder.start_run(tmp_path, model, train=config.to_dict())
    checkpoint.save_state(tmp_path, model, Optimizer(model, config), {}, 1)
    other = dataclasses.replace(config, device="cuda", workers=3)
    run_folder.start_run(tmp_path, model, resume=True, train=other.to_dict())
    recorded = run_folder.read_config(tmp_path)["train"]
    assert TrainConfig(**recorded) == dataclasses.replace(config, device="auto", workers=None)
