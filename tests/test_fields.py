"""The schema, against values of every kind."""

import dataclasses
import math

import numpy as np
import pytest

import cnmm
from cnmm import _fields
from cnmm._errors import UserError, is_printable, printable
from cnmm.config import CHECKS as MODEL_CHECKS
from cnmm.config import MixtureConfig
from cnmm.training.config import CHECKS as TRAIN_CHECKS
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import recipe
from tests.helpers import refused

VALUES = {
    "null": None,
    "true": True,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2**53": 2**53,
    "10**400": 10**400,
    "0.5": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "text": "a b",
    "empty": "",
    "escape": "a\x1b[31m",
    "newline": "a\nb",
    "long": "a" * 1001,
    "list": [1, 2],
    "object": {},
}
ACCEPTED = {
    "NUMBER": {"0", "1", "-1", "2**53", "0.5"},
    "COUNT": {"0", "1", "2**53"},
    "POSITIVE": {"1", "2**53"},
    "SHARE": {"0", "1", "0.5"},
    "TRUTH": {"true"},
    "TEXT": {"text"},
    "PATH": {"text", "escape", "newline", "long"},
    "OBJECT": {"object"},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_check_accepts_what_it_says(name):
    fulfils, words = getattr(_fields, name)
    assert {key for key, value in VALUES.items() if fulfils(value)} == ACCEPTED[name]
    assert words


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (_fields.whole(1, 3), [1, 3], [0, 4, 1.0], "a whole number from 1 to 3"),
        (_fields.number(0, below=1), [0, 0.99], [-0.1, 1], "a number of at least 0 and below 1"),
        (_fields.number(above=0), [1e-300], [0, -1, math.inf], "a finite number above 0"),
        (_fields.number(above=0, most=2), [2], [0, 2.1], "a number above 0 and at most 2"),
        (_fields.list_of(_fields.COUNT, 2), [[1, 2], (1, 2)], [[1], [1, 2, 3], [1, "2"], "12"], "a list of 2 values"),
        (_fields.list_of(_fields.COUNT, most=3), [[], [1] * 3], [[1] * 4], "a list of 0 or more values"),
        (_fields.one_of(1, 2), [1], [True, 1.0, 3, "1"], "one of 1, 2"),
        (_fields.or_null(_fields.COUNT), [None, 1], [-1], "or null"),
    ],
)
def test_checks_with_a_range(check, good, bad, words):
    assert words in check[1]
    assert all(map(check[0], good))
    assert not any(map(check[0], bad))


def test_numbers_of_numpy_become_pythons():
    assert type(_fields.checked(np.int16(3), "n", _fields.COUNT)) is int
    assert type(_fields.checked(np.float32(0.5), "p", _fields.SHARE)) is float
    assert _fields.checked(np.array([1, 2]), "size", _fields.list_of(_fields.COUNT, 2)) == [1, 2]
    assert "p=1.5" in refused(_fields.checked, np.float32(1.5), "p", _fields.SHARE)
    config = MixtureConfig(name="any", blocks=np.int64(4), input_size=np.array([32, 48]))
    assert config == MixtureConfig(name="any", blocks=4, input_size=(32, 48))
    assert type(config.blocks) is int
    assert recipe("quick", epochs=np.int64(3), lr=np.float64(0.5)).to_dict()["epochs"] == 3
    about = cnmm.Preprocessing(classes=("a", "b"), mean=np.array([0.5]), std=np.array([0.25]), size=np.array([8, 8]))
    assert (about.mean, about.std, about.size) == ((0.5,), (0.25,), (8, 8))


def test_every_field_of_a_config_has_a_check():
    assert MODEL_CHECKS.keys() == {field.name for field in dataclasses.fields(MixtureConfig)}
    assert TRAIN_CHECKS.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


def test_messages_name_the_path_of_the_field():
    assert refused(_fields.get, {}, "n", _fields.COUNT, "a[3].") == "a[3].n is missing: must be " + _fields.COUNT[1]
    assert refused(_fields.get, {"n": "x"}, "n", _fields.COUNT, "a.") == "a.n='x': must be " + _fields.COUNT[1]
    line = refused(TrainConfig.from_dict, {**recipe("quick").to_dict(), "magic": 1}, "train.")
    assert "train.magic" in line
    assert "pip install -U cnmm" in line
    assert "train.epochs is missing" in refused(TrainConfig.from_dict, {"recipe": "quick"}, "train.")
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (10**5000, deep):
        assert len(refused(_fields.checked, value, "n", _fields.COUNT)) < 200


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"std": (0.2, 0.2)}, "mean has 1 values and std 2"),
        ({"std": (0.0,)}, "std=(0.0,)"),
        ({"mean": (math.nan,)}, "mean=(nan,)"),
        ({"classes": ()}, "classes=()"),
        ({"classes": ("a", "b\x1b[2J")}, "printable"),
        ({"size": (8,)}, "size=(8,)"),
    ],
)
def test_preprocessing_is_checked(about, words):
    good = {"classes": ("a", "b"), "mean": (0.5,), "std": (0.25,), "size": (8, 8)}
    assert words in refused(cnmm.Preprocessing, **{**good, **about})


def test_preprocessing_fits_its_model():
    config = MixtureConfig(name="any", in_chans=1)
    cnmm.Preprocessing.plain(config).check_fits(config)
    for change, words in (({"num_classes": 7}, "10 names: must be 7"), ({"in_chans": 3}, "1 values: must be 3")):
        other = dataclasses.replace(config, **change)
        assert words in refused(cnmm.Preprocessing.plain(config).check_fits, other)


def test_texts_are_printable():
    assert printable("caf\xe9 \u4e2d\u6587 \U0001f468\u200d\U0001f469\u200d\U0001f467 a\xa0b") == (
        "caf\xe9 \u4e2d\u6587 \U0001f468\u200d\U0001f469\u200d\U0001f467 a\xa0b"
    )
    assert printable("a\x1b[31m\nb\r\u2028\u202e\udcff\x9b") == r"a\x1b[31m\nb\r\u2028\u202e\udcff\x9b"
    assert not any(map(is_printable, ("\x1b", "\n", "\x7f", "\x9b", "\u202e", "\udcff", "\u2028")))


def test_an_error_is_one_printable_line():
    error = UserError("a\n  b\x1b[31m" + "x" * 5000 + " end")
    assert str(error).startswith(r"a b\x1b[31mxxx")
    assert str(error).endswith("x end")
    assert len(str(error)) < 2100
