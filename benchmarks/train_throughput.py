"""Training step of ours against the literal transcription of the paper (tests/reference.py), same batch and threads.

    python -m benchmarks.train_throughput                  # cnmm_b6s3, batch 64, two threads
    python -m benchmarks.train_throughput --model cnmm_b4s3_c32 --batch 128
    python -m benchmarks.train_throughput --model cnmm_seg_b5s5 --batch 6 --size 384 768 \
        --only "ours bfloat16" "literal float32"           # pixels, as in the paper; all variants take 40 GB
    python -m benchmarks.train_throughput --profile        # where the time of our bfloat16 step goes

Run it on a quiet machine. A step is forward with relaxed gates, the losses of all exits, backward and SGD. Every
variant has a process of its own, and they take turns; figures are medians, and ratios are what counts. Ours runs as
`cnmm train` does, which asks the C library to keep freed memory; "kept" literal variants do that too, the others are
plain torch. Peak memory is that of the process less what it had before its first step. The last line is JSON with the
ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import cnmm
from cnmm._machine import keep_freed_memory
from cnmm.evaluation.task import task_of
from cnmm.training.batches import use_bfloat16
from tests.matching import reference_of

VARIANTS = (
    "ours float32",
    "ours bfloat16",
    "literal float32",
    "literal autocast",
    "literal float32, kept",
    "literal autocast, kept",
)


def make_step(variant: str, name: str, batch: int, size: Sequence[int] | None) -> Callable[[], None]:
    """One training step of a variant, ready to be called."""
    torch.manual_seed(0)
    model = cnmm.create_model(name, **sized(size))
    size = model.config.input_size
    x = torch.randn(batch, model.config.in_chans, *size).to(memory_format=torch.channels_last)
    pixels = size if model.config.task == "segmentation" else ()
    labels = torch.randint(model.config.num_classes, (batch, *pixels))
    chain = cnmm.Chain(model.lattice, torch.zeros(len(model.lattice.edges)))
    ours = variant.startswith("ours")
    network = model if ours else reference_of(model).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, fused=True)
    images = x.bfloat16() if variant == "ours bfloat16" else x

    def logits() -> dict[int, torch.Tensor]:
        if ours:
            return model.forward_exits(images, gates="relaxed")
        gates = dict(zip(model.lattice.edges, chain.rsample().unbind(-1), strict=True))
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in variant):
            return network(x, gates)

    def literal_loss(score: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(score.float(), labels)

    loss = task_of(model.config).loss if ours else literal_loss

    def step() -> None:
        optimizer.zero_grad()
        sum(loss(score, labels) for score in logits().values()).backward()
        optimizer.step()

    return step


def sized(size: Sequence[int] | None) -> dict[str, tuple[int, ...]]:
    """Options of a model for images of a height and width."""
    return {} if size is None else {"input_size": tuple(size)}


class Turns:
    """A process that does a step of one variant whenever it is told to."""

    def __init__(self, variant: str, arguments: argparse.Namespace) -> None:
        options = ["--model", arguments.model, "--batch", str(arguments.batch), "--threads", str(arguments.threads)]
        if arguments.size:
            options += ["--size", *map(str, arguments.size)]
        command = [sys.executable, "-m", "benchmarks.train_throughput", *options, "--turns-of", variant]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []
        self.memory_mb = 0.0

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        seconds, self.memory_mb = map(float, self.process.stdout.readline().split())
        self.times.append(seconds)

    def end(self) -> None:
        self.process.communicate()


def take_turns(variant: str, name: str, batch: int, size: Sequence[int] | None) -> None:
    """The other side of `Turns`: one line in, one step, one line out with its time and the peak memory so far."""
    if "literal" not in variant or "kept" in variant:
        keep_freed_memory()
    step = make_step(variant, name, batch, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(seconds, (peak - before) / 1024, flush=True)


def gemm_peak(dtype: torch.dtype) -> float:
    """Multiply-adds per second of a large product."""
    a, b = torch.randn(4096, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 4096 * 1024 * 1024 / statistics.median(times)


def profile(arguments: argparse.Namespace) -> None:
    """Time of our bfloat16 step by operation, and what of it stays with two images."""
    keep_freed_memory()
    median = {}
    for batch in (2, arguments.batch):
        step, times = make_step("ours bfloat16", arguments.model, batch, arguments.size), []
        for _ in range(arguments.rounds + 2):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        median[batch] = statistics.median(times[2:])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    print(f"{arguments.model}, bfloat16, a step of {arguments.batch} images: {1000 * median[arguments.batch]:.0f} ms")
    print(f"with 2 images, where only what does not depend on them is left: {1000 * median[2]:.0f} ms\n")
    print(f"{'operation':44}{'ms':>8}{'calls':>8}")
    for event in events[:20]:
        print(f"{event.key[:42]:44}{event.self_cpu_time_total / 1000:8.1f}{event.count:8d}")
    rest = events[20:]
    spent = sum(event.self_cpu_time_total for event in rest) / 1000
    print(f"{'all others':44}{spent:8.1f}{sum(event.count for event in rest):8d}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnmm_b6s3", choices=cnmm.list_models())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="of the images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=VARIANTS, help="variants, which all stay in memory"
    )
    parser.add_argument("--profile", action="store_true", help="only our bfloat16 step, by operation")
    parser.add_argument("--turns-of", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.turns_of:
        take_turns(arguments.turns_of, arguments.model, arguments.batch, arguments.size)
        return
    if arguments.profile:
        profile(arguments)
        return

    turns = {variant: Turns(variant, arguments) for variant in arguments.only}
    for round in range(arguments.rounds + 2):
        for each in turns.values():
            each.step()
        print(f"round {round} of {arguments.rounds + 1}", file=sys.stderr)
    for each in turns.values():
        each.end()
    median = {variant: statistics.median(each.times[2:]) for variant, each in turns.items()}  # two for warming up
    memory = {variant: each.memory_mb for variant, each in turns.items()}
    config = cnmm.model_plan(arguments.model, **sized(arguments.size)).config
    macs = 3 * cnmm.CostTable.of(config).exit().macs * arguments.batch
    peak = {"float32": gemm_peak(torch.float32), "bfloat16": gemm_peak(torch.bfloat16)}

    has_bfloat16 = "with" if use_bfloat16("auto") else "without"
    images = f"batch {arguments.batch} of {config.input_size[0]}x{config.input_size[1]}"
    print(f"{arguments.model}, {images}, {arguments.threads} threads, torch {torch.__version__}")
    print(
        f"{platform.machine()}, {has_bfloat16} bfloat16 instructions, medians of {arguments.rounds} alternating steps"
    )
    print(f"{'':24}{'step s':>8}{'images/s':>10}{'of GEMM peak':>14}{'memory MB':>11}")
    for variant in turns:
        precision = "float32" if "float32" in variant else "bfloat16"
        fraction = macs / median[variant] / peak[precision]
        speed = arguments.batch / median[variant]
        print(f"{variant:24}{median[variant]:8.3f}{speed:10.0f}{fraction:14.2f}{memory[variant]:11.0f}")
    ours = [variant for variant in turns if variant.startswith("ours")]
    times = {f"{_short(own)}_vs_{_short(other)}": median[other] / median[own] for own, other in _pairs(list(turns))}
    needs = {
        f"{_short(own)}_memory_vs_{_short(other)}": memory[own] / memory[other] for own, other in _pairs(list(turns))
    }
    best = min(ours, key=lambda variant: median[variant], default="")
    print(
        json.dumps(
            {
                "model": arguments.model,
                "size": config.input_size,
                **times,
                **needs,
                "peak_fraction": macs / median[best] / peak[best.split()[1]] if best else None,
                "bfloat16_instructions": use_bfloat16("auto"),
                "gemm_float32_gmacs": peak["float32"] / 1e9,
                "gemm_bfloat16_gmacs": peak["bfloat16"] / 1e9,
            }
        )
    )


def _pairs(variants: Sequence[str]) -> list[tuple[str, str]]:
    """Ours and what it is compared with."""
    ours = [each for each in variants if each.startswith("ours")]
    others = [each for each in variants if not each.startswith("ours")]
    return list(itertools.product(ours, others))


def _short(variant: str) -> str:
    """As a word of a name."""
    return variant.removeprefix("ours ").replace(", ", "_").replace(" ", "_")


if __name__ == "__main__":
    main()
