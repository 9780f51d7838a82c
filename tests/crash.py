"""Commands that are killed: run in forks of one process that has torch loaded, killed, and run again.

A trial kills one command once or twice, at moments that a seed decides: after so much of its time, or just before one
of its file operations. Then the same command must end as if nothing had happened: with the same files, and no others.
Disks may be full as well: a tmpfs in a mount namespace of its own where the system allows one, otherwise because file
operations fail. `python -m tests.crash --kills 60 --terms 20 --full 20` runs many trials and prints what came out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cnmm._lock import LOCK_FILE

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("--model", "cnmm_tiny", "--channels", "8", "--blocks", "2", "--precision", "float32", "--epochs", "2")
TMPFS_BYTES = 2**26
TIMES = {"images_per_s", "median_ms", "p95_ms", "total_ms", "time"}
"""Fields that differ between two runs."""

SERVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import cnmm.cli.main, cnmm.run, cnmm.run_training, cnmm.runtime.bench, cnmm.evaluation.plot
from cnmm.evaluation import kept
from cnmm.training import loop
kept.SAVE_EVERY_S = loop.SAVE_EVERY_S = 0.0  # as if every batch and step took very long
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"}

def run(order):
    os.chdir(order["folder"])
    for number in (1, 2):
        os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    count = 0
    def watch(event, args):
        nonlocal count
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or (writes and args[0] != order["log"]):
            count += 1
            if count == order["die_at"]:
                os.kill(os.getpid(), order["signum"])
            if 0 < order["fail_at"] <= count and event in ("open", "os.mkdir"):
                raise OSError(28, "No space left on device", args[0])
    sys.addaudithook(watch)
    status = cnmm.cli.main.main(order["args"])
    with open(order["log"], "a") as file:
        file.write(f"events {count}\\n")
    return status

print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = run(order)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Server:
    """Runs commands in forks."""

    def __init__(self, folder):
        self.folder, self.place = folder, Path(tempfile.mkdtemp())
        self.log = self.place / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.place), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout.readline() == "ready\n"

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.place)

    def run(self, *args, die_at=0, fail_at=0, signal_after=None, signum=signal.SIGKILL):
        """Exit status, or minus the signal.

        It gets a signal at a file operation, or after so many seconds; or finds the disk full from an operation on.
        """
        self.log.unlink(missing_ok=True)
        order = {"args": list(map(str, args)), "folder": str(self.folder), "log": str(self.log)}
        order |= {"die_at": die_at, "signum": signum, "fail_at": fail_at}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if signal_after is not None:
            time.sleep(signal_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return int(self.process.stdout.readline())

    def words(self):
        return self.log.read_text("utf-8", "replace")

    def num_events(self):
        return int(self.words().rpartition("events ")[2])


@dataclass(frozen=True)
class Story:
    """A command, what must be there before it, and the folder that it writes."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    writes: str


STORIES = (
    Story("train", ("train", "--data", "fashion:images", *TRAIN, "--out", "run", "--resume"), (), "run"),
    Story("frontier", ("frontier", "run", "--points", "5"), ("run.trained",), "run"),
    Story("frontier again", ("frontier", "run", "--points", "4", "--images", "15"), ("run.measured",), "run"),
    Story("export", ("export", "run", "--ladder", "2", "-o", "ladder", "--overwrite"), ("run.measured",), "ladder"),
    Story("slim", ("slim", "run", "--budget", "60%", "-o", "small", "--overwrite"), ("run.measured",), "small"),
    Story("bench", ("bench", "ladder", "--seconds", "0", "--runtime", "onnx"), ("ladder.made",), "ladder"),
    Story("report", ("report", "run"), ("run.measured",), "run"),
)


def content(folder):
    """All files below a folder by name: their bytes, without what two runs cannot have in common."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        if path.suffix in (".svg", ".png", ".html"):
            found[name] = path.stat().st_size > 0
        elif path.suffix in (".json", ".jsonl"):
            found[name] = [_without_times(json.loads(line)) for line in _objects(path)]
        else:
            found[name] = path.read_bytes()
    return found


def _objects(path):
    text = path.read_text("utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _without_times(value):
    if isinstance(value, dict):
        return {key: _without_times(part) for key, part in value.items() if key not in TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


class Stage:
    """A folder with images, a trained run, a measured run and a ladder; and what every command makes of them."""

    def __init__(self, folder, images):
        self.folder, self.server = folder, Server(folder)
        (folder / "images").symlink_to(images)
        self.expected, self.seconds, self.events, self.bytes = {}, {}, {}, {}
        for story in STORIES:
            self.prepare(story)
            start = time.monotonic()
            status = self.server.run(*story.command)
            assert status == 0, self.server.words()
            self.seconds[story.name] = time.monotonic() - start
            self.events[story.name] = self.server.num_events()
            self.expected[story.name] = content(folder / story.writes)
            self.bytes[story.name] = sum(path.stat().st_size for path in (folder / story.writes).rglob("*"))
            for name, made in (("train", "run.trained"), ("frontier", "run.measured"), ("export", "ladder.made")):
                if story.name == name:
                    shutil.copytree(folder / story.writes, folder / made)

    def prepare(self, story):
        """As it is before a command."""
        for name in ("run", "ladder", "small"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for need in story.needs:
            shutil.copytree(self.folder / need, self.folder / need.split(".")[0])

    def trial(self, story, rng, signum=signal.SIGKILL, *, timed=True):
        """Kills a command once or twice, and runs it to its end; returns the statuses of what was killed.

        Moments are times, which no seed repeats exactly, or file operations; if not `timed`, operations only.
        """
        self.prepare(story)
        happened = []
        for _ in range(rng.choice((1, 1, 2))):
            if timed and rng.random() < 0.5:
                after = rng.uniform(0, self.seconds[story.name])
                status = self.server.run(*story.command, signal_after=after, signum=signum)
            else:
                at = rng.randint(1, self.events[story.name])
                status = self.server.run(*story.command, die_at=at, signum=signum)
            happened.append(status)
            allowed = (0, -9) if signum == signal.SIGKILL else (0, 143, -15)
            assert status in allowed, (story.name, status, self.server.words())
            assert "Traceback" not in self.server.words(), self.server.words()
            self.check_readable(story)
        status = self.server.run(*story.command)
        assert status == 0, (story.name, happened, self.server.words())
        self.check_same(story, happened)
        return happened

    def full_trial(self, story, rng):
        """The disk is full at some file operation: one line, status 2; with room again, the command ends as always."""
        self.prepare(story)
        disk = shutil.disk_usage(self.folder)
        if disk.total <= TMPFS_BYTES:  # a disk of our own
            ballast = self.folder / "ballast"
            ballast.write_bytes(bytes(max(0, disk.free - rng.randint(0, self.bytes[story.name]))))
            status = self.server.run(*story.command)
            ballast.unlink()
        else:
            status = self.server.run(*story.command, fail_at=rng.randint(1, self.events[story.name]))
        words = self.server.words()
        assert status in (0, 2), (story.name, status, words)
        assert "Traceback" not in words, words
        (last,) = [line for line in words.splitlines() if line.startswith("cnmm: ")][-1:] or [""]
        assert status == 0 or ("No space left on device" in last and ".aside" not in last), words
        self.check_readable(story)
        assert self.server.run(*story.command) == 0, (story.name, self.server.words())
        self.check_same(story, ["full", status])
        return [status]

    def check_readable(self, story):
        """Whatever was there before a command that was killed is whole."""
        if story.name == "frontier again":
            assert self.server.run("choose", "run", "--budget", "60%") == 0, self.server.words()
            assert self.server.run("slim", "run", "--budget", "60%", "-o", "small") == 0, self.server.words()
            shutil.rmtree(self.folder / "small")
        if story.name == "bench":
            assert self.server.run("choose", "ladder", "--budget", "60%") == 0, self.server.words()

    def check_same(self, story, happened):
        found, expected = content(self.folder / story.writes), self.expected[story.name]
        assert found.keys() == expected.keys(), (story.name, happened, found.keys() ^ expected.keys())
        for name, value in expected.items():
            assert found[name] == value, (story.name, happened, name)
        places = (*self.folder.rglob(".*"), *self.server.place.rglob(".*"))
        left = [path for path in places if path.suffix == ".aside" or path.name == LOCK_FILE]
        assert not left, (story.name, happened, left)


def trials(stage, rng, signum, num):
    """Trials of all commands in turn until so many processes were killed (or, with None, met a full disk)."""
    done, number = Counter(), 0
    while sum(count for (_, status), count in done.items() if status) < num:
        story = STORIES[number % len(STORIES)]
        happened = stage.full_trial(story, rng) if signum is None else stage.trial(story, rng, signum)
        done.update((story.name, status) for status in happened)
        number += 1
        print(number, story.name, "full disk" if signum is None else signum.name, happened, flush=True)
    return done


def on_small_disk(folder):
    """Mounts a tmpfs there, for this process and those that it starts only. Says whether that was possible."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", folder], capture_output=True)
    return done.returncode == 0


def main():
    """Many trials."""
    from tests.helpers import write_fashion

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--full", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if not options.inside and subprocess.run([*enter, "true"], capture_output=True).returncode == 0:
        sys.exit(subprocess.run([*enter, sys.executable, "-m", "tests.crash", *sys.argv[1:], "--inside"]).returncode)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as images:
        small = options.inside and on_small_disk(name)
        print("disk: a tmpfs of 64 MB" if small else "disk: file operations fail, for no tmpfs can be mounted here")
        stage = Stage(Path(name), write_fashion(Path(images) / "data", 100, 20))
        for story in stage.events:
            print(f"{story}: {stage.seconds[story]:.1f} s, {stage.events[story]} file operations")
        kinds = ((signal.SIGKILL, options.kills), (signal.SIGTERM, options.terms), (None, options.full))
        counts = {signum: trials(stage, rng, signum, num) for signum, num in kinds}
        stage.server.close()
        if small:
            subprocess.run(["umount", name], check=True)
    for signum, done in counts.items():
        for (story, status), count in sorted(done.items()):
            print(f"{'full disk' if signum is None else signum.name:9}  {story:15} status {status:4}: {count}")
    print("all results equal the undisturbed ones")


if __name__ == "__main__":
    main()
