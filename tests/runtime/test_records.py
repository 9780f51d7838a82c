"""Answers about many images, written as they come."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from cnmm._lock import hold
from cnmm.cli import main as cli
from cnmm.ladder import read_ladder
from cnmm.runtime import records
from cnmm.runtime.records import parse_shard, predict_to_file
from cnmm.runtime.session import Session
from tests.helpers import ask, complaint, refused


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten images in two folders, one that is none, and one that is hidden."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(10):
        place = folder / ("a" if number % 2 else "b, c")
        place.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9 + number, 12, 3), np.uint8)).save(place / f"{number}.png")
    (folder / "a" / "broken.jpg").write_bytes(b"no image")
    (folder / "a" / ".hidden.png").write_bytes(b"no image")
    return folder


def rows(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_folder_becomes_a_file(capsys, hand_made_ladder, photos, tmp_path, suffix):
    out = tmp_path / f"answers{suffix}"
    answer = ask(capsys, "predict", hand_made_ladder, photos, "--budget", "2k", "--out", out, "--top", 2)
    assert answer == {"format_version": 1, "file": str(out), "new": 11, "known": 0, "bad": 1}
    found = {row["file"]: row for row in rows(out)}
    assert list(found) == sorted(str(path) for path in photos.glob("*/[!.]*"))
    broken = found.pop(str(photos / "a" / "broken.jpg"))
    assert "not a known image format" in broken["error"]
    assert not broken.get("label")
    with Session(hand_made_ladder, threads=1) as session:
        for path, row in found.items():
            best = session.predict(path, point="e2c3")
            (label, p), (second, _) = best.top(2)[0]
            assert (row["label"], row["point"], row["asked"]) == (label, "e2c3", f"point e2c3 of {session.title}")
            assert float(row["p"]) == pytest.approx(p, abs=1e-6)
            assert (row["top"][1]["label"] if suffix == ".jsonl" else row["label2"]) == second
    # the same command has nothing to do
    before = out.read_bytes()
    answer = ask(capsys, "predict", hand_made_ladder, photos, "--budget", "2k", "--out", out, "--top", 2)
    assert (answer["new"], answer["known"]) == (0, 11)
    assert out.read_bytes() == before


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_whatever_a_killed_process_has_left_is_gone_on_from(hand_made_ladder, photos, tmp_path, suffix, monkeypatch):
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    monkeypatch.setattr(records, "AT_ONCE", 3)
    files = sorted(photos.rglob("*.*g"))
    with Session(hand_made_ladder, threads=1) as session:
        predict_to_file(session, files, whole, confidence=0.5)
        data = whole.read_bytes()
        for end in (0, 1, 20, len(data) // 3, len(data) // 2, len(data) - 1, len(data)):
            out.write_bytes(data[:end])
            done = predict_to_file(session, files, out, confidence=0.5)
            assert out.read_bytes() == data
            assert done.num_new + done.num_known == len(files)


def test_shards_share_the_work(capsys, hand_made_ladder, photos, tmp_path):
    shared = []
    for number in range(3):
        out = tmp_path / f"{number}.jsonl"
        ask(capsys, "predict", hand_made_ladder, photos, "--shard", f"{number}/3", "-o", out)
        shared += [(row["file"], number) for row in rows(out)]
    files = sorted(str(path) for path in photos.glob("*/[!.]*"))
    assert sorted(shared) == [(path, number % 3) for number, path in enumerate(files)]
    answer = ask(capsys, "predict", hand_made_ladder, photos, "--shard", "99/100", "-o", tmp_path / "none.csv")
    assert (answer["new"], rows(tmp_path / "none.csv")) == (0, [])


def test_said_for_people(capsys, hand_made_ladder, photos, tmp_path):
    assert cli.main(["predict", str(hand_made_ladder), str(photos), "-o", str(tmp_path / "a.csv")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "a.csv, 11 new answers; 1 of these could not be read, and say why" in err


def test_what_is_refused(capsys, hand_made_ladder, photos, tmp_path):
    predict = ["predict", hand_made_ladder, photos]
    out = tmp_path / "a.jsonl"
    assert "--out FILE.jsonl" in complaint(capsys, *predict, "--shard", "0/2")
    for shard in ("2/2", "-1/2", "1", "a/b", "1/", "9" * 30 + "/2", "\u0663/4"):
        assert "must be I/N" in complaint(capsys, *predict, f"--shard={shard}", "-o", out)
    assert not out.exists()
    assert "a deadline is for one image" in complaint(capsys, *predict, "--deadline-ms", "9", "-o", out)
    ask(capsys, *predict, "-o", out)
    title = read_ladder(hand_made_ladder).title
    assert f"holds answers of 'point e3c0 of {title}', this asks for 'point e1c0 of {title}'" in complaint(
        capsys, *predict, "-o", out, "--point", "e1c0"
    )
    out.write_text(out.read_text().replace(title, "mine 0123abcd"))
    assert f"holds answers of 'point e3c0 of mine 0123abcd', this asks for 'point e3c0 of {title}'" in complaint(
        capsys, *predict, "-o", out
    )
    for text in ("hello\n", "[]\n", '{"file": 3}\n'):
        (tmp_path / "other.jsonl").write_text(text)
        assert "line 1 is not one of these answers" in complaint(capsys, *predict, "-o", tmp_path / "other.jsonl")
        assert (tmp_path / "other.jsonl").read_text() == text
    (tmp_path / "other.csv").write_text("name,age\n")
    assert "its columns are not file,label," in complaint(capsys, *predict, "-o", tmp_path / "other.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "regular file" in complaint(capsys, *predict, "-o", tmp_path / "folder.csv")
    with (tmp_path / "held.csv").open("w") as file:
        hold(file.fileno())
        assert "another process is writing to it" in complaint(capsys, *predict, "-o", tmp_path / "held.csv")


def test_odd_names(hand_made_ladder, tmp_path):
    image = np.zeros((5, 5, 3), np.uint8)
    names = ["a,b.png", 'a"b.png', "a\nb.png", "\x1b[31m.png", "=1+1.png", "é\udc80.png"]
    for name in names:
        Image.fromarray(image).save(tmp_path / name)
    files = [tmp_path / name for name in names]
    with Session(hand_made_ladder, threads=1) as session:
        for suffix in (".jsonl", ".csv"):
            out = tmp_path / f"out{suffix}"
            assert predict_to_file(session, files, out).num_bad == 0
            assert predict_to_file(session, files, out).num_known == len(names)
            assert b"\x1b" not in out.read_bytes()
            assert out.read_bytes().count(b"\n") == len(names) + (suffix == ".csv")


def test_parse_shard():
    assert [parse_shard(text) for text in ("0/1", "3/4", "07/100")] == [(0, 1), (3, 4), (7, 100)]
    assert "must be I/N" in refused(parse_shard, "4/4")
