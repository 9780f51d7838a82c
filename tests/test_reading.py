"""Files from anywhere: what is read, and what is refused before it is read."""

import json
import os
import resource

import pytest
import torch

from cnmm import _files
from cnmm._files import parse_json, read_json, read_tensors, to_bytes
from cnmm._lock import LOCK_FILE, locked
from tests.helpers import refused


def odd_files(folder):
    """What is not a regular file of a sane size, by name."""
    made = {name: folder / name for name in ("pipe", "device", "folder", "huge", "socket")}
    os.mkfifo(made["pipe"])
    made["device"].symlink_to("/dev/zero")
    made["folder"].mkdir()
    with made["huge"].open("wb") as file:
        file.truncate(2**43)  # holes take no place
    os.mknod(made["socket"], 0o140644)
    return made


@pytest.mark.parametrize("name", ["pipe", "device", "folder", "huge", "socket"])
def test_only_regular_files_of_a_sane_size_are_read(tmp_path, name):
    path = odd_files(tmp_path)[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = "must be at most" if name == "huge" else "must be a regular file"
    for read in (read_json, lambda path: read_tensors(path, "np")):
        line = refused(read, path)
        assert line.startswith(f"{path}: ")
        assert words in line or "header" in line or name == "huge"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000


def test_the_header_of_tensors_is_checked_first(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(to_bytes({"a": torch.arange(3)}))
    assert read_tensors(path, "np")["a"].tolist() == [0, 1, 2]
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    assert "a header of 1,099,511,627,776 bytes" in refused(read_tensors, path, "np")
    for data in (b"", b"\0", b"\0" * 8, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        assert f"{path}: cannot be read as safetensors" in refused(read_tensors, path, "pt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("\udcff".encode("utf-8", "surrogatepass"), "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[" * 21 + "]" * 21, "nested more than 20 deep"),
        ('{"a":' * 30 + "1" + "}" * 30, "nested more than 20 deep"),
        ("[NaN]", "NaN is no finite number"),
        ('{"a": -Infinity}', "-Infinity is no finite number"),
        ("1" * 5000, "cannot be read as JSON"),
    ],
)
def test_json_that_is_refused(text, words):
    assert words in refused(parse_json, text)


def test_json_that_is_read(tmp_path):
    assert parse_json("[" * 20 + "]" * 20)
    assert str(parse_json("[NaN]", finite=False)) == "[nan]"
    path = tmp_path / "a.json"
    _files.write_json(path, {"a": [1, {"b": None}]})
    assert read_json(path) == {"format_version": 1, "a": [1, {"b": None}]}
    for version in (2, "1", True, None, 1.0):
        path.write_text(json.dumps({"format_version": version}))
        assert f"{path}: format_version={version!r}" in refused(read_json, path)
    path.write_text("[]")
    assert refused(read_json, path, fix="remove it") == f"{path}: must be an object, not []; remove it"
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["file", "none"])
def test_a_lock_follows_no_link(tmp_path, name):
    """It is written to, and a folder from anywhere may hold a link to anything."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / name)
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / "run", "cnmm train"):
        pass
    assert (tmp_path / "file").read_text() == "precious"
    assert not (tmp_path / "none").exists()
