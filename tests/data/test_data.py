"""Readers of data sets, on files made here; the real CIFAR only where the folder in CNMM_DATA has it."""

import copyreg
import dataclasses
import gzip
import hashlib
import os
import pickle  # noqa: TID251 - makes the hostile files that the reader must refuse
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

import cnmm
from cnmm.config import check_input_size
from cnmm.data import (
    ArraySplit,
    DataSet,
    FileSplit,
    Workers,
    cifar,
    fashion_sample,
    hold_out,
    num_workers,
    open_data,
    suggest_model,
)
from cnmm.data.dataset import channel_statistics
from cnmm.data.images import decode_image, in_threads

RED, BLUE = (255, 0, 0), (0, 0, 255)


def refused(call, *args, **kwargs):
    """The text of the ValueError that a call must raise: one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the text
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    assert text
    return text


# --- the text that names a data set


@pytest.mark.parametrize(
    "spec", ["imagenet", "imagenet:/x", "cifar10", "cifar10:", "folder", "fashion:", "", "Fashion", ":"]
)
def test_unknown_data_is_refused_with_the_allowed_ones(spec):
    text = refused(open_data, spec)
    assert repr(spec) in text
    assert "must be a folder of images, or one of cifar10:DIR, cifar100:DIR, folder:DIR, fashion:DIR, fashion" in text


def test_a_bare_folder_is_a_folder_of_images(tmp_path):
    assert f"{tmp_path} has 0 class folders, must be at least 2; the layout is CLASS/IMAGE" in refused(
        open_data, str(tmp_path)
    )


@pytest.mark.parametrize("size", [(32,), (0, 32), (32, -1), (32, 32, 3), (32.0, 32)])
def test_a_bad_size_is_refused(size):
    assert repr(size) in refused(open_data, "fashion", size=size)


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "pets", train={"cat": 1, "dog": 1})
    assert open_data("folder:~/pets").name == "pets"


@pytest.mark.parametrize(
    "code",
    [
        "import sys, cnmm, cnmm.cli; assert 'cnmm.data' not in sys.modules",
        "import sys; sys.modules['torch'] = None; from cnmm.data import open_data; open_data('fashion', size=(9, 9))",
        "import sys, cnmm.data.workers; assert not {'torch', 'rich', 'tyro', 'matplotlib'} & set(sys.modules)",
    ],
)
def test_imports_stay_light(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- values: splits, statistics, held-out images, suggestions


def test_statistics_are_those_of_numpy():
    images = np.random.default_rng(0).integers(0, 256, (700, 5, 6, 3), np.uint8)
    mean, std = channel_statistics(ArraySplit(images, np.zeros(700, np.int64)))
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-12)


def test_the_deviation_of_a_constant_channel_is_one_grey_level():
    assert channel_statistics(ArraySplit(np.full((3, 4, 4, 1), 51, np.uint8), np.zeros(3, np.int64))) == (
        (0.2,),
        (1 / 255,),
    )


def test_statistics_of_files_use_a_fixed_subset():
    class Recorded:
        labels = np.zeros(5000, np.int64)
        seen: list = []  # noqa: RUF012 - one list for the two passes

        def __len__(self):
            return 5000

        def read(self, indices):
            self.seen.append(indices)
            return np.zeros((len(indices), 1, 1, 3), np.uint8)

    for _ in range(2):
        channel_statistics(Recorded())
    seen = np.concatenate(Recorded.seen)
    assert len(np.unique(seen)) == 2000
    assert seen[2000] == seen[0]
    assert (seen[:2000] == seen[2000:]).all()
    assert seen[:2000].max() > 4000


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data(), st.integers(0, 2**32 - 1))
def test_hold_out_is_a_stratified_partition(labels, data, seed):
    labels = np.array(labels) * 7 - 3  # any numbers may be labels
    num = data.draw(st.integers(0, len(labels) - 1))
    train, validation = hold_out(labels, num, seed)
    assert len(validation) == num
    assert np.concatenate([train, validation]).dtype == np.int64
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    classes, counts = np.unique(labels, return_counts=True)
    held = np.array([(labels[validation] == label).sum() for label in classes])
    assert (held >= np.floor(num * counts / len(labels))).all()
    if num <= len(labels) - len(classes):
        assert (held < counts).all()
    if (np.ceil(num * counts / len(labels)) < counts).all():
        assert (held <= np.ceil(num * counts / len(labels))).all()
    again = hold_out(labels, num, seed)
    assert (again[0] == train).all()
    assert (again[1] == validation).all()


def test_hold_out_is_balanced_and_another_seed_gives_another_one():
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 500))
    _, validation = hold_out(labels, 505, 0)
    assert sorted(np.bincount(labels[validation])) == [50] * 5 + [51] * 5
    assert set(validation) != set(hold_out(labels, 505, 1)[1])


@pytest.mark.parametrize("num", [-1, 4, 5])
def test_hold_out_refuses_what_leaves_nothing(num):
    assert "must be 0 to 3" in refused(hold_out, np.array([0, 0, 1, 1]), num, 0)


@pytest.mark.parametrize(
    ("size", "model"),
    [((28, 28), "cnmm_b4s3"), ((48, 99), "cnmm_b4s3"), ((49, 49), "cnmm_b5s4"), ((224, 224), "cnmm_b5s4")],
)
def test_the_suggested_model_takes_the_images(size, model):
    split = ArraySplit(np.zeros((1, *size, 3), np.uint8), np.zeros(1, np.int64))
    dataset = DataSet(
        name="x", spec="x", classes=("a", "b"), train=split, test=None, mean=(0,), std=(1,), size=size, in_chans=3
    )
    name, input_size, why = suggest_model(dataset)
    assert (name, input_size) == (model, size)
    check_input_size(cnmm.model_plan(name).config, input_size)
    assert f"{size[0]}x{size[1]}" in why
    assert why.endswith(".")


# --- Fashion-MNIST


def test_the_embedded_sample():
    dataset = open_data("fashion")
    assert (dataset.name, dataset.spec, dataset.size, dataset.in_chans) == ("fashion", "fashion", (28, 28), 1)
    images, labels = fashion_sample("train")
    assert (dataset.train.images == images).all()
    assert (dataset.train.labels == labels).all()
    np.testing.assert_allclose((*dataset.mean, *dataset.std), (images.mean() / 255, images.std() / 255))
    assert (dataset.train.read(np.array([5, 2, 5])) == images[[5, 2, 5]]).all()
    assert len(dataset.test) == 1000
    assert len(dataset.classes) == 10


def test_images_in_memory_are_scaled_to_the_size_asked_for():
    dataset = open_data("fashion", size=(32, 30))
    assert dataset.size == (32, 30)
    assert dataset.train.images.shape == (6000, 32, 30, 1)
    assert dataset.test.images.shape == (1000, 32, 30, 1)
    assert abs(dataset.mean[0] - open_data("fashion").mean[0]) < 0.05


def test_more_than_the_memory_limit_is_refused():
    text = refused(open_data, "fashion", size=(1000, 1000), memory_limit=10**9)
    assert "1000x1000 takes 7,000,000,000 bytes" in text


def test_skipping_bad_files_without_files_warns():
    with pytest.warns(UserWarning, match="skip_bad has no effect on fashion"):
        open_data("fashion", skip_bad=True)


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(num_train=20, num_test=10):
    rng = np.random.default_rng(0)
    for prefix, num in (("train", num_train), ("t10k", num_test)):
        yield f"{prefix}-images-idx3-ubyte", rng.integers(0, 256, (num, 28, 28), np.uint8)
        yield f"{prefix}-labels-idx1-ubyte", (np.arange(num) % 10).astype(np.uint8)


@pytest.fixture(params=[False, True], ids=["plain", "gz"])
def idx_folder(request, tmp_path):
    """Writes an IDX file, plain or gzipped: `write(name, raw)`."""

    def write(name, raw):
        path = tmp_path / (f"{name}.gz" if request.param else name)
        path.write_bytes(gzip.compress(raw) if request.param else raw)

    for name, array in idx_files():
        write(name, idx(array))
    return tmp_path, write


def test_idx_files(idx_folder):
    dataset = open_data(f"fashion:{idx_folder[0]}")
    arrays = dict(idx_files())
    assert (dataset.train.images[..., 0] == arrays["train-images-idx3-ubyte"]).all()
    assert (dataset.test.labels == arrays["t10k-labels-idx1-ubyte"]).all()
    assert dataset.train.labels.dtype == np.int64
    assert dataset.train.images.flags.writeable


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("train-images-idx3-ubyte", b"", "begins with nothing"),
        ("train-images-idx3-ubyte", b"\x89PNG", "begins with 89504e47, not 00000803"),
        ("train-images-idx3-ubyte", idx(np.zeros(20, np.uint8)), "begins with 00000801, not 00000803"),
        ("train-images-idx3-ubyte", idx(np.zeros((20, 28, 28), np.uint8))[:9], "truncated inside its header"),
        ("train-images-idx3-ubyte", idx(np.zeros((20, 28, 28), np.uint8))[:-1], "15,679 of the 15,680 bytes"),
        ("train-images-idx3-ubyte", idx(np.zeros((20, 28, 28), np.uint8)) + b"x", "more than the 15,680 bytes"),
        ("train-images-idx3-ubyte", idx(np.zeros((20, 32, 28), np.uint8)), "images of 32x28"),
        ("train-images-idx3-ubyte", struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 28, 28), "announces 4,294,967,295"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(0, np.uint8)), "announces 0 images"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(9, np.uint8)), "has 9 labels, and t10k-images-idx3-ubyte"),
        ("t10k-labels-idx1-ubyte", idx(np.full(10, 10, np.uint8)), "the label 10"),
    ],
)
def test_bad_idx_files_are_named(idx_folder, name, raw, problem):
    folder, write = idx_folder
    write(name, raw)
    text = refused(open_data, f"fashion:{folder}")
    assert problem in text
    assert str(folder / name) in text


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"plain" + raw, lambda raw: raw[:30] + bytes(50)]
)
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    for name, array in idx_files():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    text = refused(open_data, f"fashion:{tmp_path}")
    assert str(path) in text
    assert "download it again" in text


def test_missing_idx_files_are_named(tmp_path):
    assert "is not a folder" in refused(open_data, f"fashion:{tmp_path / 'no'}")
    assert "train-images-idx3-ubyte is missing" in refused(open_data, f"fashion:{tmp_path}")


# --- CIFAR: files as Python 2 wrote them

RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
NDARRAY = b"cnumpy\nndarray\n"
DTYPE = b"cnumpy\ndtype\n"


def number(value):
    return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else b"\x8a\x09" + value.to_bytes(9, "little")


def string(value):
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value


def array_pickle(shape, raw, *, code=b"u1", dtype_state=None, version=1):
    """The opcodes of an array, with room for lies."""
    if dtype_state is None:
        dtype_state = b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"t"
    empty = RECONSTRUCT + NDARRAY + number(0) + b"\x85" + string(b"b") + b"\x87R"
    dtype = DTYPE + string(code) + number(0) + number(1) + b"\x87R" + dtype_state + b"b"
    shape = b"(" + b"".join(map(number, shape)) + b"t"
    return empty + b"(" + number(version) + shape + dtype + b"\x89" + string(raw) + b"tb"


def opcodes(value):
    if isinstance(value, dict):
        return b"}(" + b"".join(opcodes(key) + opcodes(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(opcodes, value)) + b"e"
    if isinstance(value, np.ndarray):
        return array_pickle(value.shape, value.tobytes())
    if isinstance(value, bytearray):  # opcodes already
        return bytes(value)
    return number(value) if isinstance(value, int) else string(value)


def pickled(value):
    return b"\x80\x02" + opcodes(value) + b"."


CIFAR_CONTENT = {
    "cifar10": (
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"],
        b"labels",
    ),
    "cifar100": (["train", "test"], b"fine_labels"),
}


def batch(key, seed, num=6, num_classes=10):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num, 3072), np.uint8)
    return {
        b"batch_label": b"made up",
        key: [*map(int, rng.integers(0, num_classes, num))],
        b"data": data,
        b"coarse_labels": [0] * num,
    }


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar_files(request, tmp_path, monkeypatch):
    """Small files under the original names, and `write(name, raw, known=True)`, which makes them the originals."""
    kind, variant = request.param, cifar.VARIANTS[request.param]
    folder = tmp_path / variant.folder
    folder.mkdir()
    table = {}
    monkeypatch.setitem(cifar.VARIANTS, kind, dataclasses.replace(variant, files=table))

    def write(name, raw, *, known=True):
        (folder / name).write_bytes(raw)
        if known:
            table[name] = (len(raw), hashlib.md5(raw).hexdigest())

    batches, key = CIFAR_CONTENT[kind]
    for seed, name in enumerate(batches):
        write(name, pickled(batch(key, seed, num_classes=variant.num_classes)))
    names = [f"class {number}".encode() for number in range(variant.num_classes)]
    write(list(variant.files)[-1], pickled({variant.class_names: names}))
    return kind, folder, write


def test_cifar_files_are_read(cifar_files):
    kind, folder, _ = cifar_files
    batches, key = CIFAR_CONTENT[kind]
    contents = [batch(key, seed, num_classes=cifar.VARIANTS[kind].num_classes) for seed in range(len(batches))]
    dataset = open_data(f"{kind}:{folder.parent}")
    assert (dataset.name, dataset.size, dataset.in_chans, dataset.skipped) == (kind, (32, 32), 3, ())
    assert dataset.classes[3] == "class 3"
    assert dataset.train.images.shape == (6 * (len(batches) - 1), 32, 32, 3)
    assert dataset.train.labels.tolist() == [label for content in contents[:-1] for label in content[key]]
    assert dataset.test.labels.tolist() == contents[-1][key]
    data = contents[-1][b"data"]
    for channel in range(3):  # red, green, blue planes, each row by row
        plane = data[2, 1024 * channel : 1024 * (channel + 1)]
        assert (dataset.test.images[2, :, :, channel].ravel() == plane).all()
    inside = open_data(f"{kind}:{folder}")
    assert (inside.train.images == dataset.train.images).all()
    assert inside.train.images.flags.writeable


def test_a_missing_file_is_named(cifar_files):
    kind, folder, _ = cifar_files
    last = list(cifar.VARIANTS[kind].files)[-1]
    (folder / last).unlink()
    text = refused(open_data, f"{kind}:{folder}")
    assert f"{folder / last} is missing" in text
    assert f"unpack {cifar.VARIANTS[kind].archive} from https://" in text


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda raw: raw[:1000], "is truncated: 1,000 of"),
        (lambda raw: raw + b"x", "is not the original file: "),
        (lambda raw: raw[:-1] + b"x", "is not the original file: its md5 is "),
    ],
)
def test_a_file_that_is_not_the_original_is_named(cifar_files, damage, problem):
    kind, folder, write = cifar_files
    name, (_, md5) = next(iter(cifar.VARIANTS[kind].files.items()))
    raw = damage((folder / name).read_bytes())
    write(name, raw, known=False)
    text = refused(open_data, f"{kind}:{folder}")
    assert f"{folder / name} {problem}" in text
    assert f"download {cifar.VARIANTS[kind].archive} again" in text
    if "md5" in problem:
        assert f"{hashlib.md5(raw).hexdigest()}, expected {md5}" in text


def test_the_md5_is_compared_before_the_file_is_unpickled(cifar_files, monkeypatch):
    kind, folder, write = cifar_files
    for name, (size, _) in cifar.VARIANTS[kind].files.items():
        write(name, bytes(size), known=False)
    monkeypatch.setattr(cifar, "unpickle", lambda raw: pytest.fail("unpickled"))
    assert "md5" in refused(open_data, f"{kind}:{folder}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content, key: content[key].pop(), "has 5 labels for 6 images"),
        (lambda content, key: content[key].__setitem__(0, 100), "has labels outside 0..9"),
        (lambda content, key: content[key].__setitem__(0, -1), "has labels outside 0..9"),
        (lambda content, key: content[key].__setitem__(0, b"1"), "has no list of labels"),
        (lambda content, key: content.pop(key), "has no list of labels"),
        (lambda content, key: content.pop(b"data"), "has no images"),
        (lambda content, key: content.update({b"data": b"bytes"}), "has no images"),
        (lambda content, key: content.update({b"data": np.zeros((6, 5), np.uint8)}), "has no images"),
        (lambda content, key: content.update({b"data": bytearray(b"cos\nsystem\n")}), "it names os.system"),
    ],
)
def test_a_wrong_content_is_named_even_if_the_md5_fits(cifar_files, change, problem):
    kind, folder, write = cifar_files
    (*_, name), key = CIFAR_CONTENT[kind]
    content = batch(key, 0)
    change(content, key)
    write(name, pickled(content))
    text = refused(open_data, f"{kind}:{folder}")
    assert str(folder / name) in text
    assert problem in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "holds a list"),
        ({}, "no list of class names"),
        ({b"label_names": [b"a"], b"fine_label_names": [b"a"]}, "names 1 classes"),
    ],
)
def test_wrong_class_names_are_refused(cifar_files, content, problem):
    kind, folder, write = cifar_files
    write(list(cifar.VARIANTS[kind].files)[-1], pickled(content))
    assert problem in refused(open_data, f"{kind}:{folder}")


# --- the unpickler by itself, as if the md5 were known


class Runs:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile(path):
    """Pickles that create `path` when they are unpickled without care."""
    shell = f"touch {path}"
    python = f"open({str(path)!r}, 'w').close()"
    for protocol in range(6):
        yield pickle.dumps(Runs(os.system, shell), protocol)
        yield pickle.dumps(Runs(eval, python), protocol)
        yield pickle.dumps({b"data": [Runs(exec, python)]}, protocol)
        yield pickle.dumps(Runs(subprocess.check_call, ["touch", str(path)]), protocol)
    word = string(shell.encode())
    yield b"\x80\x02cos\nsystem\n" + word + b"\x85R."
    yield b"(S'" + shell.encode() + b"'\nios\nsystem\n."  # INST
    yield b"\x80\x02(cos\nsystem\n" + word + b"o."  # OBJ
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93" + word + b"\x85R."  # STACK_GLOBAL
    yield b"\x80\x04\x8c\x05numpy\x8c\x09os.system\x93" + word + b"\x85R."  # a dotted name
    yield b"\x80\x02" + RECONSTRUCT + b"cos\nsystem\n" + word + b"\x85R0" + NDARRAY + b"."  # beside allowed names
    yield b"\x80\x02" + RECONSTRUCT + b"(" + NDARRAY + b"cos\nsystem\n" + word + b"\x85R" + string(b"b") + b"tR."
    yield b"\x80\x02\x82\xc8" + word + b"\x85R."  # EXT1


@pytest.fixture
def extension():
    copyreg.add_extension("os", "system", 0xC8)
    yield
    copyreg.remove_extension("os", "system", 0xC8)
    copyreg.clear_extension_cache()


def test_hostile_pickles_run_nothing(tmp_path, extension):
    path = tmp_path / "ran"
    pickles = list(hostile(path))
    for raw in pickles:
        text = refused(cifar.unpickle, raw)
        assert "which no file of CIFAR does" in text
        assert not path.exists(), raw
    num_run = 0
    for raw in pickles:  # these are not duds: the ordinary unpickler does run them
        try:
            pickle.loads(raw, encoding="bytes")
        except Exception:
            continue
        finally:
            num_run += path.exists()
            path.unlink(missing_ok=True)
    assert num_run >= 20


SET_TRICK = b"N}" + string(b"__call__") + number(1) + b"s\x86b"
"""BUILD with a second dict, which sets attributes."""


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (NDARRAY + b")R", "not callable"),
        (NDARRAY + b")\x81", "NEWOBJ"),
        (RECONSTRUCT + b")R", "not an array"),
        (RECONSTRUCT + DTYPE + number(0) + b"\x85" + string(b"b") + b"\x87R", "not an array"),
        (RECONSTRUCT + NDARRAY + number(2**40) + b"\x85" + string(b"b") + b"\x87R", "not an array"),
        (DTYPE + b")R", "only uint8"),
        (DTYPE + string(b"O8") + number(0) + number(1) + b"\x87R", "type (b'O8',), and only uint8"),
        (DTYPE + string(b"V8") + number(0) + number(1) + b"\x87R", "only uint8"),
        (DTYPE + string(b"u1") + number(0) + number(1) + b"\x87R)R", "not callable"),
        *(
            (name + state, "changes a name")
            for name in (NDARRAY, DTYPE, RECONSTRUCT)
            for state in (SET_TRICK, b"}b", b")b")
        ),
        (b"cnumpy._core.multiarray\n_reconstruct\n", "names numpy._core.multiarray._reconstruct"),
        (b"cnumpy.core.multiarray\nscalar\n", "names numpy.core.multiarray.scalar"),
        (b"cnumpy\nload\n", "names numpy.load"),
        (b"cbuiltins\ngetattr\n", "names builtins.getattr"),
        (b"c__builtin__\ngetattr\n", "names __builtin__.getattr"),
        (b"c_codecs\nencode\n", "names _codecs.encode"),
        (b"\x8c\x05numpy\x8c\x0endarray.tofile\x93", "names numpy.ndarray.tofile"),
        (b"Pname\n", "outside the file"),
        (string(b"name") + b"Q", "outside the file"),
        (array_pickle((2, 2), b"abcd", code=b"O8"), "only uint8"),
        (
            array_pickle(
                (2, 2),
                b"abcd",
                dtype_state=b"(" + number(3) + string(b"|") + b"NNN" + number(-1) * 2 + number(63) + b"t",
            ),
            "only uint8",
        ),
        (array_pickle((2, 2), b"abcd", dtype_state=b"}" + string(b"names") + b"Ns"), "only uint8"),
        (array_pickle((2, 2), b"abcd", version=2), "two axes"),
        (array_pickle((2, 2, 1), b"abcd"), "two axes"),
        (array_pickle((), b"a"), "two axes"),
        (array_pickle((2, 2), b"abc"), "has 3 bytes"),
        (array_pickle((-1, -1), b"a"), "-1 x -1"),
        (array_pickle((0, 3072), b""), "0 x 3072"),
        (array_pickle((60_001, 3072), b"a"), "60001 x 3072, and at most 60000 x 3072"),
        (array_pickle((2**62, 2**62), b"a"), "at most 60000 x 3072"),
        (array_pickle((1, 3073), b"a" * 3073), "at most 60000 x 3072"),
        (array_pickle((2, 2), b"abcd") + SET_TRICK, "two axes"),
        (array_pickle((2, 2), b"abcd") + b"}" + string(b"values") + b"Nsb", "two axes"),
        (array_pickle((2, 2), b"abcd") + b")R", "not callable"),
        (array_pickle((2, 2), b"abcd") + string(b"x") + b"a", "append"),
        (array_pickle((2, 2), b"abcd") + string(b"x") + b"Ns", ""),
        (b"]" + SET_TRICK, ""),
        (string(b"x") + b")R", "not callable"),
        (b"\x80\xff", "protocol"),
        (b"", ""),
        (b"0", ""),
    ],
)
def test_tricks_are_refused_and_leave_no_trace(raw, reason):
    assert reason in refused(cifar.unpickle, b"\x80\x04" + raw + b".")
    content = cifar.unpickle(pickled({b"data": np.arange(6, dtype=np.uint8).reshape(2, 3)}))
    assert content[b"data"].values.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_every_cut_off_file_is_refused():
    raw = pickled(batch(b"labels", 0, num=1))
    for end in [*range(250), *range(len(raw) - 250, len(raw))]:
        refused(cifar.unpickle, raw[:end])


# --- folders of images


def colour(label, number=0):
    return (40 * label, 100 + number, 200)


def make_folder(root, *, side=8, **splits):
    """Images of one colour, which tells class and number: `train={"cat": 3}` makes three cats."""
    for split, classes in splits.items():
        for label, (name, num) in enumerate(classes.items()):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number_ in range(num):
                Image.new("RGB", (side, side), colour(label, number_)).save(folder / f"{number_:03}.png")
    return root


def test_a_folder_is_read_in_a_fixed_order(tmp_path):
    make_folder(tmp_path / "pets", train={"dog": 20, "cat": 15}, test={"cat": 2, "dog": 3})
    dataset = open_data(f"folder:{tmp_path / 'pets'}", size=(8, 8))
    assert (dataset.name, dataset.spec) == ("pets", f"folder:{tmp_path / 'pets'}")
    assert (dataset.classes, dataset.in_chans, dataset.size) == (("cat", "dog"), 3, (8, 8))
    assert isinstance(dataset.train, ArraySplit)
    assert dataset.train.labels.tolist() == [0] * 15 + [1] * 20
    assert dataset.train.labels.dtype == np.int64
    assert dataset.train.images.dtype == np.uint8
    expected = [colour(1, number_) for number_ in range(15)] + [colour(0, number_) for number_ in range(20)]
    assert (dataset.train.images == np.array(expected)[:, np.newaxis, np.newaxis]).all()
    assert dataset.test.labels.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(dataset.mean, np.mean(expected, axis=0) / 255)
    np.testing.assert_allclose(dataset.std, np.maximum(np.std(expected, axis=0), 1) / 255)


@pytest.mark.parametrize(("parts", "num_test"), [(("val",), 1), (("test",), 2), (("val", "test"), 2), ((), None)])
def test_which_part_is_the_test_part(tmp_path, parts, num_test):
    num = {"val": 1, "test": 2}
    make_folder(tmp_path, train={"a": 1, "b": 1}, **{part: {"a": num[part], "b": num[part]} for part in parts})
    test = open_data(f"folder:{tmp_path}").test
    assert (None if test is None else len(test) // 2) == num_test


def test_what_belongs_to_a_class(tmp_path):
    make_folder(tmp_path, train={"a": 1, "b": 1})
    extra = tmp_path / "train" / "a" / "deep" / "deeper"
    hidden = tmp_path / "train" / "a" / ".thumbs"
    for folder in (extra, hidden, tmp_path / "train" / ".cache"):
        folder.mkdir(parents=True)
    for path in (extra / "UPPER.PNG", extra / "png named.jpg", extra / ".hidden.png", hidden / "x.png"):
        Image.new("RGB", (8, 8), RED).save(path, "PNG")
    (extra / "notes.txt").write_text("no image")
    (tmp_path / "train" / "stray.png").write_bytes(b"not in a class")
    dataset = open_data(f"folder:{tmp_path}")
    assert dataset.classes == ("a", "b")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1]
    assert (dataset.train.images[1:3] == RED).all()


def solid(mode, value, path, **options):
    image = Image.new(mode, (6, 6), value)
    image.save(path, **options)
    return path


def palette_image(colours, index):
    image = Image.new("P", (6, 6), index)
    image.putpalette([value for one in colours for value in one])
    return image


@pytest.mark.parametrize(
    ("mode", "value", "suffix", "expected"),
    [
        ("RGB", (10, 20, 30), "png", (10, 20, 30)),
        ("L", 77, "png", (77, 77, 77)),
        ("1", 1, "png", (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), "png", (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), "png", (255, 255, 255)),  # laid on white
        ("RGBA", (0, 0, 0, 51), "png", (204, 204, 204)),
        ("RGBA", (0, 0, 0, 51), "webp", (204, 204, 204)),
        ("LA", (0, 51), "png", (204, 204, 204)),
        ("I;16", 0xFFFF, "png", (255, 255, 255)),
        ("I;16", 0x8080, "png", (128, 128, 128)),
        ("I;16", 200, "png", (1, 1, 1)),
        ("I;16", 0x8080, "tiff", (128, 128, 128)),
        ("I;16B", 0x8080, "tiff", (128, 128, 128)),
        ("I;16", 0x8080, "pgm", (128, 128, 128)),
        ("I", 0x8080, "tiff", (128, 128, 128)),
        ("CMYK", (255, 0, 0, 0), "tiff", (0, 255, 255)),
        ("L", 77, "jpg", (77, 77, 77)),
        ("L", 77, "bmp", (77, 77, 77)),
        ("L", 77, "gif", (77, 77, 77)),
        ("L", 77, "pgm", (77, 77, 77)),
        ("RGB", (10, 20, 30), "tga", (10, 20, 30)),
    ],
)
def test_every_kind_of_pixel_becomes_rgb(tmp_path, mode, value, suffix, expected):
    array = decode_image(
        solid(mode, value, tmp_path / f"x.{suffix}", **({"lossless": True} if suffix == "webp" else {})), (6, 6)
    )
    assert array.shape == (6, 6, 3)
    assert array.dtype == np.uint8
    assert (array == expected).all()


@pytest.mark.parametrize(("transparency", "expected"), [(None, BLUE), (0, BLUE), (1, (255, 255, 255))])
@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_palettes_with_and_without_transparency(tmp_path, suffix, transparency, expected):
    path = tmp_path / f"x.{suffix}"
    palette_image([RED, BLUE], 1).save(path, **({} if transparency is None else {"transparency": transparency}))
    assert (decode_image(path, (6, 6)) == expected).all()


def test_sixteen_bits_of_colour_are_read(tmp_path):
    """Pillow cannot write such a PNG, so its chunks are written here."""
    row = b"\0" + struct.pack(">3H", 0xFFFF, 0x8080, 0) * 4
    path = tmp_path / "x.png"
    path.write_bytes(png(4, 4, 16, 2, zlib.compress(row * 4)))
    assert (decode_image(path, (4, 4)) == (255, 128, 0)).all()


def png(width, height, bits, colour_type, data):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_floats_and_more_than_16_bits_are_refused(tmp_path):
    assert "range is unknown" in refused(decode_image, solid("F", 0.5, tmp_path / "f.tiff"), (6, 6))
    assert "beyond 16 bits" in refused(decode_image, solid("I", 70_000, tmp_path / "i.tiff"), (6, 6))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_the_exif_orientation_is_applied(tmp_path, suffix):
    image = Image.new("RGB", (32, 16), RED)
    image.paste(BLUE, (16, 0, 32, 16))  # right half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the right half comes to lie at the bottom
    image.save(tmp_path / f"x.{suffix}", exif=exif)
    array = decode_image(tmp_path / f"x.{suffix}", (32, 16)).astype(int)
    assert np.abs(array[:14] - RED).max() < 8
    assert np.abs(array[18:] - BLUE).max() < 8


@pytest.mark.parametrize(
    ("shape", "size", "rows", "columns"), [((8, 20), (8, 8), (0, 8), (6, 14)), ((20, 8), (10, 8), (5, 15), (0, 8))]
)
def test_the_centre_is_kept_exactly(tmp_path, shape, size, rows, columns):
    array = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "x.png")
    assert (decode_image(tmp_path / "x.png", size) == array[slice(*rows), slice(*columns)]).all()


def test_images_are_scaled_to_the_shorter_side(tmp_path):
    """A ramp stays a ramp, up and down, and a JPEG that is decoded at a fraction of its size shows the same."""
    ramp = np.tile(np.linspace(0, 250, 1000).astype(np.uint8), (500, 1))
    Image.fromarray(ramp).save(tmp_path / "x.png")
    Image.fromarray(ramp).save(tmp_path / "x.jpg", quality=95)
    for size in ((50, 50), (600, 600)):
        expected = np.linspace(62.5, 187.5, size[1])
        for name in ("x.png", "x.jpg"):
            assert np.abs(decode_image(tmp_path / name, size)[..., 0] - expected).max() < 4


@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1)])
def test_extreme_shapes_are_read(tmp_path, shape):
    Image.fromarray(np.full(shape, 9, np.uint8)).save(tmp_path / "x.png")
    assert (decode_image(tmp_path / "x.png", (16, 16)) == 9).all()


def test_only_the_first_frame_is_read(tmp_path):
    Image.new("RGB", (6, 6), RED).save(
        tmp_path / "x.gif", save_all=True, append_images=[Image.new("RGB", (6, 6), BLUE)]
    )
    assert (decode_image(tmp_path / "x.gif", (6, 6)) == RED).all()


@pytest.mark.parametrize(
    ("side", "size"), [(20, (32, 32)), (48, (32, 32)), (49, (128, 128)), (159, (128, 128)), (160, (224, 224))]
)
def test_the_size_suits_the_images(tmp_path, side, size):
    make_folder(tmp_path, side=side, train={"a": 2, "b": 1})
    Image.new("L", (1000, 600)).save(tmp_path / "train" / "a" / "one large.png")  # the median does not mind
    dataset = open_data(f"folder:{tmp_path}")
    assert dataset.size == size
    assert dataset.train.images.shape == (4, *size, 3)
    assert suggest_model(dataset)[1] == size


def test_images_beyond_the_memory_limit_stay_on_disk(tmp_path):
    make_folder(tmp_path, train={"a": 40, "b": 30}, val={"a": 2, "b": 2})
    needed = 74 * 16 * 16 * 3
    inside, outside = (open_data(f"folder:{tmp_path}", size=(16, 16), memory_limit=needed - less) for less in (0, 1))
    assert isinstance(inside.train, ArraySplit)
    assert isinstance(outside.train, FileSplit)
    assert isinstance(outside.test, FileSplit)
    assert (outside.train.labels == inside.train.labels).all()
    assert (outside.mean, outside.std, outside.classes) == (inside.mean, inside.std, inside.classes)
    indices = np.random.default_rng(0).integers(0, 70, 100)
    assert (outside.train.read(indices) == inside.train.read(indices)).all()
    assert outside.train.read(indices).dtype == np.uint8
    assert outside.train.read(np.array([], np.int64)).shape == (0, 16, 16, 3)
    assert len(outside.train) == 70


def damage(path):
    """A header that is fine, and half of the rest."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:6000])
    return path


@pytest.fixture
def folder_with_bad(tmp_path):
    make_folder(tmp_path, train={"a": 20, "b": 20}, test={"a": 2, "b": 2})
    (tmp_path / "train" / "a" / "017.png").write_bytes(b"no image")
    (tmp_path / "train" / "b" / "000.png").write_bytes(b"")
    damage(tmp_path / "train" / "b" / "003.png")
    damage(tmp_path / "test" / "a" / "001.png")
    return tmp_path, ["train/a/017.png", "train/b/000.png", "train/b/003.png", "test/a/001.png"]


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_bad_images_are_left_out_if_wanted(folder_with_bad, memory_limit):
    folder, bad = folder_with_bad
    dataset = open_data(f"folder:{folder}", size=(8, 8), skip_bad=True, memory_limit=memory_limit)
    assert dataset.skipped == tuple(str(folder / name) for name in bad)
    assert np.bincount(dataset.train.labels).tolist() == [19, 18]
    assert dataset.test.labels.tolist() == [0, 1, 1]
    images = dataset.train.read(np.arange(37))
    assert (images[:, 0, 0, 0] == 40 * dataset.train.labels).all()  # images and labels are still in one order
    assert (images[:, 0, 0, 1] - 100).tolist() == [n for n in range(20) if n != 17] + [
        n for n in range(20) if n not in (0, 3)
    ]


@pytest.mark.parametrize("size", [(8, 8), None])
def test_the_first_bad_image_is_named(folder_with_bad, size):
    folder, bad = folder_with_bad
    text = refused(open_data, f"folder:{folder}", size=size)
    assert text.startswith(f"{folder / bad[0]}: cannot be read as an image (not a known image format)")
    assert "skip_bad=True" in text


def test_a_bad_image_on_disk_is_named_at_the_latest_when_it_is_read(tmp_path):
    make_folder(tmp_path, train={"a": 3, "b": 3}, test={"a": 1, "b": 1})
    bad = damage(tmp_path / "test" / "b" / "000.png")
    test = open_data(f"folder:{tmp_path}", size=(8, 8), memory_limit=0).test
    assert f"{bad}: cannot be read as an image (image file is truncated" in refused(test.read, np.array([0, 1]))
    bad.write_bytes(b"no image")
    assert str(bad) in refused(open_data, f"folder:{tmp_path}", size=(8, 8), memory_limit=0)


@pytest.fixture
def files(tmp_path):
    """Thirty images on disk."""
    return open_data(f"folder:{make_folder(tmp_path, train={'a': 20, 'b': 10})}", size=(8, 8), memory_limit=0).train


@pytest.mark.parametrize("num", [0, 1, 3])
def test_workers_read_what_the_split_reads(files, num):
    batches = [np.random.default_rng(size).integers(0, 30, size) for size in (5, 0, 1, 30, 7, 7, 7, 7, 7, 7, 7, 7)]
    with Workers(num) as workers:
        for _ in range(2):  # they serve more than one reader
            for images, indices in zip(workers.read(files, batches), batches, strict=True):
                assert images.dtype == np.uint8
                assert np.array_equal(images, files.read(indices))
        assert len(workers.processes) == num
    assert workers.processes == []


def test_workers_leave_images_in_memory_alone():
    split = ArraySplit(np.zeros((4, 2, 2, 1), np.uint8), np.arange(4))
    with Workers(2) as workers:
        (images,) = workers.read(split, [np.arange(3)])
        assert images.shape == (3, 2, 2, 1)
        assert workers.processes == []


def test_workers_read_ahead_and_forget_what_nobody_wants(files):
    asked = []

    def batches():
        for number in range(100):
            asked.append(number)
            yield np.array([number % 30])

    with Workers(2) as workers:
        reader = workers.read(files, batches())
        next(reader)
        assert asked == [0, 1, 2, 3, 4]
        reader.close()
        (images,) = workers.read(files, [np.array([7])])
        assert np.array_equal(images, files.read(np.array([7])))


def test_workers_name_bad_images_as_the_split_does(files):
    for index in (17, 4):
        damage(files.paths[index])
    with Workers(2) as workers:
        reader = workers.read(files, [np.array([0, 1]), np.array([2, 17, 4]), np.array([3])])
        assert len(next(reader)) == 2
        text = refused(next, reader)
        assert text == refused(files.read, np.array([2, 17, 4]))
        assert text.startswith(f"{files.paths[17]}: cannot be read as an image")
        assert len(next(workers.read(files, [np.array([3])]))) == 1  # the workers live on


def test_a_worker_that_is_gone_is_an_error(files):
    with Workers(1) as workers:
        reader = workers.read(files, [np.array([0])] * 9)
        next(reader)
        workers.processes[0].process.kill()
        with pytest.raises(ChildProcessError, match="was killed by signal 9; if memory was short, use fewer"):
            list(reader)


def test_a_worker_ends_with_its_input(files):
    with Workers(1) as workers:
        next(workers.read(files, [np.array([0])]))
        (worker,) = workers.processes
        worker.requests.close()
        assert worker.process.wait(20) == 0


def test_the_number_of_workers_suits_the_machine(files, monkeypatch):
    memory = ArraySplit(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1, np.int64))
    for cores, processes, expected in ((1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (8, 8, 1), (128, 1, 16)):
        monkeypatch.setattr("cnmm.data.workers.usable_cores", lambda cores=cores: cores)
        assert num_workers(None, files, processes) == expected
        assert num_workers(None, memory, processes) == 0
    assert (num_workers(0, files), num_workers(40, files), num_workers(0, memory)) == (0, 40, 0)
    with pytest.warns(UserWarning, match="workers=2 has no effect"):
        assert num_workers(2, memory) == 0


def test_a_class_without_a_good_image_is_refused(tmp_path):
    make_folder(tmp_path, train={"a": 2, "b": 1})
    (tmp_path / "train" / "b" / "000.png").write_bytes(b"no image")
    text = refused(open_data, f"folder:{tmp_path}", skip_bad=True)
    assert f"the class {tmp_path / 'train' / 'b'} has no image that can be read" in text
    for path in (tmp_path / "train" / "a").iterdir():
        path.write_bytes(b"no image")
    assert "none of 3 image files can be read" in refused(open_data, f"folder:{tmp_path}", skip_bad=True)


@pytest.mark.parametrize(
    ("splits", "problem"),
    [
        ({}, "is not a folder"),
        ({"test": {"a": 1, "b": 1}}, "has test/ but no folder train/"),
        ({"train": {"a": 1}}, "has 1 class folders, must be at least 2"),
        ({"train": {"a": 1, "b": 0}}, "train/b has no images; their suffixes are .apng, "),
        ({"train": {"a": 1, "b": 1}, "test": {"a": 1}}, "test lacks the class 'b' of train/"),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1, "c": 1}}, "val has the class 'c', train/ has not"),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 0}}, "val/b has no images"),
    ],
)
def test_a_wrong_layout_is_explained(tmp_path, splits, problem):
    folder = make_folder(tmp_path / "x", **splits)
    text = refused(open_data, f"folder:{folder}")
    assert str(folder) in text
    assert problem in text


def test_an_image_too_large_to_decode_is_refused(tmp_path, monkeypatch):
    make_folder(tmp_path, train={"a": 1, "b": 1})
    bomb = tmp_path / "train" / "a" / "bomb.png"
    bomb.write_bytes(png(60_000, 60_000, 8, 0, zlib.compress(bytes(1000))))
    text = refused(open_data, f"folder:{tmp_path}", size=(8, 8))
    assert str(bomb) in text
    assert "decompression bomb" in text
    assert open_data(f"folder:{tmp_path}", skip_bad=True).skipped == (str(bomb),)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pillows_limit_is_a_limit_and_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode_image(solid("L", 1, tmp_path / "fits.png"), (6, 6)).shape == (6, 6, 3)
    Image.new("L", (10, 11)).save(tmp_path / "large.png")
    assert "10x11 pixels, more than the 100" in refused(decode_image, tmp_path / "large.png", (6, 6))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode_image(tmp_path / "large.png", (6, 6)).shape == (6, 6, 3)


def test_postscript_under_another_name_starts_nothing(tmp_path, monkeypatch):
    Image.new("RGB", (6, 6)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("started"))
    assert "not a known image format" in refused(decode_image, tmp_path / "x.png", (6, 6))


def test_a_broken_link_is_named(tmp_path):
    make_folder(tmp_path, train={"a": 1, "b": 1})
    (tmp_path / "train" / "a" / "link.png").symlink_to(tmp_path / "nowhere.png")
    assert "link.png: cannot be read as an image (No such file or directory)" in refused(
        open_data, f"folder:{tmp_path}"
    )


def test_progress_counts_to_the_total(tmp_path):
    make_folder(tmp_path, train={"a": 30, "b": 20}, val={"a": 1, "b": 1})
    calls = []
    open_data(f"folder:{tmp_path}", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(16, 52), (32, 52), (48, 52), (52, 52)]


def test_an_interruption_stops_the_threads():
    done = []

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_threads(done.append, 100_000, progress=stop)
    assert len(done) < 100_000


def test_a_programming_error_is_not_taken_for_a_bad_file():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda index: 1 // 0, 5, skip_bad=True)


# --- the real files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "pixel", "mean", "std"),
    [
        ("cifar10", "frog", [59, 62, 63], (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ("cifar100", "cattle", [255, 255, 255], (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ],
)
def test_the_real_cifar(kind, first, pixel, mean, std):
    folder = Path(os.environ.get("CNMM_DATA", ""))
    if not (folder / cifar.VARIANTS[kind].folder).is_dir():
        pytest.skip(f"set CNMM_DATA to a folder that holds {cifar.VARIANTS[kind].folder} to run this test")
    dataset = open_data(f"{kind}:{folder}")
    num_classes = len(dataset.classes)
    assert np.bincount(dataset.train.labels).tolist() == [50_000 // num_classes] * num_classes
    assert np.bincount(dataset.test.labels).tolist() == [10_000 // num_classes] * num_classes
    assert dataset.classes[dataset.train.labels[0]] == first
    assert dataset.train.images[0, 0, 0].tolist() == pixel
    np.testing.assert_allclose((*dataset.mean, *dataset.std), (*mean, *std), atol=6e-5)
