import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from cnmm.serve.arrivals import arrival_times
from cnmm.serve.menu import make_menu
from cnmm.serve.oracle import oracle_quality, taut_string
from cnmm.serve.policy import Policy, Settings, parse_policy
from cnmm.serve.simulate import World, run_trial, simulate
from tests.helpers import ask, complaint, refused
from tests.serve.menus import cascade_menu, frontier, point_menu

MENU = cascade_menu()
SPECS = ("poisson", "gamma:8", "step", "ramp", "burst")


def trial(rule, times, cores=2, menu=MENU, **world):
    policy = parse_policy(rule, menu)
    return run_trial(menu, policy, times, target_ms=40.0, cores=cores, world=World(**world))


# Arrivals


@pytest.mark.parametrize("spec", SPECS)
def test_arrivals_ascend_repeat_and_are_as_many_as_asked(spec):
    times = arrival_times(spec, 5000, 0.25, seed=3)
    assert len(times) == 5000
    assert (np.diff(times) >= 0).all()
    assert np.array_equal(times, arrival_times(spec, 5000, 0.25, seed=3))
    assert not np.array_equal(times, arrival_times(spec, 5000, 0.25, seed=4))
    assert np.allclose(arrival_times(spec, 5000, 0.5, seed=3), times / 2)


def test_gaps_vary_as_asked():
    for spec, spread in (("poisson", 1), ("gamma:8", 8), ("gamma:0.5", 0.5)):
        gaps = np.diff(arrival_times(spec, 200_000, 0.25))
        assert gaps.mean() == pytest.approx(4, rel=0.03)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(spread, rel=0.1)


def test_a_step_is_ten_times_as_loud():
    times = arrival_times("step", 12_000, 1.0)
    quiet, loud, quiet_again = np.histogram(times, 3, (0, times[-1]))[0]
    assert loud == pytest.approx(10_000, rel=0.05)
    assert quiet == pytest.approx(1000, rel=0.15)
    assert quiet_again == pytest.approx(1000, rel=0.15)


def test_a_trace_is_squeezed_and_repeated(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("10\n11\n13\n16\n")
    times = arrival_times(f"trace:{file}", 8, 0.5)
    assert times[-1] == pytest.approx(16)
    gaps = np.diff(times)
    assert gaps[:3] == pytest.approx(gaps[0] * np.array([1, 2, 3]))
    assert gaps[4:] == pytest.approx(gaps[:3])
    file.write_text("10\nsoon\n")
    assert str(file) in refused(arrival_times, f"trace:{file}", 8, 0.5)


@pytest.mark.parametrize("spec", ["", "often", "gamma", "gamma:-1", "gamma:x", "trace:", "step:3", "trace:/no/file"])
def test_other_arrivals_are_refused(spec):
    assert "arrivals" in (words := refused(arrival_times, spec, 10, 1.0)) or "/no/file" in words


# The oracle


def busiest_intervals(arrivals, deadlines):
    """The other way to say it: within the busiest interval everybody gets an equal share; take it out, and go on."""
    shares = np.zeros(len(arrivals))
    arrivals, deadlines, left = arrivals.astype(float), deadlines.astype(float), list(range(len(arrivals)))
    while left:
        best = None
        for start in {arrivals[i] for i in left}:
            for end in {deadlines[i] for i in left}:
                inside = [i for i in left if arrivals[i] >= start and deadlines[i] <= end]
                if inside and (best is None or (end - start) / len(inside) < best[0]):
                    best = (end - start) / len(inside), start, end, inside
        share, start, end, inside = best
        for i in inside:
            shares[i] = share
            left.remove(i)
        for times in (arrivals, deadlines):  # that time is gone
            times[:] = np.where(times > end, times - (end - start), np.minimum(times, start))
    return shares


@pytest.mark.parametrize("seed", range(12))
def test_the_taut_string_gives_the_shares_of_the_busiest_intervals(seed):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.gamma(0.3, 10, int(rng.integers(1, 25))))
    deadlines = arrivals + rng.choice([5.0, 20.0, 60.0])
    assert taut_string(arrivals, deadlines) == pytest.approx(busiest_intervals(arrivals, deadlines), rel=1e-9)


def test_the_oracle_of_one_request_is_the_best_row():
    assert oracle_quality(MENU, np.array([5.0]), 40.0, 2) == MENU.best.quality
    assert oracle_quality(MENU, np.zeros(1), MENU.cheapest.ms / 2, 1) == pytest.approx(MENU.cheapest.quality / 2)


# Trials


@pytest.mark.parametrize("load", [0.7, 1.5, 3.0, 5.0])
@pytest.mark.parametrize("spec", ["poisson", "gamma:8", "step"])
def test_the_oracle_beats_us_and_we_beat_slack(spec, load):
    times = arrival_times(spec, 800, load * 2 / MENU.full_ms, seed=1)
    ours, slack = (trial(rule, times).summary() for rule in ("adaptive", "slackfit"))
    bound = oracle_quality(MENU, times, 40.0, 2)
    insurance = 1e-4 if load < 1 else 0.0  # what is kept for slow moments is lost where there are none
    assert slack["effective_quality"] - insurance <= ours["effective_quality"] <= bound + 1e-9
    assert ours["attainment"] >= 0.999
    assert ours["p99_ms"] <= 40.0


def test_a_fixed_point_breaks_where_we_bend():
    times = arrival_times("poisson", 1500, 1.5 * 2 / MENU.full_ms)
    fixed, ours = (trial(rule, times).summary() for rule in ("fixed:e4c0", "adaptive"))
    assert fixed["attainment"] < 0.2
    assert fixed["p99_ms"] > 20 * ours["p99_ms"]


def test_one_server_with_a_fixed_time_waits_as_lindley_says():
    menu = point_menu((("e1c0", 1, 5.0, 0.9),))
    times = arrival_times("poisson", 2000, 0.8 / 5.0, seed=2)
    waits = [0.0]
    for gap in np.diff(times).tolist():
        waits.append(max(0.0, waits[-1] + 5.0 - gap))
    assert trial("fixed", times, cores=1, menu=menu).latency_ms - 5.0 == pytest.approx(np.array(waits))


def test_a_slow_machine_and_a_way_to_go():
    times = arrival_times("poisson", 500, 0.7 * 2 / MENU.full_ms)
    usual, slow, far = (trial("adaptive", times, **world) for world in ({}, {"slowdown": 2.0}, {"overhead_ms": 3.0}))
    assert np.median(slow.latency_ms) == pytest.approx(2 * np.median(usual.latency_ms), rel=0.35)
    assert np.median(far.latency_ms - usual.latency_ms) == pytest.approx(3.0)
    lonely = np.arange(50) * 1000.0
    alone, shared = (trial("fixed", lonely, **world) for world in ({}, {"loop_ms": 1.5}))
    assert shared.latency_ms - alone.latency_ms == pytest.approx(np.full(50, 1.5))
    noisy = trial("adaptive", arrival_times("poisson", 500, 3 * 2 / MENU.full_ms), noise=0.5)
    assert noisy.summary()["attainment"] > 0.98


def test_what_a_server_does_not_see_makes_few_late():
    """A way to go, and service times that are up to twice as long as expected: time is kept for both."""
    times = arrival_times("gamma:8", 2000, 2 / MENU.full_ms, seed=3)
    careless = Policy(settings=Settings(reserve=0.0))
    world = World(overhead_ms=1.5, noise=0.3)
    kept, lost = (
        run_trial(MENU, policy, times, target_ms=40.0, cores=1, world=world).summary()["attainment"]
        for policy in (Policy(), careless)
    )
    assert 1 - kept < (1 - lost) / 2


def test_hard_images_stay_longer_and_spend_what_the_row_says():
    """A server that nobody waits for runs the best row: here, that of a cascade."""
    times = np.arange(1500) * 1000.0
    menu = replace(MENU, rows=MENU.rows[:3])
    spent = trial("adaptive", times, cores=1, menu=menu).latency_ms
    assert spent.mean() == pytest.approx(menu.best.ms, rel=0.06)
    assert set(np.round(spent, 6)) == set(np.round(MENU.passed_ms((0.0, 0.0)), 6))


# The verb


def test_the_verb_says_and_draws(capsys, timed_ladder, tmp_path):
    picture = tmp_path / "load.svg"
    flags = ("--arrivals", "gamma:8", "--load", 3, "--target-ms", 1, "--requests", 500, "-o", picture)
    answer = ask(capsys, "simulate", timed_ladder, *flags)
    assert {"effective_quality", "attainment", "p50_ms", "p99_ms", "shed", "oracle_quality"} <= answer.keys()
    assert answer["requests"] == 500
    assert answer["effective_quality"] <= answer["oracle_quality"] <= answer["best_quality"]
    trial, summary = simulate(timed_ladder, arrivals="gamma:8", load=3, target_ms=1, requests=500)
    assert {**summary} == {name: answer[name] for name in summary}
    assert len(trial.latency_ms) == 500
    text = picture.read_text()
    assert text.startswith("<svg ")
    assert all(word in text for word in ("load", "ms per image", "latency", "accuracy"))
    json.dumps(answer)


def test_a_trained_model_is_simulated_by_name(capsys, timed_ladder, tmp_path, monkeypatch):
    model = tmp_path / "models" / "by_hand.scenes"
    shutil.copytree(timed_ladder, model / "ladder")
    monkeypatch.setattr("cnmm.pretrained.PLACES", (tmp_path / "models",))
    by_folder, by_name = (
        ask(capsys, "simulate", place, "--requests", 50, "--seed", 3) for place in (timed_ladder, "scenes")
    )
    assert by_name == by_folder


def test_what_cannot_be_simulated_is_one_line(capsys, timed_ladder, hand_made_ladder):
    assert f"cnmm bench {hand_made_ladder} --threads 1" in complaint(capsys, "simulate", hand_made_ladder)
    assert "--load=0" in complaint(capsys, "simulate", timed_ladder, "--load", 0)
    assert "gamma:8" in complaint(capsys, "simulate", timed_ladder, "--arrivals", "often")
    assert ".svg" in complaint(capsys, "simulate", timed_ladder, "-o", "load.pdf")


def test_what_the_full_mixture_takes_goes_by_the_largest_point():
    """Small points take longer per mac."""
    points = (("e1c0", 1, 1.0, 0.6), ("e3c0", 4, 5.0, 0.9))
    menu = make_menu(frontier(points), {"e1c0": 4.0, "e3c0": 6.0})  # the larger has half of the macs
    assert menu.full_ms == pytest.approx(12.0)
