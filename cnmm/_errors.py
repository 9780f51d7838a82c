"""The error that is the user's to mend, and the one that is nobody's; all others are bugs and keep their traceback."""

from __future__ import annotations

INSTALL_TRAIN = 'pip install "cnmm[train]"'


class Stopped(Exception):
    """Work was asked to stop; everything up to now is saved, and the same call goes on from there."""


class UserError(ValueError):
    """Says the value, what it must be, and the fix. The command line prints it as one line, exit status 2."""
