import itertools

import numpy as np
import pytest

from cnmm.cascade import NEVER
from cnmm.evaluation.calibrate import GAP, calibrate

MACS = (10, 25, 40)


def images(num, exits=3, seed=0):
    """Of different difficulty; later exits are better, and confidence tells how likely an answer is right."""
    rng = np.random.default_rng(seed)
    ease = rng.normal(0.5, 1.5, (num, 1)) + np.linspace(0, 1.5, exits) + rng.normal(0, 0.4, (num, exits))
    confidence = 1 / (1 + np.exp(-ease))
    return confidence, rng.uniform(size=(num, exits)) < confidence


def counted(confidence, right, macs, needed):
    """Average macs, accuracy and where images leave, one image after the other."""
    spent = hits = 0
    leaving = [0] * len(macs)
    for sure, hit in zip(confidence, right, strict=True):
        exit = next((k for k, least in enumerate(needed) if sure[k] >= least), len(macs) - 1)
        spent += sum(macs[: exit + 1])
        hits += hit[exit]
        leaving[exit] += 1
    num = len(confidence)
    return spent / num, hits / num, [count / num for count in leaving]


def test_rows_against_a_literal_count():
    confidence, right = images(300)
    rows = calibrate(confidence, right, MACS)
    assert rows[0].confidence == (0, 0)
    assert rows[-1].confidence == (NEVER, NEVER)
    assert (rows[0].average_macs, rows[-1].average_macs) == (10, 75)
    for row in rows[:: len(rows) // 9]:
        spent, _, leaving = counted(confidence, right, MACS, row.confidence)
        assert row.average_macs == pytest.approx(spent)
        assert row.exits == pytest.approx(leaving)
    for row in (rows[0], rows[-1]):  # nothing was found on images
        assert row.quality == pytest.approx(counted(confidence, right, MACS, row.confidence)[1], abs=0.02)


def test_more_macs_never_ask_for_less_confidence_and_are_never_worse():
    rows = calibrate(*images(2000), MACS)
    steps = []
    for low, high in itertools.pairwise(rows):
        steps.append(high.average_macs - low.average_macs)
        assert all(a <= b for a, b in zip(low.confidence, high.confidence, strict=True))
        assert low.quality <= high.quality
    assert min(steps) > 0
    assert np.median(steps) <= GAP * sum(MACS)


def test_no_row_promises_more_than_it_holds():
    """On few images, thresholds look better than they are; a row says what others are worth on images they missed."""
    others = images(4000, seed=99)
    excess = []
    for seed in range(12):
        row = [row for row in calibrate(*images(60, seed=seed), MACS) if row.average_macs <= 45][-1]
        excess.append(row.quality - counted(*others, MACS, row.confidence)[1])
    assert np.mean(excess) < 0.005


def worse_at_the_end(num, seed):
    """The last exit is worse than the one before it, and as sure."""
    confidence, right = images(num, seed=seed)
    right[:, 2] &= np.random.default_rng(seed).uniform(size=num) < 0.8
    return confidence, right


def test_spending_more_is_not_worse_where_the_last_exit_is():
    """However much may be spent, an exit that loses is not asked."""
    others = worse_at_the_end(4000, seed=99)
    losses = []
    for seed in range(4):
        rows = calibrate(*worse_at_the_end(500, seed), MACS)
        hits = [counted(*others, MACS, row.confidence)[1] for row in (*rows[:: len(rows) // 10], rows[-1])]
        losses.append(max(hits) - hits[-1])
        assert hits[-1] > others[1][:, 2].mean() + 0.03
    assert np.mean(losses) < 0.015


def test_chance_does_not_stop_what_pays():
    """Forty images often say that the last exit is worse, by one or two of them: that is not believed."""
    others = images(4000, seed=99)
    ends = [calibrate(*images(40, seed=seed), MACS)[-1] for seed in range(12)]
    worth = [counted(*others, MACS, last.confidence)[1] for last in ends]
    assert np.mean(worth) > others[1][:, 2].mean() - 0.01


def test_nearly_the_best_of_all_thresholds():
    """Every pair of thresholds on a grid: none is more accurate for the same macs, but for little."""
    confidence, right = images(400)
    rows = calibrate(confidence, right, MACS)
    found = [counted(confidence, right, MACS, row.confidence)[1] for row in rows]
    grid = [0.0, *np.quantile(confidence, np.linspace(0.02, 0.98, 25)), NEVER]
    for needed in itertools.product(grid, repeat=2):
        spent, hits, _ = counted(confidence, right, MACS, needed)
        ours = max(own for row, own in zip(rows, found, strict=True) if row.average_macs <= spent + GAP * sum(MACS))
        assert ours >= hits - 0.02, needed


def test_better_than_one_threshold_for_all_exits():
    """Where the first exit is often sure and wrong, it has to be asked for more than the second."""
    confidence, right = images(4000)
    confidence[:, 0] = confidence[:, 0] ** 0.2
    rows = calibrate(confidence, right, MACS)
    gains = []
    for threshold in np.quantile(confidence, [0.2, 0.4, 0.6, 0.8]):
        spent, hits, _ = counted(confidence, right, MACS, (threshold, threshold))
        gains.append(max(row.quality for row in rows if row.average_macs <= spent + GAP * sum(MACS)) - hits)
    assert min(gains) > 0
    assert max(gains) > 0.02


def test_they_hold_on_other_images():
    rows = calibrate(*images(5000, seed=1), MACS)
    confidence, right = images(5000, seed=2)
    for row in rows[5 :: len(rows) // 5]:
        spent, hits, _ = counted(confidence, right, MACS, row.confidence)
        assert spent == pytest.approx(row.average_macs, rel=0.05)
        assert hits == pytest.approx(row.quality, abs=0.02)


def test_an_exit_that_is_never_right_is_passed():
    confidence, right = images(500)
    right[:, 1] = False
    rows = calibrate(confidence, right, MACS)
    assert rows[-1].exits[1] == 0
    assert counted(confidence, right, MACS, rows[-1].confidence)[1] >= right[:, [0, 2]].mean(0).max()


@pytest.mark.parametrize("num", [1, 2, 30])
def test_few_images_and_equal_confidences(num):
    for confidence in (np.ones((num, 3)), np.full((num, 3), 0.5), images(num)[0]):
        rows = calibrate(confidence, np.ones((num, 3), bool), MACS)
        averages = [row.average_macs for row in rows]
        assert averages == sorted(averages)
        assert averages[0] == 10
        assert averages[-1] <= 75


def test_a_single_exit_has_nothing_to_choose():
    (row,) = calibrate(*images(10, exits=1), (7,))
    assert (row.confidence, row.average_macs, row.exits) == ((), 7.0, (1.0,))


# Where asking costs something


def drawn_exits(num, seed=0):
    """Four exits that are better and better, and surer where they are right."""
    rng = np.random.default_rng(seed)
    hard = rng.random(num)
    right = np.stack([hard < level for level in (0.5, 0.65, 0.75, 0.8)], 1)
    sure = np.clip(0.95 - 0.5 * hard[:, None] + 0.05 * rng.standard_normal((num, 4)) + [0, 0.05, 0.1, 0.1], 0.1, 0.99)
    return sure, right


STAGES, ASKING = (10, 10, 20, 30), (8, 8, 8)


def test_what_is_spent_counts_only_the_exits_that_are_asked():
    sure, right = drawn_exits(400)
    rows = calibrate(sure, right, STAGES, asking=ASKING)
    assert rows[0].confidence == (0.0, NEVER, NEVER)
    assert (rows[0].average_macs, rows[0].exits) == (10, (1, 0, 0, 0))
    assert rows[-1].average_macs == 70
    assert all(confidence > 1 for confidence in rows[-1].confidence)
    for row in rows:
        spent, left = 0.0, []
        for image in sure:
            for exit, needed in enumerate((*row.confidence, 0.0)):
                spent += STAGES[exit]
                if needed <= 1 and image[exit] >= needed:
                    left.append(exit)
                    break
                if needed <= 1:
                    spent += ASKING[exit]
        assert row.average_macs == pytest.approx(spent / len(sure))
        assert row.exits == pytest.approx(np.bincount(left, minlength=4) / len(sure))
        assert sum(needed <= 1 for needed in row.confidence) <= 2
    for low, high in itertools.pairwise(rows):
        assert low.average_macs < high.average_macs
        assert low.quality <= high.quality
    assert any(0 < part < 1 for row in rows for part in row.exits)


def test_early_exit_is_never_worse_than_to_leave_at_the_same_exit_always():
    """Not even where confidences say nothing."""
    sure, right = drawn_exits(300)
    for confidence in (sure, np.random.default_rng(1).random(sure.shape)):
        rows = calibrate(confidence, right, STAGES, asking=ASKING)
        for macs, quality in zip(np.cumsum(STAGES), right.mean(0), strict=True):
            best = max(row.quality for row in rows if row.average_macs <= macs)
            assert best >= quality - 1e-9
