"""The command line `cnmm`: results on stdout, words on stderr, `--json` for exactly one JSON object.

A verb is one dataclass: its fields are the flags, `answer` computes what `--json` prints, `show` prints the same
for people. Nothing heavy (torch, numpy, matplotlib, rich) is imported before it is needed, so that help is instant.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tyro

import cnmm
from cnmm._errors import UserError
from cnmm._files import FORMAT_VERSION
from cnmm.cli.budgets import Choose, MeasureFrontier
from cnmm.cli.evaluating import Evaluate
from cnmm.cli.exporting import Export, Report, Slim
from cnmm.cli.load_testing import LoadTest
from cnmm.cli.models import Draw, Info, Models
from cnmm.cli.running import Bench, Predict
from cnmm.cli.serving import Serve, Simulate
from cnmm.cli.signals import INTERRUPTED, TERMINATED, Terminated, terminable
from cnmm.cli.terminal import Verb, one_line, say
from cnmm.cli.training import Train
from cnmm.cli.usage import check_ranges, check_verb, on_one_line

DESCRIPTION = """Convolutional Neural Mixture Models: train one network, then run it at any compute budget.

`cnmm VERB --help` explains a verb; `cnmm --version` prints the version. A MODEL is a name of the zoo (`cnmm models`), a
RUN is a run folder."""

OWN_ERRORS = (UserError, OSError)
"""What a user can do something about; anything else is a bug of ours and keeps its traceback."""

_TYRO = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes)


VERBS: dict[str, Callable[..., Verb]] = {
    "models": Models,
    "info": Info,
    "draw": Draw,
    "train": Train,
    "evaluate": Evaluate,
    "frontier": MeasureFrontier,
    "choose": Choose,
    "slim": Slim,
    "export": Export,
    "bench": Bench,
    "predict": Predict,
    "report": Report,
    "serve": Serve,
    "simulate": Simulate,
    "loadtest": LoadTest,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    speak_for_the_library()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot encode is escaped
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in args or os.environ.get("CNMM_DEBUG", "0") not in ("", "0")
    try:
        with terminable(), saying_warnings():
            status = run(args)
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (*OWN_ERRORS, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        if not isinstance(error, KeyboardInterrupt):
            say(one_line(error))
            return 2
        terminated = isinstance(error, Terminated)
        say("terminated" if terminated else "interrupted")
        return TERMINATED if terminated else INTERRUPTED


def speak_for_the_library() -> None:
    """What the library logs is said on stderr, one line each."""
    logger = logging.getLogger("cnmm")
    if not any(isinstance(handler, _Saying) for handler in logger.handlers):
        logger.addHandler(_Saying())
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextmanager
def saying_warnings() -> Iterator[None]:
    """What is warned of is said, one line each; images that are too large are refused with a line of their own."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
        warnings.showwarning = show
        yield


class _Saying(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def run(args: list[str]) -> int:
    if args[:1] == ["--version"]:
        print(f"cnmm {cnmm.__version__}")
        return 0
    check_verb(args, VERBS)
    verbs = dict(VERBS)
    if args[:1] == ["train"]:
        verbs["train"] = Train.for_args(args)

    def parse(words: Sequence[str]) -> Verb:
        found: Verb = tyro.extras.subcommand_cli_from_dict(
            verbs, prog="cnmm", description=DESCRIPTION, args=words, config=_TYRO
        )
        return found

    try:
        with on_one_line(args, parse):
            verb = parse(args)
    except SystemExit:  # a help page
        return 0
    check_ranges(verb)
    answer = verb.answer()
    if verb.common.json and answer:
        print(json.dumps({"format_version": FORMAT_VERSION, **answer}, allow_nan=False))
    else:
        verb.show(answer)
    return 0 if answer.get("valid", True) else 1  # a measurement that must not be trusted is no success
