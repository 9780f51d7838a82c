"""The runner does what is missing, goes on where it was stopped, and does again what has changed."""

import dataclasses
import json
import os
import signal

import pytest

from benchmarks.claims import __main__ as command
from benchmarks.claims import runner as running
from benchmarks.claims.claims import CLAIMS
from benchmarks.claims.measures import KINDS, VERSIONS
from benchmarks.claims.page import write_page
from benchmarks.claims.runner import Runner, needed_kinds
from benchmarks.claims.store import Store
from benchmarks.claims.trained import MARK
from benchmarks.claims.trainings import SCALES
from cnmm._errors import UserError
from cnmm.run import Run

SMOKE = SCALES["smoke"]


def one(role="cifar10_sampled_single", **fields):
    """A scale with one training."""
    training = SMOKE.of(role)[0]
    return dataclasses.replace(SMOKE, trainings=(dataclasses.replace(training, fields={**training.fields, **fields}),))


def make(scale, folder, say=lambda words: None, **options):
    return Runner(scale, folder / "runs", Store(folder / "results"), [folder / "data"], say=say, **options)


def weights(folder, scale):
    return (folder / "runs" / scale.trainings[0].name / "model.safetensors").read_bytes()


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    scale = one(epochs=2)

    def interrupt(words):
        if "epoch 1," in words:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(scale, tmp_path / "a", interrupt).run()
    assert not (tmp_path / "a" / "results" / "trainings").exists()
    said = []
    make(scale, tmp_path / "a", said.append).run()
    assert not any("epoch 1," in words for words in said)
    make(scale, tmp_path / "b").run()
    assert weights(tmp_path / "a", scale) == weights(tmp_path / "b", scale)
    result = json.loads((tmp_path / "a/results/trainings" / f"{scale.trainings[0].name}.json").read_text())
    assert result["minutes"] > 0
    assert {"command", "seed", "versions", "hardware", "declared", "fingerprint"} <= result.keys()


def test_what_is_there_is_not_done_again_and_what_is_stale_is(tmp_path, monkeypatch):
    scale, folder, news = one(), tmp_path, []
    make(scale, folder, after=lambda: news.append(1)).run()
    name = scale.trainings[0].name
    files = [folder / "results/trainings" / f"{name}.json", folder / "results/measurements" / f"curves.{name}.json"]
    before = [path.stat().st_mtime_ns for path in files]
    make(scale, folder, after=lambda: news.append(2)).run()
    assert [path.stat().st_mtime_ns for path in files] == before
    assert news == [1]

    monkeypatch.setitem(VERSIONS, "curves", VERSIONS["curves"] + 1)  # measured otherwise: only this is done again
    make(scale, folder).run()
    assert files[0].stat().st_mtime_ns == before[0]
    assert files[1].stat().st_mtime_ns > before[1]

    old = weights(folder, scale)
    other = one(lr=0.01)
    make(other, folder).run()
    assert weights(folder, other) != old
    assert json.loads(files[0].read_text())["declared"]["fields"]["lr"] == 0.01


def test_a_measurement_that_was_killed_is_done_again(tmp_path, monkeypatch):
    def killed(trained, scale):
        raise KeyboardInterrupt

    scale, usual = one(), KINDS["curves"]
    monkeypatch.setitem(KINDS, "curves", killed)
    with pytest.raises(KeyboardInterrupt):
        make(scale, tmp_path).run()
    assert (tmp_path / "results/trainings").is_dir()
    monkeypatch.setitem(KINDS, "curves", usual)
    said = []
    make(scale, tmp_path, said.append).run()
    assert [words.partition(": ")[2] for words in said] == ["measuring curves"]


def test_data_that_are_not_at_hand_are_said_so(tmp_path):
    scale = dataclasses.replace(one(), data={**SMOKE.data, "cifar10": "cifar10:cifar-10-batches-py"})
    said = []
    make(scale, tmp_path, said.append).run()
    assert "not run, because cifar10:cifar-10-batches-py is not at hand" in said[0]
    write_page(scale, Store(tmp_path / "results"), tmp_path / "claims.md")
    assert "cifar10:cifar-10-batches-py is not at hand" in (tmp_path / "claims.md").read_text()


def test_what_could_not_be_measured_is_said_until_it_is(tmp_path, monkeypatch):
    def broken(trained, scale):
        raise UserError("the moon is in the way")

    usual = KINDS["structure"]
    monkeypatch.setitem(KINDS, "structure", broken)
    make(SMOKE, tmp_path, only=["structure.fashion_given"]).run()
    make(SMOKE, tmp_path, only=["frontier.fashion_given"]).run()  # knows nothing of it
    write_page(SMOKE, Store(tmp_path / "results"), tmp_path / "claims.md")
    assert "Not run, because the moon is in the way: counted." in (tmp_path / "claims.md").read_text()
    monkeypatch.setitem(KINDS, "structure", usual)
    make(SMOKE, tmp_path, only=["structure.fashion_given"]).run()
    assert json.loads((tmp_path / "results" / "skipped.json").read_text())["why"] == {}


def test_nobody_elses_folder_is_removed(tmp_path):
    scale = one()
    folder = tmp_path / "runs" / scale.trainings[0].name
    folder.mkdir(parents=True)
    (folder / "precious").touch()
    said = []
    make(scale, tmp_path, said.append).run()
    assert "is not a run of this benchmark" in said[-1]
    assert (folder / "precious").exists()
    assert not (folder / MARK).exists()


def test_only_what_was_named(tmp_path):
    with pytest.raises(UserError, match="--only nothing"):
        make(SMOKE, tmp_path, only=["nothing"]).chosen()
    assert [each.name for each in make(SMOKE, tmp_path, only=["cifar10_sampled"]).chosen()] == [
        "cifar10_sampled_0",
        "cifar10_sampled_1",
    ]
    make(SMOKE, tmp_path, only=["structure.fashion_given"]).run()
    assert [path.name for path in (tmp_path / "results/measurements").iterdir()] == ["structure.fashion_given.json"]


def test_no_result_names_a_folder_of_this_machine(tmp_path):
    assert running.without_places(f"{tmp_path}/runs/a is bad", [tmp_path / "runs"]) == "a is bad"


def test_the_command_lists_and_refuses(capsys, tmp_path):
    assert command.main(["--scale", "cpu", "--list", "--results", str(tmp_path)]) == 0
    assert "hours in all" in capsys.readouterr().out.splitlines()[-1]
    assert command.main(["--scale", "smoke", "--only", "x", "--results", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("claims: --only x: no training")


def check_curves(run, path):
    """What a curve says of the last exit is what `cnmm evaluate` says, cut and not."""
    found = json.loads(path.read_text())["found"]
    exit = max(point["exit"] for point in found["points"])
    mine = [point for point in found["points"] if point["exit"] == exit and point["rule"] == "flow"]
    assert len(mine) > 1
    for point in (mine[0], mine[-1]):
        name = f"e{exit}c{point['cuts']}"
        assert Run(run).evaluate(point=name).quality.value == pytest.approx(point["test"], abs=0.006)
        assert Run(run).evaluate(point=name, raw=True).quality.value == pytest.approx(point["raw"], abs=0.006)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_pipeline_at_the_smallest_scale(tmp_path):
    """What `make paper SCALE=smoke` does: every training, every measurement, every verdict, every picture."""
    options = ["--scale", "smoke", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert command.main(options) == 0
    folder = tmp_path / "results" / "smoke"
    found = {path.stem for path in (folder / "measurements").iterdir()}
    assert found == {f"{kind}.{name}" for name, kinds in needed_kinds(SMOKE).items() for kind in kinds}
    for path in folder.glob("*/*.json"):
        result = json.loads(path.read_text())
        assert {"command", "seed", "versions", "hardware", "minutes", "fingerprint"} <= result.keys()
        assert str(tmp_path) not in path.read_text()
    check_curves(
        tmp_path / "runs" / "smoke" / "cifar10_quick_0", folder / "measurements" / "curves.cifar10_quick_0.json"
    )
    page = (folder / "claims.md").read_text()
    assert "not run;" not in page
    assert "Everything was run." in page
    assert all(f"### {claim.key}. " in page for claim in CLAIMS)
    names = {path.name.removeprefix("claims_smoke_") for path in (folder / "images").iterdir()}
    assert {"ablations.svg", "strip.png", "peers_cifar10.svg", "scenes.svg", "cutting_cifar10_sampled.svg"} <= names
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert command.main(options) == 0  # nothing is left to do, and the page is the same
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
