"""Readers of scenes: masks by number and by colour, three layouts, workers, and everything that can be wrong."""

import numpy as np
import pytest
from PIL import Image

from cnmm.data import Workers, divide, open_data
from cnmm.data.masks import MaskRule, decode_mask
from cnmm.data.scenes import FileScenes, class_shares, same_sizes
from cnmm.data.streets import CAMVID_CLASSES, CITYSCAPES_CLASSES
from cnmm.palette import CAMVID, VOID
from tests.helpers import complaint, refused
from tests.scenes import CLASSES, scene, write_masks, write_pair

# Layouts


def test_masks_of_ones_own(tmp_path):
    data = open_data(f"masks:{write_masks(tmp_path / 'mine', num=5, num_test=2)}")
    assert (data.name, data.classes, data.size, data.in_chans) == ("mine", CLASSES, (48, 64), 3)
    assert (len(data.train), len(data.test), data.held_out, len(data.palette)) == (5, 2, (), 3)
    image, mask = scene(3)
    (found,) = data.train.scenes(np.array([3]))
    assert np.array_equal(found.image, image)
    assert np.array_equal(found.mask, mask)
    assert data.train.read(np.array([0, 2])).shape == (2, 48, 64, 3)
    pixels = np.concatenate([scene(k)[0].reshape(-1, 3) for k in range(5)]) / 255
    assert data.mean == pytest.approx(pixels.mean(0))
    assert data.std == pytest.approx(pixels.std(0))
    counts = np.bincount(np.concatenate([scene(k)[1].ravel() for k in (1, 4)]), minlength=256)[:3]
    assert class_shares(data.train, np.array([1, 4]), 3) == pytest.approx(counts / counts.sum())


def test_its_own_validation_images_are_held_out_unless_none_are_wanted(tmp_path):
    write_masks(tmp_path, num=5, num_test=2)
    for k in range(3):
        write_pair(tmp_path / "val" / "images", tmp_path / "val" / "masks", f"{k}", 50 + k)
    data = open_data(f"masks:{tmp_path}")
    assert (len(data.train), len(data.test), data.held_out) == (8, 2, (5, 6, 7))
    for num in (1, 3, 100):
        assert [part.tolist() for part in divide(data, num, seed=0)] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert [len(part) for part in divide(data, 0, seed=0)] == [8, 0]


def test_one_pair_of_folders_is_divided_by_seed(tmp_path):
    for k in range(6):
        write_pair(tmp_path / "images", tmp_path / "masks", f"{k}", k)
    (tmp_path / "classes.txt").write_text("ground\nbox\ndisc\n")
    data = open_data(f"masks:{tmp_path}")
    assert (len(data.train), data.test) == (6, None)
    kept, held = divide(data, 2, seed=1)
    assert (len(kept), len(held)) == (4, 2)
    assert not np.array_equal(held, divide(data, 2, seed=2)[1])


def test_colour_masks_and_the_name_of_what_is_ignored(tmp_path):
    colours = np.array([(10, 20, 30), (0, 255, 0), (255, 0, 9), *[(0, 0, 0)] * 253], np.uint8)
    write_masks(tmp_path, num=3, num_test=1, to_mask=lambda mask: colours[mask])
    (tmp_path / "classes.txt").write_text(
        "# name red green blue\nvoid 0 0 0\nroad 10 20 30\ncar, 0, 255, 0\nman 255 0 9\n"
    )
    data = open_data(f"masks:{tmp_path}")
    assert data.classes == ("road", "car", "man")
    assert data.palette == ((10, 20, 30), (0, 255, 0), (255, 0, 9))
    assert np.array_equal(data.train.scenes(np.array([1]))[0].mask, scene(1)[1])


def test_void_may_have_a_number(tmp_path):
    write_masks(tmp_path, num=2, num_test=1, to_mask=lambda mask: np.where(mask == VOID, 0, mask + 1).astype(np.uint8))
    (tmp_path / "classes.txt").write_text("Void\n" + "\n".join(CLASSES))
    assert np.array_equal(open_data(f"masks:{tmp_path}").train.scenes(np.array([0]))[0].mask, scene(0)[1])


CAMVID_NAMES = {
    "train": ("0001TP_006690", "0001TP_008520", "0006R0_f00930", "0016E5_08640"),
    "val": ("0016E5_07959", "0016E5_08159"),
    "test": ("0001TP_008550", "Seq05VD_f00000"),
}


@pytest.mark.parametrize("original", [False, True])
def test_camvid_in_both_layouts(tmp_path, original):
    palette = np.array([*CAMVID, *[(0, 0, 0)] * 245], np.uint8)
    number = 0
    for split, names in CAMVID_NAMES.items():
        for name in names:
            if original:
                folders = tmp_path / "701_StillsRaw_full", tmp_path / "LabeledApproved_full"
                options = {"mask_name": f"{name}_L", "to_mask": lambda mask: palette[mask], "size": (72, 96)}
            else:
                folders = tmp_path / "camvid" / split, tmp_path / "camvid" / f"{split}annot"
                options = {"to_mask": lambda mask: np.where(mask == VOID, 11, mask).astype(np.uint8), "suffix": ".jpg"}
            write_pair(*folders, name, number, **options)
            number += 1
    data = open_data(f"camvid:{tmp_path}", size=(36, 48))
    assert (len(data.train), len(data.test), data.held_out) == (6, 2, (4, 5))
    assert (data.classes[:3], len(data.classes), data.palette) == (("sky", "building", "pole"), 11, CAMVID)
    found = data.test.scenes(np.array([1]))[0]
    assert np.array_equal(found.mask, scene(7, (72, 96) if original else (48, 64))[1])
    assert found.image.shape == (36, 48, 3)
    assert open_data(f"camvid:{tmp_path}").size == (360, 480)


def test_the_32_colours_of_camvid_make_11_classes():
    colours = CAMVID_CLASSES.rule.colours
    assert len(colours) == 32
    assert [list(colours.values()).count(k) for k in (*range(11), VOID)] == [1, 5, 2, 3, 3, 2, 3, 1, 5, 4, 2, 1]
    for number, colour in enumerate(CAMVID):
        assert colours[colour] == number


def test_cityscapes_maps_label_ids_to_train_ids(tmp_path):
    for split in ("train", "val"):
        for city in ("aachen", "bochum"):
            name = f"{city}_000000_000019"
            write_pair(
                tmp_path / "leftImg8bit" / split / city,
                tmp_path / "gtFine" / split / city,
                f"{name}_leftImg8bit",
                1,
                mask_name=f"{name}_gtFine_labelIds",
                to_mask=lambda mask: np.array([7, 26, 33, *[4] * 253], np.uint8)[mask],
            )
    data = open_data(f"cityscapes:{tmp_path}", size=(24, 32))
    assert (len(data.train), len(data.test), len(data.classes), len(data.palette)) == (2, 2, 19, 19)
    found = data.train.scenes(np.array([0]))[0]
    assert found.image.shape == (24, 32, 3)  # half the size, and labels as they are
    assert np.array_equal(found.mask, np.array([0, 13, 18, *[VOID] * 253], np.uint8)[scene(1)[1]])
    ids = {name: value for value, name in zip(CITYSCAPES_CLASSES.rule.values.items(), range(35), strict=True)}
    assert len(ids) == 35
    named = {CITYSCAPES_CLASSES.names[to]: value for value, to in CITYSCAPES_CLASSES.rule.values.items() if to != VOID}
    assert (named["road"], named["sky"], named["train"], named["bicycle"]) == (7, 23, 31, 33)


# Sizes and streaming


def test_images_of_different_sizes_are_shrunk_and_batched_by_size(tmp_path):
    sizes = [(40, 80), (80, 40), (41, 80), (80, 160), (40, 80)]
    for k, size in enumerate(sizes):
        write_pair(tmp_path / "images", tmp_path / "masks", f"{k}", k, size=size)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    data = open_data(f"masks:{tmp_path}")
    assert data.size == (40, 80)
    assert data.train.sizes.tolist() == [[40, 80], [80, 40], [41, 80], [40, 80], [40, 80]]
    assert data.train.scenes(np.array([3]))[0].mask.shape == (80, 160)
    parts = same_sizes(data.train, np.arange(5), 6000)
    assert [part.tolist() for part in parts] == [[0], [4], [1], [2], [3]]
    assert same_sizes(data.train, np.arange(5), 6400)[0].tolist() == [0, 4]
    assert "differ in size" in refused(data.train.read, np.array([0, 1]))


def test_scenes_that_do_not_fit_into_memory_stream_through_workers(tmp_path):
    folder = write_masks(tmp_path, num=5, num_test=1)
    inside, outside = open_data(f"masks:{folder}"), open_data(f"masks:{folder}", memory_limit=1000)
    assert isinstance(outside.train, FileScenes)
    assert (outside.mean, outside.std, outside.size) == (inside.mean, inside.std, inside.size)
    batches = [np.array([4, 0]), np.array([2]), np.array([1, 3, 3])]
    with Workers(2) as workers:
        streamed = list(workers.scenes(outside.train, batches))
        Image.new("RGB", (64, 48)).save(folder / "train" / "masks" / "002.png")
        words = refused(lambda: list(workers.scenes(outside.train, batches)))
    assert "masks/002.png" in words
    for part, expected in zip(streamed, map(inside.train.scenes, batches), strict=True):
        for (image, mask), (wanted, target) in zip(part, expected, strict=True):
            assert np.array_equal(image, wanted)
            assert np.array_equal(mask, target)


# What can be wrong


def broken(folder, what):
    write_masks(folder, num=3, num_test=1)
    image, mask = (folder / "train" / kind / "001.png" for kind in ("images", "masks"))
    pixels = np.array(Image.open(mask))
    classes = folder / "classes.txt"
    match what:
        case "value":
            pixels[5, 7] = 9
            Image.fromarray(pixels).save(mask)
        case "sizes":
            Image.fromarray(pixels[:-3]).save(mask)
        case "missing":
            mask.unlink()
        case "photograph":
            mask.unlink()
            Image.open(image).save(mask.with_suffix(".jpg"))
        case "disguised":
            Image.open(image).save(mask, "JPEG")
        case "16 bits":
            Image.fromarray(pixels.astype(np.uint16)).save(mask)
        case "colours":
            Image.open(image).save(mask)
        case "one class":
            classes.write_text("all\nvoid\n")
        case "no names":
            classes.unlink()
        case "twice":
            classes.write_text("a\nb\na\n")
        case "some colours":
            classes.write_text("a 1 2 3\nb\n")
        case "same colour":
            classes.write_text("a 1 2 3\nb 1 2 3\n")
        case "truncated":
            mask.write_bytes(mask.read_bytes()[:60])
        case "no folder":
            (folder / "train").rename(folder / "training")
        case "no masks":
            (folder / "train" / "masks").rename(folder / "train" / "labels")
    return f"masks:{folder}"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "value",
            r"masks/001.png: cannot be read as a mask \(value 9 at row 5, column 7: no class has it; must be 0 to 2",
        ),
        ("sizes", r"masks/001.png: it is 45x64 \(height x width\), its image .*images/001.png is 48x64"),
        ("missing", r"images/001.png has no mask: .*masks/001.png is missing"),
        ("photograph", r"masks/001.jpg: cannot be read as a mask \(it is a JPEG, a photograph"),
        ("disguised", r"masks/001.png: cannot be read as a mask \(it is a JPEG, a photograph"),
        ("16 bits", r"masks/001.png: cannot be read as a mask \(its pixels are 16-bit"),
        ("colours", r"masks/001.png: cannot be read as a mask \(its pixels are colours, and classes have none"),
        ("one class", r"classes.txt: 1 classes: must be 2 to 255"),
        ("no names", r"classes.txt is missing, so masks have no names: one class per line"),
        ("twice", r"classes.txt: the class 'a' stands there twice"),
        ("some colours", r"classes.txt: some classes have a colour and some have none"),
        ("same colour", r"classes.txt: 'b 1 2 3': another class has this colour"),
        ("truncated", r"masks/001.png: cannot be read as a mask"),
        ("no folder", r"has neither train/images nor images"),
        ("no masks", r"train/masks is not a folder"),
    ],
)
def test_bad_scenes_are_named_and_nothing_is_written(tmp_path, capsys, what, words):
    spec = broken(tmp_path / "data", what)
    with pytest.raises(ValueError, match=words) as caught:
        open_data(spec)
    assert "\n" not in str(caught.value)
    if what in ("value", "missing", "no names"):
        assert complaint(capsys, "train", "--data", spec, "--recipe", "street", "--out", tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_colour_that_no_class_has_is_named(tmp_path):
    rule = MaskRule(values={}, colours={(0, 0, 0): 0, (9, 9, 9): 1})
    pixels = np.zeros((4, 5, 3), np.uint8)
    pixels[2, 3] = 9, 9, 8
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert "colour 9 9 8 at row 2, column 3: no class has it" in refused(decode_mask, tmp_path / "a.png", rule)


def test_palette_files_are_numbers_unless_classes_have_colours(tmp_path):
    image = Image.fromarray(np.array([[0, 1], [1, 2]], np.uint8), "P")
    image.putpalette([0, 0, 0, 9, 9, 9, 5, 5, 5])
    image.save(tmp_path / "a.png")
    numbers = MaskRule(values={0: 0, 1: 1, 2: VOID}, colours={})
    colours = MaskRule(values={0: 0, 1: 1, 2: 2}, colours={(0, 0, 0): 2, (9, 9, 9): 0, (5, 5, 5): 1})
    assert decode_mask(tmp_path / "a.png", numbers).tolist() == [[0, 1], [1, VOID]]
    assert decode_mask(tmp_path / "a.png", colours).tolist() == [[2, 0], [0, 1]]
