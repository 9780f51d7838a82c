"""The one error that is the user's to mend; everything else is a bug of ours and keeps its traceback."""

from __future__ import annotations

INSTALL_TRAIN = 'pip install "cnmm[train]"'


class UserError(ValueError):
    """Says the value, what it must be, and the fix. The command line prints it as one line, exit status 2."""
