"""From images to a run folder: `cnmm.train`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from cnmm import _fields, distributed
from cnmm._errors import UserError
from cnmm._files import sweep, write_atomically
from cnmm._lock import locked
from cnmm._machine import keep_freed_memory, usable_memory
from cnmm._progress import OnWait, no_wait, reading
from cnmm.config import SIZE, VARIANT, MixtureConfig
from cnmm.cost import CostTable
from cnmm.data import DataSet, open_data, suggest_model
from cnmm.mixture import Mixture
from cnmm.run import Run
from cnmm.run_folder import has_steps, is_run, load, read_config, start_run
from cnmm.run_held_out import load_held_out, save_held_out
from cnmm.training import tensorboard
from cnmm.training.batches import FEWEST_STEPS, affordable_batch, fitting_batch, steps_per_epoch, use_bfloat16
from cnmm.training.config import TrainConfig
from cnmm.training.loop import train as run_loop
from cnmm.training.photos import PHOTO_AREA, PHOTO_COLOUR, PHOTO_SIDE
from cnmm.training.progress import EpochResult, Progress
from cnmm.training.recipes import recipe as find_recipe
from cnmm.training.recipes import recipe_variant
from cnmm.training.teacher import ANSWERS_FILE, open_teacher
from cnmm.zoo import create_model, model_plan

logger = logging.getLogger("cnmm")


def train(
    data: str,
    out: str | Path,
    *,
    model: str | None = None,
    recipe: str = "quick",
    init: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    skip_bad: bool = False,
    size: int | tuple[int, int] | None = None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    on_epoch: Callable[[EpochResult], None] = lambda result: None,
    on_wait: OnWait = no_wait,
    should_stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> Run:
    """Trains a mixture on images into the run folder `out`.

    `data` is `cifar10:DIR`, `folder:DIR`, ...; `model` a name of the zoo, one that fits the images unless told. `size`:
    height and width to which images are fitted, or one number for both; one that suits them unless told.
    `fields` override those of the recipe (`epochs=5, seed=1`, see `TrainConfig`) and of the model (`exits="last"` is
    CNMM-single, `mixing="sum"` the deterministic variant, `blocks=12`, see `MixtureConfig`). `init` starts from the
    weights of a trained run. `resume` goes on with the run in `out`, to the same weights bit by bit, or for more
    `epochs` than it was begun with; where there is nothing to go on from, it starts. `overwrite` replaces a run.
    `on_wait` is told what else takes a while: reading images, measuring, estimating statistics.
    """
    keep_freed_memory()
    out = Path(out)
    variant = {name: fields.pop(name) for name in VARIANT if name in fields}
    config = find_recipe(recipe, **fields)
    _check_one_of(resume, overwrite)
    distributed.start(config.device)
    first = distributed.rank() == 0  # it speaks and writes for all
    on_wait = on_wait if first else no_wait
    with reserved(out) if first else nullcontext():
        images = _open_images(data, out, size=size, skip_bad=skip_bad, resume=resume, on_wait=on_wait)
        config = _fitted(config, images, fields)
        torch.manual_seed(config.seed)
        mixture = _initial(init, model, images, variant) if init else _new_model(model, images, recipe, variant)
        if init:  # trained weights are not to be replaced
            config = dataclasses.replace(config, stem_init="random")
        config = _within_memory(config, mixture, fields, out if resume and is_run(out) else None)
        going_on = resume or distributed.restarted()
        _check_teacher(config, images, out, going_on=going_on)
        about = {"data": describe_data(images)} | ({"init": str(init)} if init else {})
        going_on = _start(out, mixture, images, config, about, resume=going_on, overwrite=overwrite)
        run_loop(
            mixture,
            images,
            config,
            out,
            resume=going_on,
            on_step=on_step if first else lambda progress: None,
            on_epoch=_with_curves(on_epoch, out),
            on_wait=on_wait,
            should_stop=should_stop,
        )
        distributed.end()
        return _finished(Run(out, data=data, on_wait=on_wait), images, first=first)


def _check_one_of(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise UserError("resume goes on with a run, overwrite starts it anew: give only one of them")


def _check_teacher(config: TrainConfig, images: DataSet, out: Path, *, going_on: bool) -> None:
    """Refuses one that does not fit, before anything is written; a run that goes on may have its answers."""
    if config.teacher and not (going_on and (out / ANSWERS_FILE).exists()):
        open_teacher(config.teacher, images)


def _with_curves(on_epoch: Callable[[EpochResult], None], out: Path) -> Callable[[EpochResult], None]:
    """Also writes TensorBoard's curves, where it is installed."""
    curves = tensorboard.Curves(out) if tensorboard.is_installed() else None

    def report(result: EpochResult) -> None:
        on_epoch(result)
        if curves:
            curves.add(result)

    return report


def _finished(run: Run, images: DataSet, *, first: bool) -> Run:
    """Process 0 measures the result and writes its card."""
    run.images.data = images  # they need not be read again
    if first:
        run.evaluation = run.evaluate(split="validation" if images.test is None else "test")
        write_atomically(run.folder / "README.md", run.card(run.evaluation).encode())
    return run


@contextmanager
def reserved(out: Path) -> Iterator[None]:
    """No other process trains into this folder meanwhile. A folder that is still empty in the end was never there."""
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    try:
        with locked(out, "cnmm train"):
            yield
    finally:
        if new and not any(out.iterdir()):
            out.rmdir()


def _open_images(
    data: str, out: Path, *, size: int | tuple[int, int] | None, skip_bad: bool, resume: bool, on_wait: OnWait
) -> DataSet:
    """The images of a new run; or of an old one, without those that it has skipped, and with its own test images."""
    remembered = load_held_out(out) if resume else None
    sides = (size, size) if isinstance(size, int) else size
    wanted: Sequence[int] | None = _fields.checked(sides, "size", _fields.or_null(SIZE))
    if resume and is_run(out):
        before = read_config(out).get("data", {})
        skip_bad = skip_bad or bool(before.get("skip_bad"))
        wanted = wanted or before.get("size")
    test = None if remembered is None else remembered.test_names
    fitted = None if wanted is None else (wanted[0], wanted[1])
    images = open_data(data, size=fitted, skip_bad=skip_bad, test=test, progress=reading(on_wait))
    for name in images.skipped:
        logger.warning("skipped %s: cannot be read", name)
    if remembered is not None and has_steps(out):
        remembered.check_same(images)
        before = read_config(out).get("data", {})  # they may have moved
        images = dataclasses.replace(images, **{name: before[name] for name in ("spec", "name") if name in before})
    return dataclasses.replace(images, skip_bad=skip_bad)


def _fitted(config: TrainConfig, images: DataSet, given: Mapping[str, Any]) -> TrainConfig:
    """The recipe for these images on this machine: nothing that was given is changed."""
    narrow = use_bfloat16(config.precision, distributed.pick_device(config.device))
    config = dataclasses.replace(config, precision="bfloat16" if narrow else "float32")  # a run is one or the other
    config = dataclasses.replace(config, val=_num_held_out(images, config, asked="val" in given))
    config = _with_views(config, images, given)
    num = len(images.train) - config.val
    if "batch_size" not in given and num < FEWEST_STEPS * config.batch_size:
        size = fitting_batch(num, config.batch_size)
        logger.info("batch size %d: there are only %s training images", size, f"{num:,}")
        config = dataclasses.replace(config, batch_size=size)
    steps_per_epoch(config, num)  # an error comes before anything is written
    return config


def _within_memory(config: TrainConfig, model: Mixture, given: Mapping[str, Any], resumed: Path | None) -> TrainConfig:
    """A batch that this machine has the memory for, unless one was given; a run that goes on keeps its own."""
    size = affordable_batch(CostTable.of(model.config).exit().macs, config.batch_size, usable_memory())
    if resumed is not None:
        size = read_config(resumed).get("train", {}).get("batch_size", size)
    if "batch_size" in given or model.config.task == "segmentation" or size == config.batch_size:
        return config
    if resumed is not None:
        return dataclasses.replace(config, batch_size=size)
    logger.info("batch size %d: more images would not fit into memory", size)
    return dataclasses.replace(config, batch_size=size)


def _with_views(config: TrainConfig, images: DataSet, given: Mapping[str, Any]) -> TrainConfig:
    """Photographs are shown in parts and recoloured, by our recipes; a teacher has seen them as they are."""
    if config.recipe not in ("quick", "long") or images.palette or config.teacher or min(images.size) < PHOTO_SIDE:
        return config
    usual: dict[str, Any] = {"area": PHOTO_AREA, "colour": PHOTO_COLOUR}
    return dataclasses.replace(config, **{name: value for name, value in usual.items() if name not in given})


def _num_held_out(data: DataSet, config: TrainConfig, *, asked: bool) -> int:
    """How many images are held out: the set's own, if it has such; a small set keeps most unless one asks for more."""
    if config.val and data.held_out:
        return len(data.held_out)
    return config.val if asked else min(config.val, len(data.train) // 10)


def _start(
    out: Path,
    model: Mixture,
    data: DataSet,
    config: TrainConfig,
    about: dict[str, Any],
    *,
    resume: bool,
    overwrite: bool,
) -> bool:
    """Process 0 makes the run folder, or checks it; the others wait for it. Is there something to go on from?"""
    if distributed.rank() == 0:
        defaults = {each.name: each.default for each in dataclasses.fields(TrainConfig)}
        start_run(out, model, resume=resume, overwrite=overwrite, defaults=defaults, train=config.to_dict(), **about)
        if not has_steps(out):
            save_held_out(out, data, config.val, config.seed)
            if resume:
                logger.info("%s holds nothing to resume: starting", out)
    distributed.wait()
    return has_steps(out)


def describe_data(data: DataSet) -> dict[str, Any]:
    """What config.json says of the data."""
    optional = [name for name in ("palette", "skip_bad") if getattr(data, name)]
    return {field: getattr(data, field) for field in ("name", "spec", "classes", "mean", "std", "size", *optional)}


def _new_model(name: str | None, data: DataSet, recipe: str, variant: dict[str, Any]) -> Mixture:
    """The model that was asked for, or the one that fits the images."""
    variant = recipe_variant(recipe) | variant
    if name is None:
        name, _, why = suggest_model(data)
        logger.info("model %s: %s", name, why)
    _check_task(name, data, model_plan(name).config)
    return create_model(name, num_classes=len(data.classes), in_chans=data.in_chans, input_size=data.size, **variant)


def _check_task(name: str, data: DataSet, config: MixtureConfig) -> None:
    """Pixels are labelled by one kind of model, images by another."""
    does, needs = ("pixels" if pixels else "images" for pixels in (config.task == "segmentation", bool(data.palette)))
    if does != needs:
        raise UserError(f"{name} labels {does}, {data.spec} labels {needs}; `cnmm models` lists the others")


def _initial(init: str | Path, name: str | None, data: DataSet, variant: dict[str, Any]) -> Mixture:
    """The model of a trained run with its weights; classifiers of another number of classes start anew."""
    trained = load(init)
    if name not in (None, trained.config.name):
        raise UserError(f"--model {name}: {init} holds a {trained.config.name}; remove --model")
    for field, value in variant.items():
        if value != getattr(trained.config, field):
            raise UserError(f"{field}={value!r}: {init} has {getattr(trained.config, field)!r}, which is fixed")
    _check_task(str(init), data, trained.config)
    config: MixtureConfig = dataclasses.replace(trained.config, num_classes=len(data.classes), input_size=data.size)
    if config.in_chans != data.in_chans:
        raise UserError(f"--init {init}: it takes {config.in_chans} channels, the images have {data.in_chans}")
    model = Mixture(config)
    state = model.state_dict()
    fitting = {key: value for key, value in trained.state_dict().items() if value.shape == state[key].shape}
    model.load_state_dict({**state, **fitting})
    return model
