"""How good a mixture is: metrics, statistics, the frontier, early exit, pictures and reports."""
