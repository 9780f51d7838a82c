"""`cnmm train` and `cnmm evaluate` as their users run them: in a process of their own, killed, interrupted, resumed."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
import torch

import cnmm
from cnmm import run_training
from cnmm.data import open_data
from tests.helpers import ROOT, ask, in_new_process, refused
from tests.training.helpers import new_model

SHORT = ("--model", "cnmm_tiny", "--epochs", "4", "--batch-size", "50", "--val", "100", "--precision", "float32")


@pytest.fixture
def command(fashion_folder):
    """A short training; `--out` is missing."""
    return [sys.executable, "-m", "cnmm", "train", "--data", f"fashion:{fashion_folder}", *SHORT]


def wait_for_a_checkpoint(run, process):
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_and_resume_give_the_same_weights_bit_by_bit(command, tmp_path, capsys):
    """The real thing: a process that is killed without warning, then --resume."""
    done = in_new_process(*command, "--out", tmp_path / "whole", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["n"] == 100
    assert [row["exit"] for row in answer["exits"]] == [1, 2, 3]
    part = subprocess.Popen([*command, "--out", tmp_path / "part"], stderr=subprocess.DEVNULL, cwd=ROOT)
    wait_for_a_checkpoint(tmp_path / "part", part)
    part.send_signal(signal.SIGKILL)  # somewhere in the second epoch
    part.wait()
    assert not (tmp_path / "part" / "model.safetensors").exists()
    again = in_new_process(*command, "--out", tmp_path / "part")
    assert again.returncode == 2
    assert "already holds a run; go on with --resume" in again.stderr
    again = in_new_process(*command, "--out", tmp_path / "part", "--resume")
    assert again.returncode == 0, again.stderr
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()
    measured = ask(capsys, "evaluate", tmp_path / "whole")
    assert (measured["accuracy"], measured["exits"]) == (answer["accuracy"], answer["exits"])


def test_evaluate_measures_points_raw_and_re_estimated(trained_run, capsys):
    measured = ask(capsys, "evaluate", trained_run)
    fields = {"point", "macs", "metric", "quality", "accuracy", "mean_class_accuracy", "n", "exits", "split"}
    assert fields | {"statistics"} <= measured.keys()
    assert (measured["split"], measured["n"], measured["quality"]) == ("test", 100, measured["accuracy"])
    cut = ask(capsys, "evaluate", trained_run, "--point", "e3c5", "--split", "validation")
    assert (cut["point"], cut["n"], cut["statistics"]) == ("e3c5", 100, "re-estimated")
    assert cut["macs"] < measured["macs"]
    raw = ask(capsys, "evaluate", trained_run, "--point", "e3c5", "--raw")
    assert raw["statistics"] == "raw"
    other = ask(capsys, "evaluate", trained_run, "--metric", "mean_class_accuracy")
    assert (other["metric"], other["quality"]) == ("mean_class_accuracy", measured["mean_class_accuracy"])


def test_monte_carlo_costs_as_many_passes(trained_run, capsys):
    whole = ask(capsys, "evaluate", trained_run)
    sampled = ask(capsys, "evaluate", trained_run, "--monte-carlo", 2)
    hard = ask(capsys, "evaluate", trained_run, "--monte-carlo", 2, "--hard")
    for answer in (sampled, hard):
        assert [row["exit"] for row in answer["exits"]] == [3]
        assert answer["macs"] == answer["exits"][0]["macs"] == 2 * whole["macs"]
    assert sampled == ask(capsys, "evaluate", trained_run, "--monte-carlo", 2)  # always the same samples


def test_interrupting_saves_and_says_how_to_go_on(command, tmp_path):
    endless = [*command, "--epochs", "50", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(endless, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_for_a_checkpoint(tmp_path / "run", process)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in words
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--exits", "last"], {"exits": "last"}),  # CNMM-single
        (["--mixing", "sum"], {"mixing": "sum"}),  # the deterministic variant
        (["--blocks", "2", "--scales", "3", "--channels", "8"], {"blocks": 2, "scales": 3, "channels": 8}),
        (["--gate-init", "half", "--stem-stride", "2"], {"gate_init": "half", "stem_stride": 2}),
    ],
)
def test_variants_of_the_paper_are_flags(tmp_path, capsys, flags, expected):
    run = tmp_path / "run"
    train = ("--data", "fashion", "--model", "cnmm_tiny", "--batch-size", "3000", "--epochs", "1", "--val", "0")
    answer = ask(capsys, "train", *train, "--out", str(run), *flags)
    config = cnmm.load(run).config
    expected = {"gate_init": "uniform", **expected}  # what the recipe `quick` starts with
    assert config == dataclasses.replace(cnmm.model_plan("cnmm_tiny").config, **expected)
    exits = [row["exit"] for row in answer["exits"]]
    assert exits == list(config.exit_numbers)


@pytest.mark.parametrize(("flags", "statistics"), [([], "raw"), (["--statistics", "re-estimated"], "re-estimated")])
def test_the_papers_statistics_are_those_of_its_recipe(tmp_path, capsys, flags, statistics):
    run = str(tmp_path / "run")
    train = ("--data", "fashion", "--model", "cnmm_tiny", "--batch-size", "1500", "--epochs", "1", "--group", "500")
    assert ask(capsys, "train", *train, "--recipe", "cifar10", *flags, "--out", run)["statistics"] == statistics
    assert ask(capsys, "evaluate", run)["statistics"] == statistics


def test_a_training_can_start_from_a_trained_run_with_other_classes(tmp_path, fashion_folder, monkeypatch):
    class Begun(Exception):
        """Instead of training."""

    def stop(model, *args, **options):
        raise Begun(model)

    def started(name=None, init=None, **fields):
        with pytest.raises(Begun) as caught:
            run_training.train(
                f"fashion:{fashion_folder}", tmp_path / f"run{len(fields)}", model=name, init=init, **fields
            )
        return caught.value.args[0]

    monkeypatch.setattr(run_training, "run_loop", stop)
    trained = new_model(num_classes=4)
    cnmm.save(trained, tmp_path / "old")
    model = started(init=tmp_path / "old")
    assert model.config == dataclasses.replace(trained.config, num_classes=10)
    fresh = {name for name, value in model.state_dict().items() if value.shape != trained.state_dict()[name].shape}
    assert fresh == {f"classifiers.{k}.{part}" for k in (1, 2, 3) for part in ("weight", "bias")}
    for name, value in trained.state_dict().items():
        assert name in fresh or torch.equal(value, model.state_dict()[name])
    assert json.loads((tmp_path / "run0" / "config.json").read_text())["init"] == str(tmp_path / "old")
    variant = started("cnmm_tiny", blocks=2, exits="last", mixing="sum").config
    assert (variant.blocks, variant.exits, variant.mixing, variant.num_classes) == (2, "last", "sum", 10)
    assert started(val=10).config.name == "cnmm_b4s3"  # it fits the images

    spec, out = f"fashion:{fashion_folder}", tmp_path / "none"
    assert "cnmm_seg_tiny labels pixels" in refused(cnmm.train, spec, out, model="cnmm_seg_tiny")
    words = refused(cnmm.train, spec, out, model="cnmm_b6s3", init=tmp_path / "old")
    assert "holds a cnmm_tiny; remove --model" in words
    assert "blocks=5" in refused(cnmm.train, spec, out, init=tmp_path / "old", blocks=5)
    colour = dataclasses.replace(open_data(spec), in_chans=3)
    monkeypatch.setattr(run_training, "open_data", lambda *_, **options: colour)
    assert "it takes 1 channels, the images have 3" in refused(cnmm.train, spec, out, init=tmp_path / "old")
    assert not out.exists()
