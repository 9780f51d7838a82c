"""What a run held out is remembered: whatever happens to its images, nothing is measured on those it was trained on."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.data import open_data
from cnmm.data.classes import in_order
from cnmm.data.folder import TEST_SHARE
from cnmm.data.identity import names_of
from cnmm.run import Run
from cnmm.run_held_out import HELD_OUT_FILE, load_held_out
from tests.helpers import ask, complaint, refused, write_fashion

CLASSES = ("ant", "bee", "cat")
TINY = {"model": "cnmm_tiny", "channels": 8, "epochs": 1, "precision": "float32", "ladder_rule": "flow"}


def add_images(folder, label, numbers, seed=0):
    """PNG images of noise around a grey that tells the class."""
    rng = np.random.default_rng([seed, label, *numbers])
    place = folder / CLASSES[label]
    place.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        pixels = rng.integers(70 * label, 70 * label + 100, (20, 22, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number:03}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain folder of 75 images, and a run that was trained on it."""
    root = tmp_path_factory.mktemp("held out")
    for label in range(3):
        add_images(root / "photos", label, range(25))
    (root / "photos" / "bee" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    cnmm.train(f"folder:{root / 'photos'}", root / "run", **TINY, val=12, skip_bad=True)
    return root


@pytest.fixture
def root(trained, tmp_path, monkeypatch):
    """A copy of it, as seen from its own folder: the run says where its images were by a relative path."""
    shutil.copytree(trained, tmp_path / "root")
    about = json.loads((tmp_path / "root" / "run" / "config.json").read_text())
    about["data"]["spec"] = "photos"
    (tmp_path / "root" / "run" / "config.json").write_text(json.dumps(about))
    monkeypatch.chdir(tmp_path / "root")
    return tmp_path / "root"


def shown(run, split):
    """The images that are measured, as a set of bytes."""
    part, indices = Run(run).images.split(split)
    return {image.tobytes() for image in part.read(indices)}


def pixels(root, names):
    size = Run(root / "run").model.config.input_size
    data = open_data(f"folder:{root / 'photos'}", size=size, skip_bad=True)
    known = {}
    for split in (data.train, data.test):
        known |= dict(zip(names_of(data, split), split.read(np.arange(len(split))), strict=True))
    return {known[name].tobytes() for name in names}


def test_a_run_remembers_names(root):
    held = load_held_out(root / "run")
    assert (len(held.validation.names), len(held.test.names)) == (12, 15)
    assert not set(held.validation.names) & set(held.test.names)
    assert shown("run", "validation") == pixels(root, held.validation.names)
    assert shown("run", "test") == pixels(root, held.test.names)


def test_images_that_were_added_are_not_measured(root, said):
    before = shown("run", "validation"), shown("run", "test")
    for label in range(3):
        add_images(root / "photos", label, [*range(100, 107)])
        add_images(root / "photos" / "ant", label, range(200, 202))  # folders inside a class belong to it
    said.clear()
    assert (shown("run", "validation"), shown("run", "test")) == before
    assert "have changed since training; of the 12 that were held out for validation, all are used" in " ".join(said)


def test_images_that_are_gone_or_replaced_are_left_out(root, said):
    held = load_held_out(root / "run").validation.names
    (root / "photos" / held[0]).unlink()
    trained_on = next(
        path for path in sorted((root / "photos" / "cat").iterdir()) if f"cat/{path.name}" not in pixels_names(root)
    )
    shutil.copy(trained_on, root / "photos" / held[1])  # by name it was held out; it was trained on
    expected = pixels(root, held[2:])
    assert shown("run", "validation") == expected
    assert "of the 12 that were held out for validation, the 10 that are still there are used" in " ".join(said)
    for name in held[2:]:
        (root / "photos" / name).unlink()
    words = refused(Run("run").evaluate, split="validation")
    assert "photos has none of the 12 images that this run held out for validation; use --data" in words


def pixels_names(root):
    held = load_held_out(root / "run")
    return {*held.validation.names, *held.test.names}


def test_verbs_after_images_were_skipped(root, capsys):
    """A run that left a broken image out is measured, evaluated, reported, exported and continued without a flag."""
    frontier = ask(capsys, "frontier", "run", "--points", 2, "--test")
    assert {(point["n"], point["split"]) for point in frontier["points"]} == {(12, "validation")}
    assert ask(capsys, "evaluate", "run")["n"] == 15
    assert ask(capsys, "evaluate", "run", "--split", "validation", "--point", "e2c1")["n"] == 12
    ask(capsys, "export", "run", "--point", "e1c0", "--precision", "int8", "-o", "a.onnx")
    ask(capsys, "report", "run")
    options = ("--model", "cnmm_tiny", "--channels", 8, "--precision", "float32", "--val", 12, "--ladder-rule", "flow")
    ask(capsys, "train", "--data", root / "photos", "--out", "run", *options, "--epochs", 2, "--resume")
    (root / "photos" / "cat" / "007.png").write_bytes(b"")
    words = refused(cnmm.train, str(root / "photos"), "run", **{**TINY, "epochs": 3}, val=12, resume=True)
    assert "have changed since this run began (60 then, " in words


def test_a_run_far_from_its_images_says_how_to_name_them(root, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = complaint(capsys, "evaluate", root / "run")
    assert "was trained on 'photos'; where its images are now, say with --data folder:DIR" in words
    assert ask(capsys, "evaluate", root / "run", "--data", root / "photos")["n"] == 15


# Without names


def test_places_are_only_good_for_the_same_images(own_run, tmp_path, capsys):
    """One image more, and nobody knows what was held out; test images are as good as before."""
    write_fashion(tmp_path / "more", 610, 100)
    words = complaint(capsys, "evaluate", own_run, "--split", "validation", "--data", f"fashion:{tmp_path / 'more'}")
    assert "does not have the images that this run was trained on" in words
    assert "does not have" in complaint(capsys, "frontier", own_run, "--data", f"fashion:{tmp_path / 'more'}")
    assert ask(capsys, "evaluate", own_run, "--data", f"fashion:{tmp_path / 'more'}")["n"] == 100
    write_fashion(tmp_path / "same", 600, 100)
    answer = ask(capsys, "evaluate", own_run, "--split", "validation", "--data", f"fashion:{tmp_path / 'same'}")
    assert answer == ask(capsys, "evaluate", own_run, "--split", "validation")
    (own_run / HELD_OUT_FILE).unlink()  # a run from before it was remembered: by seed
    assert answer == ask(capsys, "evaluate", own_run, "--split", "validation")
    (own_run / HELD_OUT_FILE).write_text("[]")
    assert "nobody knows what was held out" in complaint(capsys, "evaluate", own_run, "--split", "validation")


# Classes


def test_classes_are_compared_by_name(root, said):
    expected = Run("run").evaluate().exits
    about = json.loads((root / "run" / "config.json").read_text())
    about["data"]["classes"] = ["cat", "ant", "bee"]
    (root / "run" / "config.json").write_text(json.dumps(about))
    data = Run("run").images.data
    plain = open_data("photos", skip_bad=True, size=data.size)
    assert [data.classes[label] for label in data.train.labels] == [plain.classes[k] for k in plain.train.labels]
    assert "come in another order than those of run: they are matched by name" in " ".join(said)
    assert Run("run").evaluate().exits != expected  # the weights still mean ant, bee, cat
    (root / "photos" / "bee").rename(root / "photos" / "wasp")
    words = refused(Run("run").evaluate)
    assert "photos: its class 'wasp' is unknown to run (3 classes, run has 3); both must have the same" in words
    shutil.rmtree(root / "photos" / "wasp")
    assert "it lacks the class 'bee' (2 classes, run has 3)" in refused(Run("run").evaluate)


def test_masks_are_not_matched_by_name(root):
    data = open_data("photos", skip_bad=True)
    masks = dataclasses.replace(data.train, labels=np.zeros((len(data.train), 2, 2), np.int64))
    words = refused(in_order, dataclasses.replace(data, train=masks, test=None), ("cat", "bee", "ant"), "run")
    assert "only labels of whole images" in words


# A plain folder


def test_the_test_images_of_a_plain_folder_are_drawn_by_name(root):
    data = open_data("photos", skip_bad=True)
    assert data.drawn_test
    counts = np.bincount(data.test.labels, minlength=3)
    assert len(data.test) == round(TEST_SHARE * 76)  # with the broken one
    assert counts.min() >= 5
    names = set(names_of(data, data.test))
    assert not names & set(names_of(data, data.train))
    before = names_of(data, data.train)
    add_images(root / "photos", 0, [300])
    after = open_data("photos", skip_bad=True)
    assert len(names - set(names_of(after, after.test))) <= 1  # one image more moves one image at most
    assert len(set(before) - set(names_of(after, after.train))) <= 1
    chosen = open_data("folder:photos", skip_bad=True, test={"ant/000.png", "cat/001.png"})
    assert names_of(chosen, chosen.test) == ("ant/000.png", "cat/001.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "photos" / "val").mkdir(), "has val/ but no folder train/"),
        (lambda root: [shutil.rmtree(root / "photos" / name) for name in ("ant", "bee")], "has 1 class folders"),
        (lambda root: (root / "photos" / "dog").mkdir(), "photos/dog has no images"),
    ],
)
def test_plain_folders_that_are_none(root, change, message):
    change(root)
    assert message in refused(open_data, "photos", skip_bad=True)
