#!/bin/sh
# Draws all pictures of the docs anew. Needs cnmm with the extra "train" (`make venv` installs it); another
# interpreter: PYTHON=/path/to/python sh docs/images/make.sh
set -eu
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
cnmm() { "$PYTHON" -m cnmm "$@"; }

cnmm draw cnmm_tiny -o docs/images/cnmm_tiny.svg
cnmm draw cnmm_b6s3 -o docs/images/cnmm_b6s3.svg
cnmm draw cnmm_b6s3 --point e3c0 -o docs/images/cnmm_b6s3_e3c0.svg
cnmm draw cnmm_b6s3 --point e6c37 -o docs/images/cnmm_b6s3_e6c37.svg
cnmm draw cnmm_b6s3 --point e6m37 -o docs/images/cnmm_b6s3_e6m37.svg
cnmm draw cnmm_b6s3 --point e6c75 -o docs/images/cnmm_b6s3_e6c75.svg
cnmm draw cnmm_seg_tiny -o docs/images/cnmm_seg_tiny.svg
