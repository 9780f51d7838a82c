"""Training by several processes that torchrun starts (gloo, on this machine)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from cnmm import distributed
from tests.helpers import ROOT, in_new_process

TRAIN = [
    *("-m", "cnmm", "train", "--model", "cnmm_tiny", "--channels", "8", "--batch-size", "60", "--val", "100"),
    *("--epochs", "3", "--precision", "float32"),
]


def torchrun(*args):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *args]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_alone_nothing_is_exchanged():
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(a is b for a, b in zip(distributed.total(tensors), tensors, strict=True))
    assert (distributed.world_size(), distributed.rank()) == (1, 0)


def test_two_processes_compute_what_one_does():
    """Gradients to 1e-8 and running statistics to 1e-10 in float64, norm-wise, in every gate mode; steps to 1e-5."""
    done = subprocess.run(
        torchrun(str(Path(__file__).with_name("two_processes.py"))),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout


def test_two_processes_train_what_one_does_and_survive_the_death_of_one(tmp_path, fashion_folder):
    """24 steps: weights within 2e-2 norm-wise of one process's (Muon uses bfloat16); a killed rank changes no bit."""
    train = [*TRAIN, "--data", f"fashion:{fashion_folder}"]
    done = in_new_process(sys.executable, *train, "--out", tmp_path / "one", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    done = in_new_process(*torchrun(*train, "--out", tmp_path / "two"), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    difference = torch.stack([(one[key] - two[key]).norm() for key in one]).norm()
    assert difference < 2e-2 * torch.stack([value.norm() for value in one.values()]).norm()

    process = subprocess.Popen(
        torchrun("--max-restarts", "1", *train, "--out", str(tmp_path / "killed")),
        env=environment(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_for(tmp_path / "killed" / "log.jsonl")  # two of three epochs are left
    os.kill(max(children(process.pid)), signal.SIGKILL)
    assert process.wait(timeout=200) == 0
    killed = load_file(tmp_path / "killed" / "model.safetensors")
    assert all(torch.equal(two[key], killed[key]) for key in two)


def children(parent):
    """Process numbers of the ranks that torchrun has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent and "cnmm" in command:
            found.append(int(stat.parent.name))
    return found


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
