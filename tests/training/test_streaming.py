"""Training on folders that do not fit into memory: workers decode the images ahead."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cnmm.data import ArraySplit, open_data
from cnmm.training.loop import Stopped, train
from tests.training.helpers import (
    folder,
    new_model,
    same,
    small_config,
    small_data,
    wait_for,
    wait_until,
    weights,
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """60 training and 12 test images of noise, PNG and JPEG, that stay on disk."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, num in (("train", 20), ("test", 4)):
        for label, name in enumerate(("ant", "bee", "cat")):
            parent = root / split / name
            parent.mkdir(parents=True)
            for number in range(num):
                pixels = rng.integers(60 * label, 60 * label + 100, (24 + number % 3, 30, 3), np.uint8)
                Image.fromarray(pixels).save(parent / f"{number:03}.{'png' if number % 2 else 'jpg'}")
    return root


def streamed(root):
    return open_data(f"folder:{root}", size=(16, 16), memory_limit=0)


def colour_model(seed=0):
    return new_model(seed, in_chans=3, num_classes=3, input_size=(16, 16))


def stream_config(**options):
    return small_config(**{"batch_size": 8, "val": 9, **options})


def test_workers_do_not_change_a_bit(tmp_path, photos):
    runs = [
        train(colour_model(), streamed(photos), stream_config(workers=num), folder(tmp_path / str(num)))
        for num in (0, 1, 2)
    ]
    assert same(weights(runs[0]), weights(runs[1]))
    assert same(weights(runs[0]), weights(runs[2]))
    whole = open_data(f"folder:{photos}", size=(16, 16))
    whole = dataclasses.replace(whole, mean=streamed(photos).mean, std=streamed(photos).std)
    assert isinstance(whole.train, ArraySplit)
    assert same(weights(runs[0]), weights(train(colour_model(), whole, stream_config(), folder(tmp_path / "memory"))))


@pytest.mark.parametrize("after", [2, 6])
def test_a_stopped_run_goes_on_with_workers(tmp_path, photos, after):
    """In an epoch (6 steps) and at its end, with another number of workers than before."""
    data = streamed(photos)
    whole = train(colour_model(), data, stream_config(workers=0), folder(tmp_path / "whole"))
    count = []
    with pytest.raises(Stopped):
        train(
            colour_model(),
            data,
            stream_config(workers=2),
            folder(tmp_path / "parts"),
            on_step=count.append,
            should_stop=lambda: len(count) == after,
        )
    assert running_workers(os.getpid()) == []
    resumed = train(colour_model(seed=99), data, stream_config(workers=1), tmp_path / "parts", resume=True)
    assert same(weights(whole), weights(resumed))


def test_a_bad_image_stops_the_training_alike_with_workers(tmp_path, photos):
    shutil.copytree(photos, tmp_path / "photos")
    data = streamed(tmp_path / "photos")
    bad = tmp_path / "photos" / "train" / "bee" / "003.png"
    bad.write_bytes(bad.read_bytes()[:200])
    messages = []
    for num in (0, 2):
        with pytest.raises(ValueError, match="cannot be read as an image") as problem:
            train(colour_model(), data, stream_config(workers=num, val=0), folder(tmp_path / str(num)))
        messages.append(str(problem.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{bad}: cannot be read as an image (image file is truncated")
    assert running_workers(os.getpid()) == []


def test_workers_for_images_in_memory_have_no_effect(tmp_path):
    with pytest.warns(UserWarning, match="workers=2 has no effect: these images are in memory"):
        train(new_model(), small_data(), small_config(epochs=1, workers=2), tmp_path)


def running_workers(parent):
    """Process numbers of the workers that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent and b"cnmm.data.workers" in words:
            found.append(int(stat.parent.name))
    return found


STREAMED = """
import functools, sys
import cnmm.cli.main, cnmm.data
cnmm.data.open_data = functools.partial(cnmm.data.open_data, memory_limit=0)
sys.exit(cnmm.cli.main.main(sys.argv[1:]))
"""


def streamed_command(photos, out, *args):
    """`cnmm train` in a process of its own, on images that stay on disk."""
    flags = ["--model", "cnmm_tiny", "--batch-size", "8", "--val", "9", "--lr", "0.05", "--workers", "2"]
    return [sys.executable, "-c", STREAMED, "train", "--data", f"folder:{photos}", "--out", str(out), *flags, *args]


def test_kill_and_resume_with_workers_give_the_same_weights_bit_by_bit(tmp_path, photos):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    epochs = ["--epochs", "4"]

    def run(name, *args):
        command = streamed_command(photos, tmp_path / name, *epochs, *args)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run("whole")
    part = subprocess.Popen(
        streamed_command(photos, tmp_path / "part", *epochs), env=environment, stderr=subprocess.DEVNULL
    )
    wait_for(tmp_path / "part" / "log.jsonl")
    workers = running_workers(part.pid)
    part.send_signal(signal.SIGKILL)
    part.wait()
    assert len(workers) == 2
    assert not (tmp_path / "part" / "model.safetensors").exists()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    run("part", "--resume")
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()


def test_interrupting_leaves_no_worker_behind(tmp_path, photos):
    """Ctrl-C goes to the whole process group, as a terminal sends it; the workers wait for their process's word."""
    process = subprocess.Popen(
        streamed_command(photos, tmp_path / "run", "--epochs", "500"),
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    wait_for(tmp_path / "run" / "log.jsonl")
    workers = running_workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert (process.returncode, len(workers)) == (130, 2)
    assert "--resume" in words
    assert "Traceback" not in words
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_a_killed_worker_is_one_line(tmp_path, photos):
    process = subprocess.Popen(
        streamed_command(photos, tmp_path / "run", "--epochs", "500"), stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "run" / "log.jsonl")
    os.kill(running_workers(process.pid)[0], signal.SIGKILL)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = (line for line in words.splitlines() if line.startswith("cnmm: worker"))
    assert "which decodes images, was killed by signal 9" in line
    assert "Traceback" not in words
