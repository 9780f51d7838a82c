"""A run folder in Python: everything that the verbs do, on the shared trained run."""

import json
import tempfile
from collections import Counter

import numpy as np
import pytest
import torch

import cnmm
from cnmm.cli.terminal import point_row
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.statistics import load_statistics
from cnmm.ladder import read_ladder
from cnmm.lattice import network_point
from cnmm.run import Run
from cnmm.training.seeds import seeded
from tests.helpers import ask, refused
from tests.reference import enumerate_networks


def images(num, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, 28, 28, 1), np.uint8)


# Sessions


def test_a_session_of_a_run_leaves_nothing_behind(trained_run, trained_ladder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run(trained_run)
    with run.session(3, threads=1) as session, cnmm.Session(trained_ladder, threads=1) as other:
        assert list(tmp_path.iterdir()) == []
        for options in ({}, {"budget": "60%"}, {"confidence": 0.3}):
            found, expected = session.predict(images(5), **options), other.predict(images(5), **options)
            assert (found.point, found.macs, found.exits.tolist()) == (
                expected.point,
                expected.macs,
                expected.exits.tolist(),
            )
            assert np.array_equal(found.probabilities, expected.probabilities)
        assert f"cnmm bench {trained_run}" in refused(session.choose, "9ms")
    with run.as_ladder(2) as folder:
        assert len(read_ladder(folder).networks) == 2
    assert list(tmp_path.iterdir()) == []


def test_latency_of_a_run_is_stored_with_it(own_run):
    run = Run(own_run)
    assert run.latency() == {}
    with run.as_ladder(2) as folder:
        cnmm.bench(folder, runtime="onnx", seconds=0, out=own_run)
    assert run.latency()
    assert run.latency().keys() <= {point.name for point in run.frontier.points}
    assert run.choose("9999ms").name in run.latency()
    assert "not measured with onnx, float32, 77 threads" in refused(run.choose, "9999ms", threads=77)
    assert "fastest" in refused(run.choose, "0.0001ms")


# Points


def test_a_budget_or_a_point(trained_run):
    run = Run(trained_run)
    assert run.find().name == "e3c0"
    assert run.find(point="e2c1").name == "e2c1"
    assert run.find(budget="60%").name == run.choose("60%").name
    for function in (run.find, run.evaluate, run.slim):
        line = refused(function, budget="60%", point="e2c1")
        assert "'60%'" in line
        assert "only one" in line


def test_what_a_verb_prints_is_what_python_returns(trained_run, capsys):
    run = Run(trained_run)
    row = ask(capsys, "choose", trained_run, "--budget", "60%")
    assert json.loads(json.dumps(point_row(run.choose("60%")))).items() <= row.items()
    answer = ask(capsys, "evaluate", trained_run, "--split", "validation", "--budget", "60%")
    evaluation = run.evaluate(split="validation", budget="60%")
    assert (answer["point"], answer["macs"]) == (evaluation.point.name, evaluation.macs)
    assert (answer["quality"], answer["statistics"]) == (evaluation.quality.value, evaluation.statistics)
    assert answer["quality"] == run.choose("60%").quality  # the frontier was measured on these images


# The paper's own statistics


def test_raw_statistics_for_all_points(own_run, tmp_path):
    """Nothing is re-estimated: every point is measured, slimmed and exported with the run's own statistics."""
    run = Run(own_run)
    before = run.frontier
    frontier = run.measure(statistics="raw", points=6)
    split, part, chosen = run.images.measured()
    validation = list(run.images.batches(part, chosen))
    assert {point.statistics for point in frontier.points} == {"raw"}
    for point in frontier.points:
        named = cnmm.named_point(run.model, point.name)
        expected = evaluate_exits(run.model, validation, named)[named.exit]
        assert (point.quality, point.raw_quality, point.split) == (expected.value, expected.value, split)
    assert any(point.quality != before[point.name].quality for point in frontier.points)
    assert not frontier.buffers
    assert not list(own_run.glob("statistics*"))

    again = Run(own_run)
    assert again.frontier == frontier
    name = frontier.envelope()[0].name
    point = cnmm.named_point(run.model, name)
    x = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        raw = run.model(x, point)
        assert torch.allclose(again.slim(point=name)(x), raw, atol=1e-5 * raw.abs().max().item())
    evaluation = again.evaluate(split="validation", point=name)
    assert (evaluation.statistics, evaluation.quality.value) == ("raw", frontier[name].quality)
    ladder = again.export_ladder(tmp_path / "ladder", 2)
    pixels, _ = again.images.held_out(8)
    with cnmm.Session(ladder.folder, threads=1) as session, torch.no_grad():
        x = again.images.prepared.prepare(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        expected = run.model(x, point).softmax(1).numpy()
        assert np.abs(session.predict(pixels, point=name).probabilities - expected).max() < 1e-4


def test_measuring_again_replaces_all_of_it(own_run):
    run = Run(own_run)
    run.measure(statistics="raw", points=3)
    assert not list(own_run.glob("statistics*"))
    frontier = run.measure(points=3, images=50, metric="mean_class_accuracy")
    assert {(point.n, point.metric, point.statistics) for point in frontier.points} == {
        (50, "mean_class_accuracy", "re-estimated")
    }
    (statistics,) = own_run.glob("statistics*")
    assert load_statistics(statistics).keys() == frontier.buffers.keys()
    assert Run(own_run).choose("mca:0").name == frontier.points[0].name
    saved = json.loads((own_run / "frontier.json").read_text())
    assert saved["cascade"]["metric"] == "mean_class_accuracy"


# Monte-Carlo


def test_samples_have_the_runs_temperature_and_cost_as_many_passes(own_run):
    about = json.loads((own_run / "config.json").read_text())
    about["train"]["temperature"] = 0.37
    (own_run / "config.json").write_text(json.dumps(about))
    run = Run(own_run)
    part, chosen = run.images.split("validation")
    one = run.evaluate(split="validation")
    for hard in (False, True):
        found = run.evaluate(split="validation", monte_carlo=3, hard=hard)
        generator = seeded(run.config.seed, "monte-carlo")
        options = {"monte_carlo": 3, "hard": hard, "temperature": 0.37, "generator": generator, "detailed": True}
        expected = evaluate_exits(run.model, run.images.batches(part, chosen), **options)
        assert found.exits == expected
        assert found.macs == found.exit_macs[3] == 3 * one.macs
    cut = run.evaluate(split="validation", point="e2c1", monte_carlo=4)
    assert cut.macs == 4 * cnmm.CostTable.of(run.model.config).point(cnmm.named_point(run.model, "e2c1")).macs


def test_temperature_reaches_the_samples(trained_run, monkeypatch):
    run, seen = Run(trained_run), []
    sample = run.model.monte_carlo

    def spy(images, num, point, **options):
        seen.append((num, options["hard"], options["temperature"]))
        return sample(images, num, point, **options)

    monkeypatch.setattr(run.model, "monte_carlo", spy)
    monkeypatch.setattr(run.model, "to", lambda *_: run.model)
    run.evaluate(split="validation", monte_carlo=2, hard=True)
    assert set(seen) == {(2, True, run.config.temperature)}


def test_a_hard_sample_is_one_network_of_the_mixture():
    """And each comes as often as its probability says."""
    torch.manual_seed(0)
    model = cnmm.create_model("cnmm_tiny", blocks=3, scales=1, channels=4, num_classes=3).double().eval()
    with torch.no_grad():
        model.gate_logits.normal_()
    networks = enumerate_networks(model.config, model.config.blocks)
    x = torch.randn(300, 1, 28, 28, dtype=torch.double)[:1].expand(300, -1, -1, -1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        alone = torch.cat([model(x[:1], network_point(model.lattice, network)).softmax(1) for network in networks])
        found = model.monte_carlo(x, 1, hard=True, generator=generator)
    near = (found[:, None] - alone[None]).abs().amax(2)
    assert near.min(1).values.max() < 1e-9
    counts = Counter(near.argmin(1).tolist())
    for number, network in enumerate(networks):
        p = model.chain.log_prob(network).exp().item()
        assert counts[number] / 300 == pytest.approx(p, abs=4 * (p * (1 - p) / 300) ** 0.5 + 1e-9)
