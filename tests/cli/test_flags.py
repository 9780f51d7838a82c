import dataclasses
import re
import subprocess
import sys

import pytest
import tyro

import cnmm
from cnmm.cli.flags import MODEL, VARIANT, asked_recipe, field_texts, model_flags, training_flags
from cnmm.cli.main import main
from cnmm.config import MixtureConfig
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import list_recipes, recipe


@pytest.fixture(autouse=True)
def plain_help(monkeypatch):
    """One column without colours."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def parse(flags, *args):
    return tyro.cli(flags, args=args, config=(tyro.conf.DisallowNone,))


@pytest.mark.parametrize("name", list_recipes())
def test_the_flags_are_the_fields_of_the_recipe(name):
    config, flags = recipe(name), training_flags(name)
    values = {field.name: field.default for field in dataclasses.fields(flags)}
    assert {"recipe": name, **values} == vars(config)
    assert recipe(name, **parse(flags).given()) == config


def test_every_field_has_a_help_text():
    assert set(field_texts(TrainConfig)) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(MODEL) <= set(field_texts(MixtureConfig))
    assert set(VARIANT) < set(MODEL)
    assert set(MODEL) == {field.name for field in dataclasses.fields(MixtureConfig)} - {"name", "task"}


def test_a_flag_that_repeats_its_default_overrides_nothing():
    flags = parse(training_flags("cifar10"), "--epochs", "300", "--lr", "0.2", "--flip", "True", "--nesterov", "True")
    assert flags.given() == {"lr": 0.2, "nesterov": True}
    flags = parse(training_flags("quick"), "--optimizer", "muon", "--gates", "expectation", "--group", "4")
    assert flags.given() == {"group": 4}
    flags = parse(model_flags(), "--blocks", "6", "--exits", "last", "--input-size", "32", "48")
    assert flags.given() == {"blocks": 6, "exits": "last", "input_size": (32, 48)}


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ([], "quick"),
        (["--recipe", "cifar10"], "cifar10"),
        (["--recipe=cifar100", "--lr", "1"], "cifar100"),
        (["--recipe", "cifar10", "--recipe=quick"], "quick"),  # the last one counts, as the parser has it
        (["--lr", "1", "--recipe"], "quick"),  # the parser complains
        (["--recipe", "--lr", "1"], "quick"),
    ],
)
def test_the_recipe_is_read_before_the_flags(args, name):
    assert asked_recipe(args) == name


def help_page(capsys, *args):
    """The help page of a verb on one line."""
    assert main([*args, "--help"]) == 0
    text = re.sub(r"[│╭╰─╮╯]", " ", capsys.readouterr().out)
    return " ".join(text.split())


def test_help_shows_the_values_of_the_recipe(capsys):
    quick, paper = (help_page(capsys, "train", *args) for args in ([], ["--recipe", "cifar10"]))
    for field, text in field_texts(TrainConfig).items():
        assert text in quick or field == "recipe"
    for page, epochs, lr, gates in ((quick, 14, 0.004, "expectation"), (paper, 300, 0.1, "relaxed")):
        assert f"--epochs INT Passes over the training images. (default: {epochs})" in page
        assert re.search(rf"--lr FLOAT [^-]*\(default: {lr}\)", page)
        assert re.search(rf"--gates {{expectation,relaxed,hard}} [^-]*\(default: {gates}\)", page)
    assert "(default: the whole batch)" in quick
    assert "(default: the whole batch)" not in paper


def test_unknown_recipes_and_values_are_refused(capsys):
    assert main(["train", "--data", "fashion", "--out", "x", "--recipe", "slow"]) == 2
    known = "quick, long, cifar10, cifar100, street, cityscapes"
    assert capsys.readouterr().err == f"cnmm: unknown recipe 'slow': must be one of {known}\n"
    assert main(["train", "--data", "fashion", "--out", "x", "--exits", "first"]) == 2
    assert "invalid choice 'first' for argument '--exits': must be one of all, last" in capsys.readouterr().err
    assert main(["train", "--data", "fashion", "--out", "x", "--recipe", "--json"]) == 2
    assert "'--recipe'" in capsys.readouterr().err


def test_help_of_training_needs_no_torch():
    code = "import sys; from cnmm.cli.main import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_variants_of_a_model_are_shown_and_drawn(capsys, tmp_path):
    single = cnmm.model_plan("cnmm_b6s3", exits="last", blocks=4)
    assert main(["info", "cnmm_b6s3", "--exits", "last", "--blocks", "4", "--json"]) == 0
    out = capsys.readouterr().out
    assert f'"macs": {cnmm.CostTable.of(single.config).exit().macs}' in out
    assert out.count('"exit":') == 1
    assert main(["info", "cnmm_b6s3", "--mixing", "sum", "--json"]) == 0
    assert '"networks": 1,' in capsys.readouterr().out
    for flags in (["--mixing", "sum"], ["--gate-init", "uniform", "--scales", "2"]):
        assert main(["draw", "cnmm_tiny", *flags, "-o", str(tmp_path / "a.svg")]) == 0
