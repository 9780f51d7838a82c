"""Which row the next request gets, and whether a new one is let in: pure functions of a snapshot of the queue.

Slack is insurance, not fuel. A rule that spends the slack of the earliest deadline settles, under overload, where every
latency equals the deadline. Serving at the rate of the arrivals gives the same time to each, hence the same quality,
with a short queue; but the rate alone fails in bursts. So the time per image is the smaller of two:

- what lets all that wait still be in time (`share_ms`), by every prefix of the queue in the order of its deadlines;
- what serves the images that arrive and drains the backlog within a target (`rate_ms`).

The slope of the menu's hull at that time is the price of a millisecond, and a request takes the row with the largest
weight * quality - price * ms. At its own price the rows on both sides of that time are worth the same to a request of
weight 1: it takes the cheaper one, and what it leaves unspent is the credit with which a later one takes the other.

**Why a feasible plan makes nobody late.** Requests start by deadline, each on the first free worker.
Let j + 1 workers be free from f_w on, and let the first k requests take x_1 ... x_k. If request k ended after d_k, all
these workers were busy until after d_k - x_k with the first k - 1 requests, so that x_1 + ... + x_{k-1} would exceed
sum_w max(0, d_k - f_w) - (j + 1) x_k. Hence it is enough that x_1 + ... + x_k + j x_k <= sum_w max(0, d_k - f_w), for
some number of workers, taken by when they are free. The condition goes on to hold while such a plan is carried out.

Deadlines are planned with as if they were a little earlier (`Settings.reserve`): on their way to a client, answers take
time that no server can measure, and machines have slow moments that are no slowdown.

Times are in any unit, the same one everywhere: nothing here depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from cnmm._errors import UserError
from cnmm.serve.menu import Floats, Menu, Row

Rule = Literal["adaptive", "slackfit", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Constants of the policy; results are flat around these."""

    use: float = 1.0
    """Part of the capacity that the arrivals may take (rho)."""
    drain: float = 2.0
    """The time in which a backlog is to be gone, in targets (tau)."""
    safety: float = 0.85
    """Part of the time before the deadlines that is planned with."""
    reserve: float = 0.12
    """Part of a request's time that is kept for what a server does not see: network, event loop, a machine's moods."""

    @property
    def planned(self) -> float:
        """Part of a request's time that is planned with if it is served at once."""
        return self.safety * (1 - self.reserve)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A rule and its constants."""

    rule: Rule = "adaptive"
    point: str = ""
    """Of `fixed`: the operating point that everybody gets."""
    settings: Settings = Settings()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The queue at a moment. Requests are in the order of their deadlines, ties by arrival."""

    now: float
    target: float
    """The latency that requests without a deadline of their own are promised."""
    deadline: Floats
    images: Floats
    """How many each request has; those that ask for a row of their own count 0 here, and their time below."""
    pinned: Floats
    """The time of requests that ask for a row of their own; 0 for the others, which are adaptive."""
    free: Floats
    """When each worker is free, ascending."""
    rate: float = 0.0
    """Adaptive images that arrive per unit of time."""
    pinned_rate: float = 0.0
    """Work that arrives with a row of its own, per unit of time: cores that it takes."""
    slowdown: float = 1.0
    """How many times as long everything takes as the menu says."""
    credit: float = 0.0
    """Time per image that earlier requests left unspent."""

    @cached_property
    def room_JK(self) -> Floats:
        """Time before each deadline on the first 1, 2, ... workers that are free: [workers, requests]."""
        free_J = np.maximum(self.free, self.now)
        room_JK: Floats = np.maximum(self.deadline - free_J[:, np.newaxis], 0.0).cumsum(0)
        return room_JK / self.slowdown


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a policy decides for the first request of the queue."""

    row: Row
    ms: float
    """Time per image that the policy grants: the budget."""
    price: float
    """Quality that a millisecond must bring."""
    limit: float
    """The most that the request may take in all, so that everybody else can still be in time."""
    credit: float = 0.0
    """Time per image that is left unspent now."""


def parse_policy(text: str, menu: Menu) -> Policy:
    """`adaptive`, `slackfit`, or `fixed:POINT`; `fixed` alone takes the best point."""
    name, _, point = text.partition(":")
    if name == "fixed":
        point = point or max(menu.points.values(), key=lambda row: row.quality).point
        if point not in menu.points:
            raise UserError(f"policy {text!r}: the point must be one of {', '.join(menu.points)}")
        return Policy(rule="fixed", point=point)
    if text == "adaptive":
        return Policy(rule="adaptive")
    if text == "slackfit":
        return Policy(rule="slackfit")
    raise UserError(f"policy {text!r}: must be adaptive, slackfit or fixed:POINT")


def plan(snapshot: Snapshot, menu: Menu, policy: Policy, weight: float = 1.0) -> Plan:
    """For the first request, which a worker is free for; `weight` is what a right answer to it counts."""
    images = max(float(snapshot.images[0]), 1.0)
    slack = float(snapshot.deadline[0]) - snapshot.now
    if policy.rule == "fixed":
        return Plan(row=menu.points[policy.point], ms=menu.points[policy.point].ms, price=0.0, limit=math.inf)
    if policy.rule == "slackfit":
        row = menu.within(slack / images)
        return Plan(row=menu.rows[row], ms=slack / images, price=float(menu.slope[row]), limit=slack)
    ms = budget_ms(snapshot, menu, policy.settings)
    limit = limit_ms(snapshot, menu, policy.settings)
    fitting = menu.within(limit / images)
    low = menu.within(ms)
    price = float(menu.slope[low]) if ms > menu.cheapest.ms else math.inf
    if weight == 1.0 or math.isinf(price):
        high = min(low + 1, len(menu.rows) - 1)
        row = min(high if ms + snapshot.credit >= menu.ms[high] else low, fitting)
        credit = min(snapshot.credit + ms - menu.rows[row].ms, menu.rows[high].ms - menu.rows[low].ms)
    else:
        row = int(np.argmax((weight * menu.quality - price * menu.ms)[: fitting + 1]))
        credit = snapshot.credit
    return Plan(row=menu.rows[row], ms=ms, price=price, limit=limit * snapshot.slowdown, credit=max(0.0, credit))


def budget_ms(snapshot: Snapshot, menu: Menu, settings: Settings) -> float:
    """Time per adaptive image: the smaller of what the deadlines and what the arrivals allow, within the menu."""
    wanted = min(share_ms(snapshot, settings), rate_ms(snapshot, settings))
    return min(max(wanted, menu.cheapest.ms), menu.best.ms)


def admits(snapshot: Snapshot, menu: Menu, policy: Policy) -> bool:
    """Can all of the snapshot, which holds the newcomer too, still be in time with the cheapest row?"""
    if policy.rule == "fixed":
        return True
    work = float(snapshot.pinned.sum() + menu.cheapest.ms * snapshot.images.sum())
    if work <= policy.settings.safety * float(snapshot.room_JK[0, 0]):  # one worker alone could do it before the first
        return True
    return bool((_spare(snapshot, menu.cheapest.ms, policy.settings) >= 0).all())


def share_ms(snapshot: Snapshot, settings: Settings) -> float:
    """The most time per adaptive image with which all that wait are in time; infinite if none waits."""
    extra_J1 = np.arange(len(snapshot.free))[:, np.newaxis]
    left_JK = settings.safety * snapshot.room_JK - snapshot.pinned.cumsum() - extra_J1 * snapshot.pinned
    images_JK = snapshot.images.cumsum() + extra_J1 * snapshot.images
    share_JK = np.full(left_JK.shape, math.inf)
    np.divide(left_JK, images_JK, out=share_JK, where=images_JK > 0)
    return float(share_JK.max(0).min(initial=math.inf))


def rate_ms(snapshot: Snapshot, settings: Settings) -> float:
    """Time per adaptive image that serves what arrives and drains the backlog; infinite if there is neither."""
    workers, window = len(snapshot.free), settings.drain * snapshot.target
    images = snapshot.rate + float(snapshot.images[workers:].sum()) / window
    work = snapshot.pinned_rate + float(snapshot.pinned[workers:].sum()) / window
    left = workers * settings.use / snapshot.slowdown - work
    return max(0.0, left) / images if images > 0 else math.inf


def limit_ms(snapshot: Snapshot, menu: Menu, settings: Settings) -> float:
    """The most that the first request may take if all others take the cheapest row, and all are to be in time."""
    own = settings.safety / snapshot.slowdown * max(0.0, float(snapshot.deadline[0]) - snapshot.now)
    if len(snapshot.deadline) == 1:
        return own
    least = float(snapshot.pinned[0] + menu.cheapest.ms * snapshot.images[0])
    return min(own, least + float(_spare(snapshot, menu.cheapest.ms, settings)[1:].min()))


def _spare(snapshot: Snapshot, ms: float, settings: Settings) -> Floats:
    """What is left before each deadline if every adaptive image takes `ms`; below zero where it is too late."""
    work_K = snapshot.pinned + ms * snapshot.images
    extra_J1 = np.arange(len(snapshot.free))[:, np.newaxis]
    spare: Floats = (settings.safety * snapshot.room_JK - work_K.cumsum() - extra_J1 * work_K).max(0)
    return spare
