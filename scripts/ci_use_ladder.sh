#!/usr/bin/env bash
# What a device does with a ladder, with the commands of a light install:
#   bash scripts/ci_use_ladder.sh BIN LADDER        BIN: the folder of `python` and `cnmm`
set -euo pipefail
bin=$1 ladder=$2
photo=$(mktemp --suffix=.png)
trap 'rm -f "$photo"' EXIT
export NO_COLOR=1

"$bin/python" - <<'PY'
import importlib.util

for name in ("torch", "onnx", "safetensors", "matplotlib"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed: this is no light install"
PY
"$bin/python" -c "from PIL import Image; Image.new('RGB', (50, 40), (200, 80, 20)).save('$photo')"

set -x
"$bin/cnmm" --version
"$bin/cnmm" models
"$bin/cnmm" info cnmm_b6s3
"$bin/cnmm" choose "$ladder" --budget 60%
"$bin/cnmm" bench "$ladder" --seconds 0 --threads 1
"$bin/cnmm" choose "$ladder" --budget 10000ms
"$bin/cnmm" predict "$ladder" "$photo" --budget 60%
"$bin/cnmm" predict "$ladder" "$photo" --budget 10000ms --threads 1
"$bin/cnmm" predict "$ladder" "$photo" --confidence 0.5
"$bin/cnmm" predict "$ladder" "$photo" --average-macs 70% --json
"$bin/cnmm" predict "$ladder" "$photo" --deadline-ms 5000
set +x

echo "== what needs torch says so in one line"
status=0
words=$("$bin/cnmm" train --data fashion --out never 2>&1) || status=$?
test "$status" = 2
test "$(echo "$words" | wc -l)" = 1
echo "$words" | grep -F 'pip install "cnmm[train]"'
