"""One callable for batches: what it takes, what it gives, and how it travels."""

import io
import pickle  # noqa: TID251  # that it can travel is what is tested

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.runtime.batches import BatchPredictor
from tests.helpers import refused
from tests.runtime.ladders import CLASSES, SIZE

IMAGES = np.random.default_rng(5).integers(0, 256, (9, SIZE, SIZE, 3), np.uint8)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "asked", [{}, {"budget": "50%"}, {"point": "e1c0"}, {"average_macs": "60%"}, {"confidence": 0.6}]
)
def test_it_answers_as_a_session_does(hand_made_ladder, asked):
    with cnmm.Session(hand_made_ladder, threads=1) as session:
        found = session.predict(IMAGES, **asked)
    answer = BatchPredictor(hand_made_ladder, **asked)({"image": IMAGES, "id": np.arange(9)})
    assert list(answer) == ["id", "label", "confidence", "exit", "error"]
    assert answer["label"].tolist() == [CLASSES[number] for number in found.probabilities.argmax(1)]
    np.testing.assert_array_equal(answer["confidence"], found.confidence)
    np.testing.assert_array_equal(answer["exit"], found.exits)
    assert answer["id"].tolist() == list(range(9))
    assert set(answer["error"]) == {""}


def test_images_in_every_form(hand_made_ladder, tmp_path):
    """Arrays, lists, Pillow images, files and their contents; a larger one is fitted."""
    path = tmp_path / "a.png"
    path.write_bytes(png(IMAGES[0]))
    large = np.kron(IMAGES[0], np.ones((4, 4, 1), np.uint8))
    forms = [IMAGES[0], IMAGES[0].tolist(), Image.fromarray(IMAGES[0]), path, str(path), png(IMAGES[0])]
    forms += [{"bytes": png(IMAGES[0]), "path": None}, {"bytes": None, "path": str(path)}, bytearray(png(IMAGES[0]))]
    forms += [png(large)]
    answer = BatchPredictor(hand_made_ladder)({"image": forms})
    assert answer["error"].tolist() == [""] * len(forms)
    assert len(set(answer["label"])) == 1
    np.testing.assert_allclose(answer["confidence"][:-1], answer["confidence"][0], rtol=1e-5)


def test_a_bad_image_stops_nothing(hand_made_ladder, tmp_path):
    bad = [b"no image", None, tmp_path / "none.png", np.zeros((8, 8, 5), np.uint8), np.zeros((8, 8, 3)), [[1], [2, 3]]]
    bad += [png(IMAGES[1])[:-30], [[300]], np.zeros((0, 0, 3), np.uint8)]
    answer = BatchPredictor(hand_made_ladder, column="photo")({"photo": [IMAGES[0], *bad, IMAGES[0]]})
    assert all(answer["error"].tolist()[1:-1])
    assert answer["error"].tolist()[:: len(bad) + 1] == ["", ""]
    assert answer["label"].tolist()[1:-1] == [""] * len(bad)
    assert np.isnan(answer["confidence"][1:-1]).all()
    assert answer["label"][0] == answer["label"][-1] != ""
    nothing = BatchPredictor(hand_made_ladder)({"image": bad[:2]})
    assert nothing["label"].tolist() == ["", ""]
    assert BatchPredictor(hand_made_ladder)({"image": []})["label"].tolist() == []


def test_it_travels_without_its_session(hand_made_ladder, monkeypatch, tmp_path):
    monkeypatch.chdir(hand_made_ladder.parent)
    predictor = BatchPredictor(hand_made_ladder.name)
    before = predictor({"image": IMAGES})
    monkeypatch.chdir(tmp_path)
    for copy in (pickle.loads(pickle.dumps(predictor)), pickle.loads(pickle.dumps(BatchPredictor(hand_made_ladder)))):
        assert copy({"image": IMAGES})["label"].tolist() == before["label"].tolist()


def test_grey_ladders_take_colours(tmp_path):
    from tests.runtime.ladders import make_ladder

    make_ladder(tmp_path / "grey", channels=1)
    predictor = BatchPredictor(tmp_path / "grey")
    answer = predictor({"image": [IMAGES[0], IMAGES[0][..., :1], IMAGES[0][..., 0], png(IMAGES[0][..., 0])]})
    assert answer["error"].tolist() == [""] * 4


def test_label_maps(scene_run, tmp_path):
    cnmm.Run(scene_run).export_ladder(tmp_path / "ladder", 2)
    pictures = [np.zeros((48, 64, 3), np.uint8), np.full((30, 50, 3), 9, np.uint8)]
    answer = BatchPredictor(tmp_path / "ladder")({"image": pictures})
    assert list(answer) == ["label_map", "confidence", "exit", "error"]
    assert [found.shape for found in answer["label_map"]] == [(48, 64), (30, 50)]


def test_complaints(hand_made_ladder):
    assert "the batch has 'a', 'b'" in refused(BatchPredictor(hand_made_ladder), {"a": [], "b": []})
    assert "cannot be combined" in refused(BatchPredictor, hand_made_ladder, budget="5%", point="e1c0")
