"""A server under load, for real: our policy, SlackFit and the full network in turns, beside oracle and simulator.

    python -m benchmarks.serving --data cifar10:DIR                              # cnmm_b6s3, 5 rounds of 10,000
    python -m benchmarks.serving --ladder DIR --requests 200 --rounds 1          # any ladder, small

A server for each policy runs all the time on `--server-cpus`, and the generator on `--generator-cpus`, which should be
others. Every case is run with every policy, then the next case; a round goes through all cases, with its number as the
seed, and begins with another policy. A run in which the generator lagged is invalid and made again. Reported are means
and the worst run. Every run is kept in benchmarks/results/serving.json as soon as it is over: five rounds take hours,
and the same command goes on where the last one was stopped, on the same machine only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import cnmm
from cnmm._files import write_json
from cnmm._machine import machine
from cnmm.ladder import read_ladder

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "cnmm_b6s3.cifar10"
TRACE = HERE / "data" / "arrivals_azure_llm_2023.txt"
RESULTS = HERE / "results" / "serving.json"
POLICIES = ("adaptive", "slackfit", "fixed")
CASES = (
    *(("poisson", load) for load in (0.7, 1.5, 3.0)),
    *(("gamma:8", load) for load in (0.7, 1.5, 3.0)),
    ("step", 3.0),
    (f"trace:{TRACE}", 3.0),
)
TRIES = 3
"""Of a run that is invalid."""
READY_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs share."""

    ladder: Path
    data: str | None
    requests: int
    images: int
    target_ms: float
    cores: int
    runtime: str | None
    server_cpus: str
    generator_cpus: str


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as name:
        settings = Settings(
            ladder=arguments.ladder or exported(Path(name) / "ladder"),
            data=arguments.data,
            requests=arguments.requests,
            images=arguments.images_per_request,
            target_ms=arguments.target_ms,
            cores=arguments.cores,
            runtime=arguments.runtime,
            server_cpus=arguments.server_cpus,
            generator_cpus=arguments.generator_cpus,
        )
        cases = [case for case in CASES if not arguments.cases or set(names_of(*case)) & set(arguments.cases)]
        about = described(settings, arguments.seed)
        runs = kept(arguments.out, about)
        left = plan(runs, arguments.policies, cases, arguments.rounds)
        print(f"{len(runs)} runs are there, {len(left)} are left", flush=True)
        with contextlib.ExitStack() as stack:
            policies = dict.fromkeys(policy for policy, *_ in left)
            urls = {policy: stack.enter_context(served(settings, policy)) for policy in policies}
            for policy, arrivals, load, number in left:
                runs.append(one_run(settings, urls[policy], arrivals, load, arguments.seed + number))
                runs[-1] |= {"case": case_name(arrivals, load), "policy": policy, "round": number}
                say(runs[-1])
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(arguments.out, about | {"cases": summary(runs), "runs": runs})
    show(summary(runs))
    print(json.dumps(about | {"cases": summary(runs)}))


def described(settings: Settings, seed: int) -> dict[str, Any]:
    """What runs must have in common to be summed up."""
    names = ("cnmm", "numpy", "onnxruntime", "starlette", "uvicorn")
    own = {key: value for key, value in vars(settings).items() if key not in ("ladder", "data")}
    ladder = read_ladder(settings.ladder)
    return {
        "format_version": 1,
        "machine": machine(),
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "seed": seed,
        "settings": own | {"ladder": ladder.title, "data": settings.data and settings.data.partition(":")[0]},
    }


def kept(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that are there already."""
    if not path.exists():
        return []
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if any(found.get(key) != value for key, value in about.items()):
        raise SystemExit(f"{path}: its runs had other settings, versions or another machine; give another --out")
    runs: list[dict[str, Any]] = found["runs"]
    return runs


def plan(
    runs: Sequence[dict[str, Any]], policies: Sequence[str], cases: Sequence[tuple[str, float]], rounds: int
) -> list[tuple[str, str, float, int]]:
    """Policy, arrivals, load and round of what is left, in this order."""
    done = {(run["policy"], run["case"], run["round"]) for run in runs}
    return [
        (policy, arrivals, load, number)
        for number in range(rounds)
        for arrivals, load in cases
        for policy in [*policies[number % len(policies) :], *policies[: number % len(policies)]]
        if (policy, case_name(arrivals, load), number) not in done
    ]


def case_name(arrivals: str, load: float) -> str:
    return f"{Path(arrivals).stem if 'trace' in arrivals else arrivals} {load:g}"


def names_of(arrivals: str, load: float) -> tuple[str, str]:
    """What `--cases` may call a case: with its load, or the kind of its arrivals, which others share."""
    return case_name(arrivals, load), arrivals.partition(":")[0]


def say(run: dict[str, Any]) -> None:
    print(
        f"round {run['round']}  {run['case']:32} {run['policy']:9} effective {run['effective_quality']:.4f}"
        f"  in time {run['attainment']:.4f}  p99 {run['p99_ms'] or float('nan'):8.1f} ms"
        f"{'' if run['valid'] else '  INVALID'}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    cpus = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ladder", type=Path, help="a ladder folder (default: one of models/cnmm_b6s3.cifar10)")
    parser.add_argument(
        "--data", help="labelled images, such as cifar10:DIR (default: noise, which never leaves early)"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images-per-request", type=int, default=10)
    parser.add_argument("--target-ms", type=float, default=60.0)
    parser.add_argument("--cores", type=int, default=1, help="workers of the server")
    parser.add_argument("--runtime", choices=("onnx", "openvino"))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--cases", nargs="+", help="kinds of arrivals, or cases such as 'gamma:8 3' (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-cpus", default=str(cpus[0]), help="as taskset -c takes them")
    parser.add_argument("--generator-cpus", default=str(cpus[-1]))
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def exported(folder: Path) -> Path:
    """The ladder of the shipped model."""
    cnmm.Run(MODEL).export_ladder(folder, 16)
    return folder


@contextlib.contextmanager
def served(settings: Settings, policy: str) -> Iterator[str]:
    """A server of its own process; gives its URL when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "cnmm", "serve", settings.ladder, "--port", port, "--policy", policy]
    command += ["--cores", settings.cores, "--target-ms", settings.target_ms, "--drain-s", 0]
    command += ["--runtime", settings.runtime] if settings.runtime else []
    process = subprocess.Popen(pinned(settings.server_cpus, command), stdout=subprocess.DEVNULL, env=one_thread())
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def pinned(cpus: str, command: Sequence[object]) -> list[str]:
    return ["taskset", "-c", cpus, *map(str, command)]


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode} before it was ready")
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2).status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {READY_S:g} s")


def one_run(settings: Settings, url: str, arrivals: str, load: float, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "cnmm", "loadtest", url, "--arrivals", arrivals, "--load", load]
    command += ["--requests", settings.requests, "--images-per-request", settings.images, "--seed", seed, "--json"]
    command += ["--data", settings.data] if settings.data else []
    invalid = 0
    while True:
        done = subprocess.run(
            pinned(settings.generator_cpus, command), capture_output=True, text=True, env=one_thread()
        )
        if done.returncode not in (0, 1) or not done.stdout:
            raise SystemExit(f"{shlex.join(map(str, command))}: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        if found["valid"] or invalid + 1 == TRIES:
            return found | {"seed": seed, "invalid_before": invalid}
        invalid += 1


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case and policy: the mean and the worst run."""
    rows = []
    for case, policy in dict.fromkeys((run["case"], run["policy"]) for run in runs):
        some = [run for run in runs if (run["case"], run["policy"]) == (case, policy)]

        def values(name: str, some: Sequence[dict[str, Any]] = tuple(some)) -> list[float]:
            return [run[name] for run in some if run.get(name) is not None]

        p99 = values("p99_ms")
        simulated = [run["simulated"] for run in some]
        predicted = [run["predicted"] for run in some]
        rows.append(
            {
                "case": case,
                "policy": policy,
                "runs": len(some),
                "requests": sum(run["requests"] for run in some),
                "effective_quality": float(np.mean(values("effective_quality"))),
                "effective_quality_worst": min(values("effective_quality")),
                "expected_quality": float(np.mean(values("expected_quality"))),
                "oracle_quality": float(np.mean(values("oracle_quality"))),
                "below_oracle_worst": max(run["oracle_quality"] - run["expected_quality"] for run in some),
                "attainment": float(np.mean(values("attainment"))),
                "attainment_worst": min(values("attainment")),
                "p99_ms": float(np.mean(p99)) if p99 else None,
                "p99_ms_worst": max(p99, default=None),
                "worst_ms": max(values("worst_ms"), default=None),
                "shed": float(np.mean(values("shed"))),
                "errors": sum(run["errors"] for run in some),
                "lost": sum(run["lost"] for run in some),
                "recovery_ms_worst": max(values("recovery_ms"), default=None),
                "simulated_quality_off": _largest(simulated, "quality_difference"),
                "simulated_p99_ratio": _farthest(simulated),
                "predicted_quality_off": _largest(predicted, "quality_difference"),
                "predicted_p99_ratio": _farthest(predicted),
                "invalid": sum(not run["valid"] for run in some),
                "overhead_ms": float(np.mean(values("overhead_ms"))),
                "slowdown": float(np.mean(values("slowdown"))),
            }
        )
    return rows


def _largest(found: Sequence[dict[str, Any]], name: str) -> float:
    return max((each[name] for each in found), key=abs)


def _farthest(found: Sequence[dict[str, Any]]) -> float | None:
    """Live over simulated, of the run where it is farthest from 1."""
    ratios = [each["p99_ratio"] for each in found if each["p99_ratio"]]
    return max(ratios, key=lambda ratio: abs(np.log(ratio)), default=None)


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("effective_quality", "effective_quality_worst", "oracle_quality", "attainment_worst", "p99_ms_worst")
    more = ("simulated_quality_off", "simulated_p99_ratio", "recovery_ms_worst", "errors", "lost", "invalid")
    print(f"{'case':32} {'policy':9} " + " ".join(f"{name[:22]:>22}" for name in columns + more))
    for row in rows:
        cells = ["" if row[name] is None else f"{row[name]:.4g}" for name in columns + more]
        print(f"{row['case']:32} {row['policy']:9} " + " ".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
