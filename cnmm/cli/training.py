"""The verb `train`. Torch is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from tyro.conf import arg

from cnmm._errors import UserError
from cnmm.cli.evaluating import evaluation_row, show_exits
from cnmm.cli.flags import DEFAULT_RECIPE, Flags, asked_recipe, training_flags, variant_flags, with_flags
from cnmm.cli.signals import stopping
from cnmm.cli.terminal import NO_HINT, Bar, Common, say
from cnmm.plan import require_torch

if TYPE_CHECKING:
    from cnmm.training.progress import EpochResult, Progress

DataName = Annotated[str, arg(metavar="KIND:DIR", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a mixture on your images; Ctrl-C saves, and --resume continues to the same result."""

    data: DataName
    """A folder of images; cifar10:DIR, cifar100:DIR, fashion:DIR or fashion (the embedded sample); pixels are labelled
    in camvid:DIR, cityscapes:DIR and masks:DIR."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="RUN")]
    """The run folder to write."""
    model: Annotated[str | None, arg(help_behavior_hint="(default: fits the images)")] = None
    """A model of the zoo."""
    recipe: str = DEFAULT_RECIPE
    """quick, long, cifar10 or cifar100 (the paper's); for pixels, street or cityscapes (the paper's): the defaults of
    the training options below."""
    init: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="(default: train from scratch)")] = None
    """Start from the weights of a trained run; its classes may differ."""
    resume: Annotated[bool, NO_HINT] = False
    """Continue the run in --out from its last checkpoint; with a larger --epochs, beyond its end."""
    overwrite: Annotated[bool, NO_HINT] = False
    """Replace the run in --out."""
    skip_bad: Annotated[bool, NO_HINT] = False
    """Leave out images that cannot be read."""
    size: Annotated[str | None, arg(metavar="N|HxW", help_behavior_hint="(default: suits the images)")] = None
    """Pixels along the sides of images, to which all are fitted: 96, or height and width, 96x128."""
    training: Annotated[Flags, arg(constructor_factory=training_flags)]
    variant: Annotated[Flags, arg(constructor_factory=variant_flags)]
    common: Common = Common()

    @classmethod
    def for_args(cls, args: Sequence[str]) -> type[Self]:
        """The verb where the defaults are those of the recipe that the arguments name."""
        return with_flags(cls, training=training_flags(asked_recipe(args), args))

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.run_training import train

        with TrainingBar() as bar, stopping("continue with the same command and --resume") as should_stop:
            run = train(
                self.data,
                self.out,
                model=self.model,
                recipe=self.recipe,
                init=self.init,
                resume=self.resume,
                overwrite=self.overwrite,
                skip_bad=self.skip_bad,
                size=parse_size(self.size),
                on_step=bar.step,
                on_epoch=bar.epoch,
                on_wait=bar.wait,
                should_stop=should_stop,
                **self.training.given(),
                **self.variant.given(),
            )
        return {"run": str(self.out), **evaluation_row(run.evaluation)} if run.evaluation else {}

    def show(self, answer: dict[str, Any]) -> None:
        if answer:  # process 0 speaks for all
            show_exits(answer)
            say(f"trained: {answer['run']}")


def parse_size(text: str | None) -> tuple[int, int] | None:
    """`96` or `96x128` as height and width."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and len(side) < 6 for side in sides):
        raise UserError(f"--size {text}: must be a number of pixels such as 96, or height and width such as 96x128")
    return int(sides[0]), int(sides[-1])


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
        measured = f"  validation % by exit: {exits}" if exits else ""
        words = f"loss {result.loss:.3f}{measured}  gate entropy {result.entropy:.2f} bits"
        self.say(f"epoch {result.epoch}/{self.epochs}  {words}")
