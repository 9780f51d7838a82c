"""All claims: the paper's statements, the controls, and what goes beyond; and what the paper's table and figures
show."""

from __future__ import annotations

from benchmarks.claims import ablations, comparison, cutting
from benchmarks.claims.beyond import BEYOND, CONTROLS
from benchmarks.claims.claim import Claim

STATEMENTS: tuple[Claim, ...] = (
    cutting.CLAIM_1,
    cutting.CLAIM_2,
    cutting.CLAIM_3,
    cutting.CLAIM_4,
    cutting.CLAIM_5,
    cutting.CLAIM_6,
    cutting.CLAIM_7,
    comparison.CLAIM_8,
    comparison.CLAIM_8B,
    comparison.CLAIM_8C,
    comparison.CLAIM_9,
    comparison.CLAIM_9B,
    comparison.CLAIM_10,
    ablations.CLAIM_11,
    ablations.CLAIM_12,
    ablations.CLAIM_13,
    ablations.CLAIM_14,
    ablations.CLAIM_15,
    ablations.CLAIM_16,
)
CLAIMS = (*STATEMENTS, *CONTROLS, *BEYOND)
SHOWN = {
    "Figure 6: exits and CNMM-single under cutting": ("1", "2", "3", "4", "5", "6", "7"),
    "Figure 7: state of the art": ("8", "8b", "8c", "9", "9b"),
    "Figure 8: pictures at several budgets": ("10",),
    "Figure 9: variants of training": ("11", "12"),
    "Figure 10: more pictures": ("10",),
    "Table 1: expectation and Monte-Carlo": ("13",),
}
"""What the paper shows of its results, by the claims that are read off it."""
