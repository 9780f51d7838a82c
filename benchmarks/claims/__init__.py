"""The paper's claims, checked by one command: `make paper`, or `python -m benchmarks.claims --scale cpu`.

Where to look:

- `statements` and `controls` and `beyond`: the claims. Each stands there in one place: what the paper says, which runs it
  is judged on, what is computed of them, and the rule for the verdict.
- `trainings`: what is trained, at every scale. `measures`: what is measured on a trained network.
- `verdict` and `evidence`: the few pure functions that rules and comparisons are made of.
- `runner`: does what is missing. `store`: the JSON files. `page` and `figures`: docs/claims.md, from these files alone.
"""
