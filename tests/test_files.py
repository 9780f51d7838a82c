"""Files written in one step, what a killed process leaves behind, and locks: with real processes."""

import contextlib
import os
import subprocess
import sys
import tempfile

import pytest

from cnmm import run_folder
from cnmm._errors import UserError
from cnmm._files import scratch_folder, sweep, write_atomically, written_aside
from cnmm._lock import LOCK_FILE, locked, remove_passing
from cnmm.ladder import is_ladder
from tests.helpers import ROOT, python, refused

HOLD = """
import sys, time
from pathlib import Path
from cnmm._files import scratch_folder, write_atomically, written_aside
from cnmm._lock import locked
folder = Path(sys.argv[1])
with locked(folder, "cnmm train"), written_aside(folder / "ladder") as aside, scratch_folder():
    write_atomically(aside / "file", b"x")
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(folder):
    """A process that holds the lock of a folder, and has a folder aside in it; killed in the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def asides(folder):
    return [path for path in folder.rglob(".*") if path.name.endswith(".aside")]


def test_a_lock_names_its_process_and_ends_with_it(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(UserError, match=r"^[^\n]+$") as caught, locked(tmp_path, "cnmm frontier"):
            pass
        words = str(caught.value)
        assert f"{tmp_path} is in use: 'cnmm train', process {process.pid}, since " in words
        assert words.endswith(f"kill {process.pid}")
        assert len(asides(tmp_path)) == 2
        sweep(tmp_path)
        assert len(asides(tmp_path)) == 2  # its maker lives
    assert (tmp_path / LOCK_FILE).exists()  # nobody was left to remove it
    with locked(tmp_path, "cnmm frontier"):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_what_a_killed_process_left_aside_is_swept_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with holder(tmp_path):
        pass
    (tmp_path / ".mine.aside.txt").touch()
    assert len(asides(tmp_path)) == 2
    with scratch_folder():
        assert len(asides(tmp_path)) == 1  # this one
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE, ".mine.aside.txt"}


RACE = """
import sys
from pathlib import Path
from cnmm import run_folder
from cnmm._errors import UserError
from cnmm._lock import locked
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1]), "cnmm train"):
        print("won", flush=True)
        sys.stdin.readline()
except UserError:
    print("lost", flush=True)
"""


def test_of_many_starts_at_once_exactly_one_wins(tmp_path):
    """Also where a lock file was left by a process that died."""
    (tmp_path / LOCK_FILE).write_text("{}")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.stdout.readline().strip() for racer in racers]
    for racer in racers:
        racer.communicate("end\n")
    assert sorted(results) == ["lost"] * 5 + ["won"]


def test_a_folder_is_replaced_only_if_it_is_what_it_should_be(tmp_path):
    def write(**options):
        with written_aside(tmp_path / "out", **options) as aside:
            (aside / "ladder.json").write_text(str(options))

    write()
    assert "exists" in refused(write)
    write(overwrite=is_ladder)
    assert "overwrite" in (tmp_path / "out" / "ladder.json").read_text()
    (tmp_path / "out" / "ladder.json").unlink()
    (tmp_path / "out" / "letters").touch()
    assert "exists; it is not what --overwrite replaces" in refused(write, overwrite=is_ladder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_write_that_fails_leaves_nothing_aside(tmp_path):
    def fail():
        with written_aside(tmp_path / "out"):
            raise UserError("no")

    refused(fail)
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []


TERMINATED = """
import os, signal, sys, time
from pathlib import Path
from cnmm._files import written_aside
from cnmm._lock import locked
from cnmm.cli import main, models
folder = Path(sys.argv[1])
def answer(verb):
    with locked(folder, "cnmm export"), written_aside(folder / "ladder") as aside:
        (aside / "file").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
models.Models.answer = answer
sys.exit(main.main(["models"]))
"""


def test_sigterm_undoes_what_is_half_done(tmp_path):
    """Where nothing can go on later, as in an export: 143, one line, nothing left."""
    done = python(TERMINATED, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "cnmm: terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_alone_what_is_its_parents(tmp_path):
    with written_aside(tmp_path / "ladder") as aside:
        pid = os.fork()
        if not pid:
            remove_passing()
            os._exit(0)
        os.waitpid(pid, 0)
        assert aside.exists()
        remove_passing()
        assert not aside.exists()
        aside.mkdir()


def test_errors_of_the_system_name_what_was_asked_for(tmp_path):
    def fail():
        with written_aside(tmp_path / "ladder") as aside:
            write_atomically(aside / "none" / "file", b"x")

    with pytest.raises(FileNotFoundError) as caught:
        fail()
    assert caught.value.filename == str(tmp_path / "ladder")
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "none" / "file", b"x")
    assert caught.value.filename == str(tmp_path / "none" / "file")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        run_folder.append_log(Log(tmp_path / "full"), {"step": 1})
    assert caught.value.filename == str(tmp_path / "full")


class Log:
    """A folder whose log is on a full disk."""

    def __init__(self, path):
        self.path = path

    def __truediv__(self, name):
        return self.path


def test_folders_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "..", "/", "../here"):
        with pytest.raises(UserError, match="is the folder that you are in, or above it"), written_aside(name):
            pass
    for name in ("link", "dangling"):
        with pytest.raises(UserError, match="is a link; give the folder"), written_aside(tmp_path / name):
            pass
    with written_aside("new") as aside:
        (aside / "x").write_text("x")
    assert (tmp_path / "here/new/x").is_file()
