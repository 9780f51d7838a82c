"""Training, readable from top to bottom: `train` is the loop, below it the parts that it calls.

All randomness is a function of (seed, what for, epoch, step): a run that was killed and goes on from its last
checkpoint ends with the same weights, bit by bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnmm import distributed, run_folder
from cnmm._errors import UserError
from cnmm.config import Gates
from cnmm.cost import CostTable
from cnmm.data import DataSet, Split, Workers, hold_out, num_workers
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.statistics import reestimated
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.prune import Rule, cutting_order
from cnmm.training import checkpoint
from cnmm.training.config import TrainConfig

STATISTICS_IMAGES = 4000
"""Training images on which the statistics for inference are estimated."""
EVALUATION_BATCH = 125
"""Images of a batch where nothing is learned, at most. More are slower per image: their maps leave the cache."""
LADDER_RULES: tuple[Rule, ...] = ("flow", "flow_per_mac")
"""Whose points ladder tuning draws: by flow alone, no point lies between those that lose a whole map in one cut."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the loop reports after a step."""

    epoch: int
    step: int
    """Steps done in this epoch."""
    steps: int
    """Steps of an epoch."""
    loss: float
    images_per_s: float
    left_s: float
    """Estimated time to the end of the training."""


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """One line of log.jsonl."""

    epoch: int
    loss: float
    lr: float
    images_per_s: float
    entropy: float
    """Mean entropy of the gates, in bits."""
    accuracy: dict[int, float]
    """Per exit, on the held-out images (on the training images of the last batches if none are held out)."""


class Stopped(Exception):
    """Training was asked to stop; everything up to the last step is saved."""


class NotFinite(UserError):
    """The loss is no number any more; the parameters are those before the step."""


def train(
    model: Mixture,
    data: DataSet,
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    save_every_s: float = 300.0,
    on_step: Callable[[Progress], None] = lambda progress: None,
    on_epoch: Callable[[EpochResult], None] = lambda result: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Mixture:
    """Trains a mixture into a run folder and returns it with the statistics of expectation mode, in eval mode."""
    kept, held_out = hold_out(data.train.labels, config.val, config.seed)
    steps = steps_per_epoch(config, len(kept))
    writes = distributed.rank() == 0
    device = distributed.pick_device(config.device)
    optimizer = make_optimizer(model.to(device), config)
    average = Average(model, config.average)
    done = checkpoint.restore(folder, model, optimizer, average.tensors) if resume else 0
    if writes:
        run_folder.cut_log(folder, done)
    distributed.wait()
    model.train()
    meter = Meter(total=config.epochs * steps, done=done)
    saved_at = time.monotonic()
    stop = False

    with start_workers(data, config) as workers:
        images = Images(data, config, device=device, workers=workers)
        for epoch in range(done // steps, config.epochs):
            losses: list[float] = []
            for step, x, labels in images.training_batches(data.train, kept, epoch, first=done - epoch * steps):
                loss = training_loss(model, x, labels, config, part=done / (config.epochs * steps), at=(epoch, step))
                value, stop = agree(loss, should_stop())
                if not math.isfinite(value):
                    raise NotFinite(
                        f"the loss is {value} at epoch {epoch + 1}, step {step + 1}; the step was not taken; "
                        f"try a lower rate: --lr {config.lr / 2:g}"
                    )
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                if tunes_ladder(model, config, done / (config.epochs * steps)):
                    model.gate_logits.grad = None  # the ladder stands still while it is tuned
                average_gradients(model)
                if config.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, done / (config.epochs * steps))
                optimizer.step()
                average.update(model)
                done += 1
                losses.append(value)
                on_step(meter.tick(epoch, step, steps, value, config.batch_size))
                if step + 1 < steps and (stop or time.monotonic() - saved_at > save_every_s):
                    if writes:
                        checkpoint.save_state(folder, model, optimizer, average.tensors, done)
                    saved_at = time.monotonic()
                    if stop:
                        raise Stopped(f"stopped after epoch {epoch + 1}, step {step + 1}")
            if writes:
                result = epoch_result(model, images, data, held_out, config, epoch, losses, meter)
                run_folder.append_log(folder, {"step": done, **asdict(result)})
                on_epoch(result)
                checkpoint.save_state(folder, model, optimizer, average.tensors, done)
            saved_at = time.monotonic()
            if stop and epoch + 1 < config.epochs:
                raise Stopped(f"stopped after epoch {epoch + 1}")

        average.copy_to(model)
        with distributed.paused():
            model = reestimated(model, images.statistics_batches(data.train, kept))
    if writes:
        run_folder.save_weights(model, folder)
    distributed.wait()
    return model


def steps_per_epoch(config: TrainConfig, num: int) -> int:
    """Whole batches in `num` images."""
    if config.batch_size % distributed.world_size():
        raise UserError(
            f"batch_size={config.batch_size}: it must be a multiple of {distributed.world_size()} processes"
        )
    if num < config.batch_size:
        raise UserError(f"batch_size={config.batch_size}: there are only {num} training images; use less")
    return num // config.batch_size


def start_workers(data: DataSet, config: TrainConfig) -> Workers:
    """The processes that decode image files for this one."""
    return Workers(num_workers(config.workers, data.train, distributed.local_size()))


def keep_freed_memory() -> None:
    """Asks glibc to keep large freed blocks: every step needs them again, and page faults cost 5 to 15 % of it."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):  # another C library
        pass


def agree(loss: Tensor, stop: bool) -> tuple[float, bool]:
    """The loss over all processes, and whether one of them was asked to stop."""
    sums = distributed.total([loss.detach().double().view(1), loss.new_tensor([stop], dtype=torch.float64)])
    return sums[0].item() / distributed.world_size(), sums[1].item() > 0


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Every process had its part of the batch: the gradient of the whole is the mean of the parts'."""
    if distributed.world_size() == 1:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    sums = distributed.total([parameter.grad for parameter in parameters if parameter.grad is not None])
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient / distributed.world_size()


def training_loss(
    model: Mixture, x: Tensor, labels: Tensor, config: TrainConfig, *, part: float, at: tuple[int, int]
) -> Tensor:
    """Eq. (9), the weighted losses of all exits from one sample of the gates; later in training with a ladder point."""
    gates, group = draw_gates(model, config, at, len(x))
    logits = model.forward_exits(x, gates=gates, group=group)
    weights = exit_weights(list(logits), config)
    total = torch.zeros((), device=x.device)
    for exit, score in logits.items():
        total = total + weights[exit] * F.cross_entropy(score.float(), labels, label_smoothing=config.label_smoothing)
    if tunes_ladder(model, config, part):
        teacher = logits[max(logits)].detach().float()
        total = total + config.ladder_weight * ladder_loss(model, x, labels, teacher, config, at)
    return total


def tunes_ladder(model: Mixture, config: TrainConfig, part: float) -> bool:
    """Is it time for ladder tuning?"""
    return part >= config.ladder_start and model.config.mixing == "gates"


def draw_gates(model: Mixture, config: TrainConfig, at: tuple[int, int], num: int) -> tuple[Gates | Tensor, int | None]:
    """The gates of a step: drawn for the whole batch, of which this process has `num` images."""
    if config.gates == "expectation" or model.config.mixing == "sum":
        return "expectation", None
    world, generator = distributed.world_size(), seeded(config.seed, "gates", *at)
    group = min(config.group or num * world, num * world)
    draws = -(-num * world // group)
    if config.gates == "relaxed":
        values = model.chain.rsample((draws,), temperature=config.temperature, generator=generator)
    else:
        values = model.chain.sample((draws,), generator=generator)
    if draws == 1:
        return values, None
    if world == 1:
        return values, group
    images = torch.arange(num, device=values.device) + num * distributed.rank()
    return values[images // group], 1


def exit_weights(exits: list[int], config: TrainConfig) -> dict[int, float]:
    """Loss weights of the exits, in proportion to their number (the paper) or equal; their sum is one."""
    raw = {exit: float(exit) if config.exit_weights == "linear" else 1.0 for exit in exits}
    return {exit: weight / sum(raw.values()) for exit, weight in raw.items()}


def ladder_loss(
    model: Mixture, x: Tensor, labels: Tensor, teacher: Tensor, config: TrainConfig, at: tuple[int, int]
) -> Tensor:
    """Ladder tuning: the loss of one random operating point, taught by the label and by the full mixture.

    The pass normalises by its own batch, as a point with re-estimated statistics does, and leaves the full mixture's
    running statistics alone.
    """
    point = ladder_point(model, config, at)
    score = model(x, point, update_statistics=False).float()
    hard = F.cross_entropy(score, labels, label_smoothing=config.label_smoothing)
    soft = F.kl_div(score.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return 0.5 * hard + 0.5 * soft


def ladder_point(model: Mixture, config: TrainConfig, at: tuple[int, int]) -> OperatingPoint:
    """The point of a random budget: the cheapest exit that can spend it all, cut to the budget by a random rule.

    Budgets lie between the first exit's macs and the full mixture's, evenly on a logarithmic scale. So hardly any point
    costs less than the exit before its own: an envelope has hardly any such points.
    """
    generator = seeded(config.seed, "ladder", *at)
    rule = LADDER_RULES[_draw(len(LADDER_RULES), generator)]
    costs, exits = CostTable.of(model.config), model.config.exit_numbers
    full = [costs.exit(exit).macs for exit in exits]
    least = full[0] if len(full) > 1 else costs.point(cutting_order(model, exits[0], rule=rule)[-1]).macs
    budget = least * (full[-1] / least) ** torch.rand((), generator=generator).item()
    exit = next(exit for exit, macs in zip(exits, full, strict=True) if macs >= budget or exit == exits[-1])
    order = cutting_order(model, exit, rule=rule)
    return next((point for point in order if costs.point(point).macs <= budget), order[-1])


def learning_rate(config: TrainConfig, part: float) -> float:
    """A linear rise over the warm-up, then half a cosine down to zero."""
    if part < config.warmup:
        return config.lr * part / config.warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (part - config.warmup) / (1 - config.warmup)))


def make_optimizer(model: Mixture, config: TrainConfig) -> torch.optim.SGD:
    """SGD with momentum; weight decay on everything, or on convolution and linear weights only."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        small = name.endswith(("bias", "slope", "gate_logits", "affine.weight", "first.weight", "second.weight"))
        (plain if small and not config.decay_all else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=True,
    )


def seeded(seed: int, *key: object) -> torch.Generator:
    """A generator for one purpose: a function of the seed and the key, on any machine."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


class Images:
    """Prepares uint8 images for the network: augmentation, normalisation, and its device.

    Steps of the training may be in bfloat16; statistics and figures never are, for what is exported is float32.
    """

    def __init__(
        self, data: DataSet, config: TrainConfig, *, device: torch.device | str = "cpu", workers: Workers | None = None
    ) -> None:
        self.config = config
        self.mean = torch.tensor(data.mean).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(data.std).view(1, -1, 1, 1) * 255
        self.device = torch.device(device)
        self.workers = workers or Workers()
        self.dtype = torch.bfloat16 if use_bfloat16(config.precision, self.device) else torch.float32

    def training_batches(
        self, split: Split, kept: np.ndarray, epoch: int, *, first: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Step, images and labels of an epoch from step `first` on: this process's part of every batch.

        What is drawn for an image depends on its place in the whole batch.
        """
        seed, size = self.config.seed, self.config.batch_size
        num = size // distributed.world_size()
        places = slice(num * distributed.rank(), num * (distributed.rank() + 1))
        order = torch.randperm(len(kept), generator=seeded(seed, "order", epoch)).numpy()
        steps = range(first, len(kept) // size)
        parts = [np.sort(kept[order[step * size : (step + 1) * size]])[places] for step in steps]
        for step, (chosen, pixels) in zip(steps, self._read(split, parts), strict=True):
            images = augment(pixels, self.config, seeded(seed, "augment", epoch, step), places)
            yield step, self.prepare(images.permute(0, 3, 1, 2)).to(self.dtype), self._labels(split, chosen)

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] to normalised floats on the device."""
        return ((images.float() - self.mean) / self.std).to(self.device)

    def batches(self, split: Split, indices: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Images as they are, for evaluation."""
        for chosen, images in self._read(split, chunks(indices)):
            yield self.prepare(images.permute(0, 3, 1, 2)), self._labels(split, chosen)

    def statistics_batches(self, split: Split, kept: np.ndarray) -> Iterator[Tensor]:
        """A few thousand training images, augmented as in training: black borders belong to what was learned."""
        seed = self.config.seed
        chosen = torch.randperm(len(kept), generator=seeded(seed, "statistics"))[:STATISTICS_IMAGES]
        for number, (_, images) in enumerate(self._read(split, chunks(np.sort(kept[chosen.numpy()])))):
            if len(images) > 1:
                images = augment(images, self.config, seeded(seed, "statistics", number * EVALUATION_BATCH))
                yield self.prepare(images.permute(0, 3, 1, 2))

    def _read(self, split: Split, parts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Each part with its images, uint8 [N, H, W, C]."""
        for chosen, pixels in zip(parts, self.workers.read(split, parts), strict=True):
            yield chosen, torch.from_numpy(pixels)

    def _labels(self, split: Split, chosen: np.ndarray) -> Tensor:
        return torch.from_numpy(split.labels[chosen]).to(self.device)


def chunks(indices: np.ndarray) -> list[np.ndarray]:
    """Indices in batches for evaluation, of equal size: each counts the same where statistics are averaged."""
    num = -(-len(indices) // EVALUATION_BATCH)
    return np.array_split(indices, num) if num else []


def augment(images: Tensor, config: TrainConfig, generator: torch.Generator, places: slice | None = None) -> Tensor:
    """Pad and crop, and flip, the whole batch in one gather: uint8 [N, H, W, C].

    `places`: which images of a larger batch these are (default: all of it).
    """
    num, height, width, _ = images.shape
    pad, whole = config.crop, num if places is None else config.batch_size
    draws = torch.randint(2 * pad + 1, (whole, 2), generator=generator)[places or slice(None)]
    down, right = draws[:, :1], draws[:, 1:]
    rows, columns = down + torch.arange(height), torch.arange(width).expand(num, -1)
    if config.flip:
        mirrored = (torch.rand(whole, 1, generator=generator) < 0.5)[places or slice(None)]
        columns = torch.where(mirrored, width - 1 - columns, columns)
    padded = F.pad(images, (0, 0, pad, pad, pad, pad))
    which = torch.arange(num)[:, None, None]
    return padded[which, rows[:, :, None], (right + columns)[:, None, :]]


def use_bfloat16(precision: str, device: torch.device | str = "cpu") -> bool:
    """ "auto" takes bfloat16 where the device has instructions for it."""
    if precision == "auto":
        if torch.device(device).type == "cuda":
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return precision == "bfloat16"


class Average:
    """A moving average of the parameters; empty when it is not wanted."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = (
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()} if decay else {}
        )

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        if self.tensors:
            torch._foreach_lerp_(list(self.tensors.values()), list(model.parameters()), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                parameter.copy_(self.tensors[name])


class Meter:
    """Images per second and time left, from a moving average of the time of a step."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.step_s: float | None = None
        self.images_per_s = 0.0
        self.last = time.monotonic()

    def tick(self, epoch: int, step: int, steps: int, loss: float, batch: int) -> Progress:
        now = time.monotonic()
        elapsed, self.last = now - self.last, now
        self.step_s = elapsed if self.step_s is None else 0.95 * self.step_s + 0.05 * elapsed
        self.done += 1
        self.images_per_s = batch / self.step_s
        return Progress(
            epoch=epoch,
            step=step + 1,
            steps=steps,
            loss=loss,
            images_per_s=self.images_per_s,
            left_s=(self.total - self.done) * self.step_s,
        )


def epoch_result(
    model: Mixture,
    images: Images,
    data: DataSet,
    held_out: np.ndarray,
    config: TrainConfig,
    epoch: int,
    losses: list[float],
    meter: Meter,
) -> EpochResult:
    """Per-exit accuracy on the held-out images with the running statistics, and the state of the gates."""
    accuracy: dict[int, float] = {}
    if len(held_out):
        qualities = evaluate_exits(model, images.batches(data.train, held_out))
        accuracy = {exit: quality.accuracy for exit, quality in qualities.items()}
        meter.last = time.monotonic()
    return EpochResult(
        epoch=epoch + 1,
        loss=sum(losses) / len(losses),
        lr=learning_rate(config, (epoch + 1) / config.epochs),
        images_per_s=meter.images_per_s,
        entropy=gate_entropy(model),
        accuracy=accuracy,
    )


def gate_entropy(model: Mixture) -> float:
    """Mean entropy of the gates that decide something, in bits: 1 at the start, 0 when all are open or closed."""
    if model.config.mixing == "sum":
        return 0.0
    base = {(sources[0], j) for j, sources in enumerate(model.lattice.inputs) if sources}
    bits = [_bits(p) for edge, p in model.chain.detach().gates().items() if edge not in base]
    return sum(bits) / len(bits) if bits else 0.0


def _bits(p: float) -> float:
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)


def card(model: Mixture, data: DataSet, config: TrainConfig, results: dict[str, Any]) -> str:
    """The model card, README.md of the run folder."""
    rows = "\n".join(f"| {exit} | {100 * value:.2f} |" for exit, value in results["accuracy"].items())
    return f"""# {model.config.name}, trained on {data.name}

A Convolutional Neural Mixture Model made by `cnmm train` (recipe `{config.recipe}`, {config.epochs} epochs, seed
{config.seed}). One set of weights holds every exit and every operating point: `cnmm info` shows them.

Accuracy (%) on {results["n"]} {results["split"]} images, expectation, nothing cut:

| exit | accuracy |
|---|---|
{rows}

Classes: {", ".join(data.classes)}. Images: {data.in_chans} x {data.size[0]} x {data.size[1]}, mean
{", ".join(f"{value:.4f}" for value in data.mean)}, deviation {", ".join(f"{value:.4f}" for value in data.std)}.
"""
