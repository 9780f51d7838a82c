"""Pictures of label maps: what is in their pixels."""

import io

import numpy as np
import pytest
from PIL import Image

from cnmm.palette import VOID, default_palette
from cnmm.pictures import OPACITY, PANEL, Panel, caption, differences, index_png, overlay, strip, to_png

CLASSES = ("ground", "box", "a class that is nowhere")
PALETTE = default_palette(3)


@pytest.fixture
def labels():
    labels = np.zeros((20, 30), np.uint8)
    labels[5:12, 4:20] = 1
    labels[0] = VOID
    return labels


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def test_an_index_file_has_classes_as_values_and_their_colours_as_palette(labels):
    opened = Image.open(io.BytesIO(index_png(labels, PALETTE)))
    assert (opened.mode, opened.size) == ("P", (30, 20))
    assert np.array_equal(np.asarray(opened), labels)
    colours = np.asarray(opened.convert("RGB"))
    for value, colour in ((0, PALETTE[0]), (1, PALETTE[1]), (VOID, (0, 0, 0))):
        assert (colours[labels == value] == colour).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_an_overlay_is_the_image_under_colours_with_a_legend(image, labels, channels):
    drawn = np.asarray(overlay(image[..., :channels], labels, CLASSES, PALETTE))
    found, below = drawn[:20, :30].astype(float), drawn[20:]
    for value in (0, 1):
        expected = (1 - OPACITY) * image[..., :channels] + OPACITY * np.array(PALETTE[value])
        assert np.abs(found - expected)[labels == value].max() <= 0.5
    assert (found[labels == VOID] == image[..., :channels][labels == VOID]).all()
    here = {tuple(colour) for colour in below.reshape(-1, 3).tolist()}
    assert {PALETTE[0], PALETTE[1]} <= here
    assert PALETTE[2] not in here


def test_a_strip_has_the_image_every_answer_and_their_differences(image, labels):
    other = labels.copy()
    other[15:, 20:] = 2
    panels = [Panel(other, caption("e1c0", 12_300_000, 4.12)), Panel(labels, caption("e2c0", 2e9))]
    drawn = np.asarray(strip(image, panels, CLASSES, PALETTE))
    factor = PANEL // 30
    width, gap = 30 * factor, 8
    assert drawn.shape[1] == 4 * width + 3 * gap
    shown = [
        drawn[: 20 * factor : factor, start : start + width : factor] for start in range(0, 4 * width, width + gap)
    ]
    assert np.array_equal(shown[0], image)
    for picture, panel in zip(shown[1:3], panels, strict=True):
        assert np.array_equal(picture, np.asarray(overlay(image, panel.labels, CLASSES, PALETTE))[:20, :30])
    assert np.array_equal(shown[3], differences(image, [other, labels]))
    red = shown[3][..., 0].astype(int) - shown[3][..., 1] > 50
    assert np.array_equal(red, other != labels)
    assert np.asarray(strip(image, panels[:1], CLASSES, PALETTE)).shape[1] == 2 * width + gap


def test_a_strip_without_an_image_has_the_labels_alone(labels):
    panels = [Panel(labels, "a"), Panel(np.roll(labels, 1, 0), "b")]
    drawn = np.asarray(strip(None, panels, CLASSES, PALETTE))
    factor = PANEL // 30
    assert drawn.shape[1] == 3 * 30 * factor + 2 * 8
    first = drawn[: 20 * factor : factor, : 30 * factor : factor]
    for number, colour in enumerate(PALETTE):
        assert (first[labels == number] == colour).all()


def test_captions_say_what_it_costs():
    assert caption("e1c0", 12_300_000, 4.12) == "e1c0\n12.3 M macs, 4.1 ms"
    assert caption("e1c0", 2e9) == "e1c0\n2.00 G macs"


def test_large_pictures_are_shrunk_and_long_legends_wrap(labels):
    big = np.zeros((500, 800, 3), np.uint8)
    wide = np.arange(500 * 800, dtype=np.int64).reshape(500, 800) % 100
    names = [f"class number {k}" for k in range(100)]
    drawn = strip(big, [Panel(wide.astype(np.uint8), "x")], names, default_palette(100))
    assert drawn.width == 2 * PANEL + 8
    assert drawn.height > 225 + 14 * 15
    assert to_png(drawn) == to_png(drawn)
