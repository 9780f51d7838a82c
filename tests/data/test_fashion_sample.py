"""The embedded Fashion-MNIST sample and the script that makes it."""

import gzip
import hashlib
import runpy
import struct
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from cnmm.data import FASHION_CLASSES, fashion_sample

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_fashion_sample.py"
NPZ = files("cnmm.data").joinpath("fashion_sample.npz")
MEMBERS = {"train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy"}
# sha256 of images, then labels (uint8): another sample would silently change every figure measured on it.
GOLDEN = {
    "train": "01cdf2b8c020e5735edf94cf72b67ae89f97e0fff62acf5d339ba938cf542a3d",
    "test": "42e76471354cff797cb7269177438af88e33cf1600aca125572d510f4e1bd9c6",
}


@pytest.mark.parametrize(("split", "num_per_class"), [("train", 600), ("test", 100)])
def test_shapes_types_and_balance(split, num_per_class):
    images, labels = fashion_sample(split)
    assert images.shape == (10 * num_per_class, 28, 28, 1)
    assert images.dtype == np.uint8
    assert labels.shape == (10 * num_per_class,)
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [num_per_class] * len(FASHION_CLASSES)
    assert images.min() == 0
    assert images.max() == 255


@pytest.mark.parametrize("split", ["train", "test"])
def test_golden(split):
    images, labels = fashion_sample(split)
    assert hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest() == GOLDEN[split]


def test_labels_belong_to_the_images():
    """The nearest class mean is far better than chance on held-out images, so images and labels are in one order."""
    (train_images, train_labels), (test_images, test_labels) = fashion_sample("train"), fashion_sample("test")
    x_train, x_test = (x.reshape(len(x), -1) / 255.0 for x in (train_images, test_images))
    means = np.stack([x_train[train_labels == label].mean(axis=0) for label in range(10)])
    nearest = ((x_test[:, np.newaxis] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == test_labels).mean() > 0.6


def test_classes_are_mixed_and_splits_disjoint():
    (train_images, train_labels), (test_images, test_labels) = fashion_sample("train"), fashion_sample("test")
    assert set(train_labels[:200]) == set(test_labels[:200]) == set(range(10))
    train = {image.tobytes() for image in train_images}
    assert len(train) == len(train_images)
    assert not any(image.tobytes() in train for image in test_images)


def test_each_call_gives_its_own_arrays():
    images, labels = fashion_sample("test")
    images[:], labels[:] = 7, 7
    again, again_labels = fashion_sample("test")
    assert again.max() == 255
    assert again_labels.max() == 9


def test_file_holds_plain_arrays_only(monkeypatch):
    with NPZ.open("rb") as file, zipfile.ZipFile(file) as archive:
        assert set(archive.namelist()) == MEMBERS
        for name in MEMBERS:
            with archive.open(name) as member:
                assert np.lib.format.read_magic(member) == (1, 0)
                assert np.lib.format.read_array_header_1_0(member)[2] == np.uint8

    # The reader asks for no pickle, whatever numpy's default is, and never opens the file for writing.
    calls = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda file, **kwargs: calls.append((file.mode, kwargs)) or load(file, **kwargs))
    fashion_sample("test")
    assert calls == [("rb", {"allow_pickle": False})]


def test_file_is_small_and_its_licence_lies_beside_it():
    assert len(NPZ.read_bytes()) < 4_000_000
    text = files("cnmm.data").joinpath("fashion_sample.LICENSE").read_text(encoding="utf-8")
    assert "Copyright (c) 2017 Zalando SE" in text
    assert "Permission is hereby granted, free of charge" in text
    assert 'THE SOFTWARE IS PROVIDED "AS IS"' in text


@pytest.mark.parametrize("split", ["val", "Train", "", None])
def test_unknown_split_names_the_value_and_the_allowed_ones(split):
    with pytest.raises(ValueError, match="'train' or 'test'") as caught:
        fashion_sample(split)
    assert repr(split) in str(caught.value)


def test_reading_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from cnmm.data import fashion_sample; fashion_sample('test')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def idx_folder(tmp_path):
    """Made-up IDX files, unbalanced; every image is filled with its own label."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for prefix, num_images in (("train", 8000), ("t10k", 1500)):
        labels = np.minimum(np.arange(num_images) % 11, 9).astype(np.uint8)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
        images = np.broadcast_to(labels[:, np.newaxis, np.newaxis], (num_images, 28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
    return folder


def test_script_balances_and_writes_the_same_bytes_twice(idx_folder, tmp_path, monkeypatch):
    main = runpy.run_path(str(SCRIPT))["main"]
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    main([str(idx_folder), "--output", str(first)])
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)  # another day: no date may enter the file
    main([str(idx_folder), "--output", str(second)])
    assert first.read_bytes() == second.read_bytes()
    with np.load(first, allow_pickle=False) as npz:
        assert {f"{name}.npy" for name in npz.files} == MEMBERS
        for split, num_per_class in (("train", 600), ("test", 100)):
            images, labels = npz[f"{split}_images"], npz[f"{split}_labels"]
            assert np.bincount(labels).tolist() == [num_per_class] * 10
            assert (images == labels[:, np.newaxis, np.newaxis]).all()


def test_script_refuses_what_is_not_idx(idx_folder, tmp_path):
    main = runpy.run_path(str(SCRIPT))["main"]
    (idx_folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\x89PNG not an IDX file"))
    with pytest.raises(ValueError, match="not an IDX file of unsigned bytes: it begins with 89504e47"):
        main([str(idx_folder), "--output", str(tmp_path / "out.npz")])
    assert not (tmp_path / "out.npz").exists()
