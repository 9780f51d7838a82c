"""Rules are pure functions: made-up measurements, and every claim can come out in all three ways."""

import pytest

from benchmarks.claims.claim import NOT_RUN, Case, Judged, overall
from benchmarks.claims.claims import CLAIMS, SHOWN
from benchmarks.claims.verdict import FAILS, HOLDS, UNKNOWN, Verdict, better, no_worse, slightly, together


def diff(middle, half=0.004, **more):
    """A difference in shares with its interval."""
    return {
        "difference": middle,
        "low": middle - half,
        "high": middle + half,
        "p": None,
        "n": 100,
        "split": "test",
        "paired": True,
        **more,
    }


def rows(*middles, half=0.004, **more):
    return {"rows": [diff(middle, half, share=0.5, macs=1e6, exit=1, peer=0.5, **more) for middle in middles], "n": 100}


def orders(*middles):
    found = [diff(middle, share=share, control="random 0") for share in (0.75, 0.5) for middle in middles]
    return {"rows": found, "rule": "flow", "n": 100}


def table(one, five, half=0.004):
    shown = {"test": 0.7, "expectation": 0.74, "macs": 1e6}
    found = [diff(value, half, samples=number, **shown) for number, value in ((1, one), (5, five))]
    return {"rows": found, "gates": "relaxed", "n": 100}


def losses(*middles, half=0.004):
    return rows(*middles, half=half, sampled=0.01, expectation=0.03)


def gain(*gains):
    first = [{"exit": 1, "quality": 0.5}]
    return {"rows": first + [{"exit": k, "quality": 0.6, "gain": each} for k, each in enumerate(gains, 2)], "n": 100}


def structure(networks=4, macs=100):
    graphs = [{"T": 1, "networks": 1, "functions": 1}, {"T": 3, "networks": networks, "functions": 6}]
    model = {"networks": 9, "params": 5, "dense_params": 5, "macs": macs, "dense_macs": 100}
    return {"graphs": graphs, "model": model, "n": 2}


def doubt(usual, ours):
    found = [{"signal": "largest probability", "auroc": usual}, {"signal": "exits: disagreement", "auroc": ours}]
    return {"rows": found, "of": "errors", "n": 100, "unknown": "", "unknown_n": 0}


def calibration(usual, ours):
    names = ("largest probability", "with a temperature", "mean of samples", "mean of exits")
    return {"rows": [{"way": n, "error": e} for n, e in zip(names, (0.1, usual, ours, 0.2), strict=True)], "n": 9}


def seeds(*values):
    return {"rows": [{"what": "in full", "values": list(values)}], "n": 100}


def fits(*values):
    return {"fits": {str(k): {"r2": value} for k, value in enumerate(values)}, "n": 16}


def curves(rising, num=3):
    return {"curves": [{}] * num, "rising": rising, "n": 100}


def choices(num, gain, step):
    return {"rows": [{"choices": num, "exits": 4, "gain": gain, "step": step, "exit_step": 2.0}], "n": 100}


def agreeing(*shares):
    return {"rows": [{"macs": 1e6 * k, "agrees": share} for k, share in enumerate(shares, 1)], "n": 1}


def free(cut):
    return {"cut": cut, "best": diff(0.0), "raw": -0.1, "share": 0.5, "n": 100}


def statistics(better, mean=0.01):
    return {"points": 10, "better": better, "mean": mean, "most": 0.02, "n": 100}


def published(middle, epochs=14):
    more = {"name": "MSDNet", "one": True, "published": 0.9, "ours": 0.9}
    return {**rows(middle, **more), "epochs": epochs}


PEERS = (rows(0.01), rows(-0.02), rows(-0.005))
WINS = (rows(0.01, 0.02), rows(-0.02, 0.001), rows(0.003))
RULES = tuple({**found, "rule": "damage"} for found in WINS)
FOUND = {
    "1": (curves(0.9), curves(0.3), curves(0.6)),
    "2": WINS,
    "3": (gain(diff(0.01), diff(0.001)), gain(diff(0.01), diff(-0.01)), gain(diff(0.01), diff(-0.001))),
    "4": ({**diff(-0.01), "better": False}, {**diff(0.01), "better": False}, {**diff(0.001), "better": True}),
    "5": (free(diff(-0.002)), free(diff(-0.03)), free(None)),
    "6": ({"won": 9, "lost": 1}, {"won": 2, "lost": 8}, {"won": 6, "lost": 4}),
    "7": (choices(12, 0.01, 1.1), choices(4, 0.01, 1.1), choices(12, 0.01, 2.5)),
    "8": PEERS,
    "8b": (
        {"in full": diff(0.01), "equal macs": diff(-0.01)},
        {"in full": diff(-0.01)},
        {"in full": diff(0.003), "equal macs": diff(0.0)},
    ),
    "8c": (published(0.01), published(-0.02, 300), published(-0.02, 14)),
    "9": (rows(0.01), rows(-0.01), rows(0.001)),
    "9b": ({**diff(0.02), "share": 0.4}, {**diff(0.02), "share": 0.9}, {**diff(-0.02), "share": 0.4}),
    "10": (agreeing(0.8, 0.9, 1.0), agreeing(0.95, 0.9, 1.0), agreeing(1.0)),
    "11": (losses(0.01, 0.02), losses(-0.02), losses(0.003)),
    "12": tuple({**found, "choices": [9, 4]} for found in WINS),
    "13": (table(-0.03, 0.001), table(-0.03, 0.05), table(-0.03, 0.0, 0.02)),
    "14": (fits(0.99, 0.96), fits(0.99, 0.8), fits(0.92, 0.99)),
    "15": (orders(0.05, 0.02), orders(0.05, -0.02), orders(0.05, 0.001)),
    "16": (structure(), structure(networks=5), structure(macs=105)),
    "C1": ({**diff(0.0), "share": 0.5}, {**diff(-0.05), "share": 0.5}, {"n": 0, "share": 0.5}),
    "C2": PEERS,
    "C3": (seeds(0.81, 0.815), seeds(0.81, 0.85), seeds(0.8)),
    "B1": RULES,
    "B2": RULES,
    "B3": (statistics(9), statistics(2), statistics(6)),
    "B4": WINS,
    "B5": WINS,
    "B6": tuple({**found, "against": "fixed"} for found in WINS),
    "B7": (doubt(0.8, 0.85), doubt(0.8, 0.7), doubt(0.8, 0.805)),
    "B8": (calibration(0.05, 0.01), calibration(0.01, 0.05), calibration(0.02, 0.02)),
}


def test_every_claim_is_here():
    assert FOUND.keys() == {claim.key for claim in CLAIMS}
    assert {key for keys in SHOWN.values() for key in keys} <= FOUND.keys()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_a_rule_can_come_out_in_all_three_ways(claim):
    verdicts = [claim.rule(found) for found in FOUND[claim.key]]
    assert [verdict.word for verdict in verdicts] == [HOLDS, FAILS, UNKNOWN]
    assert all(verdict.reason for verdict in verdicts)


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.table], ids=lambda claim: claim.key)
def test_a_table_has_a_cell_for_every_column(claim):
    for found in FOUND[claim.key]:
        head, lines = claim.table(found)
        assert lines
        assert {len(line) for line in lines} == {len(head)}


def test_the_interval_decides():
    assert better(diff(0.01, 0.009), "").word == HOLDS
    assert better(diff(0.01, 0.011), "").word == UNKNOWN
    assert better(diff(-0.01, 0.009), "").word == FAILS
    assert better(diff(0.0, 0.001), "").word == FAILS  # too small to matter
    assert no_worse(diff(-0.009, 0.0005), "").word == HOLDS
    assert no_worse(diff(-0.02, 0.005), "").word == FAILS
    assert slightly(diff(0.05, 0.01), "", better=True).word == FAILS  # not slightly
    assert slightly(diff(0.025, 0.01), "", better=True).word == UNKNOWN
    assert together([]).word == UNKNOWN


def judged(*words):
    """Cases with these verdicts; a star marks those of the paper's training."""
    cases = []
    for word in words:
        case = Case(label="", needs={}, paper=word.endswith("*"))
        cases.append(Judged(case, None, Verdict(word.rstrip("*"), ""), ()))
    return cases


def test_one_case_that_does_not_hold_refutes_a_claim():
    assert overall(judged(HOLDS, HOLDS, FAILS)).word == FAILS
    assert overall(judged(HOLDS, UNKNOWN)).word == HOLDS
    assert overall(judged(HOLDS, UNKNOWN, UNKNOWN)).word == UNKNOWN
    assert overall(judged(NOT_RUN, NOT_RUN)).word == NOT_RUN


def test_cases_of_the_papers_training_decide():
    assert overall(judged(FAILS, f"{HOLDS}*")).word == HOLDS
    found = overall(judged(FAILS, f"{NOT_RUN}*"))
    assert (found.word, found.reason) == (FAILS, "1 of 2 cases run; with our training; the paper's was not run")
