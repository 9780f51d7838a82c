"""Trainings that begin, fail, go on and are replaced: `cnmm.train` as a whole."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import cnmm
from cnmm import run_training
from cnmm._errors import Stopped
from cnmm._lock import LOCK_FILE, locked
from cnmm.data import hold_out, open_data
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.run import Run
from cnmm.training import batches, loop, progress
from cnmm.training.batches import fitting_batch
from cnmm.training.config import TrainConfig
from cnmm.training.optim import learning_rate
from tests.helpers import ask, complaint, refused, write_fashion
from tests.training.helpers import lines, same

TINY = {"model": "cnmm_tiny", "channels": 8, "blocks": 2, "precision": "float32", "ladder_rule": "flow"}
FLAGS = ("--model", "cnmm_tiny", "--channels", "8", "--blocks", "2", "--precision", "float32")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """200 training and 20 test images."""
    return f"fashion:{write_fashion(tmp_path_factory.mktemp('images') / 'fashion', 200, 20)}"


def config(folder):
    return json.loads((folder / "config.json").read_text())


def weights(*folders):
    return [load_file(folder / "model.safetensors") for folder in folders]


# Starting


def test_a_start_that_fails_blocks_nothing(spec, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert "only 180 training images" in refused(cnmm.train, spec, run, **TINY, batch_size=500)
    assert not run.exists()
    monkeypatch.setattr(run_training, "run_loop", lambda *_, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cnmm.train(spec, run, **TINY, epochs=7)
    assert config(run)["train"]["epochs"] == 7  # it was about to begin
    monkeypatch.undo()
    cnmm.train(spec, run, **TINY, epochs=1)
    assert config(run)["train"]["epochs"] == 1
    words = refused(cnmm.train, spec, run, **TINY, epochs=1)
    assert "already holds a run; go on with --resume, replace it with --overwrite, or choose another" in words
    assert "give only one" in refused(cnmm.train, spec, run, **TINY, resume=True, overwrite=True)


def test_a_batch_that_fits_is_chosen(spec, tmp_path, said):
    run = cnmm.train(spec, tmp_path / "run", **TINY, epochs=1)
    assert run.config.batch_size == 16  # 180 images: 11 steps
    assert "batch size 16: there are only 180 training images" in " ".join(said)
    assert lines(tmp_path / "run")[-1]["step"] == 180 // 16
    said.clear()
    cnmm.train(spec, tmp_path / "run", **TINY, epochs=1, batch_size=64, overwrite=True)
    assert "batch size" not in " ".join(said)
    for num in (2, 5, 30, 100, 999, 1023, 1024, 10**6):
        size = fitting_batch(num, 128)
        assert size == 2 or num // size >= 8
        assert size == 128 or num // (2 * size) < 8


def test_nothing_to_resume_is_a_start(spec, tmp_path, said):
    cnmm.train(spec, tmp_path / "a", **TINY, epochs=1, resume=True)
    assert "holds nothing to resume: starting" in " ".join(said)
    cnmm.train(spec, tmp_path / "b", **TINY, epochs=1)
    assert same(*weights(tmp_path / "a", tmp_path / "b"))


def test_overwriting_leaves_nothing_of_the_old_run(spec, tmp_path):
    run = cnmm.train(spec, tmp_path / "run", **TINY, epochs=1)
    run.measure(points=2)
    (tmp_path / "run" / "notes.txt").touch()
    old = {path.name for path in (tmp_path / "run").iterdir()}
    cnmm.train(spec, tmp_path / "run", **TINY, epochs=1, seed=1, overwrite=True)
    cnmm.train(spec, tmp_path / "new", **TINY, epochs=1, seed=1)
    found, new = ({path.name for path in (tmp_path / name).iterdir()} for name in ("run", "new"))
    assert found == {*new, "notes.txt"} < old
    assert same(*weights(tmp_path / "run", tmp_path / "new"))


def test_only_runs_are_overwritten(spec, tmp_path):
    for name, content in {"config.json": '{"name": "something else"}', "README.md": "mine"}.items():
        (tmp_path / name).write_text(content)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        assert "config.json: format_version=None" in refused(cnmm.train, spec, tmp_path, **TINY, **options)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").touch()
    assert "already holds a run" in refused(cnmm.train, spec, tmp_path, **TINY)
    assert "not a run folder" in refused(cnmm.train, spec, tmp_path, **TINY, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "model.safetensors"]


def test_a_folder_in_use_is_refused_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_training, "open_data", lambda *_, **options: 1 / 0)
    with locked(tmp_path, "cnmm frontier"):
        assert "in use: 'cnmm frontier'" in refused(cnmm.train, "fashion", tmp_path)
        assert (tmp_path / LOCK_FILE).exists()


# Divergence


@pytest.mark.parametrize("recipe", ["quick", "cifar10"])
def test_the_advice_after_divergence_can_be_followed(spec, tmp_path, capsys, monkeypatch, recipe):
    """The first step diverges; the same command with the flags of the message trains to the end."""
    command = ["train", "--data", spec, "--out", tmp_path / "run", *FLAGS, "--recipe", recipe, "--epochs", 2]
    command += ["--batch-size", 60, "--lr", 8, "--val", 20]
    check = loop.check_finite

    def diverging(loss, config, epoch, step):  # normalised edges hardly ever do so by themselves
        check(loss if config.lr < 1 else float("nan"), config, epoch, step)

    monkeypatch.setattr(loop, "check_finite", diverging)
    words = complaint(capsys, *command).partition("same command with ")[2].split()
    assert words[0] == "--overwrite"
    assert words[1::2] == (["--lr", "--matrix-lr"] if recipe == "quick" else ["--lr"])
    ask(capsys, *command, *words)
    assert float(words[2]) == config(tmp_path / "run")["train"]["lr"] <= 0.1


# More epochs


@pytest.fixture(scope="module")
def two_epochs(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs") / "run"
    run = cnmm.train(spec, folder, **TINY, epochs=2)
    run.measure(points=2)
    return folder


def test_a_finished_run_can_be_given_more_epochs(two_epochs, spec, tmp_path):
    """It follows the schedule of all epochs from where it stands; stopped on the way, it ends with the same weights."""
    for name in ("whole", "parts"):
        shutil.copytree(two_epochs, tmp_path / name)
    count, more = [], {**TINY, "epochs": 4, "resume": True}
    cnmm.train(spec, tmp_path / "whole", **more)
    with pytest.raises(Stopped):
        cnmm.train(spec, tmp_path / "parts", **more, on_step=count.append, should_stop=lambda: len(count) == 15)
    assert config(tmp_path / "parts")["epochs_before"] == [2]
    cnmm.train(spec, tmp_path / "parts", **more)
    whole, parts, before = weights(tmp_path / "whole", tmp_path / "parts", two_epochs)
    assert same(whole, parts)
    assert not same(whole, before)
    full = TrainConfig(**config(tmp_path / "whole")["train"])
    log = lines(tmp_path / "whole")
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]
    assert [line["lr"] for line in log[2:]] == [learning_rate(full, epoch / 4) for epoch in (3, 4)]
    assert "cnmm frontier" in refused(Run(tmp_path / "whole").choose, "50%")  # it was that of other weights
    words = refused(cnmm.train, spec, tmp_path / "whole", **TINY, epochs=3, resume=True)
    assert "train.epochs is 4 there, 3 now" in words


def test_more_epochs_need_a_checkpoint(two_epochs, spec, tmp_path):
    shutil.copytree(two_epochs, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    words = refused(cnmm.train, spec, tmp_path / "run", **TINY, epochs=3, resume=True)
    assert f"--init {tmp_path / 'run'}" in words
    assert Run(tmp_path / "run").frontier.points  # nothing was removed


def test_a_run_from_before_an_option_goes_on(two_epochs, spec, tmp_path):
    """What its config.json does not name had the value that is the default now."""
    shutil.copytree(two_epochs, tmp_path / "run")
    about = config(tmp_path / "run")
    del about["train"]["exit_distill"], about["train"]["temperature"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(about))
    words = refused(cnmm.train, spec, tmp_path / "run", **TINY, epochs=2, resume=True)
    assert re.search(r"train\.exit_distill is 0\.0 there, 0\.5 now", words)
    cnmm.train(spec, tmp_path / "run", **TINY, epochs=2, resume=True, exit_distill=0.0)


def test_images_may_have_moved(two_epochs, spec, tmp_path):
    shutil.copytree(two_epochs, tmp_path / "run")
    shutil.copytree(spec.removeprefix("fashion:"), tmp_path / "elsewhere")
    cnmm.train(f"fashion:{tmp_path / 'elsewhere'}", tmp_path / "run", **TINY, epochs=2, resume=True)
    assert same(*weights(tmp_path / "run", two_epochs))
    other = f"fashion:{write_fashion(tmp_path / 'other', 190, 20)}"
    assert "(200 then, 190 now)" in refused(cnmm.train, other, tmp_path / "run", **TINY, epochs=2, resume=True)


# After every epoch


def test_validation_after_an_epoch_has_statistics_that_fit(spec, tmp_path, monkeypatch):
    """The last epoch's figures are those of the result, where both are estimated on as many images."""
    monkeypatch.setattr(batches, "STATISTICS_IMAGES", 90)
    monkeypatch.setattr(batches.Images, "num_after_epoch", 90)
    run = cnmm.train(spec, tmp_path / "run", **TINY, epochs=2, val=50)
    data = open_data(spec)
    held = hold_out(data.train.labels, 50, 0)[1]
    exits = evaluate_exits(run.model, run.images.batches(data.train, held))
    log = lines(tmp_path / "run")
    assert {int(exit): value for exit, value in log[-1]["quality"].items()} == {k: q.value for k, q in exits.items()}
    assert [line["statistics"] for line in log] == ["re-estimated"] * 2


def test_validation_after_an_epoch_leaves_the_training_alone(spec, tmp_path, monkeypatch):
    options = {**TINY, "epochs": 2, "val": 50, "gates": "relaxed", "group": 4}
    one = cnmm.train(spec, tmp_path / "a", **options)
    monkeypatch.setattr(progress, "reestimated", lambda model, *_: model)
    other = cnmm.train(spec, tmp_path / "b", **options)
    assert same(one.model.state_dict(), other.model.state_dict())
    raw = cnmm.train(spec, tmp_path / "c", **options, statistics="raw")
    assert [line["statistics"] for line in lines(tmp_path / "c")] == ["raw"] * 2
    assert torch.equal(raw.model.gate_logits, one.model.gate_logits)
