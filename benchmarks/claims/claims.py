"""All claims: the paper's statements, the controls, and what goes beyond; and what the paper's table and figures show."""

from __future__ import annotations

from benchmarks.claims.beyond import BEYOND, CONTROLS
from benchmarks.claims.statements import STATEMENTS

CLAIMS = (*STATEMENTS, *CONTROLS, *BEYOND)
SHOWN = {
    "Figure 6: exits and CNMM-single under cutting": ("1", "2", "3", "4", "5", "6", "7"),
    "Figure 7: state of the art": ("8", "8b", "9", "9b"),
    "Figure 8: pictures at several budgets": ("10",),
    "Figure 9: variants of training": ("11", "12"),
    "Figure 10: more pictures": ("10",),
    "Table 1: expectation and Monte-Carlo": ("13",),
}
"""What the paper shows of its results, by the claims that are read off it."""
