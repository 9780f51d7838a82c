"""From a run folder to answers, by the command line: frontier, choose, slim, export, bench, predict, report."""

import html
import json
import re
import shutil

import numpy as np
import pytest
import torch

import cnmm
from cnmm.data import registry
from cnmm.export.slim import load_slim
from cnmm.run import Run
from cnmm.run_folder import save
from tests.helpers import ask, complaint

CLASSES = tuple(f"<b>{k}</b> & co" for k in range(10))


@pytest.fixture(scope="module")
def run(trained_run, tmp_path_factory):
    """The trained run, with hostile class names, which its images have too."""
    folder = shutil.copytree(trained_run, tmp_path_factory.mktemp("story") / "run")
    about = json.loads((folder / "config.json").read_text())
    about["data"]["classes"] = CLASSES
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FASHION_CLASSES", CLASSES)
        yield folder


@pytest.fixture(scope="module")
def ladder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("story") / "ladder"
    Run(run).export_ladder(folder, 3)
    return folder


def test_slim_is_the_chosen_point_with_its_statistics(run, tmp_path, capsys):
    answer = ask(capsys, "slim", run, "--budget", "60%", "-o", tmp_path / "small")
    chosen = ask(capsys, "choose", run, "--budget", "60%")
    assert answer["point"] == chosen["point"]
    for count in ("macs", "params"):
        assert (answer[count], answer[f"mixture_{count}"]) == (chosen[f"written_{count}"], chosen[count])
    network, opened = load_slim(tmp_path / "small"), Run(run)
    point = cnmm.named_point(opened.model, answer["point"])
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        expected = opened.settled(point)(x, point)
    assert torch.allclose(network(x), expected, atol=1e-5 * expected.abs().max())
    assert "exists" in complaint(capsys, "slim", run, "-o", tmp_path / "small")


def test_a_point_that_was_not_stored_is_estimated_from_images(run, tmp_path, capsys):
    stored = {point.name for point in cnmm.Frontier.load(run / "frontier.json").envelope()}
    name = next(point.name for point in cnmm.cutting_order(cnmm.load(run)) if point.name not in stored)
    assert ask(capsys, "slim", run, "--point", name, "-o", tmp_path / "a")["point"] == name
    error = complaint(capsys, "slim", run, "--point", name, "--data", "fashion:/nowhere", "-o", tmp_path / "b")
    assert "--data" in error
    assert not (tmp_path / "b").exists()


def test_export_writes_one_file(run, tmp_path, capsys):
    answer = ask(capsys, "export", run, "--budget", "60%", "-o", tmp_path / "a.onnx")
    assert answer["bytes"] == (tmp_path / "a.onnx").stat().st_size
    assert "exists" in complaint(capsys, "export", run, "-o", tmp_path / "a.onnx")
    assert ".onnx" in complaint(capsys, "export", run, "-o", tmp_path / "folder")
    assert "--ladder" in complaint(capsys, "export", run, "--ladder", 2, "--budget", "40%", "-o", tmp_path / "folder")
    both = ("--point", "e1c0", "--budget", "9M")
    assert "only one" in complaint(capsys, "export", run, *both, "-o", tmp_path / "b.onnx")
    assert "cheapest" in complaint(capsys, "export", run, "--budget", "1k", "-o", tmp_path / "b.onnx")
    assert "cnmm bench" in complaint(capsys, "export", run, "--budget", "5ms", "-o", tmp_path / "b.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_int8_says_what_it_costs(run, tmp_path, capsys):
    answer = ask(capsys, "export", run, "--point", "e1c0", "--precision", "int8", "-o", tmp_path / "a.onnx")
    assert (answer["n"], answer["split"], answer["metric"]) == (100, "validation", "accuracy")
    assert answer["quality"] == answer["accuracy"]
    assert abs(answer["quality"] - answer["float32_quality"]) < 0.2


def test_the_ladder_answers_like_the_mixture(run, ladder):
    opened = Run(run)
    images, _ = opened.images.held_out(16)
    x = opened.images.prepared.prepare(torch.from_numpy(images).permute(0, 3, 1, 2))
    with cnmm.Session(ladder, threads=1) as session, torch.no_grad():
        assert session.classes == CLASSES
        for found in session.points:
            point = cnmm.named_point(opened.model, found.name)
            expected = opened.settled(point)(x, point).softmax(1).numpy()
            answer = session.predict(images, point=found.name)
            assert np.abs(answer.probabilities - expected).max() < 1e-4
        cascade = opened.frontier.cascade
        point = cnmm.named_point(opened.model, cascade.point)
        exits = opened.settled(point).forward_exits(x, point)
        sure = session.predict(images, confidence=0.0)
        assert set(sure.exits) == {cascade.exits[0]}
        assert sure.macs == session.cascade.macs[0] < cascade.macs[0]
        assert np.abs(sure.probabilities - exits[cascade.exits[0]].softmax(1).numpy()).max() < 1e-4
        never = session.predict(images, confidence=1.0)
        last = never.exits == cascade.exits[-1]
        assert np.abs(never.probabilities - exits[cascade.exits[-1]].softmax(1).numpy())[last].max(initial=0) < 1e-4


def test_the_manifest_has_the_frontier_and_the_thresholds(run, ladder):
    manifest = json.loads((ladder / "ladder.json").read_text())
    frontier = json.loads((run / "frontier.json").read_text())
    assert manifest["classes"] == list(CLASSES)
    measured = {point["name"]: point for point in frontier["points"]}
    of_the_file = {"file", "sha256", "inputs", "outputs"}
    for entry in manifest["points"]:
        expected = dict(measured[entry["name"]])
        for count in ("macs", "params"):
            expected[f"mixture_{count}"], expected[count] = expected[count], expected[f"written_{count}"]
            expected[f"written_{count}"] = None
        assert {key: value for key, value in entry.items() if key not in of_the_file} == expected
    stages = manifest["cascade"].pop("stages")
    assert [stage["file"] for stage in stages] == [f"stage{exit}.onnx" for exit in frontier["cascade"]["exits"]]
    cascade = cnmm.Frontier.load(ladder / "ladder.json").cascade
    said = manifest["cascade"]
    assert cascade == Run(run).frontier.cascade.with_macs(said["macs"], said["asking"])


def test_predict_choose_and_bench_on_a_ladder(ladder, photo, capsys, tmp_path):
    shutil.copytree(ladder, tmp_path / "ladder")
    ladder = tmp_path / "ladder"
    answer = ask(capsys, "predict", ladder, photo, "--budget", "100%", "--top", 2)
    assert answer["results"][0]["file"] == str(photo)
    assert len(answer["results"][0]["top"]) == 2
    assert "cnmm bench" in complaint(capsys, "choose", ladder, "--budget", "5ms")
    timed = ask(capsys, "bench", ladder, "--runtime", "onnx", "--seconds", 0.05)
    assert all(row["median_ms"] <= row["p95_ms"] for row in timed["points"])
    chosen = ask(capsys, "choose", ladder, "--budget", "10000ms")
    assert chosen["latency_ms"] > 0


def test_the_report_stands_alone_and_escapes_names(run, capsys):
    answer = ask(capsys, "report", run)
    page = (run / "report.html").read_text("utf-8")
    assert answer["bytes"] == len(page.encode()) < 5e6
    assert any(html.escape(name) in page for name in CLASSES)
    assert not any(name in page for name in CLASSES)
    assert "<script" not in page
    for reference in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert reference.startswith("data:image/")
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert "Examples" in page


def test_without_a_frontier_everything_says_how_to_get_one(tmp_path, capsys):
    save(cnmm.create_model("cnmm_tiny"), tmp_path / "run", data={"classes": CLASSES, "mean": [0.5], "std": [0.5]})
    for verb in (["choose", "--budget", "9M"], ["slim", "--budget", "9M", "-o", tmp_path / "x"], ["report"]):
        error = complaint(capsys, verb[0], tmp_path / "run", *verb[1:])
        assert "cnmm frontier" in error
    assert "cnmm frontier" in complaint(capsys, "export", tmp_path / "run", "--ladder", 2, "-o", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["frontier.json", "statistics*.safetensors", "model.safetensors"])
def test_corrupt_files_of_a_run_are_refused(run, name, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    (path,) = (tmp_path / "run").glob(name)
    path.write_bytes(b"{ this is neither")
    assert path.name in complaint(capsys, "export", tmp_path / "run", "--ladder", 2, "-o", tmp_path / "x")
    assert not (tmp_path / "x").exists()
