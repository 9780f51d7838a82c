"""The fuzz test: some 5,000 damaged inputs, always the same ones, in one process of their own (see tests/fuzz)."""

import json
import sys

from tests.helpers import in_new_process


def test_damaged_input_gives_one_line_or_a_right_answer(tmp_path):
    done = in_new_process(sys.executable, "-m", "tests.fuzz", tmp_path, timeout=280, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert sum(found["cases"].values()) >= 3000
    for kind, num in found["cases"].items():
        assert 0 < found["answered"][kind] <= num  # damage that damages nothing is answered
    refused = sum(found["cases"].values()) - sum(found["answered"].values())
    assert refused >= 3000
