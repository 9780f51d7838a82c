import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import cnmm
from cnmm._files import write_atomically
from cnmm.run_folder import load_config, load_plan, save


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = cnmm.create_model("cnmm_tiny", num_classes=4)
    with torch.no_grad():
        model.gate_logits.copy_(torch.randn_like(model.gate_logits))
        model(torch.randn(8, 1, 28, 28))  # statistics that are not the initial ones
    return model


@pytest.mark.parametrize("name", cnmm.list_models())
def test_round_trip_is_bitwise(name, tmp_path):
    model = cnmm.create_model(name).to(memory_format=torch.channels_last)  # safetensors wants contiguous tensors
    save(model, tmp_path / "run")
    loaded = cnmm.load(tmp_path / "run")
    assert loaded.config == model.config
    assert not loaded.training
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_loaded_model_answers_the_same(model, tmp_path):
    save(model, tmp_path)
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(cnmm.load(tmp_path)(x), model.eval()(x))


def test_the_plan_of_a_run_has_its_gates(model, tmp_path):
    save(model, tmp_path)
    plan = load_plan(tmp_path)
    assert plan.chain.logits == pytest.approx(model.gate_logits.tolist())
    assert [p.edges for p in cnmm.cutting_order(plan)] == [p.edges for p in cnmm.cutting_order(model)]


def test_the_deterministic_variant_is_saved_too(tmp_path):
    save(cnmm.create_model("cnmm_tiny", mixing="sum"), tmp_path)
    assert load_plan(tmp_path).config.mixing == "sum"
    assert cnmm.load(tmp_path).config.mixing == "sum"


def test_a_broken_write_leaves_the_old_file(model, tmp_path, monkeypatch):
    save(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save(cnmm.create_model("cnmm_tiny"), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_files_are_readable_by_others(tmp_path):
    write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def damaged(tmp_path, model, how):
    save(model, tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    data = json.loads(config.read_text())
    if how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "not json":
        config.write_text("{")
    elif how == "no model":
        config.write_text("[]")
    elif how == "newer format":
        config.write_text(json.dumps({**data, "format_version": 99}))
    elif how == "unknown field":
        config.write_text(json.dumps({**data, "model": {**data["model"], "depth": 3}}))
    elif how == "bad value":
        config.write_text(json.dumps({**data, "model": {**data["model"], "blocks": "six"}}))
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "pickle":
        torch.save({"gate_logits": torch.zeros(16)}, weights)
    elif how == "other shapes":
        save_file({**load_file(weights), "gate_logits": torch.zeros(3)}, weights)
    elif how == "extra tensor":
        save_file({**load_file(weights), "surprise": torch.zeros(3)}, weights)
    return tmp_path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "not a run folder \\(config.json is missing"),
        ("no weights", "model.safetensors is missing"),
        ("not json", "config.json: cannot be read"),
        ("no model", "must be an object, not "),
        ("newer format", "format_version=99, this version of cnmm reads 1"),
        ("unknown field", "unknown field model.depth; it was written by a later version"),
        ("bad value", "model.blocks='six': must be a whole number"),
        ("truncated", "cannot be read as safetensors"),
        ("pickle", "cannot be read as safetensors"),
        ("other shapes", r"'gate_logits' is \(3,\) but config.json needs \(16,\)"),
        ("extra tensor", "'surprise' is .* but config.json needs nothing"),
    ],
)
def test_damaged_runs_are_refused(how, message, model, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        cnmm.load(damaged(tmp_path, model, how))
    assert "\n" not in str(caught.value)


def test_a_plan_needs_the_gates_of_its_lattice(model, tmp_path):
    with pytest.raises(ValueError, match="must have 'gate_logits' with 16 finite values"):
        load_plan(damaged(tmp_path, model, "other shapes"))


def test_config_is_plain_json(model, tmp_path):
    save(model, tmp_path)
    assert load_config(tmp_path) == model.config
    assert json.loads((tmp_path / "config.json").read_text())["format_version"] == 1
