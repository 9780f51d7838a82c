"""Trains and measures what is missing for the paper's claims, and renders docs/claims.md.

    python -m benchmarks.claims --scale cpu --data-dir DIR        # what `make paper SCALE=cpu DATA=DIR` does
    python -m benchmarks.claims --scale cpu --list                # trainings, with estimated minutes, and what is there
    python -m benchmarks.claims --scale cpu --only cifar10_quick --data-dir DIR
    python -m benchmarks.claims --scale cpu --render              # the page alone, from the results that are there

DIR holds cifar-10-batches-py, cifar-100-python, camvid (at the scale full: cityscapes), or is one of them. What was
stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.claims.page import write_page
from benchmarks.claims.runner import Runner, measuring_minutes, needed_kinds, training_fingerprint
from benchmarks.claims.store import Store
from benchmarks.claims.trainings import SCALES, Scale
from cnmm._errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=list(SCALES), default="cpu")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="trainings, by name or role")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "claims", metavar="DIR", help="of run folders")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--data-dir", type=Path, nargs="+", default=[ROOT / "data"], metavar="DIR")
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="default: docs/claims.md; smoke: beside its results"
    )
    parser.add_argument("--render", action="store_true", help="only render the page")
    parser.add_argument("--list", action="store_true", help="only list the trainings")
    given = parser.parse_args(arguments)
    scale, store = SCALES[given.scale], Store(given.results / given.scale)
    try:
        if given.list:
            print("\n".join(listing(scale, store)))
            return 0
        page = given.page or default_page(scale, store)
        if not given.render:
            runs = given.runs / scale.name
            after = partial(write_page, scale, store, page) if scale.name != "smoke" else _nothing
            Runner(scale, runs, store, given.data_dir, say=_say, only=given.only, after=after).run()
        write_page(scale, store, page)
        _say(f"written: {page}")
    except UserError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def default_page(scale: Scale, store: Store) -> Path:
    """The page of the scale cpu is the repository's."""
    if scale.name == "smoke":
        return store.folder / "claims.md"
    return ROOT / "docs" / ("claims.md" if scale.name == "cpu" else f"claims-{scale.name}.md")


def listing(scale: Scale, store: Store) -> list[str]:
    """Every training in the order in which they run, what is measured of it, and what is there."""
    kinds, lines = needed_kinds(scale), []
    for training in scale.ordered():
        try:
            there = store.read(store.training(training.name), training_fingerprint(training)) is not None
        except UserError:
            there = False
        measuring = measuring_minutes(training, scale)
        words = f"{training.minutes:7.1f} + {measuring:5.1f} min  {'done' if there else '    '}  {training.name:26}"
        lines.append(f"{words} {training.network:20} {', '.join(kinds[training.name])}")
    measuring = sum(measuring_minutes(each, scale) for each in scale.trainings)
    total = f"{scale.minutes:.0f} minutes of two cores for training and {measuring:.0f} for measuring"
    hours = f"{(scale.minutes + measuring) / 60:.1f} hours in all"
    return [*lines, f"scale {scale.name}: {len(scale.trainings)} runs, {total}: {hours}"]


def _nothing() -> None:
    """A run of seconds renders its page once."""


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
