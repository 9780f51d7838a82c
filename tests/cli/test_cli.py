import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cnmm
from cnmm import create_model
from cnmm.cli import main as cli
from cnmm.run_folder import save
from tests.helpers import RUN_CLI, ask, complaint, in_new_process, python

HEAVY = ("torch", "numpy", "matplotlib", "onnxruntime", "openvino", "safetensors", "PIL", "starlette", "uvicorn")

VARIANT = {"--blocks", "--scales", "--channels", "--stem-stride", "--exits", "--mixing", "--gate-init"}
OPTIONS = {
    "models": {"--json", "--debug"},
    "info": VARIANT | {"--learning", "--num-classes", "--in-chans", "--input-size", "--json", "--debug"},
    "draw": VARIANT | {"--num-classes", "--in-chans", "--input-size", "--json", "--debug", "-o", "--out", "--point"},
    "train": VARIANT
    | {
        *("--data", "-o", "--out", "--model", "--recipe", "--init", "--resume", "--overwrite", "--skip-bad"),
        *("--size", "--area"),
        *("--json", "--debug"),
        *("--epochs", "--batch-size", "--lr", "--warmup", "--momentum", "--nesterov", "--weight-decay", "--decay-all"),
        *("--gates", "--group", "--temperature", "--exit-weights", "--label-smoothing", "--ladder-start"),
        *("--exits-per-step", "--loss-stride"),
        *("--optimizer", "--matrix-lr", "--shift-lr", "--freeze-out", "--schedule", "--stem-init"),
        *("--ladder-weight", "--ladder-rule", "--ladder-labels", "--exit-distill", "--clip", "--average"),
        *("--teacher", "--teacher-weight", "--teacher-temperature"),
        *("--crop", "--padding", "--flip", "--flips", "--val", "--seed", "--precision"),
        *("--cycle-lr", "--scene-crop", "--final-crop", "--final-epochs", "--zoom", "--colour", "--class-weights"),
        *("--statistics", "--device", "--workers"),
    },
    "evaluate": {
        *("--data", "--split", "--point", "--budget", "--metric", "--raw", "--monte-carlo", "--hard", "--device"),
        *("--workers", "--json", "--debug"),
    },
    "frontier": {
        *(
            "--data",
            "--rule",
            "--images",
            "--points",
            "--metric",
            "--statistics",
            "--test",
            "--plot",
            "--json",
            "--debug",
        )
    },
    "choose": {"--budget", "--runtime", "--threads", "--json", "--debug"},
    "slim": {"-o", "--out", "--budget", "--point", "--data", "--overwrite", "--json", "--debug"},
    "export": {
        *("-o", "--out", "--budget", "--point", "--ladder", "--precision", "--any-size", "--data", "--overwrite"),
        *("--json", "--debug"),
    },
    "report": {"-o", "--out", "--data", "--json", "--debug"},
    "predict": {
        *("--budget", "--point", "--confidence", "--average-macs", "--deadline-ms", "--runtime", "--threads", "--top"),
        *("-o", "--out", "--shard", "--budgets", "--json", "--debug"),
    },
    "serve": {
        *("--target-ms", "--runtime", "--cores", "--host", "--port", "--policy", "--drain-s"),
        *("--engine", "--replicas", "--json", "--debug"),
    },
    "simulate": {
        *("--arrivals", "--load", "--target-ms", "--policy", "--cores", "--images", "--requests", "--runtime"),
        *("--seed", "-o", "--out", "--json", "--debug"),
    },
    "loadtest": {
        *("--arrivals", "--rate", "--load", "--requests", "--target-ms", "--images", "--data", "--images-per-request"),
        *("--seed", "-o", "--out", "--json", "--debug"),
    },
    "bench": {"--runtime", "--threads", "--batch", "--precision", "--seconds", "--json", "--debug"},
}
"""The contract: scripts of users depend on every one of these."""

B6S3 = [
    (1, 5_657_600, 1),
    (2, 15_209_472, 6),
    (3, 28_955_648, 24),
    (4, 46_896_128, 80),
    (5, 69_030_912, 240),
    (6, 95_360_000, 672),
]


pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    model = create_model("cnmm_tiny", num_classes=7)
    with_gates = model.gate_logits.detach()
    with_gates.copy_(with_gates.new_tensor([0.3 * (-1) ** k * (k % 5) for k in range(len(with_gates))]))
    save(model, folder)
    return folder


# What help costs


def test_help_imports_nothing_heavy():
    """All pages in one process: what one of them imports stays in sys.modules. Starting the command is help too."""
    code = f"""
import sys
from cnmm.cli import main
for args in {[["--help"], ["--version"], *([verb, "--help"] for verb in OPTIONS)]}:
    assert main.main(args) == 0, args
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (args, heavy)
"""
    result = python(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(f"usage: cnmm {verb}" in result.stdout for verb in OPTIONS)


def test_looking_at_the_zoo_needs_no_torch():
    for args in (["models"], ["info", "cnmm_b6s3"], ["info", "cnmm_b6s3", "--json"]):
        result = python(RUN_CLI, *args, missing=HEAVY)
        assert result.returncode == 0, result.stderr
        assert "cnmm_b6s3" in result.stdout


def test_python_m_and_version():
    result = in_new_process(sys.executable, "-m", "cnmm", "--version")
    assert (result.returncode, result.stdout) == (0, f"cnmm {cnmm.__version__}\n")


# The contract


def test_verbs_are_frozen():
    assert set(cli.VERBS) == set(OPTIONS)


@pytest.mark.parametrize("verb", OPTIONS)
def test_options_are_frozen(capsys, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "100")  # one column of options
    assert cli.main([verb, "--help"]) == 0
    shown = re.findall(r"(?:^\W? +|, )(--?[a-z][a-z-]*)", capsys.readouterr().out, re.MULTILINE)
    assert set(shown) - {"-h", "--help"} == OPTIONS[verb]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["no verb given", "models, info, draw", "cnmm --help"]),
        (["fly"], ["unknown verb 'fly'", "models, info, draw"]),
        (["evalute", "run"], ["unknown verb 'evalute'", "did you mean evaluate?"]),
        (["\x1b[31m"], [r"unknown verb '\x1b[31m'"]),
        (["--json"], ["unknown verb '--json'"]),
        (["info"], ["missing MODEL|RUN ", "`cnmm info --help`"]),
        (["info", "cnmm_b6s3", "--chanels", "4"], ["unknown flag --chanels of `cnmm info`; did you mean --channels?"]),
        (["info", "cnmm_b6s3", "--xyzzy=4"], ["unknown flag --xyzzy of `cnmm info`; `cnmm info --help` lists all"]),
        (["draw", "cnmm_b6s3"], ["missing -o", "--out FILE", "`cnmm draw --help`"]),
        (["draw", "cnmm_b6s3", "-p", "e1c0", "-o", "a.svg"], ["unknown flag -p of `cnmm draw`"]),
        (["train", "--dat", "fashion", "--out", "x"], ["unknown flag --dat of `cnmm train`; did you mean --data?"]),
        (["train", "--data", "fashion", "--ot", "x"], ["unknown flag --ot of `cnmm train`; did you mean --out?"]),
        (["train", "--data", "fashion", "--out", "x", "--lr", "abc"], ["--lr", "'abc'", "`cnmm train --help`"]),
        (["info", "cnmm_b6s3", "--exits", "one"], ["'one' for argument '--exits': must be one of all, last"]),
        (["train", "--data", "fashion", "--out", "x", "--epochs", "9" * 5000], ["--epochs", "4300 digits"]),
        (["info", "cnmm_b6s3", "--input-size", "3"], ["--input-size", "['3']"]),
        (["bench", "x", "--batch"], ["'--batch'"]),
        (["choose", "run", "--budget", "40%", "--jsn"], ["unknown flag --jsn of `cnmm choose`; did you mean --json?"]),
        (["export", "run", "-o", "a", "extra"], ["extra"]),
    ],
)
def test_usage_errors_are_one_line_with_the_nearest_right_thing(capsys, args, words):
    line = complaint(capsys, *args)
    assert len(line) < 600
    for word in words:
        assert word in line


def test_info_of_the_papers_model(capsys):
    answer = ask(capsys, "info", "cnmm_b6s3")
    assert {"model", "maps", "edges", "networks", "macs", "params", "exits"} <= answer.keys()
    assert (answer["model"], answer["maps"], answer["block_edges"]) == ("cnmm_b6s3", 18, 87)
    assert answer["edges"] == 87 + 1 + 6
    assert (answer["macs"], answer["networks"]) == (95_360_000, 672)
    assert answer["params"] == answer["exits"][-1]["params"]
    assert answer["format_version"] == 1
    assert [(row["exit"], row["macs"], row["networks"]) for row in answer["exits"]] == B6S3
    assert all(row.keys() == {"exit", "macs", "params", "networks"} for row in answer["exits"])


@pytest.mark.parametrize(
    ("model", "macs", "networks"), [("cnmm_b12s3", 341_414_912, 159_744), ("cnmm_seg_b5s5", 2_671_411_200, 2_016)]
)
def test_info_of_the_papers_larger_models(capsys, model, macs, networks):
    answer = ask(capsys, "info", model)
    assert (answer["macs"], answer["networks"]) == (macs, networks)


def test_info_for_people_has_the_same_numbers(capsys):
    assert cli.main(["info", "cnmm_b6s3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for _, macs, networks in B6S3:
        assert re.search(rf" {networks} +{macs:,} ", out)


def test_overrides(capsys):
    plan = cnmm.model_plan("cnmm_b5s4", num_classes=7, in_chans=1, input_size=(96, 64), stem_stride=2, channels=16)
    flags = ["--num-classes", 7, "--in-chans", 1, "--input-size", 96, 64, "--stem-stride", 2, "--channels", 16]
    answer = ask(capsys, "info", "cnmm_b5s4", *flags)
    cost = cnmm.CostTable.of(plan.config).exit()
    assert (answer["macs"], answer["params"], answer["input_size"]) == (cost.macs, cost.params, [96, 64])


def test_models_lists_the_zoo(capsys):
    answer = ask(capsys, "models")
    assert [row["model"] for row in answer["models"]] == cnmm.list_models()
    assert all(row["description"] and row["networks"] >= 1 and row["macs"] > 0 for row in answer["models"])
    assert [row["model"] for row in ask(capsys, "models", "seg")["models"]] == cnmm.list_models("seg")


def test_models_for_people(capsys):
    assert cli.main(["models"]) == 0
    out, err = capsys.readouterr()
    for name in cnmm.list_models():
        assert name in out
    assert re.search(r"cnmm_b6s3 +18 +94 +672 +95\.4 M +1\.51 M +3x32x32 +The paper's CIFAR model", out)
    assert "stem" in err  # says which edges are counted


# Run folders


def test_info_of_a_run_folder(capsys, run_folder):
    answer = ask(capsys, "info", run_folder)
    expected = ask(capsys, "info", "cnmm_tiny", "--num-classes", "7")
    assert answer.pop("run") == str(run_folder)
    assert answer == expected


def test_a_run_folder_at_another_input_size(capsys, run_folder):
    answer = ask(capsys, "info", run_folder, "--input-size", 56, 56)
    expected = ask(capsys, "info", "cnmm_tiny", "--num-classes", 7, "--input-size", 56, 56)
    assert answer["macs"] == expected["macs"]
    assert answer["macs"] > 3 * ask(capsys, "info", run_folder)["macs"]


def test_a_run_folder_is_drawn_with_its_own_gates(capsys, run_folder):
    answer = ask(capsys, "draw", run_folder, "--point", "e3c3", "-o", "own.svg")
    untrained = ask(capsys, "draw", "cnmm_tiny", "--num-classes", 7, "--point", "e3c3", "-o", "zoo.svg")
    assert answer["point"] == untrained["point"] == "e3c3"
    assert Path("own.svg").read_bytes() != Path("zoo.svg").read_bytes()


def test_a_run_folder_takes_no_overrides(capsys, run_folder):
    line = complaint(capsys, "info", run_folder, "--num-classes", 9)
    assert "--num-classes 9" in line
    assert "run folder" in line


def test_a_run_folder_named_like_a_model(capsys, run_folder):
    shutil.copytree(run_folder, "cnmm_b6s3")
    assert cli.main(["info", "cnmm_b6s3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "cnmm_tiny"
    assert "run folder" in err


def test_any_other_folder_named_like_a_model_changes_nothing(capsys):
    Path("cnmm_b6s3").mkdir()
    assert ask(capsys, "info", "cnmm_b6s3")["macs"] == 95_360_000


# Errors


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["info", "cnmm_b6s33"], ["cnmm_b6s33", "cnmm_b6s3", "cnmm models"]),
        (["info", "runs/none"], ["runs/none", "no such run folder", "cnmm models"]),
        (["models", "resnet"], ["'resnet'", "cnmm_b6s3"]),
        (["info", "cnmm_seg_b5s5", "--input-size", "4", "4"], ["4x4", "at least 64x64"]),
        (["info", "cnmm_b6s3", "--input-size", "3", "32"], ["3x32", "at least 4x4"]),
        (["info", "cnmm_b6s3", "--channels", "30"], ["channels=30", "multiple of 4"]),
        (["info", "cnmm_b6s3", "--stem-stride", "3"], ["stem_stride=3", "1, 2, 4"]),
        (["draw", "cnmm_b6s3", "-o", "a.svg", "--point", "e9c0"], ["'e9c0'", "no exit 9", "6"]),
        (["draw", "cnmm_b6s3", "-o", "a.svg", "--point", "e6c999"], ["'e6c999'", "0 to 75", "e6c75"]),
        (["draw", "cnmm_b6s3", "-o", "a.svg", "--point", "banana"], ["'banana'", "e5c37"]),
        (["draw", "cnmm_b6s3", "-o", "a.pdf"], ["a.pdf", ".svg or .png", "a.svg"]),
        (["draw", "cnmm_b6s3", "-o", "a"], [".svg or .png", "a.svg"]),
        (["draw", "cnmm_tiny", "-o", "none/a.svg"], ["none/a.svg", "mkdir -p none"]),
    ],
)
def test_errors_name_the_value_and_the_fix(capsys, args, words):
    line = complaint(capsys, *args)
    for word in words:
        assert word in line
    assert list(Path().iterdir()) == []


def test_a_file_and_another_folder_are_no_run(capsys):
    Path("file").write_text("x")
    Path("folder").mkdir()
    for name in ("file", "folder"):
        assert f"{name}: not a run folder (config.json missing)" in complaint(capsys, "info", name)
        assert "cannot be written" in complaint(capsys, "draw", "cnmm_tiny", "-o", "file/a.svg")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format_version": 1, "model": 3}', '{"format_version": 99, "model": {"name": "x"}}'],
)
def test_corrupt_config(capsys, run_folder, text):
    shutil.copytree(run_folder, "run")
    Path("run/config.json").write_text(text)
    assert str(Path("run/config.json")) in complaint(capsys, "info", "run")


def test_corrupt_weights(capsys, run_folder):
    shutil.copytree(run_folder, "run")
    Path("run/model.safetensors").write_bytes(b"no weights")
    assert str(Path("run/model.safetensors")) in complaint(capsys, "info", "run")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(capsys):
    Path("locked").mkdir(mode=0o500)
    assert "locked/a.svg: cannot be written" in complaint(capsys, "draw", "cnmm_tiny", "-o", "locked/a.svg")


def test_a_refused_write(capsys, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", f".{path.name}.x7")

    monkeypatch.setattr("cnmm.draw.write_atomically", refuse)
    line = complaint(capsys, "draw", "cnmm_tiny", "-o", "a.svg")
    assert line.startswith("cnmm: a.svg: cannot be written (Permission denied)")


def test_a_folder_instead_of_a_file(capsys):
    Path("a.svg").mkdir()
    assert "a.svg: cannot be written" in complaint(capsys, "draw", "cnmm_tiny", "-o", "a.svg")
    assert [path.name for path in Path().iterdir()] == ["a.svg"]


def test_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = complaint(capsys, "draw", "cnmm_tiny", "-o", "a.svg")
    assert "needs matplotlib" in line
    assert 'pip install "cnmm[train]"' in line


def test_debug_shows_the_traceback(capsys, monkeypatch):
    assert cli.main(["info", "no_model", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("CNMM_DEBUG", "1")
    assert cli.main(["info", "no_model"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cnmm.cli.models.find_model", interrupt)
    assert cli.main(["info", "cnmm_b6s3"]) == 130
    assert capsys.readouterr() == ("", "cnmm: interrupted\n")


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = in_new_process(
            *(sys.executable, "-m", "cnmm", "models"), capture_output=False, stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert result.returncode == 141
    assert "Error" not in result.stderr


# Drawing


def test_draw_prints_the_path(capsys):
    assert cli.main(["draw", "cnmm_tiny", "-o", "a.png"]) == 0
    assert capsys.readouterr() == ("a.png\n", "")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_draw_json(capsys):
    answer = ask(capsys, "draw", "cnmm_b6s3", "--point", "e4c0", "-o", "a.svg")
    assert (answer["file"], answer["point"], answer["macs"]) == ("a.svg", "e4c0", 46_896_128)
    answer = ask(capsys, "draw", "cnmm_b6s3", "--out", "a.svg")
    assert (answer["file"], answer["point"], answer["macs"]) == ("a.svg", "e6c0", 95_360_000)
