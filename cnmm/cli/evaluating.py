"""The verb `evaluate`. Torch is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from cnmm.cli.budgets import MetricName
from cnmm.cli.terminal import NO_HINT, Bar, Common, percent, print_table, say
from cnmm.config import Device
from cnmm.frontier import metric_words
from cnmm.plan import require_torch

if TYPE_CHECKING:
    from cnmm.run import Evaluation

AUTO = arg(help_behavior_hint="(default: auto)")
WORKERS = arg(metavar="N", help_behavior_hint="(default: cores - 1 if the images do not fit into memory)")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure the quality of a trained run, per exit."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """A run folder."""
    data: Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")] = None
    """Where the images are."""
    split: Annotated[str, NO_HINT] = "test"
    """test, or validation: the images that training held out."""
    point: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: nothing cut)")] = None
    """An operating point such as e4c12."""
    budget: Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint="")] = None
    """Instead of a point: 60M, 40%, 25ms or acc:0.92 takes the best measured point within it (`cnmm frontier`)."""
    metric: Annotated[MetricName | None, arg(help_behavior_hint="(default: accuracy, or mIoU of pixels)")] = None
    """What the interval and `quality` refer to; all metrics are shown."""
    raw: Annotated[bool, NO_HINT] = False
    """Keep the full mixture's statistics at a cut point, instead of the point's own."""
    monte_carlo: Annotated[int, arg(metavar="N", help_behavior_hint="(default: the expectation)")] = 0
    """Average the probabilities of N samples of the gates, at N times the macs."""
    hard: Annotated[bool, NO_HINT] = False
    """Monte-Carlo samples are hard: each is one network of the mixture."""
    device: Annotated[Device, AUTO] = "auto"
    """Device; auto uses a GPU if there is one."""
    workers: Annotated[int | None, WORKERS] = None
    """Worker processes that decode images of a large folder; 0 for none. The result does not change."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.run import Run

        with Bar() as bar:
            evaluation = Run(self.run, data=self.data, on_wait=bar.wait).evaluate(
                split=self.split,
                budget=self.budget,
                point=self.point,
                metric=self.metric,
                raw=self.raw,
                monte_carlo=self.monte_carlo,
                hard=self.hard,
                device=self.device,
                workers=self.workers,
            )
        return evaluation_row(evaluation)

    def show(self, answer: dict[str, Any]) -> None:
        show_exits(answer)
        show_classes(answer)


def evaluation_row(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as `--json` prints it."""

    def row(exit: int) -> dict[str, Any]:
        quality = evaluation.exits[exit]
        about = {"metric": quality.metric, "quality": quality.value, **quality.all}
        interval: dict[str, Any] = {"low": quality.low, "high": quality.high, "n": quality.n}
        if quality.per_class:
            interval["per_class"] = quality.per_class
        return {"exit": exit, "macs": evaluation.exit_macs[exit], **about, **interval}

    exits = [row(exit) for exit in evaluation.exits]
    about = {"point": evaluation.point.name, "macs": evaluation.macs, "split": evaluation.split}
    last = {
        name: value for name, value in exits[-1].items() if name not in ("exit", "macs", "low", "high", "per_class")
    }
    row_of_all = {**about, "statistics": evaluation.statistics, **last, "exits": exits}
    confusion = evaluation.quality.confusion
    return {**row_of_all, "classes": evaluation.classes, **({"confusion": confusion} if confusion else {})}


def show_exits(answer: dict[str, Any]) -> None:
    """A table with a row for every exit."""
    names = (*get_args(MetricName), "top5_accuracy")
    other = [name for name in names if name in answer and name != answer["metric"]]
    rows = []
    for row in answer["exits"]:
        macs = "" if row["macs"] is None else f"{row['macs']:,}"
        interval = f"{percent(row['low'])} - {percent(row['high'])}"
        rows.append((row["exit"], macs, percent(row["quality"]), interval, *(percent(row[name]) for name in other)))
    columns = ("exit", "macs", f"{metric_words(answer['metric'])} %", "95 % interval")
    print_table((*columns, *(f"{metric_words(name)} %" for name in other)), rows)
    say(f"{answer['point']}, {answer['n']:,} {answer['split']} images, {answer['statistics']} statistics")


MOST_COLUMNS = 12
"""Classes of a confusion matrix that is shown whole."""


def show_classes(answer: dict[str, Any]) -> None:
    """A row for every class: how good the last exit is, and what it takes images of the class for."""
    classes, per_class = answer["classes"], answer["exits"][-1].get("per_class")
    confusion = answer.get("confusion")
    if not per_class:
        return
    if not confusion:
        rows = [(name, percent(value)) for name, value in zip(classes, per_class, strict=True)]
        print_table(("class", "IoU %"), rows, left=("class",))
        return
    whole = len(classes) <= MOST_COLUMNS
    rows = []
    for name, value, counts in zip(classes, per_class, confusion, strict=True):
        more = [f"{count:,}" if count else "" for count in counts] if whole else [_taken_for(name, counts, classes)]
        rows.append((name, f"{sum(counts):,}", percent(value), *more))
    columns = [f"as {name}" for name in classes] if whole else ["most often taken for"]
    print_table(("class", "images", "accuracy %", *columns), rows, left=("class", "most often taken for"))


def _taken_for(own: str, counts: Sequence[int], classes: Sequence[str]) -> str:
    wrong = sorted(((-count, name) for count, name in zip(counts, classes, strict=True) if count and name != own))
    return ", ".join(f"{name} {-count:,}" for count, name in wrong[:3])
