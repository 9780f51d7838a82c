"""Label maps from ladders: at the images' own sizes, by budget, by confidence and before deadlines, in many threads."""

import itertools
import math
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import cnmm
from cnmm.blocks import Statistics
from cnmm.cli import main as cli
from cnmm.data.images import resize_image
from cnmm.evaluation.segmentation import image_confidence as by_torch
from cnmm.export.slim import slim_cascade
from cnmm.export.stages import written_stage_macs
from cnmm.runtime import bench, latency, pixels
from cnmm.runtime.answers import Finishing
from cnmm.runtime.session import Session
from tests.helpers import RUN_CLI, ask, complaint, made_up_ladder, python, refused, trained

RUNTIMES = [name for name in latency.RUNTIMES if latency.runtime_version(name)]
SIZE = (48, 64)
POINTS = ("e1c0", "e2c3", "e3c0")
CASCADE = "e3a2"
SIZES = (SIZE, (37, 51), (75, 40), (121, 160))
"""The ladder's own; smaller and odd; of another shape; larger and odd."""


@pytest.fixture(scope="module")
def model():
    """Not trained, but with statistics of real passes, and classes that all occur."""
    model = trained("cnmm_seg_tiny", blocks=3, num_classes=5, input_size=SIZE)
    x = F.interpolate(torch.randn(8, 3, 6, 8, generator=torch.Generator().manual_seed(0)), SIZE, mode="bicubic")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Statistics):
                module.momentum = 1.0
        model.train().forward_exits(x)
        model.eval()
        for exit, logits in model.forward_exits(x).items():
            scale, classifier = 2 / logits.std((0, 2, 3)), model.classifiers[str(exit)]
            classifier.pointwise.mul_(scale.view(-1, 1, 1, 1))
            classifier.bias.sub_(logits.mean((0, 2, 3))).mul_(scale)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["one size", "any size"])
def folder(request, model, tmp_path_factory):
    name = "any" if request.param else "one"
    folder = tmp_path_factory.mktemp("pixels") / name
    return made_up_ladder(folder, model, POINTS, cascade=CASCADE, any_size=request.param)


@pytest.fixture(scope="module", params=RUNTIMES)
def session(request, folder):
    with Session(folder, runtime=request.param, threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def pictures():
    """Blots of colour, so that label maps are no noise."""
    rng = np.random.default_rng(0)
    small = [rng.integers(0, 256, (5, 6, 3), np.uint8) for _ in SIZES]
    return [
        np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))
        for image, size in zip(small, SIZES, strict=True)
    ]


def scores(session, model, picture, point=None):
    """What torch says of every exit's pixels, at the size with which the image runs."""
    height, width = picture.shape[:2]
    size = SIZE
    if session.any_size:
        scale = min(1.0, math.sqrt(math.prod(SIZE) / (height * width)))
        size = int(scale * height), int(scale * width)
    about = session.preprocessing
    x = torch.from_numpy(resize_image(picture, size).copy()).permute(2, 0, 1)[None].double() / 255
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (about.mean, about.std))
    with torch.no_grad():
        return model.forward_exits(((x - mean) / std).float(), cnmm.named_point(model, point or CASCADE))


def same_labels(labels, logits):
    """Where torch's two best classes of a pixel are apart, the label is the best of them."""
    whole = F.interpolate(logits, labels.shape, mode="bilinear", align_corners=False)[0]
    best = whole.topk(2, 0)
    clear = (best.values[0] - best.values[1] > 1e-3).numpy()
    assert labels.dtype == np.uint8
    assert clear.mean() > 0.9
    assert (labels == best.indices[0].numpy())[clear].all()
    assert len(np.unique(labels)) > 1


# In numpy


@pytest.mark.parametrize("new", [(48, 64), (96, 128), (97, 51), (5, 3), (1, 1), (200, 65)])
@pytest.mark.parametrize("old", [(48, 64), (7, 9), (1, 4)])
def test_upsampling_is_that_of_torch(old, new):
    plane = np.random.default_rng(1).normal(size=old).astype(np.float32)
    exact = torch.from_numpy(plane)[None, None].double()
    expected = F.interpolate(exact, new, mode="bilinear", align_corners=False)[0, 0]
    found = pixels._Bilinear(old, new).rows(plane, slice(0, new[0]))
    assert np.abs(found - expected.numpy()).max() < 1e-6


@pytest.mark.parametrize("size", [(48, 64), (33, 70)])
def test_blocks_change_nothing(size, monkeypatch):
    values = np.random.default_rng(2).normal(size=(4, 48, 64)).astype(np.float32)
    whole = pixels.label_map(values, size), pixels.image_confidence(values)
    monkeypatch.setattr(pixels, "BLOCK_PIXELS", 300)
    assert np.array_equal(pixels.label_map(values, size), whole[0])
    assert pixels.image_confidence(values) == pytest.approx(whole[1], abs=1e-7)
    if size == (48, 64):
        assert np.array_equal(whole[0], values.argmax(0))
    assert whole[1] == pytest.approx(by_torch(torch.from_numpy(values)[None]).item(), abs=1e-6)


def test_the_first_of_equal_classes_wins_and_large_scores_do_not_overflow():
    values = np.full((3, 2, 2), 1000, np.float32)
    assert np.array_equal(pixels.label_map(values, (2, 2)), np.zeros((2, 2), np.uint8))
    assert pixels.image_confidence(values) == pytest.approx(1 / 3)


# Points


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_label_maps_have_the_size_of_their_images(session, model, pictures, number):
    picture = pictures[number]
    for name in POINTS:
        answer = session.predict(picture, point=name)
        (logits,) = list(scores(session, model, picture, name).values())[-1:]
        assert answer.labels[0].shape == picture.shape[:2]
        same_labels(answer.labels[0], logits)
        assert answer.confidence[0] == pytest.approx(by_torch(logits).item(), abs=1e-4)
        assert answer.exits.tolist() == [int(name[1])]
        shares = np.bincount(answer.labels[0].ravel(), minlength=5) / answer.labels[0].size
        assert answer.probabilities[0] == pytest.approx(shares)


def test_several_images_of_several_sizes(session, pictures, tmp_path):
    files = []
    for number, picture in enumerate(pictures):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(picture).save(files[-1])
    alone = [session.predict(picture, budget="90%") for picture in pictures]
    for same in (files, [Image.open(file) for file in files], pictures):
        together = session.predict(same, budget="90%")
        for labels, one in zip(together.labels, alone, strict=True):
            assert np.array_equal(labels, one.labels[0])
        assert together.macs == pytest.approx(np.mean([one.macs for one in alone]))


def test_no_image_costs_more_than_was_measured(session, pictures):
    full = session.points[-1].macs
    for picture in pictures:
        macs = session.predict(picture, point=session.points[-1].name).macs
        run = min(1.0, picture.shape[0] * picture.shape[1] / math.prod(SIZE)) if session.any_size else 1.0
        assert 0.95 * run * full <= macs <= full * min(1.0, run * 1.0001)


def test_bad_pictures(session):
    for bad, words in (
        (np.zeros((2, 8, 8, 3), np.float32), "float32"),
        (np.zeros((8, 8, 4), np.uint8), "[N, H, W, 3]"),
        (np.zeros((8, 8), np.uint8), "[8, 8]"),
        (np.zeros((0, 8, 8, 3), np.uint8), "[0, 8, 8, 3]"),
        ([np.zeros((8, 8), np.uint8)], "[8, 8] in a list"),
        ([np.zeros((2, 8, 8, 3), np.uint8)], "[2, 8, 8, 3] in a list"),
        ([np.zeros((8, 8, 1), np.uint8)], "[N, H, W, 3]"),
        ([], "no images"),
        ("none.png", "none.png"),
    ):
        assert words in refused(session.predict, bad)


# Early exit and deadlines


def test_an_image_leaves_at_the_first_confident_exit(session, model, pictures):
    exits = [scores(session, model, picture) for picture in pictures]
    sure = np.array([[by_torch(logits).item() for logits in each.values()] for each in exits])
    needed = float(np.median(sure[:, 0]))
    answer = session.predict(pictures, confidence=needed)
    for number, each in enumerate(exits):
        first = next((k for k, value in enumerate(sure[number]) if value >= needed), len(each) - 1)
        exit = list(each)[first]
        assert answer.exits[number] == exit
        assert answer.confidence[number] == pytest.approx(sure[number, first], abs=1e-4)
        same_labels(answer.labels[number], each[exit])
    assert len(set(answer.exits.tolist())) > 1


def test_macs_are_those_of_the_stages_that_ran(session, model, pictures):
    graph = slim_cascade(model, CASCADE).graph
    macs, asking = written_stage_macs(graph)
    first, last = session.predict(pictures[:1], confidence=0.0), session.predict(pictures[:1], confidence=1.0)
    assert (first.macs, last.macs) == (macs[0], sum(macs) + sum(asking))
    dear = session.predict(pictures[:1], average_macs="999%")
    assert (dear.exits.tolist(), dear.macs) == ([graph.exits[-1]], sum(macs))
    assert min(asking) > 0
    assert "one image" in refused(session.predict, pictures, deadline_ms=10_000)
    late = session.predict(pictures[-1], deadline_ms=10_000)
    assert late.exits.tolist() == [graph.exits[-1]]
    same_labels(late.labels[0], scores(session, model, pictures[-1])[late.exits[0]])
    assert "first exit alone" in refused(session.predict, pictures[0], deadline_ms=1e-3)


def test_making_the_label_map_is_part_of_a_deadline(folder, pictures):
    with Session(folder, threads=1) as session:
        session._finishing = type(session._finishing)(same_ms=1.0, other_ms=2.0)
        line = refused(session.predict, pictures[0], deadline_ms=math.prod(SIZE))
        assert "first exit alone" in line
        large = pictures[-1].shape[0] * pictures[-1].shape[1]
        assert "first exit alone" in refused(session.predict, pictures[-1], deadline_ms=1.9 * large)


def test_threads_with_different_budgets_and_sizes_do_not_disturb_each_other(session, pictures):
    options = [{"point": name} for name in POINTS] + [{"confidence": 0.4}, {"average_macs": "150%"}, {"budget": "90%"}]
    work = [(random.Random(seed).choice(options), seed % len(pictures)) for seed in range(24)]

    def call(job):
        answer = session.predict(pictures[job[1]], **job[0])
        return answer.point, answer.exits.tolist(), answer.labels[0], answer.confidence

    serial = [call(job) for job in work]
    with ThreadPoolExecutor(6) as pool:
        parallel = list(pool.map(call, work))
    for one, other in zip(serial, parallel, strict=True):
        assert one[:2] == other[:2]
        assert (one[2] != other[2]).mean() < 1e-3  # equal scores but for rounding
        assert one[3] == pytest.approx(other[3], abs=1e-6)


def test_points_and_stages_are_timed(session, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    measured = bench.time_session(session, seconds=0)
    assert [timing.point for timing in measured.points] == [point.name for point in session.points]
    assert [timing.macs for timing in measured.stages] == list(session.cascade.macs)
    height, width = session.input_size
    slow = Finishing(same_ms=1e6 / (height * width), other_ms=0.0)  # so the label map of an image takes 1,000 seconds
    monkeypatch.setattr(session, "_finishing", slow)
    stages, asking = bench._time_stages(session)
    first, *others = (timing.median_ms for timing in stages)
    assert first > 1e6 > sum(others)
    assert [timing.macs for timing in asking] == list(session.cascade.asking)
    assert 0 < sum(timing.median_ms for timing in asking) < 1e6


def test_classifiers_have_one_size(tmp_path):
    model = trained("cnmm_tiny")
    line = refused(made_up_ladder, tmp_path / "a", model, ["e1c0"], cascade="e3a0", any_size=True)
    assert "any_size" in line
    assert not list(tmp_path.iterdir())


# The command line


@pytest.fixture(scope="module")
def files(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"street{number}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_predict_writes_label_maps_and_overlays(folder, files, pictures, tmp_path, capsys):
    answer = ask(capsys, "predict", folder, files, "--budget", "90%", "-o", tmp_path / "out", "--threads", 1)
    names = [f"street{number}" for number in range(len(SIZES))]
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == sorted(f"{name}{end}.png" for name in names for end in ("", "_overlay"))
    with Session(folder, threads=1) as session:
        for row, name, picture in zip(answer["results"], names, pictures, strict=True):
            expected = session.predict(picture, budget="90%")
            assert (row["file"], row["labels"]) == (str(files / f"{name}.png"), str(tmp_path / "out" / f"{name}.png"))
            labels = Image.open(row["labels"])
            assert np.array_equal(np.asarray(labels), expected.labels[0])
            assert labels.getpalette()[:15] == list(itertools.chain(*session.preprocessing.palette))
            assert Image.open(row["overlay"]).height > picture.shape[0]
            assert row["confidence"] == pytest.approx(float(expected.confidence[0]), abs=1e-6)
            assert row["top"][0]["p"] == pytest.approx(float(expected.probabilities.max()))
    assert answer["point"] == expected.point


def test_predict_compares_budgets_in_strips(folder, files, pictures, tmp_path, capsys):
    picture, out = files / "street1.png", tmp_path / "out"
    answer = ask(capsys, "predict", folder, picture, "--budgets", "75%, 100%", "-o", out, "--threads", 1)
    (row,) = answer["results"]
    assert (row["file"], row["strip"]) == (str(picture), str(out / "street1_strip.png"))
    with Session(folder, threads=1) as session:
        expected = [session.predict(pictures[1], budget=budget) for budget in ("75%", "100%")]
    assert [one["point"] for one in row["answers"]] == [one.point for one in expected]
    assert [one["macs"] for one in row["answers"]] == [one.macs for one in expected]
    assert len({one["point"] for one in row["answers"]}) == 2
    assert [path.name for path in out.iterdir()] == ["street1_strip.png"]
    assert Image.open(row["strip"]).width > 4 * 200


def test_pictures_for_people(folder, files, tmp_path, capsys):
    one = str(files / "street0.png")
    assert cli.main(["predict", str(folder), one, "-o", str(tmp_path / "a"), "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert "class" in out
    assert str(tmp_path / "a") in err
    flags = ["--budgets", "100%", "-o", str(tmp_path / "b"), "--threads", "1"]
    assert cli.main(["predict", str(folder), one, *flags]) == 0
    out, err = capsys.readouterr()
    assert "e3c0" in out
    assert str(tmp_path / "b") in err


def test_predict_complains_and_leaves_nothing(folder, hand_made_ladder, files, tmp_path, capsys):
    one = files / "street0.png"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("mine")
    assert "exists" in complaint(capsys, "predict", folder, one, "-o", tmp_path / "there")
    again = shutil.copy(one, tmp_path / "street0.jpg")
    assert "one name" in complaint(capsys, "predict", folder, one, again, "-o", tmp_path / "out")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert "bad.png" in complaint(capsys, "predict", folder, one, tmp_path / "bad.png", "-o", tmp_path / "out")
    assert "no images in this folder" in complaint(capsys, "predict", folder, tmp_path / "there")
    assert "-o" in complaint(capsys, "predict", folder, one, "--budgets", "50%,100%")
    flags = ("--budgets", "50%,100%", "-o", tmp_path / "out")
    assert "no other budget" in complaint(capsys, "predict", folder, one, *flags, "--budget", "40%")
    assert "cheapest" in complaint(capsys, "predict", folder, one, "--budgets", "1%", "-o", tmp_path / "out")
    assert "''" in complaint(capsys, "predict", folder, one, "--budgets", "100%,", "-o", tmp_path / "out")
    assert "whole images" in complaint(capsys, "predict", hand_made_ladder, one, "-o", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png", "street0.jpg", "there"]


def test_a_device_without_torch_draws(folder, files, tmp_path):
    flags = ["--budgets", "100%", "-o", tmp_path / "out", "--json"]
    missing = ("torch", "safetensors", "matplotlib", "onnx")
    done = python(RUN_CLI, "predict", folder, files / "street1.png", *flags, missing=missing)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "street1_strip.png").is_file()
