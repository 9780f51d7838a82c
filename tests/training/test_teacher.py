import json

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file
from torch.nn import functional as F

import cnmm
from cnmm.data import hold_out
from cnmm.training import teacher as teaching
from cnmm.training.batches import Images
from cnmm.training.loop import train
from cnmm.training.objective import Lesson, task_of
from cnmm.training.teacher import ANSWERS_FILE, open_teacher
from tests.helpers import complaint, refused
from tests.training.helpers import folder, new_model, same, small_config, small_data, weights
from tests.training.test_ladder_tuning import EVERYTHING, stopped


def onnx_file(path, shape, *, kind=TensorProto.FLOAT, classes=10, softmax=False, output=("N", 10)):
    """A linear classifier of all pixels: what anyone's file might be. Returns its weights [H * W, classes]."""
    weight = np.random.default_rng(0).normal(0, 0.05, (784, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["wide"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    nodes += [helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1)] if softmax else []
    name = "probabilities" if softmax else "logits"
    graph = helper.make_graph(
        nodes,
        "anyone's",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [output[0], classes])],
        [numpy_helper.from_array(weight, "weight")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return torch.from_numpy(weight)


def expected(data, pixels, weight, *, normalised):
    x = torch.from_numpy(pixels).float().flatten(1)
    return ((x / 255 - data.mean[0]) / data.std[0] if normalised else x) @ weight


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (["N", 1, 28, 28], {}),
        (["N", 1, "H", "W"], {}),
        (["N", "C", "H", "W"], {}),
        (["N", 28, 28, 1], {}),
        ([3, 1, 28, 28], {"output": (3, 10)}),  # batches of three only
        (["N", 28, 28, 1], {"kind": TensorProto.UINT8}),
        (["N", 1, 28, 28], {"softmax": True}),
        (["N", 1, 28, 28], {"kind": TensorProto.FLOAT16}),
    ],
)
def test_what_a_file_takes_is_told_from_its_graph(tmp_path, shape, options):
    data = small_data()
    weight = onnx_file(tmp_path / "a.onnx", shape, **options)
    pixels = data.train.read(np.arange(5))
    found = open_teacher(str(tmp_path / "a.onnx"), data)(pixels)
    wanted = expected(data, pixels, weight, normalised=options.get("kind") != TensorProto.UINT8)
    if options.get("softmax"):
        torch.testing.assert_close(found, wanted.softmax(1).clamp_min(1e-8).log(), rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2)


def test_an_exported_network_and_its_run_teach_the_same(trained_run, tmp_path):
    run = cnmm.Run(trained_run)
    run.export(tmp_path / "a.onnx")
    pixels = run.images.training(6)
    from_file, from_run = (
        open_teacher(str(name), run.images.data)(pixels) for name in (tmp_path / "a.onnx", run.folder)
    )
    torch.testing.assert_close(from_file.softmax(1), from_run.softmax(1), rtol=0, atol=1e-4)
    with torch.no_grad():
        x = run.images.prepared.prepare(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        torch.testing.assert_close(from_run, run.model(x))


def test_teachers_that_do_not_fit_are_refused(trained_run, tmp_path):
    data = small_data()
    file = tmp_path / "a.onnx"
    assert "must be a run folder, or an ONNX file" in refused(open_teacher, str(tmp_path / "none.onnx"), data)
    file.write_bytes(b"no graph")
    assert f"{file}: not an ONNX file" in refused(open_teacher, str(file), data)
    onnx_file(file, ["N", 1, 28, 28], classes=7)
    assert f"teacher '{file}': it knows 7 classes, fashion has 10" in refused(open_teacher, str(file), data)
    onnx_file(file, ["N", 1, 14, 56])
    words = refused(open_teacher, str(file), data)
    assert "it takes images of 1 x 14 x 56 (channels, height, width), fashion has 1 x 28 x 28" in words
    onnx_file(file, ["N", 4, 14, 14])
    assert "it takes images of 4 x 14 x 14" in refused(open_teacher, str(file), data)
    onnx_file(file, ["N", 784])
    assert "must have one input of uint8 or float images" in refused(open_teacher, str(file), data)
    assert "its class 0 is 'T-shirt/top', that of fashion is 'a'" in refused(open_teacher, str(trained_run), data)
    cnmm.save(new_model(), tmp_path / "run")
    assert "must be a trained run that labels images" in refused(open_teacher, str(tmp_path / "run"), data)


def test_a_teachers_answers_are_a_part_of_what_the_labels_teach():
    config = small_config(label_smoothing=0.1, teacher_weight=0.25, teacher_temperature=2.0)
    task, labels = task_of(new_model().config), torch.arange(6) % 4
    score, best, answers = torch.randn(3, 6, 4).unbind()
    hard = F.cross_entropy(score, labels, label_smoothing=0.1)
    soft = 4 * F.kl_div((score / 2).log_softmax(1), (answers / 2).softmax(1), reduction="batchmean")
    last = F.kl_div(score.log_softmax(1), best.softmax(1), reduction="batchmean")
    lesson = Lesson(task, config, labels, best, answers)
    torch.testing.assert_close(lesson.loss(score, 0.0), 0.75 * hard + 0.25 * soft)
    torch.testing.assert_close(lesson.loss(score, 0.5), 0.5 * (0.75 * hard + 0.25 * soft) + 0.5 * last)
    torch.testing.assert_close(Lesson(task, config, labels, best).loss(score, 0.0), hard)


@pytest.mark.parametrize("flips", ["random", "alternating"])
def test_a_batch_has_the_answers_of_its_images_as_they_are_shown(flips):
    data, config = small_data(), small_config(flips=flips, crop=0, batch_size=20, precision="float32")
    images, kept = Images(data, config), np.arange(100)
    (whole,) = images.batches(data.train, kept)
    images.answers = torch.arange(200).view(100, 2, 1).half()
    sides = set()
    for batch in images.training_batches(data.train, kept, 0):
        for x, answer in zip(batch.images, batch.answers.long().flatten().tolist(), strict=True):
            image = whole[0][answer // 2]
            assert torch.equal(x, image.flip(2) if answer % 2 else image)
            sides.add(answer % 2)
    assert sides == {0, 1}


def test_answers_are_stored_once_and_used_after_a_stop(tmp_path, monkeypatch):
    """Also when the teacher is gone; all other options are on, and the weights are the same bit by bit."""
    data, file = small_data(), tmp_path / "a.onnx"
    weight = onnx_file(file, ["N", 1, 28, 28])
    config = small_config(**EVERYTHING, teacher=str(file))
    opened = []
    monkeypatch.setattr(teaching, "open_teacher", lambda *args: opened.append(args[0]) or open_teacher(*args))
    whole = train(new_model(), data, config, folder(tmp_path / "whole"))
    parts = folder(tmp_path / "parts")
    stopped(new_model(), data, config, parts, 3, resume=False)
    file.unlink()
    resumed = train(new_model(seed=5), data, config, parts, resume=True)
    assert opened == [str(file)] * 2
    assert same(weights(whole), weights(resumed))
    stored = load_file(parts / ANSWERS_FILE)["answers"]
    kept, held_out = hold_out(data.train.labels, config.val, config.seed)
    assert stored.shape == (100, 2, 10)
    assert stored[torch.from_numpy(held_out)].isnan().all()  # nothing is known of what is held out
    pixels = data.train.read(kept)
    for side, shown in enumerate((pixels, np.ascontiguousarray(pixels[:, :, ::-1]))):
        wanted = expected(data, shown, weight, normalised=True)
        torch.testing.assert_close(stored[torch.from_numpy(kept), side].float(), wanted, rtol=1e-2, atol=1e-2)
    plain = train(new_model(), data, small_config(**EVERYTHING), folder(tmp_path / "plain"))
    assert not same(weights(whole), weights(plain))
    other = small_data(80)
    assert "these are not answers about the images" in refused(train, new_model(), other, config, parts)


def test_a_run_teaches_another_from_the_command_line(trained_run, fashion_folder, tmp_path, capsys):
    from cnmm.cli.main import main

    flags = ["train", "--data", f"fashion:{fashion_folder}", "--model", "cnmm_tiny", "--channels", "8"]
    flags += ["--epochs", "1", "--batch-size", "100", "--val", "100", "--teacher", str(trained_run)]
    assert main([*flags, "-o", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["teacher"] == str(trained_run)
    assert (tmp_path / "run" / ANSWERS_FILE).is_file()
    capsys.readouterr()
    onnx_file(tmp_path / "a.onnx", ["N", 1, 28, 28], classes=3)
    words = complaint(capsys, *flags[:-1], tmp_path / "a.onnx", "-o", tmp_path / "other")
    assert "it knows 3 classes" in words
    assert not (tmp_path / "other").exists()  # nothing is written before it is checked
