"""From a run that labels pixels to answers: ladder, int8, predict with pictures, report."""

import html
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import cnmm
from cnmm.evaluation.segmentation import Segmentation
from cnmm.ladder import read_ladder
from tests.helpers import ask
from tests.scenes import CLASSES


@pytest.fixture(scope="module")
def run(scene_run):
    return cnmm.Run(scene_run)


@pytest.fixture(scope="module")
def ladder(run, tmp_path_factory):
    return run.export_ladder(tmp_path_factory.mktemp("story") / "ladder", 3).folder


def test_the_ladder_labels_held_out_scenes_like_the_mixture(run, ladder):
    scenes = run.images.scenes(2)
    with cnmm.Session(ladder, threads=1) as session, torch.no_grad():
        assert (session.classes, session.task) == (CLASSES, "segmentation")
        for found in session.points:
            point = cnmm.named_point(run.model, found.name)
            for scene in scenes:
                x = run.images.prepared.prepare(torch.from_numpy(scene.image.copy()).permute(2, 0, 1)[None])
                logits = run.settled(point)(x, point)
                logits = F.interpolate(logits, scene.mask.shape, mode="bilinear", align_corners=False)[0]
                best = logits.topk(2, 0)
                clear = (best.values[0] - best.values[1] > 1e-3).numpy()
                labels = session.predict(scene.image, point=found.name).labels[0]
                assert (labels == best.indices[0].numpy())[clear].all()


def test_the_quality_of_a_point_is_that_of_its_answers(run, ladder):
    """The frontier's mIoU on held-out scenes, once more from the label maps of the ladder."""
    scenes = run.images.scenes()
    with cnmm.Session(ladder, threads=1) as session:
        for point in session.points:
            meter = Segmentation().meter(len(CLASSES))
            for scene in scenes:
                labels = session.predict(scene.image, point=point.name).labels[0]
                meter.add(torch.from_numpy(labels).long()[None], torch.from_numpy(scene.mask)[None])
            quality = meter.quality()
            assert quality.value == pytest.approx(point.quality, abs=2e-3)
            assert quality.per_class == pytest.approx(point.per_class, abs=5e-3)
            assert quality.n == point.n == 4


def test_int8_ladders_are_calibrated_and_measured_on_scenes(run, tmp_path, capsys):
    answer = ask(capsys, "export", run.folder, "--ladder", 2, "--precision", "int8", "-o", tmp_path / "small")
    assert answer["metric"] == "miou"
    made = read_ladder(tmp_path / "small")
    scenes = run.images.scenes()
    for point in made.frontier.points:
        assert point.n == len(scenes)
        assert abs(point.quality - run.frontier[point.name].quality) < 0.15
    with cnmm.Session(tmp_path / "small", threads=1) as session:
        assert session.precision == "int8"
        meter = Segmentation().meter(len(CLASSES))
        for scene in scenes:
            labels = session.predict(scene.image, point=point.name).labels[0]
            meter.add(torch.from_numpy(labels).long()[None], torch.from_numpy(scene.mask)[None])
        assert meter.quality().value == pytest.approx(point.quality, abs=2e-3)


def test_one_file_for_any_size(run, tmp_path, capsys):
    ask(capsys, "export", run.folder, "--point", "e1c0", "--any-size", "-o", tmp_path / "a.onnx")
    answer = ask(capsys, "export", run.folder, "--ladder", 2, "--any-size", "-o", tmp_path / "ladder")
    assert len(answer["points"]) == 2
    assert read_ladder(tmp_path / "ladder").any_size


def test_predict_takes_a_run_folder(run, tmp_path, capsys):
    Image.fromarray(run.images.scenes(1)[0].image).resize((70, 39)).save(tmp_path / "odd.png")
    answer = ask(capsys, "predict", run.folder, tmp_path / "odd.png", "--budgets", "95%,100%", "-o", tmp_path / "out")
    (row,) = answer["results"]
    assert [one["budget"] for one in row["answers"]] == ["95%", "100%"]
    assert (tmp_path / "out" / "odd_strip.png").is_file()
    ask(capsys, "predict", run.folder, tmp_path / "odd.png", "-o", tmp_path / "maps")
    assert Image.open(tmp_path / "maps" / "odd.png").size == (70, 39)


def test_the_report_has_strips_and_classes(run, tmp_path, capsys):
    answer = ask(capsys, "report", run.folder, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert answer["bytes"] == len(page.encode()) < 5e6
    assert "Every class along the frontier" in page
    best = run.frontier.envelope()[-1]
    for name, value in zip(CLASSES, best.per_class, strict=True):
        assert f"<td>{html.escape(name)}</td>" in page
        assert f"{100 * value:.1f}" in page
    assert len(re.findall(r'src="data:image/png', page)) == 4
    for reference in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert reference.startswith("data:image/")
    assert np.isfinite(best.quality)
