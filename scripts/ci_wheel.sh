#!/usr/bin/env bash
# A built wheel: it holds what it must, trains with torch, and runs the demo's light part without.
#   bash scripts/ci_wheel.sh            PYTHON=... chooses the interpreter
# TRAIN_PYTHON=...: an interpreter with torch to make the ladder with, instead of a new environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
source=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

echo "== build"
"$python" -m venv "$place/light"
"$place/light/bin/pip" wheel -qq --no-deps --wheel-dir "$place/dist" .
"$place/light/bin/python" - "$place"/dist/*.whl <<'PY'
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
for wanted in ("cnmm/py.typed", "cnmm/data/fashion_sample.npz", "cnmm/data/fashion_sample.LICENSE"):
    assert wanted in names, f"{wanted} is missing in the wheel"
outside = [name for name in names if not name.startswith(("cnmm/", "cnmm-"))]
assert not outside, f"the wheel holds {outside}"
print(f"{sys.argv[1].rpartition('/')[2]}: {len(names)} files")
PY

echo "== a ladder, with torch"
if [ -z "${TRAIN_PYTHON:-}" ]; then
    "$python" -m venv "$place/train"
    "$place/train/bin/pip" install -qq -c constraints.txt "$(echo "$place"/dist/*.whl)[train]"
    TRAIN_PYTHON=$place/train/bin/python
fi
cd "$place"
"$TRAIN_PYTHON" -m cnmm train --data fashion --model cnmm_tiny --epochs 1 --out demo/run
"$TRAIN_PYTHON" -m cnmm frontier demo/run --points 8 --images 200
"$TRAIN_PYTHON" -m cnmm export demo/run --ladder 3 -o demo/ladder

echo "== the wheel without torch"
"$place/light/bin/pip" install -qq "$place"/dist/*.whl
bash "$source/scripts/ci_use_ladder.sh" "$place/light/bin" demo/ladder
"$place/light/bin/python" "$source/examples/demo.py" light
