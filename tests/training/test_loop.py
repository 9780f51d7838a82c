import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cnmm
from cnmm import distributed, run_folder
from cnmm.chain import Chain
from cnmm.cli.main import main
from cnmm.data import ArraySplit, DataSet, fashion_sample, open_data
from cnmm.evaluation.evaluate import evaluate_exits, quality_of
from cnmm.evaluation.statistics import reestimated
from cnmm.training import checkpoint
from cnmm.training.config import TrainConfig
from cnmm.training.loop import (
    Average,
    Images,
    NotFinite,
    Stopped,
    augment,
    exit_weights,
    gate_entropy,
    ladder_loss,
    ladder_point,
    learning_rate,
    make_optimizer,
    seeded,
    train,
    training_loss,
    use_bfloat16,
)
from cnmm.training.recipes import list_recipes, recipe


def small_config(**options):
    return recipe("quick", **{"epochs": 2, "batch_size": 16, "val": 20, "lr": 0.05, **options})


def small_data(num=100):
    """The first images of the embedded sample."""
    images, labels = fashion_sample("train")
    test_images, test_labels = fashion_sample("test")
    return DataSet(
        name="fashion",
        spec="fashion",
        classes=tuple("abcdefghij"),
        train=ArraySplit(images=images[:num], labels=labels[:num]),
        test=ArraySplit(images=test_images[:50], labels=test_labels[:50]),
        mean=(0.29,),
        std=(0.35,),
        size=(28, 28),
        in_chans=1,
    )


def new_model(seed=0, **options):
    torch.manual_seed(seed)
    return cnmm.create_model("cnmm_tiny", **{"channels": 8, **options})


def weights(model):
    return model.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_recipes_of_the_paper_are_the_papers():
    for name in ("cifar10", "cifar100"):
        config = recipe(name)
        assert (config.epochs, config.batch_size, config.lr, config.weight_decay) == (300, 64, 0.1, 1e-4)
        assert (config.momentum, config.nesterov, config.warmup, config.decay_all) == (0.9, False, 0.0, True)
        assert (config.gates, config.temperature, config.exit_weights) == ("relaxed", 2.0, "linear")
        assert config.ladder_start == 1.0
    assert list_recipes() == ["quick", "cifar10", "cifar100"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0: a whole number"),
        ({"batch_size": 1}, "at least 2 images"),
        ({"lr": 0.0}, "lr=0.0: a positive number"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"ladder_start": 1.5}, "ladder_start=1.5: a number from 0 to 1"),
        ({"gates": "soft"}, "gates='soft': allowed are expectation, relaxed, hard"),
        ({"val": -1}, "val=-1"),
        ({"workers": -1}, "workers=-1: zero, a whole number, or None"),
        ({"workers": 1.5}, "workers=1.5: zero"),
        ({"learning_rate": 1}, "unknown training option 'learning_rate'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        recipe("quick", **options)


def test_unknown_recipes_list_the_known():
    with pytest.raises(ValueError, match="unknown recipe 'slow': allowed are quick, cifar10, cifar100"):
        recipe("slow")


def test_learning_rate_rises_and_falls_to_zero():
    config = small_config(lr=1.0, warmup=0.2)
    rates = [learning_rate(config, part) for part in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert learning_rate(small_config(lr=1.0, warmup=0.0), 0.5) == pytest.approx(0.5)


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


def test_ladder_tuning_begins_when_told_and_leaves_statistics_alone():
    model, config = new_model(), small_config(ladder_start=0.5, ladder_weight=2.0)
    x, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    before = training_loss(model, x, labels, config, part=0.4, at=(0, 1)).item()
    after = training_loss(model, x, labels, config, part=0.6, at=(0, 1)).item()
    teacher = model.forward_exits(x)[3].detach()
    extra = ladder_loss(model, x, labels, teacher, config, (0, 1)).item()
    assert extra > 0
    assert after == pytest.approx(before + 2 * extra, abs=1e-5)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ladder_loss(model, x, labels, teacher, config, (0, 2))
    assert same(buffers, dict(model.named_buffers()))


def test_ladder_tuning_draws_budgets_evenly_on_a_logarithmic_scale():
    model, config = new_model(), small_config()
    places = [(epoch, step) for epoch in range(8) for step in range(50)]
    points = [ladder_point(model, config, at) for at in places]
    assert points == [ladder_point(model, config, at) for at in places]
    costs = cnmm.CostTable.of(model.config)
    full = [costs.exit(exit).macs for exit in (1, 2, 3)]
    for exit in (2, 3):
        part = math.log(full[exit - 1] / full[exit - 2]) / math.log(full[2] / full[0])
        assert sum(point.exit == exit for point in points) / len(points) == pytest.approx(part, abs=0.08)
    last = {point.name for point in points if point.exit == 3}
    assert {name[:3] for name in last} == {"e3c", "e3m"}
    assert len(last) > 5
    for rule in ("flow", "flow_per_mac"):  # no point is passed over for a cheaper one, but for budgets below an exit
        macs = [costs.point(point).macs for point in cnmm.cutting_order(model, 3, rule=rule)]
        worth = {value for value in macs if value > full[1]} | {max(value for value in macs if value <= full[1])}
        drawn = {costs.point(point).macs for point in points if point.exit == 3 and point.name[2] == rule_letter(rule)}
        assert drawn <= worth
        assert len(drawn) > len(worth) / 2
    x, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    teacher = model.forward_exits(x)[3].detach()
    losses = {round(ladder_loss(model, x, labels, teacher, config, (0, step)).item(), 6) for step in range(12)}
    assert len(losses) > 3


def rule_letter(rule):
    return {"flow": "c", "flow_per_mac": "m"}[rule]


def test_ladder_tuning_of_a_single_exit_reaches_its_cheapest_network():
    model = cnmm.create_model("cnmm_tiny", exits="last")
    points = [ladder_point(model, small_config(), (0, step)) for step in range(200)]
    assert {point.exit for point in points} == {3}
    costs = cnmm.CostTable.of(model.config)
    found = {costs.point(point).macs for point in points}
    least = min(costs.point(point).macs for point in cnmm.cutting_order(model))
    assert max(found) > 0.8 * costs.exit().macs
    assert min(found) < 1.5 * least


def test_gates_stand_still_while_the_ladder_is_tuned(tmp_path):
    for start, moves in ((0.0, False), (1.0, True)):
        model, folder = new_model(), tmp_path / str(start)
        before = model.gate_logits.detach().clone()
        folder.mkdir()
        after = train(model, small_data(), small_config(ladder_start=start, gates="expectation", epochs=1), folder)
        assert torch.equal(before, after.gate_logits) != moves


def test_weight_decay_spares_what_it_should():
    model = new_model()
    everything = make_optimizer(model, recipe("cifar10"))
    assert [group["weight_decay"] for group in everything.param_groups] == [1e-4]
    decayed, plain = make_optimizer(model, recipe("quick")).param_groups
    assert decayed["weight_decay"] == 5e-4
    assert plain["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    spared = {names[id(parameter)] for parameter in plain["params"]}
    assert "gate_logits" in spared
    assert "classifiers.1.bias" in spared
    assert not {name for name in spared if name.endswith(("mix.weight", "depthwise", "pointwise", "outputs.1.weight"))}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_augmentation_is_a_crop_and_a_flip():
    images = torch.arange(1, 1 + 64 * 6 * 5 * 2, dtype=torch.int64).remainder(250).add(1).to(torch.uint8)
    images = images.view(64, 6, 5, 2)
    config = small_config(crop=2, flip=True)
    result = augment(images, config, seeded(0, "test"))
    assert result.shape == images.shape
    found = set()
    for before, after in zip(images, result, strict=True):
        padded = F.pad(before, (0, 0, 2, 2, 2, 2))
        options = {}
        for down in range(5):
            for right in range(5):
                window = padded[down : down + 6, right : right + 5]
                options[down, right, False] = window
                options[down, right, True] = F.pad(before, (0, 0, 2, 2, 2, 2))[down : down + 6, right : right + 5].flip(
                    1
                )
        match = [key for key, value in options.items() if torch.equal(value, after)]
        assert match
        found.add(match[0])
    assert {flip for *_, flip in found} == {False, True}
    assert len({key[:2] for key in found}) > 10
    assert torch.equal(augment(images, small_config(crop=0, flip=False), seeded(0)), images)
    assert torch.equal(result, augment(images, config, seeded(0, "test")))


def test_images_are_normalised_by_the_training_set():
    data = small_data()
    images = Images(data, small_config())
    x, labels = next(images.batches(data.train, np.arange(4)))
    expected = (torch.from_numpy(data.train.images[:4]).permute(0, 3, 1, 2).float() / 255 - 0.29) / 0.35
    assert torch.allclose(x, expected, atol=1e-5)
    assert labels.tolist() == data.train.labels[:4].tolist()
    assert not use_bfloat16("float32")
    assert use_bfloat16("bfloat16")


def test_training_learns_and_writes_a_run(tmp_path):
    data, config = small_data(400), small_config(epochs=6, val=100, ladder_start=0.5)
    model = new_model()
    run_folder.start_run(tmp_path, model, resume=False, train=config.to_dict())
    steps, epochs = [], []
    trained = train(model, data, config, tmp_path, on_step=steps.append, on_epoch=epochs.append)
    assert len(steps) == 6 * (300 // 16)
    assert steps[-1].left_s == 0
    assert all(progress.images_per_s > 0 for progress in steps)
    assert epochs[-1].accuracy[3] > 0.3  # ten classes
    assert epochs[0].loss > epochs[2].loss  # before the ladder adds its own
    assert [line["epoch"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert same(weights(cnmm.load(tmp_path)), weights(trained))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert 0 < gate_entropy(trained) < 1
    measured = evaluate_exits(trained, Images(data, config).batches(data.test, np.arange(50)))
    assert measured[3].accuracy > 0.3
    assert measured[3].n == 50


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("after", [1, 5, 8])
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


def folder(path):
    path.mkdir()
    return path


def test_different_seeds_give_different_weights(tmp_path):
    data = small_data()
    runs = [train(new_model(), data, small_config(seed=s), folder(tmp_path / str(s))) for s in (0, 1)]
    assert not same(weights(runs[0]), weights(runs[1]))


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    for step in (5, 10, 15):
        run_folder.append_log(tmp_path, {"step": step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2')  # the power failed here
    run_folder.cut_log(tmp_path, 10)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    model, config = new_model(), small_config()
    optimizer = make_optimizer(model, config)
    checkpoint.save_state(tmp_path, model, optimizer, {}, 1)
    expected = {name: tensor.clone() for name, tensor in weights(model).items()}
    with torch.no_grad():
        model.stem.add_(1)
    for step in (2, 3):
        checkpoint.save_state(tmp_path, model, optimizer, {}, step)
    newest = tmp_path / "checkpoints" / "step-00000003" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    fresh = new_model(seed=5)
    assert checkpoint.restore(tmp_path, fresh, make_optimizer(fresh, config), {}) == 2
    assert same(weights(fresh), weights(model))
    assert not same(weights(fresh), expected)
    older = tmp_path / "checkpoints" / "step-00000002" / "state.safetensors"
    older.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        checkpoint.restore(tmp_path, fresh, make_optimizer(fresh, config), {})


def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    model, config = new_model(), small_config()
    optimizer = make_optimizer(model, config)
    checkpoint.save_state(tmp_path, model, optimizer, {}, 1)

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_state(tmp_path, model, optimizer, {}, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path):
    model, config = new_model(), small_config()
    with torch.no_grad():
        model.classifiers["3"].bias.fill_(float("nan"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NotFinite, match="the loss is nan at epoch 1, step 1; the step was not taken"):
        train(model, small_data(), config, tmp_path)
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before if name != "classifiers.3.bias")


def test_a_folder_with_another_run_is_refused(tmp_path):
    model, config = new_model(), small_config()
    with pytest.raises(ValueError, match="nothing to resume"):
        run_folder.start_run(tmp_path / "new", model, resume=True)
    run_folder.start_run(tmp_path, model, resume=False, train=config.to_dict())
    with pytest.raises(ValueError, match="already holds a run; go on with --resume"):
        run_folder.start_run(tmp_path, model, resume=False, train=config.to_dict())
    run_folder.start_run(tmp_path, model, resume=True, train=config.to_dict())
    other = dataclasses.replace(config, lr=0.3)
    with pytest.raises(ValueError, match=r"train\.lr is 0\.05 there, 0\.3 now"):
        run_folder.start_run(tmp_path, model, resume=True, train=other.to_dict())
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="its training has not ended"):
        cnmm.load(tmp_path)


def test_a_set_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size=200: there are only 80 training images"):
        train(new_model(), small_data(), small_config(batch_size=200), tmp_path)


@pytest.mark.parametrize("variant", [{"exits": "last"}, {"mixing": "sum"}, {"gate_init": "uniform"}])
def test_every_variant_of_the_paper_trains(tmp_path, variant):
    trained = train(new_model(**variant), small_data(), small_config(epochs=1), tmp_path)
    assert all(torch.isfinite(tensor).all() for tensor in weights(trained).values())


def test_long_gradients_are_shortened(tmp_path):
    """With a tiny limit and neither momentum nor decay, a step moves the parameters by rate x limit at most."""
    model = new_model()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    config = small_config(epochs=1, clip=1e-3, momentum=0.0, nesterov=False, weight_decay=0.0, warmup=0.0, lr=1.0)
    moved = []

    def measure(_):
        now = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        moved.append((now - before).norm().item())

    train(model, small_data(), config, tmp_path, on_step=measure)
    assert moved[0] == pytest.approx(1e-3, rel=0.01)


def test_averages_follow_the_parameters():
    model = new_model()
    average = Average(model, 0.5)
    start = model.stem.detach().clone()
    with torch.no_grad():
        model.stem.add_(1)
    average.update(model)
    average.copy_to(model)
    assert torch.allclose(model.stem, start + 0.5, atol=1e-6)
    assert Average(model, 0.0).tensors == {}


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


COMMAND = ["train", "--data", "fashion", "--model", "cnmm_tiny", "--epochs", "2", "--batch-size", "600", "--val", "600"]


def command(*args):
    return [sys.executable, "-m", "cnmm", *args]


def test_kill_and_resume_give_the_same_weights_bit_by_bit(tmp_path):
    """The real thing: a process that is killed without warning, then --resume."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(*COMMAND, "--out", str(tmp_path / "whole"), "--json"), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["n"] == 1000
    assert [row["exit"] for row in answer["exits"]] == [1, 2, 3]
    part = subprocess.Popen(
        command(*COMMAND, "--out", str(tmp_path / "part")), env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "part" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.7)  # somewhere in the second epoch
    part.send_signal(signal.SIGKILL)
    part.wait()
    assert not (tmp_path / "part" / "model.safetensors").exists()
    refused = subprocess.run(command(*COMMAND, "--out", str(tmp_path / "part")), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "already holds a run; go on with --resume" in refused.stderr
    again = subprocess.run(
        command(*COMMAND, "--out", str(tmp_path / "part"), "--resume"), env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()
    check_evaluate(tmp_path / "whole", answer)


def check_evaluate(run, answer):
    """`cnmm evaluate` finds what `cnmm train` reported, and measures points, raw and re-estimated."""
    measured = json.loads(subprocess.check_output(command("evaluate", str(run), "--json")))
    assert measured["accuracy"] == answer["accuracy"]
    fields = {"point", "macs", "accuracy", "mean_class_accuracy", "n", "exits", "split", "statistics"}
    assert fields <= measured.keys()
    cut = json.loads(
        subprocess.check_output(command("evaluate", str(run), "--point", "e3c5", "--split", "validation", "--json"))
    )
    assert (cut["point"], cut["n"], cut["statistics"]) == ("e3c5", 600, "re-estimated")
    assert cut["macs"] < measured["macs"]
    raw = json.loads(subprocess.check_output(command("evaluate", str(run), "--point", "e3c5", "--raw", "--json")))
    assert raw["statistics"] == "raw"
    sampled = json.loads(subprocess.check_output(command("evaluate", str(run), "--monte-carlo", "2", "--json")))
    assert [row["exit"] for row in sampled["exits"]] == [3]


def test_interrupting_saves_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        command(*COMMAND, "--epochs", "50", "--out", str(tmp_path / "run")), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in words
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_training_can_start_from_a_trained_run_with_other_classes(tmp_path):
    from cnmm.cli.training import new_model as model_for

    trained = new_model(num_classes=4)
    cnmm.save(trained, tmp_path)
    model = model_for(None, small_data(), tmp_path)
    assert model.config == dataclasses.replace(trained.config, num_classes=10)
    fresh = {name for name, value in model.state_dict().items() if value.shape != trained.state_dict()[name].shape}
    assert fresh == {f"classifiers.{k}.{part}" for k in (1, 2, 3) for part in ("weight", "bias")}
    for name, value in trained.state_dict().items():
        assert name in fresh or torch.equal(value, model.state_dict()[name])
    with pytest.raises(ValueError, match="--model cnmm_seg_tiny: it labels pixels"):
        model_for("cnmm_seg_tiny", small_data(), None)
    with pytest.raises(ValueError, match="holds a cnmm_tiny; leave --model out"):
        model_for("cnmm_b6s3", small_data(), tmp_path)
    with pytest.raises(ValueError, match="it takes 1 channels, the images have 3"):
        model_for(None, dataclasses.replace(small_data(), in_chans=3), tmp_path)


def test_the_flags_are_the_fields_of_the_config():
    from cnmm.cli.training import Fields

    fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"recipe"}
    assert {field.name for field in dataclasses.fields(Fields)} == fields


# Devices. There is no GPU here; tensors on the device "meta" have none of their values, only a device and a shape.


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
    config = small_config(gates=gates, group=group, ladder_start=0.0)
    x, labels = torch.empty(6, 1, 28, 28, device="meta", dtype=dtype), torch.zeros(6, device="meta", dtype=torch.long)
    for step in range(2):
        with OneDevice():
            loss = training_loss(model, x, labels, config, part=0.5, at=(0, step))
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
    _, trained, targets = next(images.training_batches(data.train, np.arange(100), 0))
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
    with pytest.raises(ValueError, match=r"device='cuda': torch .* finds no GPU here; allowed are auto and cpu"):
        train(new_model(), small_data(), small_config(device="cuda"), None)
    with pytest.raises(ValueError, match="device='tpu': allowed are auto, cpu, cuda"):
        distributed.pick_device("tpu")
    with pytest.raises(ValueError, match="device='tpu': allowed are auto, cpu, cuda"):
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


@pytest.mark.parametrize("has", [True, False])
def test_auto_takes_bfloat16_where_the_gpu_has_it(monkeypatch, has):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has or including_emulation)
    assert use_bfloat16("auto", torch.device("cuda")) == has
    assert use_bfloat16("bfloat16", "cuda")
    assert not use_bfloat16("float32", "cuda")


def test_a_run_goes_on_with_another_device_and_other_workers(tmp_path):
    model, config = new_model(), small_config(device="cpu", workers=0)
    run_folder.start_run(tmp_path, model, resume=False, train=config.to_dict())
    other = dataclasses.replace(config, device="cuda", workers=3)
    run_folder.start_run(tmp_path, model, resume=True, train=other.to_dict())
    recorded = run_folder.read_config(tmp_path)["train"]
    assert TrainConfig(**recorded) == dataclasses.replace(config, device="auto", workers=None)


# Folders that do not fit into memory


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """60 training and 12 test images of noise, PNG and JPEG, that stay on disk."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, num in (("train", 20), ("test", 4)):
        for label, name in enumerate(("ant", "bee", "cat")):
            parent = root / split / name
            parent.mkdir(parents=True)
            for number in range(num):
                pixels = rng.integers(60 * label, 60 * label + 100, (24 + number % 3, 30, 3), np.uint8)
                Image.fromarray(pixels).save(parent / f"{number:03}.{'png' if number % 2 else 'jpg'}")
    return root


def streamed(root):
    return open_data(f"folder:{root}", size=(16, 16), memory_limit=0)


def colour_model(seed=0):
    return new_model(seed, in_chans=3, num_classes=3, input_size=(16, 16))


def stream_config(**options):
    return small_config(**{"batch_size": 8, "val": 9, **options})


def test_workers_do_not_change_a_bit(tmp_path, photos):
    runs = [
        train(colour_model(), streamed(photos), stream_config(workers=num), folder(tmp_path / str(num)))
        for num in (0, 1, 2)
    ]
    assert same(weights(runs[0]), weights(runs[1]))
    assert same(weights(runs[0]), weights(runs[2]))
    whole = open_data(f"folder:{photos}", size=(16, 16))
    whole = dataclasses.replace(whole, mean=streamed(photos).mean, std=streamed(photos).std)
    assert isinstance(whole.train, ArraySplit)
    assert same(weights(runs[0]), weights(train(colour_model(), whole, stream_config(), folder(tmp_path / "memory"))))


@pytest.mark.parametrize("after", [2, 6, 8])
def test_a_stopped_run_goes_on_with_workers(tmp_path, photos, after):
    """In an epoch (6 steps), at its end, and with another number of workers than before."""
    data = streamed(photos)
    whole = train(colour_model(), data, stream_config(workers=0), folder(tmp_path / "whole"))
    count = []
    with pytest.raises(Stopped):
        train(
            colour_model(),
            data,
            stream_config(workers=2),
            folder(tmp_path / "parts"),
            on_step=count.append,
            should_stop=lambda: len(count) == after,
        )
    assert running_workers(os.getpid()) == []
    resumed = train(colour_model(seed=99), data, stream_config(workers=1), tmp_path / "parts", resume=True)
    assert same(weights(whole), weights(resumed))


def test_a_bad_image_stops_the_training_alike_with_workers(tmp_path, photos):
    shutil.copytree(photos, tmp_path / "photos")
    data = streamed(tmp_path / "photos")
    bad = tmp_path / "photos" / "train" / "bee" / "003.png"
    bad.write_bytes(bad.read_bytes()[:200])
    messages = []
    for num in (0, 2):
        with pytest.raises(ValueError, match="cannot be read as an image") as problem:
            train(colour_model(), data, stream_config(workers=num, val=0), folder(tmp_path / str(num)))
        messages.append(str(problem.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{bad}: cannot be read as an image (image file is truncated")
    assert running_workers(os.getpid()) == []


def test_workers_for_images_in_memory_have_no_effect(tmp_path):
    with pytest.warns(UserWarning, match="workers=2 has no effect: these images are in memory"):
        train(new_model(), small_data(), small_config(epochs=1, workers=2), tmp_path)


def running_workers(parent):
    """Process numbers of the workers that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent and b"cnmm.data.workers" in words:
            found.append(int(stat.parent.name))
    return found


STREAMED = """
import functools, sys
import cnmm.cli.main, cnmm.data
cnmm.data.open_data = functools.partial(cnmm.data.open_data, memory_limit=0)
sys.exit(cnmm.cli.main(sys.argv[1:]))
"""


def streamed_command(photos, out, *args):
    """`cnmm train` in a process of its own, on images that stay on disk."""
    flags = ["--model", "cnmm_tiny", "--batch-size", "8", "--val", "9", "--lr", "0.05", "--workers", "2"]
    return [sys.executable, "-c", STREAMED, "train", "--data", f"folder:{photos}", "--out", str(out), *flags, *args]


def test_kill_and_resume_with_workers_give_the_same_weights_bit_by_bit(tmp_path, photos):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    epochs = ["--epochs", "6"]

    def run(name, *args):
        command = streamed_command(photos, tmp_path / name, *epochs, *args)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run("whole")
    part = subprocess.Popen(
        streamed_command(photos, tmp_path / "part", *epochs), env=environment, stderr=subprocess.DEVNULL
    )
    wait_for(tmp_path / "part" / "log.jsonl")
    workers = running_workers(part.pid)
    time.sleep(0.1)  # somewhere in a later epoch
    part.send_signal(signal.SIGKILL)
    part.wait()
    assert len(workers) == 2
    assert not (tmp_path / "part" / "model.safetensors").exists()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    run("part", "--resume")
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()


def test_interrupting_leaves_no_worker_behind(tmp_path, photos):
    """Ctrl-C goes to the whole process group, as a terminal sends it; the workers wait for their process's word."""
    process = subprocess.Popen(
        streamed_command(photos, tmp_path / "run", "--epochs", "500"),
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    wait_for(tmp_path / "run" / "log.jsonl")
    workers = running_workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert (process.returncode, len(workers)) == (130, 2)
    assert "--resume" in words
    assert "Traceback" not in words
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_a_killed_worker_is_one_line(tmp_path, photos):
    process = subprocess.Popen(
        streamed_command(photos, tmp_path / "run", "--epochs", "500"), stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "run" / "log.jsonl")
    os.kill(running_workers(process.pid)[0], signal.SIGKILL)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = (line for line in words.splitlines() if line.startswith("cnmm: worker"))
    assert "which decodes images, was killed by signal 9" in line
    assert "Traceback" not in words


def wait_for(path):
    wait_until(path.exists)


def wait_until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
