"""The verbs that need torch: `train` and `evaluate`. Torch itself is imported when they run."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

import cnmm
from cnmm._errors import UserError
from cnmm._files import write_atomically
from cnmm.cli.terminal import NO_HINT, Bar, Common, print_table, say
from cnmm.config import Device, Gates
from cnmm.run_folder import is_run, load, start_run
from cnmm.training.config import ExitWeights, Precision, TrainConfig
from cnmm.training.recipes import recipe
from cnmm.zoo import require_torch

if TYPE_CHECKING:
    from cnmm.data import DataSet
    from cnmm.mixture import Mixture
    from cnmm.training.loop import EpochResult, Progress

_RECIPE = arg(help_behavior_hint="(default: the recipe's)")
_AUTO = arg(help_behavior_hint="(default: auto)")
_WORKERS = arg(metavar="N", help_behavior_hint="(default: cores - 1 if the images do not fit into memory)")
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
        import torch

        from cnmm import distributed
        from cnmm.training.loop import Stopped, keep_freed_memory, train, use_bfloat16

        keep_freed_memory()
        config = recipe(self.recipe, **self.fields.given())
        distributed.start(config.device)
        narrow = use_bfloat16(config.precision, distributed.pick_device(config.device))
        config = dataclasses.replace(config, precision="bfloat16" if narrow else "float32")  # a run is one or the other
        resume = self.resume or distributed.restarted()
        first = distributed.rank() == 0

        data = open_data(self.data, self.skip_bad)
        torch.manual_seed(config.seed)
        model = new_model(self.model, data, self.init)
        if config.val and "val" not in self.fields.given():  # a small set keeps most of its images
            config = dataclasses.replace(config, val=min(config.val, len(data.train) // 10))
        about = {"data": describe(data), **({"init": str(self.init)} if self.init else {})}
        if first:
            going_on = self.resume or (resume and is_run(self.out))
            start_run(self.out, model, resume=going_on, train=config.to_dict(), **about)
        distributed.wait()
        with TrainingBar(config, shown=first) as bar, stopping() as asked:
            try:
                trained = train(
                    model,
                    data,
                    config,
                    self.out,
                    resume=resume,
                    on_step=bar.step,
                    on_epoch=bar.epoch,
                    should_stop=lambda: bool(asked),
                )
            except Stopped as stop:
                say(f"{stop}; go on with the same command and --resume")
                raise KeyboardInterrupt from None
        split = "test" if data.test is not None else "validation"
        distributed.end()
        if not first:
            return {}
        answer = evaluation(trained, data, config, split)
        write_card(self.out, trained, data, config, answer)
        return {"run": str(self.out), **answer}

    def show(self, answer: dict[str, Any]) -> None:
        if answer:  # process 0 speaks for all
            show_exits(answer)
            say(f"trained: {answer['run']}")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure the accuracy of a trained run, per exit."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """A run folder."""
    data: Annotated[str | None, arg(metavar="KIND:DIR", help_behavior_hint="(default: the run's own)")] = None
    """Where the images are."""
    split: Annotated[str, NO_HINT] = "test"
    """test, or validation: the images that training held out."""
    point: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: nothing cut)")] = None
    """An operating point such as e4c12."""
    budget: Annotated[str | None, arg(metavar="BUDGET", help_behavior_hint="")] = None
    """60M, 40%, 25ms or acc:0.92, instead of a point: the best measured one within it (see `cnmm frontier`)."""
    raw: Annotated[bool, NO_HINT] = False
    """Keep the full mixture's statistics at a cut point, instead of re-estimating them on training images."""
    monte_carlo: Annotated[int, arg(metavar="N", help_behavior_hint="(default: the expectation)")] = 0
    """Average the probabilities of N samples of the gates."""
    device: Annotated[Device, _AUTO] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    workers: Annotated[int | None, _WORKERS] = None
    """Processes that decode images of a large folder ahead; 0: none. The result is the same."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        require_torch()
        from cnmm.distributed import pick_device
        from cnmm.run import Run

        run = Run(self.run, data=self.data)
        config = dataclasses.replace(run.config, device=self.device, workers=self.workers)
        chosen = run.find(budget=self.budget, point=self.point).name if self.budget or self.point else None
        model = run.model.to(pick_device(config.device))
        return evaluation(model, run.data, config, self.split, chosen, raw=self.raw, monte_carlo=self.monte_carlo)

    def show(self, answer: dict[str, Any]) -> None:
        show_exits(answer)


def open_data(spec: str, skip_bad: bool, size: tuple[int, int] | None = None) -> DataSet:
    from cnmm.data import open_data as opened

    data = opened(spec, skip_bad=skip_bad, size=size)
    for name in data.skipped:
        say(f"skipped {name}: cannot be read")
    return data


def new_model(name: str | None, data: DataSet, init: Path | None) -> Mixture:
    """The model for a data set: the one asked for, or that of the run it starts from, or the one that fits."""
    from cnmm.data import suggest_model

    if init is not None:
        trained = load(init)
        if name not in (None, trained.config.name):
            raise UserError(f"--model {name}: {init} holds a {trained.config.name}; leave --model out")
        config = dataclasses.replace(trained.config, num_classes=len(data.classes), input_size=data.size)
        if config.in_chans != data.in_chans:
            raise UserError(f"--init {init}: it takes {config.in_chans} channels, the images have {data.in_chans}")
        model: Mixture = require_torch().Mixture(config)
        copy_weights(trained, model)
        return model
    if name is None:
        name, _, why = suggest_model(data)
        say(f"model {name}: {why}")
    if cnmm.model_plan(name).config.task != "classification":
        raise UserError(f"--model {name}: it labels pixels, {data.spec} labels images; `cnmm models` lists the others")
    return cnmm.create_model(name, num_classes=len(data.classes), in_chans=data.in_chans, input_size=data.size)


def copy_weights(trained: Mixture, model: Mixture) -> None:
    """All weights and statistics; classifiers of another number of classes start anew."""
    state = model.state_dict()
    found = {name: value for name, value in trained.state_dict().items() if value.shape == state[name].shape}
    model.load_state_dict({**state, **found})


def describe(data: DataSet) -> dict[str, Any]:
    """What config.json says of the data."""
    fields = ("name", "spec", "classes", "mean", "std", "size")
    return {field: getattr(data, field) for field in fields}


def evaluation(
    model: Mixture,
    data: DataSet,
    config: TrainConfig,
    split: str,
    point: str | None = None,
    *,
    raw: bool = False,
    monte_carlo: int = 0,
) -> dict[str, Any]:
    """The answer of `evaluate`."""
    import numpy as np

    from cnmm.data import hold_out
    from cnmm.evaluation.evaluate import evaluate_exits
    from cnmm.evaluation.statistics import reestimated
    from cnmm.training.loop import Images, seeded, start_workers

    chosen = cnmm.named_point(model, point) if point else None
    kept, held_out = hold_out(data.train.labels, config.val, config.seed)
    if split == "validation":
        part, indices = data.train, held_out
    elif split == "test" and data.test is not None:
        part, indices = data.test, np.arange(len(data.test))
    else:
        raise UserError(f"split {split!r}: allowed are test (if the data set has one) and validation")
    if len(indices) == 0:
        raise UserError(f"split {split!r}: no images were held out (val=0); use --split test")
    with start_workers(data, config) as workers:
        images = Images(data, config, device=model.stem.device, workers=workers)
        if chosen and not raw:
            model = reestimated(model, images.statistics_batches(data.train, kept), chosen)
        batches = images.batches(part, indices)
        generator = seeded(config.seed, "monte-carlo")
        qualities = evaluate_exits(model, batches, chosen, monte_carlo=monte_carlo, generator=generator)
    costs = cnmm.CostTable.of(model.config)
    last = max(qualities)
    name = chosen.name if chosen else f"e{last}c0"
    macs = costs.point(chosen).macs if chosen else costs.exit(last).macs
    exits = [
        {"exit": exit, "macs": macs if exit == last else costs.exit(exit).macs if not chosen else None}
        | dataclasses.asdict(quality)
        for exit, quality in qualities.items()
    ]
    statistics = "raw" if chosen and raw else "re-estimated"
    return {"point": name, "macs": macs, "split": split, "statistics": statistics} | {
        "accuracy": qualities[last].accuracy,
        "mean_class_accuracy": qualities[last].mean_class_accuracy,
        "n": qualities[last].n,
        "exits": exits,
    }


def show_exits(answer: dict[str, Any]) -> None:
    rows = []
    for row in answer["exits"]:
        interval = f"{100 * row['low']:.2f} - {100 * row['high']:.2f}"
        macs = "" if row["macs"] is None else f"{row['macs']:,}"
        rows.append(
            (row["exit"], macs, f"{100 * row['accuracy']:.2f}", interval, f"{100 * row['mean_class_accuracy']:.2f}")
        )
    print_table(("exit", "macs", "accuracy %", "95 % interval", "mean class accuracy %"), rows)
    say(f"{answer['point']}, {answer['n']:,} {answer['split']} images, {answer['statistics']} statistics")


def write_card(folder: Path, model: Mixture, data: DataSet, config: TrainConfig, answer: dict[str, Any]) -> None:
    from cnmm.training.loop import card

    accuracy = {row["exit"]: row["accuracy"] for row in answer["exits"]}
    text = card(model, data, config, {"accuracy": accuracy, "n": answer["n"], "split": answer["split"]})
    write_atomically(folder / "README.md", text.encode())


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

    def __init__(self, config: TrainConfig, *, shown: bool = True) -> None:
        super().__init__()
        self.config, self.shown = config, shown

    def step(self, progress: Progress) -> None:
        if self.shown:
            what = f"epoch {progress.epoch + 1}/{self.config.epochs}"
            more = f"loss {progress.loss:.3f}  {progress.images_per_s:.0f} images/s"
            self.show(what, progress.step / progress.steps, progress.left_s, more)

    def epoch(self, result: EpochResult) -> None:
        exits = " ".join(f"{100 * value:.1f}" for value in result.accuracy.values())
        words = f"loss {result.loss:.3f}  validation % by exit: {exits}  gate entropy {result.entropy:.2f} bits"
        self.say(f"epoch {result.epoch}/{self.config.epochs}  {words}")
