"""What verbs that need torch begin with: one line if it is missing, then the run folder."""

from __future__ import annotations

from pathlib import Path

from cnmm._machine import keep_freed_memory
from cnmm._progress import OnWait, no_wait
from cnmm.draw import check_suffix, require_matplotlib
from cnmm.run import Run


def open_run(folder: Path, data: str | None, *, picture: Path | None = None, on_wait: OnWait = no_wait) -> Run:
    """A run folder; `picture`: a file that will be drawn, which is checked before anything is computed."""
    require_matplotlib()
    if picture is not None:
        check_suffix(picture)
    keep_freed_memory()
    return Run(folder, data=data, on_wait=on_wait)
