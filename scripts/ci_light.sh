#!/usr/bin/env bash
# The light install for real, without torch: a ladder made by hand is chosen from, timed and run.
#   bash scripts/ci_light.sh            PYTHON=... chooses the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

echo "== a ladder made by hand (numpy and onnx)"
"$python" -m venv "$place/maker"
"$place/maker/bin/pip" install -qq numpy onnx
"$place/maker/bin/python" -m tests.runtime.ladders "$place/ladder"

echo "== pip install ."
"$python" -m venv "$place/light"
"$place/light/bin/pip" install -qq .
source=$PWD
cd "$place"  # away from the source: what runs is what was installed
bash "$source/scripts/ci_use_ladder.sh" "$place/light/bin" "$place/ladder"
