"""Commands that are killed, terminated, or meet a full disk: the same command then ends as if nothing had happened.

`python -m tests.crash` does the same many times, and with a real full disk.
"""

import random
import signal

import pytest

from tests.crash import STORIES, Stage
from tests.helpers import write_fashion

BY_NAME = {story.name: story for story in STORIES}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """What every command makes of the same folder when nothing happens."""
    images = write_fashion(tmp_path_factory.mktemp("images") / "fashion", 60, 20)
    stage = Stage(tmp_path_factory.mktemp("stage"), images)
    yield stage
    stage.server.close()


@pytest.mark.parametrize("name", ["train", "frontier again", "export", "slim"])
def test_a_killed_command_ends_the_same(stage, name):
    assert -9 in stage.trial(BY_NAME[name], random.Random(1), timed=False)


def test_a_terminated_training_ends_the_same(stage):
    assert 143 in stage.trial(BY_NAME["train"], random.Random(1), signal.SIGTERM, timed=False)


@pytest.mark.parametrize("name", ["frontier", "export"])
def test_a_full_disk_is_one_line(stage, name):
    assert stage.full_trial(BY_NAME[name], random.Random(4)) == [2]
