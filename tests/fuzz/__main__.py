"""Thousands of damaged files, budgets, flags, images and networks in one process: `python -m tests.fuzz FOLDER [SEED]`.

Every case ends with one printable line (a UserError or an OSError, which is what the command line prints, status 2), or
with an answer that an oracle finds right. A traceback, a hang, an escape sequence, and a file outside of the folder
that is opened or changed are failures. Prints one JSON object: how many cases of each kind, and what went wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cnmm._errors import UserError
from cnmm.cli.terminal import one_line, say
from cnmm.runtime import latency
from tests.fuzz import right
from tests.fuzz.damage import EXTERNAL
from tests.fuzz.kinds import ALL
from tests.runtime.ladders import make_ladder

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 10
"""Of a case, on a busy machine."""
MOST_MEMORY = 3 * 2**30
"""Of the process, beyond what it has when it begins."""
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "subprocess.Popen", "socket.connect")


class Hang(BaseException):
    """A case that takes too long."""


class Watch:
    """Runs cases, counts them, and keeps what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.cases: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self.opened: list[str] = []
        self.watching = False
        self.ours = tuple(
            map(str, (folder, ROOT, sys.prefix, sys.base_prefix, "/proc/", "/sys/fs/cgroup", "/dev/null"))
        )

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: what is opened, changed or started while a case runs."""
        if self.watching and event in EVENTS and isinstance(args[0], str | bytes):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(self.ours):
                self.opened.append(f"{event} {path}")

    def run(self, kind: str, case: Callable[[], None]) -> None:
        self.cases[kind] += 1
        self.opened.clear()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            problem, status = self._call(case)
        problem = problem or _spoken(status, out.getvalue(), err.getvalue())
        problem = problem or next((f"outside of the folder: {event}" for event in self.opened), "")
        self.answered[kind] += status == 0
        if problem:
            self.failures.append(f"{kind} {self.cases[kind]}: {problem}")

    def _call(self, case: Callable[[], None]) -> tuple[str, int]:
        """What is wrong, if anything, and the status."""
        try:
            self._watched(case)
        except (UserError, OSError) as error:
            say(one_line(error))
            return "", 2
        except Hang:
            return "hangs", 1
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return f"{type(error).__name__} at {place}: {str(error)[:200]}", 1
        return "", 0

    def _watched(self, case: Callable[[], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        self.watching = True
        try:
            case()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.watching = False


def _spoken(status: int, out: str, err: str) -> str:
    """What is wrong with the words of a case."""
    odd = [char for char in out + err if char != "\n" and not char.isprintable()]
    if odd:
        return f"writes {odd[0]!r}"
    if status == 2 and (out or err.count("\n") != 1 or not err.startswith("cnmm: ") or len(err) > 2200):
        return f"says {err[:300]!r} {out[:100]!r}"
    return ""


def _stop(*_: object) -> None:
    raise Hang


def _prepare(folder: Path) -> None:
    """What cases need, and beside the folder what they must not reach; loads what is loaded at first use."""
    folder.mkdir()
    os.environ |= {"TMPDIR": str(folder), "MPLCONFIGDIR": str(folder)}
    os.chdir(folder)
    make_ladder(folder / "asked")
    for source, secret in (("ladder.json", "secret.json"), ("e1c0.onnx", "secret.onnx")):
        shutil.copy(folder / "asked" / source, folder.parent / secret)
    for place in (folder, folder.parent):
        (place / EXTERNAL).write_bytes(bytes(10**5))
    logging.getLogger("cnmm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for runtime in latency.RUNTIMES:
        if latency.runtime_version(runtime):
            right.session(folder / "asked", runtime)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, hard))
    signal.signal(signal.SIGALRM, _stop)


def main(folder: Path, seed: int = 0) -> dict[str, Any]:
    """All cases, in one process."""
    folder = folder.resolve() / "inside"
    _prepare(folder)
    before = _outside(folder)
    watch = Watch(folder)
    sys.addaudithook(watch.hear)
    for make in ALL:
        for kind, case in make(random.Random(f"{seed} {make.__name__}"), folder):
            watch.run(kind, case)
    if _outside(folder) != before:
        watch.failures.append("files outside of the folder were changed")
    return {"cases": watch.cases, "answered": watch.answered, "failures": watch.failures}


def _outside(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.parent.iterdir() if path != folder)
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
