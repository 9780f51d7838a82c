"""The verbs that need torch: `train` and `evaluate`. Torch itself is imported when they run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from cnmm.cli.evaluating import AUTO as _AUTO
from cnmm.cli.evaluating import WORKERS as _WORKERS
from cnmm.cli.evaluating import evaluation_row, show_exits
from cnmm.cli.terminal import NO_HINT, Bar, Common, say
from cnmm.config import Device, Gates
from cnmm.training.config import ExitWeights, Precision
from cnmm.zoo import require_torch

if TYPE_CHECKING:
    from cnmm.training.progress import EpochResult, Progress

_RECIPE = arg(help_behavior_hint="(default: the recipe's)")
DataName = Annotated[str, arg(metavar="KIND:DIR", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What differs from the recipe."""

    epochs: Annotated[int | None, _RECIPE] = None
    """Passes over the training images."""
    batch_size: Annotated[int | None, _RECIPE] = None
    """Images of a step."""
    lr: Annotated[float | None, _RECIPE] = None
    """Learning rate at its highest."""
    warmup: Annotated[float | None, _RECIPE] = None
    """Part of the training over which the rate rises."""
    momentum: Annotated[float | None, _RECIPE] = None
    """Momentum of SGD."""
    nesterov: Annotated[bool | None, _RECIPE, tyro.conf.FlagConversionOff] = None
    """Nesterov's momentum."""
    weight_decay: Annotated[float | None, _RECIPE] = None
    """Weight decay."""
    decay_all: Annotated[bool | None, _RECIPE, tyro.conf.FlagConversionOff] = None
    """Decay gates, normalisation and biases too."""
    gates: Annotated[Gates | None, _RECIPE] = None
    """Gates in training."""
    group: Annotated[int | None, _RECIPE] = None
    """Images that share a sample of the gates."""
    temperature: Annotated[float | None, _RECIPE] = None
    """Temperature of relaxed samples."""
    exit_weights: Annotated[ExitWeights | None, _RECIPE] = None
    """Weights of the exits' losses."""
    label_smoothing: Annotated[float | None, _RECIPE] = None
    """Label smoothing."""
    ladder_start: Annotated[float | None, _RECIPE] = None
    """Part of the training after which ladder tuning begins; 1: never."""
    ladder_weight: Annotated[float | None, _RECIPE] = None
    """Weight of the ladder's loss."""
    clip: Annotated[float | None, _RECIPE] = None
    """Largest norm of a step's gradient; 0: no limit."""
    average: Annotated[float | None, _RECIPE] = None
    """Weight of the past in averaged parameters; 0: no averaging."""
    crop: Annotated[int | None, _RECIPE] = None
    """Pixels of padding before random crops."""
    flip: Annotated[bool | None, _RECIPE, tyro.conf.FlagConversionOff] = None
    """Mirror images at random."""
    val: Annotated[int | None, _RECIPE] = None
    """Training images held out for validation."""
    seed: Annotated[int | None, _RECIPE] = None
    """Seed of all randomness."""
    precision: Annotated[Precision | None, _RECIPE] = None
    """Type of activations; auto: bfloat16 where the device has the instructions."""
    device: Annotated[Device | None, _AUTO] = None
    """Where to compute; auto: on a GPU if there is one."""
    workers: Annotated[int | None, _WORKERS] = None
    """Processes that decode images of a large folder ahead; 0: none. The result is the same."""

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a mixture on your images; Ctrl-C saves, and --resume goes on to the same result."""

    data: DataName
    """cifar10:DIR, cifar100:DIR, folder:DIR, fashion:DIR, or fashion (the embedded sample)."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="RUN")]
    """The run folder to write."""
    model: Annotated[str | None, arg(help_behavior_hint="(default: fits the images)")] = None
    """A model of the zoo."""
    recipe: Annotated[str, NO_HINT] = "quick"
    """quick, cifar10 or cifar100 (the paper's)."""
    init: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="(default: from nothing)")] = None
    """Start from the weights of a trained run; the classes may be others."""
    resume: Annotated[bool, NO_HINT] = False
    """Go on with the run in --out from its last checkpoint."""
    skip_bad: Annotated[bool, NO_HINT] = False
    """Leave out images that cannot be read."""
    fields: Annotated[Fields, tyro.conf.arg(name="")] = Fields()
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.run_training import train
        from cnmm.training.loop import Stopped

        with TrainingBar() as bar, stopping() as asked:
            try:
                run = train(
                    self.data,
                    self.out,
                    model=self.model,
                    recipe=self.recipe,
                    init=self.init,
                    resume=self.resume,
                    skip_bad=self.skip_bad,
                    on_step=bar.step,
                    on_epoch=bar.epoch,
                    should_stop=lambda: bool(asked),
                    **self.fields.given(),
                )
            except Stopped as stop:
                say(f"{stop}; go on with the same command and --resume")
                raise KeyboardInterrupt from None
        return {"run": str(self.out), **evaluation_row(run.evaluation)} if run.evaluation else {}

    def show(self, answer: dict[str, Any]) -> None:
        if answer:  # process 0 speaks for all
            show_exits(answer)
            say(f"trained: {answer['run']}")


@contextmanager
def stopping() -> Iterator[list[bool]]:
    """While this runs, the first Ctrl-C only asks to stop after the step; a second one interrupts at once."""
    asked: list[bool] = []

    def ask(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        say("stopping after this step (again: at once)")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class TrainingBar(Bar):
    """Progress on stderr: a bar with images per second and time left, and one line per epoch."""

    epochs = 0

    def step(self, progress: Progress) -> None:
        self.epochs = progress.epochs
        what = f"epoch {progress.epoch + 1}/{progress.epochs}"
        more = f"loss {progress.loss:.3f}  {progress.images_per_s:.0f} images/s"
        self.show(what, progress.step / progress.steps, progress.left_s, more)

    def epoch(self, result: EpochResult) -> None:
        exits = " ".join(f"{100 * value:.1f}" for value in result.quality.values())
        words = f"loss {result.loss:.3f}  validation % by exit: {exits}  gate entropy {result.entropy:.2f} bits"
        self.say(f"epoch {result.epoch}/{self.epochs}  {words}")
