"""Devices. There is no GPU here; tensors on the device "meta" have none of their values, only a device and a shape."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cnmm
from cnmm import distributed
from cnmm.chain import Chain
from cnmm.cli.main import main
from cnmm.evaluation.statistics import reestimated
from cnmm.training.batches import Images
from cnmm.training.ladder_tuning import Ladder
from cnmm.training.loop import train
from cnmm.training.objective import training_loss
from cnmm.training.optim import Average
from cnmm.training.seeds import seeded
from tests.training.helpers import new_model, small_config, small_data


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices; only a copy may cross."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        assert len(devices) < 2 or "copy" in function.__name__, (function, [tensor.shape for tensor in tensors])
        if function is torch.ops.aten.batch_norm_update_stats.default and "meta" in devices:
            return torch.empty_like(args[1]), torch.empty_like(args[2])  # torch has no meta kernel
        return function(*args, **(kwargs or {}))


def elsewhere(model, monkeypatch):
    """The model on another device. Its gates have no values there: cutting goes by those it has now."""
    here = model.chain.detach()
    monkeypatch.setattr(Chain, "detach", lambda chain: here)
    return model.to("meta")


def test_one_device_is_able_to_fail():
    with OneDevice():
        torch.ones(2, device="meta") + torch.ones(2, device="meta")
        with pytest.raises(AssertionError):
            torch.ones(2, device="meta")[torch.arange(1)]
        with pytest.raises(AssertionError):
            torch.ones(2, device="meta") + torch.zeros(())


@pytest.mark.parametrize(
    ("gates", "group", "dtype"),
    [
        ("expectation", None, torch.float32),
        ("relaxed", 1, torch.float32),
        ("relaxed", 3, torch.bfloat16),
        ("hard", 4, torch.float32),
    ],
)
def test_a_step_stays_on_the_models_device(monkeypatch, gates, group, dtype):
    """Everything that a pass, its ladder point and its backward make is where the model is."""
    model = elsewhere(new_model().train(), monkeypatch)
    config, ladder = small_config(gates=gates, group=group), Ladder(model)
    x, labels = torch.empty(6, 1, 28, 28, device="meta", dtype=dtype), torch.zeros(6, device="meta", dtype=torch.long)
    for step in range(2):
        with OneDevice():
            loss = training_loss(model, x, labels, config, at=(0, step), ladder=ladder)
            loss.backward()
        assert loss.device.type == "meta"
    assert {parameter.grad.device.type for parameter in model.parameters() if parameter.grad is not None} == {"meta"}


@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_seg_tiny"])
def test_points_and_samples_stay_on_the_models_device(monkeypatch, name):
    model = cnmm.create_model(name)
    order = cnmm.cutting_order(model)
    model = elsewhere(model.train(), monkeypatch)
    x = torch.empty(4, model.config.in_chans, *model.config.input_size, device="meta")
    with OneDevice():
        for point in (None, order[3], order[-1]):
            sum(score.sum() for score in model.forward_exits(x, point).values()).backward()
            assert model.eval().monte_carlo(x, 2, point).device.type == "meta"
            model.train()
        assert {buffer.device.type for buffer in reestimated(model, [x, x], order[3]).buffers()} == {"meta"}


def test_images_and_optimizer_follow_the_device():
    data, config = small_data(), small_config()
    images = Images(data, config, device="meta")
    ((x, labels),) = images.batches(data.test, np.arange(4))
    _, trained, targets, *_ = next(images.training_batches(data.train, np.arange(100), 0))
    moments = next(images.statistics_batches(data.train, np.arange(100)))
    assert {tensor.device.type for tensor in (x, labels, trained, targets, moments)} == {"meta"}
    assert {tensor.device.type for tensor in Average(new_model().to("meta"), 0.5).tensors.values()} == {"meta"}


def test_samples_of_the_gates_depend_on_the_seed_alone():
    """Also on another device, they are drawn on the CPU."""
    chain = new_model().chain
    moved = Chain(chain.dag, chain.logits.to("meta"))
    for draw in ("sample", "rsample"):
        generators = [seeded(0, "gates"), seeded(0, "gates")]
        here, there = (getattr(c, draw)((3,), generator=g) for c, g in zip((chain, moved), generators, strict=True))
        assert (here.device.type, there.device.type) == ("cpu", "meta")
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.pick_device("auto") == distributed.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device='cuda': torch .* finds no GPU here; use auto or cpu"):
        train(new_model(), small_data(), small_config(device="cuda"), None)
    with pytest.raises(ValueError, match="device='tpu': must be one of auto, cpu, cuda"):
        distributed.pick_device("tpu")
    with pytest.raises(ValueError, match="device='tpu': must be one of auto, cpu, cuda"):
        small_config(device="tpu")


def test_the_command_line_refuses_it_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cnmm.save(new_model(), tmp_path / "run")
    for verb in (["train", "--data", "fashion", "--out", str(tmp_path / "new")], ["evaluate", str(tmp_path / "run")]):
        assert main([*verb, "--device", "cuda"]) == 2
        words = capsys.readouterr().err
        assert words.startswith("cnmm: device='cuda': torch")
        assert words.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_every_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.pick_device("auto") == torch.device("cuda", 0)
    assert distributed.pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="there are 2 GPUs for 3 processes; use --nproc-per-node 2, or --device cpu"):
        distributed.pick_device("auto")
