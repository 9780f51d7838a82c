import dataclasses
import json
import os
import signal
import subprocess
import time

import pytest
import torch

import cnmm
from cnmm.training.config import TrainConfig
from tests.training.helpers import COMMAND, command, new_model, small_data


def test_kill_and_resume_give_the_same_weights_bit_by_bit(tmp_path):
    """The real thing: a process that is killed without warning, then --resume."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(*COMMAND, "--out", str(tmp_path / "whole"), "--json"), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["n"] == 1000
    assert [row["exit"] for row in answer["exits"]] == [1, 2, 3]
    part = subprocess.Popen(
        command(*COMMAND, "--out", str(tmp_path / "part")), env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "part" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.7)  # somewhere in the second epoch
    part.send_signal(signal.SIGKILL)
    part.wait()
    assert not (tmp_path / "part" / "model.safetensors").exists()
    refused = subprocess.run(command(*COMMAND, "--out", str(tmp_path / "part")), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "already holds a run; go on with --resume" in refused.stderr
    again = subprocess.run(
        command(*COMMAND, "--out", str(tmp_path / "part"), "--resume"), env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()
    check_evaluate(tmp_path / "whole", answer)


def check_evaluate(run, answer):
    """`cnmm evaluate` finds what `cnmm train` reported, and measures points, raw and re-estimated."""
    measured = json.loads(subprocess.check_output(command("evaluate", str(run), "--json")))
    assert measured["accuracy"] == answer["accuracy"]
    fields = {"point", "macs", "accuracy", "mean_class_accuracy", "n", "exits", "split", "statistics"}
    assert fields <= measured.keys()
    cut = json.loads(
        subprocess.check_output(command("evaluate", str(run), "--point", "e3c5", "--split", "validation", "--json"))
    )
    assert (cut["point"], cut["n"], cut["statistics"]) == ("e3c5", 600, "re-estimated")
    assert cut["macs"] < measured["macs"]
    raw = json.loads(subprocess.check_output(command("evaluate", str(run), "--point", "e3c5", "--raw", "--json")))
    assert raw["statistics"] == "raw"
    sampled = json.loads(subprocess.check_output(command("evaluate", str(run), "--monte-carlo", "2", "--json")))
    assert [row["exit"] for row in sampled["exits"]] == [3]


def test_interrupting_saves_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        command(*COMMAND, "--epochs", "50", "--out", str(tmp_path / "run")), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in words
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_training_can_start_from_a_trained_run_with_other_classes(tmp_path):
    from cnmm.cli.training import new_model as model_for

    trained = new_model(num_classes=4)
    cnmm.save(trained, tmp_path)
    model = model_for(None, small_data(), tmp_path)
    assert model.config == dataclasses.replace(trained.config, num_classes=10)
    fresh = {name for name, value in model.state_dict().items() if value.shape != trained.state_dict()[name].shape}
    assert fresh == {f"classifiers.{k}.{part}" for k in (1, 2, 3) for part in ("weight", "bias")}
    for name, value in trained.state_dict().items():
        assert name in fresh or torch.equal(value, model.state_dict()[name])
    with pytest.raises(ValueError, match="--model cnmm_seg_tiny: it labels pixels"):
        model_for("cnmm_seg_tiny", small_data(), None)
    with pytest.raises(ValueError, match="holds a cnmm_tiny; leave --model out"):
        model_for("cnmm_b6s3", small_data(), tmp_path)
    with pytest.raises(ValueError, match="it takes 1 channels, the images have 3"):
        model_for(None, dataclasses.replace(small_data(), in_chans=3), tmp_path)


def test_the_flags_are_the_fields_of_the_config():
    from cnmm.cli.training import Fields

    fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"recipe"}
    assert {field.name for field in dataclasses.fields(Fields)} == fields
