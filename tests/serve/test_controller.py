"""The policy's promises, one by one: see the head of cnmm/serve/policy.py."""

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cnmm.serve.controller import SHORT, Controller, Ticket
from cnmm.serve.menu import hull
from cnmm.serve.policy import Policy, Settings, Snapshot, admits, budget_ms, parse_policy, plan, share_ms
from tests.helpers import refused
from tests.serve.menus import POINTS, cascade_menu, point_menu

MENUS = {"points": point_menu(), "cascade": cascade_menu()}
ADAPTIVE = Policy()
times = st.floats(0.0, 200.0)


quickly = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
"""Hypothesis draws the seed, numpy the rest: a story of hundreds of numbers in no time."""


def random_snapshot(seed):
    """Some requests wait, adaptive or pinned; some workers are busy for a while."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 13))
    kinds = rng.integers(0, 4, num)
    return Snapshot(
        now=rng.uniform(0, 200),
        target=60.0,
        deadline=np.sort(rng.uniform(0, 400, num)),
        images=np.array([1.0, 1.0, 5.0, 0.0])[kinds],
        pinned=np.array([0.0, 0.0, 0.0, 6.0])[kinds],
        free=np.sort(rng.uniform(0, 200, int(rng.integers(1, 5)))),
        rate=rng.choice([0.0, rng.uniform(0, 0.2), rng.uniform(0, 2)]),
        pinned_rate=rng.choice([0.0, rng.uniform(0, 0.5)]),
        slowdown=rng.uniform(0.5, 4),
        credit=rng.choice([0.0, rng.uniform(0, 4)]),
    )


snapshots = st.builds(random_snapshot, seeds)


def inserted(snapshot, deadline, images, pinned=0.0):
    place = int(np.searchsorted(snapshot.deadline, deadline, side="right"))
    return replace(
        snapshot,
        deadline=np.insert(snapshot.deadline, place, deadline),
        images=np.insert(snapshot.images, place, images),
        pinned=np.insert(snapshot.pinned, place, pinned),
    )


def budget(snapshot):
    return budget_ms(snapshot, MENUS["points"], Settings())


def at_most(less, more):
    assert less == more or less <= more + 1e-9 * (1 + abs(more))


# Monotone


@quickly
@given(snapshots, st.floats(0, 400), st.sampled_from([1.0, 5.0]))
def test_one_more_in_the_queue_gives_nobody_more_time(snapshot, deadline, images):
    assume(deadline >= snapshot.deadline[0])
    at_most(budget(inserted(snapshot, deadline, images)), budget(snapshot))


@quickly
@given(snapshots, st.floats(0, 100))
def test_later_deadlines_give_no_less_time(snapshot, more):
    at_most(budget(snapshot), budget(replace(snapshot, deadline=snapshot.deadline + more)))


@quickly
@given(snapshots, st.floats(0, 2))
def test_more_arrivals_give_no_more_time(snapshot, more):
    at_most(budget(replace(snapshot, rate=snapshot.rate + more)), budget(snapshot))
    at_most(budget(replace(snapshot, pinned_rate=snapshot.pinned_rate + more)), budget(snapshot))


@quickly
@given(snapshots, times)
def test_one_more_core_gives_no_less_time(snapshot, free):
    """Even one that is busy for a long time: nobody has to use it."""
    more = replace(snapshot, free=np.sort(np.append(snapshot.free, free)))
    at_most(share_ms(snapshot, Settings()), share_ms(more, Settings()))
    if free <= snapshot.now:
        at_most(budget(snapshot), budget(more))


@quickly
@given(snapshots, st.floats(1, 4))
def test_a_slower_machine_gives_no_more_time(snapshot, factor):
    assume(share_ms(snapshot, Settings()) > 0)
    at_most(budget(replace(snapshot, slowdown=snapshot.slowdown * factor)), budget(snapshot))


@quickly
@given(snapshots, st.sampled_from([2.0**-20, 0.125, 1024.0]))
def test_the_unit_of_time_does_not_matter(snapshot, unit):
    assume(snapshot.images[0] > 0)
    scaled = replace(
        snapshot,
        now=snapshot.now * unit,
        target=snapshot.target * unit,
        deadline=snapshot.deadline * unit,
        pinned=snapshot.pinned * unit,
        free=snapshot.free * unit,
        rate=snapshot.rate / unit,
        credit=snapshot.credit * unit,
    )
    for weight in (1.0, 4.0, 0.25):
        for policy in (ADAPTIVE, Policy(rule="slackfit")):
            ours, theirs = (
                plan(snapshot, cascade_menu(), policy, weight),
                plan(scaled, cascade_menu(unit), policy, weight),
            )
            assert ours.row.quality == theirs.row.quality
            assert theirs.ms == pytest.approx(ours.ms * unit)
            assert theirs.limit == pytest.approx(ours.limit * unit)


@quickly
@given(snapshots)
def test_a_heavier_request_gets_no_less(snapshot):
    assume(snapshot.images[0] > 0)
    rows = [plan(snapshot, MENUS["cascade"], ADAPTIVE, weight).row.ms for weight in (0.25, 1.0, 4.0)]
    assert rows == sorted(rows)


def test_the_budget_is_spent_on_average():
    """Rows on both sides of it take turns."""
    menu = MENUS["points"]
    for rate, expected in ((1 / 4, 4.0), (1 / 2.4, 2.4), (1 / 1.5, 1.5), (1 / 2.5, 2.5)):
        one = np.array([1.0])
        snapshot = Snapshot(
            now=0.0, target=60.0, deadline=60 * one, images=one, pinned=0 * one, free=0 * one, rate=rate
        )
        spent, seen = [], set()
        for _ in range(1000):
            chosen = plan(snapshot, menu, ADAPTIVE)
            snapshot = replace(snapshot, credit=chosen.credit)
            spent.append(chosen.row.ms)
            seen.add(chosen.row.point)
        assert np.mean(spent) == pytest.approx(expected, rel=0.01)
        assert len(seen) <= 2


# Feasibility, against a literal transcription


def literal_share(snapshot, settings=Settings()):  # noqa: B008
    """For every request the most that everybody up to it may take, by the best number of workers; the least."""
    shares = []
    for k in range(len(snapshot.deadline)):
        best = -math.inf
        for workers in range(1, len(snapshot.free) + 1):
            room = sum(max(0.0, snapshot.deadline[k] - max(snapshot.now, f)) for f in snapshot.free[:workers])
            room *= settings.safety / snapshot.slowdown
            left = room - sum(snapshot.pinned[: k + 1]) - (workers - 1) * snapshot.pinned[k]
            images = sum(snapshot.images[: k + 1]) + (workers - 1) * snapshot.images[k]
            best = max(best, left / images if images else math.inf)
        shares.append(best)
    return min(shares)


@quickly
@given(snapshots)
def test_the_share_is_that_of_the_text(snapshot):
    assert share_ms(snapshot, Settings()) == pytest.approx(literal_share(snapshot), rel=1e-9, abs=1e-9)


@quickly
@given(snapshots)
def test_requests_are_refused_only_if_not_even_the_cheapest_row_is_in_time(snapshot):
    snapshot = replace(snapshot, pinned=0 * snapshot.pinned, images=np.maximum(snapshot.images, 1))
    cheapest = MENUS["points"].cheapest.ms
    share = literal_share(snapshot)
    assume(abs(share - cheapest) > 1e-9)
    assert admits(snapshot, MENUS["points"], ADAPTIVE) == (share >= cheapest)


# Whole stories


def random_story(seed):
    """Cores, and arrivals with all sorts of deadlines, sizes, weights and wishes."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 41))
    now = np.cumsum(rng.uniform(0, rng.choice([1.0, 5.0, 20.0]), num))
    deadline = now + rng.choice([15.0, 60.0, 60.0, 200.0], num)
    images, weight = rng.choice([1, 1, 1, 4], num), rng.choice([1.0, 1.0, 4.0, 0.25], num)
    names = [[None, None, None, "e2c3", "e4c0"][number] for number in rng.integers(0, 5, num)]
    columns = (column.tolist() for column in (now, deadline, images, weight))
    return int(rng.integers(1, 5)), list(zip(*columns, names, strict=True))


stories = st.builds(random_story, seeds)


def tell(menu, cores, requests, policy=ADAPTIVE, hardness=None):
    """Runs a story to its end with the times of the menu: (ticket, row, end) of all that were let in, and of the rest.

    `hardness`: how far images go in a cascade, in stages.
    """
    controller = Controller(menu, policy, target_ms=60.0, workers=cores)
    ends, done, shut_out = [], [], []
    order = itertools.count()

    def dispatch(now):
        while job := controller.next(now):
            expected = took = job.row.ms * job.ticket.images
            if job.row.confidence:
                deep = job.ticket.images * np.array(menu.stage_ms)[: hardness(next(order)) + 1]
                took = deep[0]
                for ms in deep[1:]:
                    if now + took + ms > job.until:
                        break
                    took += ms
                expected = took
            heapq.heappush(ends, (now + took, next(order), job, took, expected))
        assert not controller.waiting or controller.running == cores, "work was held back"

    def go_on(moment):
        while ends and ends[0][0] <= moment:
            now, _, job, took, expected = heapq.heappop(ends)
            controller.finish(now, job.worker, measured_ms=took, expected_ms=expected)
            done.append((job.ticket, job.row, now))
            dispatch(now)

    for now, arriving in itertools.groupby(requests, key=lambda request: request[0]):
        go_on(now)
        for _, deadline, images, weight, name in arriving:
            row = menu.points[name] if name else None
            ticket = Ticket(arrived=now, deadline=deadline, images=images, weight=weight, row=row)
            if not controller.arrive(now, ticket):
                shut_out.append(ticket)
        dispatch(now)
    go_on(math.inf)
    assert len(done) + len(shut_out) == len(requests)
    return done, shut_out


@quickly
@given(stories)
def test_nobody_who_was_let_in_is_late(story):
    """Pinned requests neither, whatever adaptive ones come with them."""
    done, _ = tell(MENUS["points"], *story)
    for ticket, row, end in done:
        assert end <= ticket.deadline + 1e-9
        assert ticket.row in (None, row)


@quickly
@given(stories, seeds)
def test_hard_images_make_nobody_late_who_waits_already(story, seed):
    """However far they go in the cascade: it stops when others need the time. (Later ones were let in by averages.)"""
    rng = np.random.default_rng(seed)
    requests = [(0.0, deadline - now, *rest) for now, deadline, *rest in story[1]]
    done, _ = tell(MENUS["cascade"], 1, requests, hardness=lambda _: int(rng.integers(3)))
    assert all(end <= ticket.deadline + 1e-9 for ticket, _, end in done)


def test_a_fixed_point_lets_everybody_in_and_is_late():
    requests = [(float(n), n + 60.0, 1, 1.0, None) for n in range(200)]
    done, shut_out = tell(MENUS["points"], 2, requests, parse_policy("fixed:e4c0", MENUS["points"]))
    assert not shut_out
    assert {row.point for _, row, _ in done} == {"e4c0"}
    assert max(end - ticket.arrived for ticket, _, end in done) > 700


def test_who_comes_to_an_idle_server_gets_the_best_row():
    requests = [(1000.0 * n, 1000.0 * n + 60, 1, 1.0, None) for n in range(5)]
    for menu in MENUS.values():
        done, _ = tell(menu, 2, requests, hardness=lambda _: 2)
        assert all(row == menu.best for _, row, _ in done)


def test_the_best_row_is_back_within_five_targets_of_a_step_down():
    loud = [(n / 2, n / 2 + 60, 1, 1.0, None) for n in range(600)]
    end = loud[-1][0]
    quiet = [(end + 15.0 * n, end + 15 * n + 60, 1, 1.0, None) for n in range(1, 60)]
    for menu in MENUS.values():
        done, _ = tell(menu, 2, loud + quiet, hardness=lambda _: 1)
        during = [row.quality for ticket, row, _ in done if 100 < ticket.arrived <= end]
        after = [row for ticket, row, _ in done if ticket.arrived > end + 5 * 60]
        assert max(during) < menu.best.quality
        assert after
        assert all(row == menu.best for row in after)


def test_a_lost_worker_gives_its_request_back():
    menu = MENUS["points"]
    controller = Controller(menu, ADAPTIVE, target_ms=60.0, workers=2)
    tickets = [Ticket(arrived=0.0, deadline=60.0 + n) for n in range(3)]
    assert all(controller.arrive(0.0, ticket) for ticket in tickets)
    first, second = controller.next(0.0), controller.next(0.0)
    assert (first.ticket, second.ticket, controller.next(0.0)) == (tickets[0], tickets[1], None)
    assert controller.lose(1.0, first.worker, back=30.0) is tickets[0]
    assert controller.waiting == 2
    controller.finish(5.0, second.worker)
    again = controller.next(5.0)
    assert (again.ticket, again.worker) == (tickets[0], second.worker)  # its deadline puts it before the third
    assert controller.next(5.0) is None
    controller.join(30.0, first.worker)
    assert controller.next(30.0).ticket is tickets[2]


def test_who_goes_away_leaves_the_queue():
    controller = Controller(MENUS["points"], ADAPTIVE, target_ms=60.0, workers=1)
    tickets = [Ticket(arrived=0.0, deadline=60.0) for _ in range(100)]
    let_in = [ticket for ticket in tickets if controller.arrive(0.0, ticket)]
    assert len(let_in) == int(Settings().planned * 60 / MENUS["points"].cheapest.ms)
    running = controller.next(0.0).ticket
    assert not controller.cancel(running)
    assert all(controller.cancel(ticket) for ticket in let_in if ticket is not running)
    assert controller.waiting == 0


def test_slow_moments_are_noticed_and_forgotten():
    controller = Controller(MENUS["points"], ADAPTIVE, target_ms=60.0, workers=1)
    seen = []
    for number in range(200):
        now = 100.0 * number
        assert controller.arrive(now, Ticket(arrived=now, deadline=now + 60))
        job = controller.next(now)
        controller.finish(now + 50, job.worker, measured_ms=(30 if number < 100 else 10), expected_ms=10)
        seen.append(controller.slowdown)
    assert seen[99] == pytest.approx(3, abs=0.01)
    assert seen[-1] == pytest.approx(1, abs=0.01)


def test_wanted_cores_follow_the_load():
    menu = MENUS["points"]
    controller = Controller(menu, ADAPTIVE, target_ms=60.0, workers=1)
    for number in range(2000):
        controller.arrive(number / 2, Ticket(arrived=number / 2, deadline=number / 2 + 60))
        if controller.next(number / 2):
            controller.finish(number / 2, 0)
    # Two arrive per millisecond; within half a point of the best, only the best row (10 ms) is.
    assert controller.wanted_cores(1000.0) == pytest.approx(2 * 10 / 0.95, rel=0.01)
    assert controller.wanted_cores(1000.0 + SHORT * 60) == pytest.approx(0, abs=1e-9)


def test_arrivals_are_forgotten_even_if_nobody_asks_for_their_rate():
    """Requests for a point of their own need no plan, and so no rate."""
    controller = Controller(MENUS["points"], ADAPTIVE, target_ms=60.0, workers=1)
    for number in range(3000):
        now = 10.0 * number
        controller.arrive(now, Ticket(arrived=now, deadline=now + 60, row=MENUS["points"].points["e1c0"]))
        controller.finish(now, controller.next(now).worker)
    windows = controller._load._windows
    assert [len(window._recent) for window in windows] == [24, 96]


def test_rows_between_are_on_no_hull():
    rows = hull(MENUS["points"].points.values())
    assert [row.point for row in rows] == ["e1c0", "e2c3", "e3c0", "e4c0"]
    bent = point_menu((*POINTS, ("e2c9", 2, 4.0, 0.81), ("e3c9", 4, 7.0, 0.7)))
    assert [row.point for row in bent.rows] == ["e1c0", "e2c3", "e3c0", "e4c0"]
    assert set(bent.points) == {"e1c0", "e2c3", "e2c9", "e3c0", "e3c9", "e4c0"}


def test_a_policy_has_a_name():
    menu = MENUS["points"]
    assert parse_policy("adaptive", menu).rule == "adaptive"
    assert parse_policy("fixed", menu).point == "e4c0"
    assert "fixed:POINT" in refused(parse_policy, "fast", menu)
    assert "e1c0, e2c3" in refused(parse_policy, "fixed:e9c9", menu)
