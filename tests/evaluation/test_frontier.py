import csv
import json
import re
import sys
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cnmm
from cnmm import create_model, cutting_order
from cnmm.cli import main as cli
from cnmm.draw import save_picture
from cnmm.evaluation.engine import Engine
from cnmm.evaluation.evaluate import evaluate_exits
from cnmm.evaluation.measure import measure
from cnmm.evaluation.plot import plot_frontier
from cnmm.evaluation.search import MATTERS, cutting_curves, first_points, next_points
from cnmm.evaluation.statistics import load_statistics, reestimated, statistics_bytes, with_statistics
from cnmm.frontier import Frontier, FrontierPoint, find_frontier
from cnmm.training import batches as training
from tests.helpers import RUN_CLI, ask, complaint, python, refused


def made_up(name, macs, quality, **fields):
    known = {"name": name, "rule": "flow", "cuts": 0, "exit": 1, "macs": macs, "params": macs // 10}
    near = {"low": max(quality - 0.01, 0), "high": min(quality + 0.01, 1), "n": 1000, "metric": "accuracy"}
    about = {"split": "validation", "statistics": "re-estimated"}
    return FrontierPoint(**{**known, "quality": quality, **near, **about, **fields})


@pytest.fixture
def frontier():
    points = made_up("b", 20, 0.7), made_up("a", 10, 0.5), made_up("c", 30, 0.6), made_up("d", 40, 0.9)
    return Frontier(model="m", full_macs=40, points=points)


# Choosing


def test_envelope(frontier):
    assert [point.name for point in frontier.points] == ["a", "b", "c", "d"]
    assert [point.name for point in frontier.envelope()] == ["a", "b", "d"]
    assert frontier["c"].on_envelope is False


@pytest.mark.parametrize(
    ("budget", "point"),
    [("40", "d"), ("39", "b"), (10, "a"), ("1G", "d"), ("25%", "a"), ("99.9%", "b"), ("100%", "d"), ("acc:0.55", "b")],
)
def test_choose(frontier, budget, point):
    assert frontier.choose(budget).name == point


@pytest.mark.parametrize(
    ("budget", "words"),
    [("9", ["'9'", "a with 10 macs"]), ("20%", ["'20%'", "a", "25.0%"]), ("acc:0.95", ["'acc:0.95'", "d", "0.9"])],
)
def test_nothing_fits(frontier, budget, words):
    with pytest.raises(ValueError, match="no point is that") as error:
        frontier.choose(budget)
    assert all(word in str(error.value) for word in words)


def test_a_quality_is_of_the_metric_that_was_measured(frontier):
    line = refused(frontier.choose, "mca:0.6")
    assert "measured by accuracy" in line
    assert "acc:0.6" in line
    points = tuple(replace(point, metric="mean_class_accuracy") for point in frontier.points)
    other = replace(frontier, points=points)
    assert (other.metric, other.choose("mca:0.6").name) == ("mean_class_accuracy", "b")
    assert "try mca:0.6" in refused(other.choose, "acc:0.6")


def test_choose_by_latency(frontier):
    times = {"a": 2.0, "b": 1.0, "c": 1.5}
    assert frontier.choose("1.5ms", times).name == "b"
    assert frontier.choose("9ms", times).name == "b"  # d was not timed
    assert frontier.choose("9ms", {**times, "d": 9.0}).name == "d"
    with pytest.raises(ValueError, match="fastest is b with 1 ms"):
        frontier.choose("0.5ms", times)
    for missing in (None, {}, {"z": 1.0}):
        with pytest.raises(ValueError, match="cnmm bench"):
            frontier.choose("25ms", missing)


points_strategy = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=12)


@given(points_strategy, st.integers(1, 100), st.integers(1, 8))
def test_a_budget_is_never_exceeded_and_never_wasted(pairs, budget, num):
    points = tuple(made_up(f"e1c{k}", macs, accuracy / 100) for k, (macs, accuracy) in enumerate(pairs))
    frontier = Frontier(model="m", full_macs=100, points=points)
    fitting = [point for point in points if point.macs <= budget]
    if fitting:
        chosen = frontier.choose(budget)
        assert chosen.macs <= budget
        assert chosen.quality == max(point.quality for point in fitting)
        assert chosen.on_envelope
    else:
        with pytest.raises(ValueError, match="no point is that cheap"):
            frontier.choose(budget)
    envelope, ladder = frontier.envelope(), frontier.ladder(num)
    assert len(ladder) == min(num, len(envelope))
    assert set(ladder) <= set(envelope)
    assert ladder[-1] == envelope[-1]
    assert num == 1 or ladder[0] == envelope[0]
    assert [point.macs for point in ladder] == sorted({point.macs for point in ladder})


def test_ladder_is_even():
    points = tuple(made_up(f"e1c{k}", 10 * k, k / 100) for k in range(1, 100))
    ladder = Frontier(model="m", full_macs=1000, points=points).ladder(8)
    assert [point.macs for point in ladder] == [10, 150, 290, 430, 570, 710, 850, 990]
    with pytest.raises(ValueError, match="points=0: must be a whole number of at least 1"):
        Frontier(model="m", full_macs=1000, points=points).ladder(0)


# Files


def test_round_trip(frontier, tmp_path):
    frontier.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == frontier
    assert find_frontier(tmp_path) == frontier


def cascade(**changes):
    row = {"confidence": [0.5], "average_macs": 5.0, "quality": 0.5, "exits": [0.5, 0.5]} | changes
    row = {name: value for name, value in row.items() if value is not None}
    about = {"metric": "accuracy", "n": 10, "split": "validation"}
    return {"point": "e2a0", "exits": [1, 2], "macs": [3, 4], "thresholds": [row], **about}


def damaged(**changes):
    point = asdict(made_up("a", 10, 0.5))
    data = {"format_version": 1, "model": "m", "full_macs": 40, "points": [point]}
    for name, value in changes.items():
        (point if name in point and name != "model" else data)[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "frontier"),
        ("[]", "object"),
        ("[" * 100_000, "frontier"),
        ("{}", "format_version"),
        (damaged(format_version=9), "pip install -U"),
        (damaged(points=[]), "points=[]: must be a list of 1 or more"),
        (damaged(points="abc"), "points='abc'"),
        (damaged(points=[3]), "points=[3]: must be a list of 1 or more values, each an object"),
        (damaged(points=[asdict(made_up("a", 10, 0.5))] * 2), "'a' occurs twice"),
        (damaged(model=None), "model=None"),
        (damaged(full_macs=0), "full_macs=0"),
        (damaged(name=""), "points[0].name"),
        (damaged(name="a\nb"), "points[0].name"),
        (damaged(rule="best"), "points[0].rule='best'"),
        (damaged(metric=None), "points[0].metric=None"),
        (damaged(exit=0), "points[0].exit=0"),
        (damaged(cuts=-1), "points[0].cuts=-1"),
        (damaged(macs=-1), "points[0].macs=-1"),
        (damaged(macs=1.5), "points[0].macs=1.5"),
        (damaged(params=True), "points[0].params=True"),
        (damaged(quality=1.01), "points[0].quality=1.01"),
        (damaged(quality=float("nan")), "NaN is no finite number"),
        (damaged(low="0.4"), "points[0].low='0.4'"),
        (damaged(n=0), "points[0].n=0"),
        (damaged(statistics="guessed"), "one of re-estimated, raw"),
        (damaged(raw_quality=2), "points[0].raw_quality=2"),
        (damaged(test_n="many"), "points[0].test_n"),
        (damaged(on_envelope=1), "points[0].on_envelope"),
        (damaged(points=[asdict(made_up("a", 1, 0.5)), asdict(made_up("b", 2, 0.5, metric="miou"))]), "one metric"),
        (damaged(cascade=3), "cascade=3: must be an object, or null"),
        (damaged(cascade={}), "cascade.exits is missing"),
        (damaged(cascade=cascade(confidence=None, threshold=0.5)), "cascade.thresholds[0].confidence is missing"),
        (damaged(cascade=cascade(confidence=0.5)), "cascade.thresholds[0].confidence=0.5: must be a list of 1"),
        (damaged(cascade=cascade(confidence=[0.5, 0.6])), "confidence=[0.5, 0.6]: must be a list of 1"),
        (damaged(cascade=cascade(exits=[1.0])), "cascade.thresholds[0].exits=[1.0]: must be a list of 2"),
        (damaged(cascade=cascade(quality=1.5)), "cascade.thresholds[0].quality=1.5"),
        (damaged(cascade={**cascade(), "thresholds": []}), "cascade.thresholds=[]"),
        (damaged(cascade={**cascade(), "exits": [2, 1]}), "cascade.exits=[2, 1]: must ascend"),
        (damaged(cascade={**cascade(), "macs": [3]}), "cascade.macs=[3]: must be a list of 2"),
        (damaged(cascade={**cascade(), "metric": ""}), "cascade.metric=''"),
        (damaged().replace('"macs": 10, ', ""), "points[0].macs is missing"),
    ],
)
def test_a_damaged_file_is_one_clear_line(text, words, tmp_path):
    (tmp_path / "frontier.json").write_text(text)
    with pytest.raises(ValueError, match=r"frontier\.json") as error:
        Frontier.load(tmp_path / "frontier.json")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_undamaged_file_is_read(tmp_path):
    (tmp_path / "frontier.json").write_text(damaged(later="a field of a later version", cascade=cascade()))
    found = Frontier.load(tmp_path / "frontier.json")
    assert found.points[0].name == "a"
    assert found.cascade.thresholds[0].confidence == (0.5,)


def test_no_frontier_yet(tmp_path):
    with pytest.raises(ValueError, match="cnmm frontier"):
        find_frontier(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        find_frontier(tmp_path / "none")


# Measuring


def a_mixture(seed=0, **overrides):
    """Untrained, with random gates, and statistics that fit no point."""
    torch.manual_seed(seed)
    model = create_model("cnmm_tiny", **{"channels": 8, **overrides})
    with torch.no_grad():
        if model.config.mixing == "gates":
            model.gate_logits.normal_()
        for name, buffer in model.named_buffers():
            buffer.add_(0.2 * torch.rand_like(buffer) if name.endswith("var") else 0.2 * torch.randn_like(buffer))
    return model.eval()


def some_images(num, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 1, 28, 28, generator=generator).cumsum(2).cumsum(3) / 8


def some_batches(num=40, seed=2):
    labels = torch.randint(10, (num,), generator=torch.Generator().manual_seed(seed))
    return list(zip(some_images(num, seed).split(16), labels.split(16), strict=True))


def all_points(model, rule="both"):
    return list({each.point.name: each.point for curve in cutting_curves(model, rule) for each in curve}.values())


@pytest.mark.parametrize("memo_bytes", [2**30, 75_000, 0])
def test_shared_passes_equal_separate_ones(memo_bytes):
    model, statistics, validation = a_mixture(), some_images(30).split(12), some_batches()
    engine = Engine(model, memo_bytes)
    points = engine.ordered(all_points(model)[::-1])
    with torch.no_grad():
        engine.estimate(points, statistics, lambda part, fresh=True: None)
        settled = engine.evaluate(points, validation, lambda part, fresh=True: None, metric="accuracy", raw=False)
        raw = engine.evaluate(points, validation, lambda part, fresh=True: None, metric="accuracy", raw=True)
    assert len(points) > 15
    for point in points[:: 1 if memo_bytes > 2**20 else 4]:
        expected = reestimated(model, statistics, point)
        assert settled[point.name] == evaluate_exits(expected, validation, point)[point.exit]
        assert raw[point.name] == evaluate_exits(model, validation, point)[point.exit]
        ours = with_statistics(model, engine.buffers(point))
        for images, _ in validation:
            torch.testing.assert_close(ours(images, point), expected(images, point), rtol=1e-5, atol=1e-5)
    assert raw != settled


def test_shared_passes_over_several_rounds():
    """What a map's readers need may grow from round to round; no statistics of an earlier round may be lost."""
    model, statistics, images = a_mixture(3), some_images(20).split(10), some_images(8)
    engine = Engine(model)
    points = all_points(model)
    with torch.no_grad():
        for chosen in (points[::3], points[1::3], points[2::3]):
            engine.estimate(engine.ordered(chosen), statistics, lambda part, fresh=True: None)
        for point in points[::3] + points[1::6]:
            expected = reestimated(model, statistics, point)(images, point)
            found = with_statistics(model, engine.buffers(point))(images, point)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sharing_saves_most_of_the_work():
    model = a_mixture(blocks=4)
    engine = Engine(model)
    points = engine.ordered(all_points(model))
    separate = sum(engine.costs.point(point).macs for point in points)
    assert engine.macs(points) < 0.3 * separate
    full = engine.ordered(cutting_order(model, exit)[0] for exit in model.config.exit_numbers)
    last = engine.costs.exit().macs
    assert last < engine.macs(full) < 1.1 * last  # all exits for the price of one and some classifiers
    engine.evaluate(points, some_batches(20), lambda part, fresh=True: None, metric="accuracy", raw=True)
    assert engine.evaluated_macs == 20 * engine.macs(points)


def test_measure_does_not_touch_the_model():
    model = a_mixture().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, some_batches(), statistics=some_images(20).split(10), num_points=4)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_figures_of_a_frontier():
    model, statistics, validation, test = a_mixture(), some_images(30).split(15), some_batches(), some_batches(24, 5)
    seen = []
    frontier = cnmm.measure(
        model, validation, statistics=statistics, test=test, rule="both", split="held out", on_progress=seen.append
    )
    assert (frontier.model, frontier.full_macs) == ("cnmm_tiny", cnmm.CostTable.of(model.config).exit().macs)
    assert frontier.buffers.keys() == {point.name for point in frontier.envelope()} | {frontier.cascade.point}
    for point in frontier.points:
        named = cnmm.named_point(model, point.name)
        settled = reestimated(model, statistics, named)
        assert (point.exit, point.split, point.statistics) == (named.exit, "held out", "re-estimated")
        assert point.macs == cnmm.CostTable.of(model.config).point(named).macs
        assert point.quality == evaluate_exits(settled, validation, named)[named.exit].value
        if point.on_envelope:
            assert point.raw_quality == evaluate_exits(model, validation, named)[named.exit].value
            assert point.test_quality == evaluate_exits(settled, test, named)[named.exit].value
            assert (point.n, point.test_n) == (40, 24)
        else:
            assert point.raw_quality is point.test_quality is None
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] <= 1
    assert all(progress.left_s >= 0 for progress in seen)
    assert seen[-1].num_points == len(frontier.points)


def test_without_statistics_the_points_say_raw():
    model, validation = a_mixture(), some_batches()
    frontier = measure(model, validation, num_points=5)
    assert len(frontier.points) <= 5
    assert not frontier.buffers
    for point in frontier.points:
        named = cnmm.named_point(model, point.name)
        expected = evaluate_exits(model, validation, named)[named.exit].value
        assert (point.statistics, point.quality, point.raw_quality) == ("raw", expected, expected)


def test_the_deterministic_variant_has_its_full_exits():
    frontier = measure(a_mixture(mixing="sum"), some_batches(), statistics=[some_images(20)])
    assert {point.name for point in frontier.points} == {"e1c0", "e2c0", "e3c0"}


def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match="metric 'accuracy': must be one of miou, pixel_accuracy"):
        measure(create_model("cnmm_seg_tiny"), [], metric="accuracy")
    with pytest.raises(ValueError, match="validation is iterated more than once"):
        measure(a_mixture(), iter(some_batches()))
    with pytest.raises(ValueError, match="no images to evaluate"):
        measure(a_mixture(), [])
    with pytest.raises(ValueError, match="no images to estimate"):
        measure(a_mixture(), some_batches(), statistics=[])
    with pytest.raises(ValueError, match="rule='best'"):
        measure(a_mixture(), some_batches(), rule="best")
    with pytest.raises(ValueError, match="num_points=0"):
        measure(a_mixture(), some_batches(), num_points=0)


# Searching


def shortfall(frontier, every):
    """The most that a frontier's best point within a budget is worse than the best of all points."""
    worst = 0.0
    for point in every.envelope():
        found = [mine.quality for mine in frontier.points if mine.macs <= point.macs]
        worst = max(worst, point.quality - max(found, default=0.0))
    return worst


def test_the_search_finds_the_envelope():
    """Labels are what the full mixture says, so accuracy falls with every cut, steeply and not evenly."""
    model, statistics, images = a_mixture(1, blocks=5), some_images(80).split(40), some_images(300, 7)
    with torch.no_grad():
        labels = reestimated(model, statistics)(images).argmax(1)
    every = measure(model, [(images, labels)], statistics=statistics, points=all_points(model, "flow"), raw=False)
    found = measure(model, [(images, labels)], statistics=statistics, raw=False, num_points=96, rule="flow")
    coarse = first_points(cutting_curves(model, "flow"), 96)
    first = replace(every, points=tuple(every[point.name] for point in coarse))
    assert len(first.points) < len(found.points) < 0.85 * len(every.points)
    assert shortfall(first, every) > 0.02  # it is the search that finds it
    assert shortfall(found, every) <= MATTERS


def test_a_search_measures_no_more_than_allowed():
    model = a_mixture(blocks=5)
    curves = cutting_curves(model, "both")
    full = max(curve[-1].macs for curve in curves)
    for num in (1, 2, 5, 20, 1000):
        names = {point.name for point in first_points(curves, num)}
        assert 1 <= len(names) <= num
        assert "e5c0" in names
        more = next_points(curves, dict.fromkeys(names, 0.5), num - len(names))
        assert len(more) <= num - len(names)
        assert not names & {point.name for point in more}
    assert {"e1c0", "e2c0", "e3c0", "e4c0", "e5c0"} <= names
    assert all(curve[0].macs < curve[-1].macs <= full for curve in curves[1:5])


def test_a_stretch_that_is_beaten_is_left_alone():
    model = a_mixture(blocks=3)
    (_, other, curve) = cutting_curves(model, "flow")
    ends = {curve[0].point.name: 0.4, curve[-1].point.name: 0.8}
    (middle,) = next_points([curve], ends, 9)
    assert middle in [each.point for each in curve[1:-1]]
    cheaper = dict.fromkeys((each.point.name for each in other), 0.9)
    assert next_points([curve, other], ends | cheaper, 9) == []
    cheaper[other[1].point.name] = 0.91  # a bump of 0.01 is not enough to make up for 0.1
    assert next_points([curve, other], ends | cheaper, 9) == []
    bumpy = {each.point.name: value for each, value in zip(other, (0.7, 0.9, 0.7, 0.7), strict=True)}
    assert next_points([curve, other], ends | bumpy, 9) == [middle]  # where points stick out that much, this one may


def test_all_points_are_measured_if_they_have_enough_in_common(monkeypatch):
    model = a_mixture()
    for rule in ("flow", "both"):
        everything = {point.name for point in all_points(model, rule)}
        assert {point.name for point in measure(model, some_batches(), rule=rule).points} == everything
    assert {point.name for point in measure(model, some_batches()).points} == everything
    monkeypatch.setattr(sys.modules["cnmm.evaluation.measure"], "ALL_AT_ONCE", 1)
    monkeypatch.setattr(sys.modules["cnmm.evaluation.measure"], "NUM_POINTS", 7)
    assert len(measure(model, some_batches()).points) <= 7


# Statistics in a file


def test_statistics_round_trip(tmp_path):
    frontier = measure(a_mixture(), some_batches(), statistics=[some_images(20)], num_points=6)
    (tmp_path / "file").write_bytes(statistics_bytes(frontier.buffers))
    found = load_statistics(tmp_path / "file")
    assert found.keys() == frontier.buffers.keys()
    for name, buffers in frontier.buffers.items():
        assert found[name].keys() == buffers.keys()
        assert all(torch.equal(found[name][key], tensor) for key, tensor in buffers.items())
    with pytest.raises(ValueError, match="do not belong to this model"):
        with_statistics(create_model("cnmm_b4s3_c32"), next(iter(found.values())))


def test_damaged_statistics(tmp_path):
    (tmp_path / "file").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="file: cannot be read as safetensors"):
        load_statistics(tmp_path / "file")


# The plot


def measured_frontier(trained_run):
    return Frontier.load(trained_run / "frontier.json")


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_plot_is_the_same_every_time(tmp_path, trained_run):
    frontier = measured_frontier(trained_run)
    for name in ("a.svg", "b.svg", "c.png", "d.png"):
        save_picture(plot_frontier(frontier), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes() == (tmp_path / "d.png").read_bytes()
    assert b"http" not in re.sub(rb"http://www.w3.org/\S+", b"", (tmp_path / "a.svg").read_bytes())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_plot_shows(trained_run):
    frontier = measured_frontier(trained_run)
    figure = plot_frontier(frontier)
    axes = figure.axes[0]
    assert len(figure.axes) == 1
    assert axes.get_ylabel() == "accuracy (%), 100 validation images"
    assert axes.child_axes[0].get_xlabel().startswith("% of the full mixture")
    assert {f"exit {point.exit}" for point in frontier.points} <= {words.split(",")[0] for words in legend(figure)}
    (early,) = [line for line in axes.lines if line.get_label() == "early exit, macs on average"]
    rows = [(row.average_macs / 1e6, 100 * row.quality) for row in frontier.cascade.thresholds]
    assert [tuple(point) for point in early.get_xydata().tolist()] == rows
    assert not any("early exit" in words for words in legend(plot_frontier(replace(frontier, cascade=None))))
    points = tuple(replace(point, metric="mean_class_accuracy") for point in frontier.points)
    assert plot_frontier(replace(frontier, points=points)).axes[0].get_ylabel().startswith("mean class accuracy (%)")
    times = {point.name: 0.1 + point.macs / 1e6 for point in frontier.points[1:]}
    timed = plot_frontier(frontier, times).axes[1]
    assert "latency on this machine (ms)" in timed.get_xlabel()
    assert {x for line in timed.lines for x in line.get_xdata()} == set(times.values())


# The verbs


@pytest.fixture
def run(own_run, monkeypatch):
    """The trained run as it was before its frontier was measured."""
    monkeypatch.setattr(training, "STATISTICS_IMAGES", 120)
    monkeypatch.setattr(training, "EVALUATION_BATCH", 60)
    for path in (*own_run.glob("frontier.*"), *own_run.glob("statistics*")):
        path.unlink()
    return own_run


def test_frontier_and_choose(capsys, run, tmp_path):
    assert "cnmm frontier" in complaint(capsys, "choose", run, "--budget", "1M")
    answer = ask(capsys, "frontier", run, "--points", 8, "--test", "--plot", tmp_path / "other.png")
    wanted = {"point", "name", "rule", "cuts", "exit", "macs", "params", "quality", "metric", "accuracy"}
    wanted |= {"low", "high", "n", "split", "statistics"}
    assert all(wanted <= point.keys() for point in answer["points"])
    assert {(point["n"], point["split"], point["statistics"]) for point in answer["points"]} == {
        (100, "validation", "re-estimated")
    }
    best = [point for point in answer["points"] if point["on_envelope"]]
    assert all(point["raw_quality"] is not None and point["test_n"] == 100 for point in best)
    names = {path.name for path in run.iterdir()}
    assert names >= {"frontier.json", "frontier.csv", "frontier.svg", "frontier.png"}
    assert not [name for name in names if name.startswith(".")]
    assert (tmp_path / "other.png").exists()

    frontier = Frontier.load(run / "frontier.json")
    rows = list(csv.DictReader((run / "frontier.csv").open()))
    assert [row["name"] for row in rows] == [point.name for point in frontier.points]
    assert frontier.cascade is not None
    (statistics,) = run.glob("statistics*")
    assert load_statistics(statistics).keys() == {*(point["point"] for point in best), frontier.cascade.point}

    chosen = ask(capsys, "choose", run, "--budget", "100%")
    assert (chosen["point"], chosen["accuracy"]) == (best[-1]["point"], best[-1]["accuracy"])
    assert chosen["latency_ms"] is None
    assert {"macs", "exit", "params"} <= chosen.keys()
    assert "cnmm bench" in complaint(capsys, "choose", run, "--budget", "25ms")
    assert frontier.points[0].name in complaint(capsys, "choose", run, "--budget", "1k")
    assert "'fast'" in complaint(capsys, "choose", run, "--budget", "fast")
    (run / "frontier.json").write_text("{")
    assert "frontier.json" in complaint(capsys, "choose", run, "--budget", "1M")


def test_frontier_for_people(capsys, run):
    assert cli.main(["frontier", str(run), "--points", "3", "--images", "40"]) == 0
    out, err = capsys.readouterr()
    frontier = Frontier.load(run / "frontier.json")
    assert {point.n for point in frontier.points} == {40}
    for point in frontier.envelope():
        assert re.search(rf"{point.name} +{point.macs:,} .*{100 * point.quality:.2f}", out)
    assert "40 validation images" in err


def test_a_run_without_held_out_images_says_so(capsys, run):
    about = json.loads((run / "config.json").read_text())
    about["train"]["val"] = 0
    (run / "config.json").write_text(json.dumps(about))
    (run / "held_out.json").unlink()
    answer = ask(capsys, "frontier", run, "--points", 3, "--images", 50)
    assert {(point["split"], point["n"]) for point in answer["points"]} == {("test (chosen on test)", 50)}


def test_frontier_complaints(capsys, run, tmp_path):
    assert "not a run folder" in complaint(capsys, "frontier", tmp_path / "none")
    assert ".svg or .png" in complaint(capsys, "frontier", run, "--plot", "a.pdf")
    assert "images=0" in complaint(capsys, "frontier", run, "--images", 0)
    assert "--points=0" in complaint(capsys, "frontier", run, "--points", 0)
    assert "nowhere" in complaint(capsys, "frontier", run, "--data", "cifar10:nowhere")
    assert not (run / "frontier.json").exists()


def test_choosing_needs_no_torch(frontier, tmp_path):
    frontier.save(tmp_path / "frontier.json")
    blocked = ("torch", "numpy", "matplotlib", "safetensors")
    done = python(RUN_CLI, "choose", tmp_path, "--budget", "30", "--json", missing=blocked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["point"] == "b"
