"""Values that nobody should give, and names that nobody should have: one line each, printable, before any work."""

import dataclasses
import os
import typing

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.cli import main as cli
from cnmm.cli.usage import RANGES
from cnmm.data import open_data
from cnmm.runtime.bench import MOST_IMAGES, MOST_SECONDS, bench
from cnmm.runtime.engines import MOST_THREADS
from cnmm.runtime.session import Session
from cnmm.training.card import code
from cnmm.training.config import MOST_WORKERS
from tests.helpers import complaint, refused
from tests.runtime.ladders import CLASSES, SIZE, make_ladder, write

ESCAPE = "\x1b[31mred\x1b]0;title\x07\n\r\u202e\x9b"
IMAGE = np.zeros((SIZE, SIZE, 3), np.uint8)

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture(scope="module")
def session(hand_made_ladder):
    with Session(hand_made_ladder, threads=1) as session:
        yield session


# Arguments of functions


@pytest.mark.parametrize(
    "images",
    [None, 3, 1.5, True, b"bytes", {"a": 1}, [], [None], [3], "none.png", ["none.png"], object(), "\0", [b"x"]],
)
def test_images_that_are_none(session, images):
    refused(session.predict, images)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((SIZE, SIZE, 3)),
        np.zeros((0, SIZE, SIZE, 3), np.uint8),
        np.zeros((SIZE, SIZE), np.uint8),
        np.zeros((1, 1, SIZE, SIZE, 3), np.uint8),
        np.zeros((SIZE, SIZE, 4), np.uint8),
        np.array(None),
        np.array("x"),
        np.array([[1], [2]], object),
    ],
)
def test_arrays_that_are_no_images(session, array):
    assert "images of" in refused(session.predict, array)


@pytest.mark.parametrize(
    "asked",
    [
        *(
            {"budget": value}
            for value in ("", "x", "1e5", "-3M", 0, -1, True, [], {}, b"1M", 10**400, 10**5000, "9" * 5000)
        ),
        *(
            {"budget": value}
            for value in (float("nan"), float("inf"), np.float32("nan"), "acc:2", "acc:x", "0%", "\x1b")
        ),
        *({"average_macs": value} for value in ("acc:0.5", "5ms", 1, "nan", None.__class__, [1])),
        *({"confidence": value} for value in ("0.5", -0.1, 1.1, float("nan"), True, [0.5], 10**400)),
        *({"deadline_ms": value} for value in ("5", 0, -1, float("nan"), float("inf"), True, [5], 10**400)),
        *({"point": value} for value in ("", "e9c9", 3, ["e1c0"], b"e1c0", ESCAPE)),
        {"budget": "2k", "confidence": 0.5},
    ],
)
def test_a_call_that_asks_for_the_impossible(session, asked):
    line = refused(session.predict, IMAGE, **asked)
    assert line.isprintable()
    assert len(line) < 2100


@pytest.mark.parametrize(
    "options",
    [
        *({"threads": value} for value in (0, -1, 1.5, "2", True, 100_000, 10**400, [1], float("nan"))),
        *({"runtime": value} for value in ("", "tensorrt", 3, [], ESCAPE)),
        *({"precision": value} for value in ("", "float64", 3, [], ESCAPE)),
        *({"points": value} for value in ("e1c0", ["e9c9"], [3], [["e1c0"]])),
    ],
)
def test_a_session_that_cannot_be(hand_made_ladder, options):
    refused(Session, hand_made_ladder, **{"threads": 1, **options})


@pytest.mark.parametrize("folder", [None, 3, b"ladder", [], "", "\0", ESCAPE])
@pytest.mark.parametrize("function", [Session, cnmm.Run, cnmm.load, bench])
def test_a_folder_that_is_none(function, folder):
    assert refused(function, folder).isprintable()


def test_numbers_of_numpy_are_numbers(hand_made_ladder, session):
    plain = session.predict(IMAGE, confidence=0.5)
    assert np.array_equal(session.predict(IMAGE, confidence=np.float32(0.5)).probabilities, plain.probabilities)
    assert session.predict(IMAGE, budget=np.int64(2500)).point == session.predict(IMAGE, budget=2500).point == "e2c3"
    assert session.predict(IMAGE, average_macs=np.array(4000)).point == "e3c0"
    assert session.predict(IMAGE, deadline_ms=np.float64(1e5)).exits.tolist() == [3]
    assert len(plain.top(np.int8(2))[0]) == 2
    with Session(hand_made_ladder, threads=np.int64(1), points=["e1c0"], cascade=False) as one:
        assert one.threads == 1
    model = cnmm.model_plan("cnmm_tiny", blocks=np.int32(3))
    assert cnmm.cutting_order(model, np.int64(2)) == cnmm.cutting_order(model, 2)
    for exit in (2.0, True, "2", 0, 4, None.__class__):
        assert "must be an exit from 1 to 3" in refused(cnmm.cutting_order, model, exit)


@pytest.mark.parametrize(
    "options", [{"batch": 10**8}, {"batch": 0}, {"batch": 1.5}, {"seconds": "1"}, {"threads": 1e9}]
)
def test_a_measurement_that_cannot_be(hand_made_ladder, options):
    refused(bench, hand_made_ladder, **options)


# Flags


def numbers(verb):
    """Fields of a verb that are numbers."""
    hints = typing.get_type_hints(verb)
    return {
        field.name
        for field in dataclasses.fields(verb)
        if {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}
    }


def test_every_number_that_a_verb_takes_has_a_range():
    found = set().union(*(numbers(verb) for verb in cli.VERBS.values()))
    assert found == RANGES.keys()
    limits = {"batch": MOST_IMAGES, "threads": MOST_THREADS, "seconds": MOST_SECONDS, "workers": MOST_WORKERS}
    for name, most in limits.items():  # those of the library
        assert RANGES[name][0](most)
        assert not RANGES[name][0](most + 1)


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "L", "--batch", "100000000"],
        ["bench", "L", "--batch", "0"],
        ["bench", "L", "--threads", "100000"],
        ["bench", "L", "--seconds", "nan"],
        ["bench", "L", "--seconds", "inf"],
        ["predict", "L", "a.png", "--threads", "-1"],
        ["predict", "L", "a.png", "--top", "0"],
        ["predict", "L", "a.png", "--confidence", "nan"],
        ["predict", "L", "a.png", "--deadline-ms", "inf"],
        ["predict", "L", "a.png", "--budget", "many"],
        ["predict", "L", "a.png", "--average-macs", "-5"],
        ["frontier", "R", "--images", "0"],
        ["frontier", "R", "--points", "-1"],
        ["evaluate", "R", "--monte-carlo", "-1"],
        ["evaluate", "R", "--workers", "100000"],
        ["export", "R", "-o", "x", "--ladder", "0"],
        ["info", "cnmm_tiny", "--blocks", "100000"],
        ["info", "cnmm_tiny", "--channels", "1000000000"],
        ["info", "cnmm_tiny", "--input-size", "1000000000", "32"],
        ["train", "--data", "fashion", "--out", "R", "--warmup", "1"],
        ["train", "--data", "fashion", "--out", "R", "--group", "-3"],
        ["train", "--data", "fashion", "--out", "R", "--crop", "1000000000"],
        ["train", "--data", "fashion", "--out", "R", "--seed", "99999999999999999999999"],
        ["train", "--data", "fashion", "--out", "R", "--lr", "inf"],
        ["train", "--data", "fashion", "--out", "R", "--lr", "nan"],
        ["train", "--data", "fashion", "--out", "R", "--epochs", "-1"],
        ["train", "--data", "fashion", "--out", "R", "--model", "cnmm_b6s3", "--channels", "4096"],
    ],
)
def test_numbers_out_of_range_are_one_line_before_any_work(capsys, args):
    """Neither ladder nor run exists: the flag is looked at first."""
    line = complaint(capsys, *args)
    flag = next(word for word in reversed(args) if word.startswith("--") and word not in ("--data", "--out"))
    assert flag.lstrip("-").replace("-", "_") in line.replace("-", "_") or "budget" in line
    assert "must" in line
    assert os.listdir() == []


# Names


def test_names_from_files_reach_the_terminal_escaped(capsys, tmp_path):
    manifest = make_ladder(tmp_path / "ladder")
    for change, path in (
        ({"classes": [ESCAPE, *CLASSES[1:]]}, "classes="),
        ({"model": ESCAPE}, "model="),
        ({"precision": ESCAPE}, "precision="),
    ):
        write(tmp_path / "ladder", {**manifest, **change})
        line = complaint(capsys, "predict", tmp_path / "ladder", "a.png")
        assert path in line
        assert line.strip().isprintable()


def test_names_of_files_reach_the_terminal_escaped(capsys, hand_made_ladder):
    name = ESCAPE + "[bold]:smile:.png"
    Image.fromarray(IMAGE).save(name)
    Image.fromarray(IMAGE).save(b"\xff.png".decode("utf-8", "surrogateescape"))
    assert cli.main(["predict", str(hand_made_ladder), *os.listdir()]) == 0
    out, err = capsys.readouterr()
    assert "\\x1b[31mred" in out
    assert "[bold]:smile:.png" in out
    assert "\\udcff.png" in out
    assert all(char.isprintable() or char == "\n" for char in out + err)
    line = complaint(capsys, "predict", hand_made_ladder, "none" + ESCAPE)
    assert line.strip().isprintable()
    line = complaint(capsys, "info", ESCAPE)
    assert line.strip().isprintable()


def test_class_folders_have_printable_names(tmp_path):
    for name in ("cat", "dog\x1b[31m"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        Image.fromarray(IMAGE).save(folder / "a.png")
    line = refused(open_data, f"folder:{tmp_path}")
    assert r"the class 'dog\x1b[31m'" in line
    assert "rename it" in line


def test_names_in_markdown_are_code():
    assert code("cat") == "`cat`"
    assert code("a | <b> [x](y)") == "`a | <b> [x](y)`"
    assert code("`a`") == "`` `a` ``"
    assert code("a``b") == "```a``b```"
    assert code("a\nb\x1b") == r"`a\nb\x1b`"
