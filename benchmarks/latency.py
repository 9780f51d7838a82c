"""Wall clock of slim networks at batch 1, against macs, against the paper run literally, and against the hardware.

    python -m benchmarks.latency                     # cnmm_b6s3, one and two threads, both runtimes: about 4 minutes
    python -m benchmarks.latency --run runs/a        # a trained run's weights instead of random ones

Run it on a quiet machine. Contenders take turns in one process; times are medians over all rounds. The limit is the
time that the network's macs take at the measured rate of a large float32 matrix product with as many threads. The last
line is JSON with the ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cnmm
from cnmm._machine import machine
from cnmm.config import Preprocessing
from cnmm.export.network import onnx_bytes
from cnmm.export.slim import SlimNetwork, slim
from cnmm.ladder import NetworkFile, answer_of
from cnmm.runtime.engines import open_runtime
from cnmm.runtime.latency import runtime_version
from tests.matching import reference_of

RUNTIMES = ("onnx", "openvino")


def make_model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model = cnmm.load(arguments.run) if arguments.run else cnmm.create_model(arguments.model)
    if not arguments.run:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def choose_points(model: Any, num: int) -> list[Any]:
    """Points spread evenly over macs, from the cheapest to the full mixture."""
    costs = cnmm.CostTable.of(model.config)
    found = {}
    for exit in model.config.exit_numbers:
        for point in cnmm.cutting_order(model, exit):
            found.setdefault(costs.point(point).macs, point)
    low, high = min(found), max(found)
    wanted = [low + (high - low) * k / (num - 1) for k in range(num)]
    return [found[min(found, key=lambda macs: abs(macs - target))] for target in wanted]


class Literal(torch.nn.Module):
    """The literal transcription with its gates, probabilities of the last exit."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.network = reference_of(model).eval()
        values = model.gate_logits.detach().sigmoid().unbind(-1)
        self.gates = dict(zip(model.lattice.edges, values, strict=True))
        self.last = model.config.exit_numbers[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x, self.gates, exits=[self.last])[self.last].softmax(1)


def literal_file(literal: Literal, x: torch.Tensor, folder: Path) -> Path:
    """The literal network through torch's own exporter; its image is a float one of fixed shape."""
    path = folder / "literal.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(literal, (x,), path, dynamo=True, external_data=False, verbose=False, input_names=["image"])
    return path


def literal_call(path: Path, runtime: str, threads: int, x: torch.Tensor) -> Callable[[], object]:
    image = x.numpy()
    if runtime == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"image": image})
    import openvino

    core = openvino.Core()
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    request.set_input_tensor(openvino.Tensor(image))
    return lambda: request.infer(share_outputs=True)


def plain_bytes(network: SlimNetwork) -> bytes:
    """A network of an untrained model as a file."""
    return onnx_bytes(network, Preprocessing.plain(network.config))


def file_call(
    data: bytes,
    runtime: str,
    threads: int,
    image: np.ndarray,
    folder: Path,
    precision: str = "float32",
    *,
    task: str = "classification",
    any_size: bool = False,
) -> Callable[[], object]:
    """One of our files, as a session runs it: from the image in memory to the answer."""
    digest = hashlib.sha256(data).hexdigest()
    about = {"image_shape": image.shape[1:], "any_size": any_size}
    opened = open_runtime(runtime, threads=threads, precision=precision, **about)
    chain = opened.chain([NetworkFile.write(folder / f"{digest}.onnx", data, outputs=(answer_of(task),))])

    def call() -> object:
        return [ask() for ask in chain.walk(image)]

    return call


def medians(calls: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Milliseconds of each call; they take turns, so that a slow moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            until = time.perf_counter() + seconds
            while True:
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                times[name].append(1000 * (end - start))
                if end > until:
                    break
    return {name: statistics.median(values) for name, values in times.items()}


def gemm_macs_per_ms(threads: int) -> Callable[[], object]:
    torch.set_num_threads(threads)
    a = torch.randn(1536, 1536)
    return lambda: torch.mm(a, a)


def compare(model: Any, threads: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The full network: ours on both runtimes, in eager torch, the literal one in eager torch and exported."""
    torch.set_num_threads(threads)
    config = model.config
    image = np.random.default_rng(0).integers(0, 256, (1, *config.input_size, config.in_chans), dtype=np.uint8)
    x = torch.from_numpy(image).permute(0, 3, 1, 2).float().contiguous()
    literal = Literal(model)
    path = literal_file(literal, x, folder)
    network = slim(model)
    data = plain_bytes(network)
    noise = np.random.default_rng(1).integers(0, 256, (64, *config.input_size, config.in_chans), dtype=np.uint8)
    small = onnx_bytes(network, Preprocessing.plain(network.config), precision="int8", calibration=noise)

    def eager(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.inference_mode():
                return function(x)

        return call

    calls = {"GEMM": gemm_macs_per_ms(threads), "literal eager": eager(literal), "mixture eager": eager(model)}
    calls["slim eager"] = eager(network)
    for runtime in RUNTIMES:
        calls[f"literal {runtime}"] = literal_call(path, runtime, threads, x)
        calls[f"slim {runtime}"] = file_call(data, runtime, threads, image, folder)
        calls[f"slim {runtime} int8"] = file_call(small, runtime, threads, image, folder)
    try:
        calls["slim openvino bfloat16"] = file_call(data, "openvino", threads, image, folder, "bfloat16")
    except ValueError as error:
        print(f"  no bfloat16 row: {error}")
    times = medians(calls, arguments.rounds, arguments.seconds)
    rate = 1536**3 / times.pop("GEMM")
    times["limit"] = network.cost.macs / rate
    print(f"\n{threads} thread(s), full network, {network.cost.macs:,} macs, GEMM {rate / 1e6:.0f} G macs/s")
    for name, value in sorted(times.items(), key=lambda item: -item[1]):
        print(f"  {name:24} {value:8.3f} ms   {times['literal eager'] / value:6.2f} x literal eager")
    return times


def fit(model: Any, threads: int, runtime: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """A straight line through time against macs over the ladder."""
    config = model.config
    image = np.random.default_rng(0).integers(0, 256, (1, *config.input_size, config.in_chans), dtype=np.uint8)
    points = choose_points(model, arguments.points)
    networks = {point.name: slim(model, point) for point in points}
    calls = {
        name: file_call(onnx_bytes(network, Preprocessing.plain(network.config)), runtime, threads, image, folder)
        for name, network in networks.items()
    }
    times = medians(calls, arguments.rounds, arguments.seconds / 2)
    macs = np.array([networks[name].cost.macs for name in calls])
    found = np.array([times[name] for name in calls])
    slope, intercept = np.polyfit(macs, found, 1)
    r2 = 1 - ((found - slope * macs - intercept) ** 2).sum() / ((found - found.mean()) ** 2).sum()
    print(f"\n{threads} thread(s), {runtime}: {len(calls)} points")
    for name in calls:
        print(f"  {name:8} {networks[name].cost.macs / 1e6:8.2f} M macs {times[name]:8.3f} ms")
    print(f"  fit: {intercept:.3f} ms + {1e6 * slope:.4f} ms per M macs, R2 {r2:.4f}")
    return {"r2": float(r2), "intercept_fraction": float(intercept / found.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnmm_b6s3")
    parser.add_argument("--run", help="a run folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each contender in each round")
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    model = make_model(arguments)
    versions = {runtime: runtime_version(runtime) for runtime in RUNTIMES}
    print(f"{machine()}, Python {platform.python_version()}, torch {torch.__version__}, {versions}")
    answer: dict[str, Any] = {"model": model.config.name, "vs_literal_eager": {}, "vs_gemm_limit": {}}
    answer |= {"vs_literal_export": {runtime: {} for runtime in RUNTIMES}, "int8_vs_float32": {}, "times_ms": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for threads in arguments.threads:
            times = compare(model, threads, folder, arguments)
            best = min(RUNTIMES, key=lambda runtime: times[f"slim {runtime}"])
            ours = times[f"slim {best}"]
            answer["best_runtime"] = best
            answer["vs_literal_eager"][threads] = times["literal eager"] / ours
            answer["vs_gemm_limit"][threads] = ours / times["limit"]
            answer["int8_vs_float32"][threads] = ours / min(times[f"slim {runtime} int8"] for runtime in RUNTIMES)
            answer["times_ms"][threads] = times
            for runtime in RUNTIMES:
                ratio = times[f"literal {runtime}"] / times[f"slim {runtime}"]
                answer["vs_literal_export"][runtime][threads] = ratio
        fits = [fit(model, arguments.threads[0], runtime, folder, arguments) for runtime in RUNTIMES]
    chosen = fits[RUNTIMES.index(answer["best_runtime"])]
    answer |= {"fit_r2": chosen["r2"], "fit_intercept_fraction": chosen["intercept_fraction"]}
    answer["fits"] = dict(zip(RUNTIMES, fits, strict=True))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
