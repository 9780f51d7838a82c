"""Views of photographs, image sizes, and what else a training chooses by the images that it is given."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import cnmm
from cnmm._errors import Stopped
from cnmm.cli.flags import training_flags
from cnmm.cli.training import parse_size
from cnmm.training.batches import Images, affordable_batch
from cnmm.training.photos import PhotoView, draw_photo_view, recolour, show_parts
from tests.helpers import refused
from tests.training.helpers import small_config, small_data

WHOLE = PhotoView(size=(1.0, 1.0), place=(0.0, 0.0), mirrored=False, colours=(1.0, 1.0, 1.0))
TINY = {"model": "cnmm_tiny", "channels": 8, "blocks": 2, "precision": "float32", "epochs": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, level in (("dark", 60), ("bright", 200)):
        (folder / name).mkdir()
        for number in range(20):
            pixels = rng.normal(level, 30, (70, 90, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return str(folder)


def config(run):
    return json.loads((run / "config.json").read_text())


def test_views_depend_on_their_key_alone():
    config = small_config(area=(0.3, 0.9), colour=0.4)
    views = [draw_photo_view((0, 1, index), config) for index in range(300)]
    assert views == [draw_photo_view((0, 1, index), config) for index in range(300)]
    assert views[7] != draw_photo_view((0, 2, 7), config)
    areas = [view.size[0] * view.size[1] for view in views]
    assert 0.25 < min(areas) < 0.4
    assert 0.75 < max(areas) <= 0.9
    assert all(0 <= place <= 1 for view in views for place in view.place)
    assert all(0.6 <= value <= 1.4 for view in views for value in view.colours)
    assert 100 < sum(view.mirrored for view in views) < 200
    assert not any(draw_photo_view((0, k), small_config(flip=False)).mirrored for k in range(50))


def test_what_views_show():
    rows = torch.arange(32, dtype=torch.uint8)[:, None, None].expand(32, 24, 3) * 7
    images = torch.stack([rows, rows])
    assert torch.equal(show_parts(images, [WHOLE, WHOLE]), images)
    lower = show_parts(images, [WHOLE._replace(size=(0.5, 0.5), place=(1.0, 0.0)), WHOLE])[0]
    assert lower.shape == (32, 24, 3)
    assert abs(int(lower[0, 0, 0]) - 7 * 16) <= 4
    assert abs(int(lower[-1, 0, 0]) - 7 * 31) <= 4
    columns = images.transpose(1, 2).contiguous()
    assert torch.equal(show_parts(columns, [WHOLE._replace(mirrored=True)] * 2), columns.flip(2))
    assert torch.equal(recolour(images, [WHOLE, WHOLE]), images)
    dark = recolour(images, [WHOLE._replace(colours=(0.5, 1.0, 1.0))] * 2)
    assert (dark.int() - images.int() // 2).abs().max() <= 1
    grey = images[..., :1].contiguous()  # without saturation, and without an error
    assert torch.equal(recolour(grey, [WHOLE._replace(colours=(1.0, 1.0, 0.3))] * 2), grey)


def test_images_look_the_same_whatever_batch_they_are_in():
    data = small_data(64)
    shown = {}
    for batch_size in (8, 16):
        images = Images(data, small_config(area=(0.3, 1.0), colour=0.3, batch_size=batch_size, flips="random"))
        x = {}
        for batch in images.training_batches(data.train, np.arange(64), epoch=3):
            order = torch.randperm(64, generator=cnmm.training.seeds.seeded(0, "order", 3)).numpy()
            chosen = np.sort(order[batch.step * batch_size : (batch.step + 1) * batch_size])
            x |= dict(zip(chosen.tolist(), batch.images, strict=True))
        shown[batch_size] = x
    assert shown[8].keys() == shown[16].keys() == set(range(64))
    assert all(torch.equal(shown[8][index], shown[16][index]) for index in range(64))


def test_photographs_are_shown_in_parts_and_others_are_not(photos, tmp_path):
    cnmm.train(photos, tmp_path / "large", size=64, **TINY)
    train = config(tmp_path / "large")["train"]
    assert (train["area"], train["colour"]) == ([0.35, 1.0], 0.3)
    cnmm.train(photos, tmp_path / "small", size=(32, 40), **TINY)
    train = config(tmp_path / "small")["train"]
    assert (train["area"], train["colour"]) == ([1.0, 1.0], 0.0)
    assert config(tmp_path / "small")["data"]["size"] == [32, 40]
    assert cnmm.load(tmp_path / "small").config.input_size == (32, 40)
    cnmm.train(photos, tmp_path / "told", size=64, area=(1.0, 1.0), **TINY)
    train = config(tmp_path / "told")["train"]
    assert (train["area"], train["colour"]) == ([1.0, 1.0], 0.3)
    assert "area=(0.9, 0.5)" in refused(cnmm.train, photos, tmp_path / "no", area=(0.9, 0.5))
    assert "size=(0, 0): must be" in refused(cnmm.train, photos, tmp_path / "no", size=0)


def test_a_training_on_photographs_resumes_to_the_same_weights(photos, tmp_path):
    steps = iter(range(100))
    options = {**TINY, "size": 64}
    with pytest.raises(Stopped):
        cnmm.train(photos, tmp_path / "a", should_stop=lambda: next(steps) == 8, **options)
    del options["size"]  # a run that goes on remembers its size
    cnmm.train(photos, tmp_path / "a", resume=True, **options)
    cnmm.train(photos, tmp_path / "b", size=64, **options)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_sizes_as_people_write_them():
    assert [parse_size(text) for text in (None, "96", "96x128", "96X128")] == [None, (96, 96), (96, 128), (96, 128)]
    for text in ("", "x", "96x", "1x2x3", "-5", "9.5", "9" * 40):
        assert f"--size {text}: must be" in refused(parse_size, text)


def test_a_flag_that_repeats_its_default_is_given():
    args = ["train", "--val", "5000", "--label-smoothing=0.1", "--lr", "0.5"]
    flags = training_flags("quick", args)(lr=0.5)
    assert flags.given() == {"val": 5000, "label_smoothing": 0.1, "lr": 0.5}
    assert training_flags("quick")().given() == {}


def test_a_batch_fits_into_memory():
    gigabyte = 2**30
    assert affordable_batch(12_000_000, 128, 4 * gigabyte) == 128
    assert affordable_batch(300_000_000, 128, 64 * gigabyte) == 128
    assert affordable_batch(300_000_000, 128, 8 * gigabyte) == 32
    assert affordable_batch(300_000_000, 128, gigabyte // 100) == 2
