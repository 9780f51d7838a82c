"""The paper's claims, checked by one command: `make paper`, or `python -m benchmarks.claims --scale cpu`.

Where to look:

- `cutting` (statements 1 to 7), `comparison` (8 to 10), `ablations` (11 to 16), `beyond` (controls, and what goes
  beyond the paper): the claims. Each stands in one place: what is computed of its runs, the rule for the verdict,
  what the paper says, and which runs it is judged on. `claim` says what a claim is; `claims` lists them all.
- `trainings`: what is trained, at every scale. `measures`: what is measured on a trained network.
- `verdict` and `evidence`: the few pure functions that rules and comparisons are made of.
- `runner`: does what is missing. `store`: the JSON files. `page` and `figures`: docs/claims.md, from these files
  alone.
"""
