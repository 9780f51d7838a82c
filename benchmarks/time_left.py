"""Is the time left that `train` and `frontier` say the time that was left?

    python -m benchmarks.time_left [--data DIR] [--model NAME] [--epochs 4]

Trains on the embedded sample, or on your folder, and measures the frontier; prints what was said over what was true
after each tenth of the work, and the share of what was said from 20 % on that is within a factor of two (or within
1.5 seconds: the last ones are not counted). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cnmm
from cnmm import _progress
from cnmm._machine import machine

ROUNDING_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Said:
    """One report, and the truth."""

    at: float
    """Part of the time that had passed."""
    said_s: float
    true_s: float

    def within(self, factor: float) -> bool:
        """Seconds are not counted."""
        off = abs(self.said_s - self.true_s)
        return self.true_s / factor < self.said_s < factor * self.true_s or off < ROUNDING_S


def listen(work: Callable[[Callable[[Any], None]], Any]) -> tuple[Any, list[Said]]:
    """Does the work, and hears what it says of its time left."""
    heard: list[tuple[float, float | None]] = []
    now = _progress.time.monotonic
    start = now()
    result = work(lambda progress: heard.append((now() - start, progress.left_s)))
    whole = now() - start
    return result, [Said(at=t / whole, said_s=left, true_s=whole - t) for t, left in heard if left is not None]


def share_right(said: list[Said], factor: float = 2.0, start: float = 0.2) -> float:
    """The share of the reports after `start` that are right."""
    right = [each.within(factor) for each in said if each.at > start]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        chosen = {"model": options.model} if options.model else {}
        run, training = listen(
            lambda say: cnmm.train(options.data, out, epochs=options.epochs, on_step=say, on_wait=say, **chosen)
        )
        _, measuring = listen(lambda say: run.measure(test=True, on_progress=say))
    for name, said in (("train", training), ("frontier", measuring)):
        tenths = {n: next(each for each in said if each.at >= n / 10) for n in range(1, 10) if said[-1].at >= n / 10}
        ratios = {f"{n * 10} %": round(each.said_s / each.true_s, 2) for n, each in tenths.items()}
        found[name] = {"reports": len(said), "within two": round(share_right(said), 3), "said / true": ratios}
        print(f"{name}: {len(said)} reports, {share_right(said):.1%} of those after 20 % within a factor of two")
        print("  said / true after " + ", ".join(f"{at}: {ratio}" for at, ratio in ratios.items()))
    print(json.dumps({"data": options.data, "epochs": options.epochs, **found, "machine": machine()}))


if __name__ == "__main__":
    main()
