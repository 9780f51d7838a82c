#!/usr/bin/env bash
# The tests with the oldest versions that pyproject.toml allows.
#   bash scripts/ci_minimum.sh [ARGUMENTS OF PYTEST]        PYTHON=... chooses the interpreter
# TORCH=...: another torch than the oldest, for example TORCH=torch==2.13.0 where no other is on offer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" - > "$place/oldest.txt" <<'PY'
import os
import re
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for line in (*project["dependencies"], *extras["train"], *extras["openvino"]):
    name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups()
    oldest = f"{name}=={bound}{'.0' * (2 - bound.count('.'))}"
    print(os.environ.get("TORCH", oldest) if name == "torch" else oldest)
PY
cat "$place/oldest.txt"
"$python" -m venv "$place/venv"
"$place/venv/bin/pip" install -qq -r "$place/oldest.txt" \
    hypothesis pytest pytest-timeout pytest-xdist torchmetrics
"$place/venv/bin/pip" install -qq --no-deps -e .
OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest -n 2 -m "not slow" "$@"
