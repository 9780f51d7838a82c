"""Training step of ours against the literal transcription of the paper (tests/reference.py), same batch and threads.

    python benchmarks/train_throughput.py                  # cnmm_b6s3, batch 64, two threads
    python benchmarks/train_throughput.py --model cnmm_b4s3_c32 --batch 128

Run it on a quiet machine. A step is forward with relaxed gates, the losses of all exits, backward and SGD. The variants
take turns in one process; figures are medians, and ratios are what counts. Peak memory comes from one new process per
variant, less what the process had before its first step. The last line is JSON with the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

import cnmm
from cnmm.train import use_bfloat16
from tests.matching import reference_of

VARIANTS = ("ours float32", "ours bfloat16", "literal float32", "literal autocast")


def make_step(variant: str, name: str, batch: int) -> Callable[[], None]:
    """One training step of a variant, ready to be called."""
    torch.manual_seed(0)
    model = cnmm.create_model(name)
    size = model.config.input_size
    x = torch.randn(batch, model.config.in_chans, *size).to(memory_format=torch.channels_last)
    labels = torch.randint(model.config.num_classes, (batch,))
    chain = cnmm.Chain(model.lattice, torch.zeros(len(model.lattice.edges)))
    ours = variant.startswith("ours")
    network = model if ours else reference_of(model).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, fused=True)
    images = x.bfloat16() if variant == "ours bfloat16" else x

    def logits() -> dict[int, torch.Tensor]:
        if ours:
            return model.forward_exits(images, gates="relaxed")
        gates = dict(zip(model.lattice.edges, chain.rsample().unbind(-1), strict=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "literal autocast"):
            return network(x, gates)

    def step() -> None:
        optimizer.zero_grad()
        sum(F.cross_entropy(score.float(), labels) for score in logits().values()).backward()
        optimizer.step()

    return step


def peak_memory_mb(variant: str, arguments: argparse.Namespace) -> float:
    """Peak memory of three steps above what was there before them, in a new process."""
    options = ["--model", arguments.model, "--batch", str(arguments.batch), "--threads", str(arguments.threads)]
    command = [sys.executable, __file__, *options, "--memory-of", variant]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_memory(variant: str, name: str, batch: int) -> None:
    step = make_step(variant, name, batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def gemm_peak(dtype: torch.dtype) -> float:
    """Multiply-adds per second of a large product."""
    a, b = torch.randn(4096, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 4096 * 1024 * 1024 / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnmm_b6s3", choices=cnmm.list_models())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print_memory(arguments.memory_of, arguments.model, arguments.batch)
        return

    memory = {variant: peak_memory_mb(variant, arguments) for variant in VARIANTS}
    steps = {variant: make_step(variant, arguments.model, arguments.batch) for variant in VARIANTS}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for round in range(arguments.rounds + 1):
        for variant, step in steps.items():
            start = time.perf_counter()
            step()
            if round:  # the first is for warming up
                times[variant].append(time.perf_counter() - start)
        print(f"round {round} of {arguments.rounds}", file=sys.stderr)
    median = {variant: statistics.median(values) for variant, values in times.items()}
    macs = 3 * cnmm.CostTable.of(cnmm.model_plan(arguments.model).config).exit().macs * arguments.batch
    peak = {"float32": gemm_peak(torch.float32), "bfloat16": gemm_peak(torch.bfloat16)}

    has_bfloat16 = "with" if use_bfloat16("auto") else "without"
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.threads} threads, torch {torch.__version__}")
    print(
        f"{platform.machine()}, {has_bfloat16} bfloat16 instructions, medians of {arguments.rounds} alternating steps"
    )
    print(f"{'':18}{'step s':>8}{'images/s':>10}{'of GEMM peak':>14}{'memory MB':>11}")
    for variant in VARIANTS:
        precision = "float32" if "float32" in variant else "bfloat16"
        fraction = macs / median[variant] / peak[precision]
        speed = arguments.batch / median[variant]
        print(f"{variant:18}{median[variant]:8.3f}{speed:10.0f}{fraction:14.2f}{memory[variant]:11.0f}")
    best = min(("ours float32", "ours bfloat16"), key=lambda variant: median[variant])
    print(
        json.dumps(
            {
                "model": arguments.model,
                "bfloat16_vs_literal_float32": median["literal float32"] / median["ours bfloat16"],
                "bfloat16_vs_literal_autocast": median["literal autocast"] / median["ours bfloat16"],
                "float32_vs_literal_float32": median["literal float32"] / median["ours float32"],
                "memory_vs_literal": memory["ours float32"] / memory["literal float32"],
                "peak_fraction": macs / median[best] / peak[best.split()[1]],
                "bfloat16_instructions": use_bfloat16("auto"),
                "gemm_float32_gmacs": peak["float32"] / 1e9,
                "gemm_bfloat16_gmacs": peak["bfloat16"] / 1e9,
            }
        )
    )


if __name__ == "__main__":
    main()
