import json

import pytest
import torch

import cnmm
from benchmarks.peers import Curve, Point, compare, main, read, within
from cnmm.prune import named_point


def curve(label, seed, shift=0.0):
    """Three fixed points; the last is worse on held-out images than the second."""
    fixed = [Point(1e6, 0.5, 0.6 + shift, 1e6), Point(3e6, 0.7, 0.65 + shift, 3e6), Point(5e6, 0.6, 0.9, 5e6)]
    return Curve(label, seed, "accuracy", 100, fixed, [Point(2e6, 0.8, 0.7 + shift, 2.1e6)] if label == "b" else [])


def test_a_budget_buys_what_is_best_on_held_out_images():
    points = curve("a", 0).fixed
    assert within(points, 0.9e6) is None
    assert within(points, 1e6) == points[0]
    assert within(points, 9e6) == points[1]


def test_the_table_has_means_over_seeds():
    rows = compare([curve("a", 0), curve("b", 0), curve("a", 1, 0.1)], [0.5e6, 2e6, 9e6])
    assert [(row["network"], row["way"], row["seeds"]) for row in rows] == [
        ("a", "fixed", [0, 1]),
        ("b", "fixed", [0]),
        ("b", "early exit", [0]),
    ]
    assert [row["test"] for row in rows] == [
        [None, pytest.approx(0.65), pytest.approx(0.7)],
        [None, pytest.approx(0.6), pytest.approx(0.65)],
        [None, pytest.approx(0.7), pytest.approx(0.7)],
    ]


def results(folder, **train):
    """What a peer's training leaves."""
    exits = [
        {"macs": macs, "validation": {"accuracy": quality}, "test": {"accuracy": quality - 0.02, "n": 100}}
        for macs, quality in ((400_000, 0.5), (900_000, 0.6))
    ]
    early = [{"validation": {"macs": 5e5, "quality": 0.55}, "test": {"macs": 5.1e5, "quality": 0.54}}]
    about = {
        "peer": "msdnet_tiny",
        "metric": "accuracy",
        "train": {"recipe": "own", "seed": 3, "teacher": None, **train},
    }
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({**about, "exits": exits, "early_exit": early}))
    return folder


def test_runs_and_peers_are_drawn_into_one_picture(trained_run, tmp_path, capsys):
    peer, out = results(tmp_path / "peer"), tmp_path / "all.svg"
    assert main([str(trained_run), str(peer), "--out", str(out), "--budgets", "0.5M", "2M"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| network | | seeds | 0.5M | 2M |"
    assert "| msdnet_tiny, own | fixed | 1 | 48.0 | 58.0 |" in printed
    assert "| msdnet_tiny, own | early exit | 1 | 54.0 | 54.0 |" in printed
    frontier = cnmm.Run(trained_run).frontier
    best = frontier.choose("2M")
    (row,) = [
        row for row in json.loads(printed[-1])["rows"] if row["network"] == "cnmm_tiny, quick" and row["way"] == "fixed"
    ]
    assert row["test"][1] == best.test_quality
    text = out.read_text()
    assert text.count("<svg") == 1
    assert len(json.loads(out.with_suffix(".json").read_text())["curves"]) == 2


def test_early_exit_of_a_run_is_measured_on_test_images(trained_run):
    run = cnmm.Run(trained_run)
    cascade, found = run.frontier.cascade, read(trained_run, None).early
    assert [point.macs for point in found] == [row.average_macs for row in cascade.thresholds]
    point = named_point(run.model, cascade.point)
    model, (images, labels) = run.settled(point), next(iter(run.images.batches(*run.images.split("test"))))
    assert len(labels) == 100  # all of them
    with torch.no_grad():
        scores = [score.softmax(1) for score in model.forward_exits(images, point).values()]
    for row, measured in list(zip(cascade.thresholds, found, strict=True))[::9]:
        right = macs = 0
        for n in range(100):
            sure = [float(score[n].max()) for score in scores]
            exit = next((k for k, least in enumerate(row.confidence) if sure[k] >= least), len(sure) - 1)
            right += int(scores[exit][n].argmax() == labels[n])
            macs += sum(cascade.macs[: exit + 1])
        assert measured.test == pytest.approx(right / 100)
        assert measured.test_macs == pytest.approx(macs / 100)


def test_a_run_without_test_figures_is_refused(own_run, tmp_path, capsys):
    path = own_run / "frontier.json"
    frontier = json.loads(path.read_text())
    for point in frontier["points"]:
        point["test_quality"] = None
    path.write_text(json.dumps(frontier))
    assert main([str(own_run), "--out", str(tmp_path / "a.svg")]) == 2
    assert "its frontier has no test figures; run: cnmm frontier" in capsys.readouterr().err
    assert not (tmp_path / "a.svg").exists()
