"""What the tests of training share: a small set of real images, a small model, a short recipe."""

import json
import sys
import time

import torch

import cnmm
from cnmm.data import ArraySplit, DataSet, fashion_sample
from cnmm.training.recipes import recipe

SGD = {
    "optimizer": "sgd",
    "lr": 0.05,
    "nesterov": True,
    "clip": 1.0,
    "schedule": "cosine",
    "label_smoothing": 0.0,
    "shift_lr": 1.0,
    "freeze_out": False,
    "stem_init": "random",
    "padding": "black",
    "flips": "random",
    "crop": 4,
    "ladder_rule": "flow",
    "ladder_labels": 0.5,
    "exit_distill": 0.0,
}
"""What `quick` was before Muon: the plainest training."""


def small_config(**options):
    return recipe("quick", **{"epochs": 2, "batch_size": 16, "val": 20, **SGD, **options})


def small_data(num=100):
    """The first images of the embedded sample."""
    images, labels = fashion_sample("train")
    test_images, test_labels = fashion_sample("test")
    return DataSet(
        name="fashion",
        spec="fashion",
        classes=tuple("abcdefghij"),
        train=ArraySplit(images=images[:num], labels=labels[:num]),
        test=ArraySplit(images=test_images[:50], labels=test_labels[:50]),
        mean=(0.29,),
        std=(0.35,),
        size=(28, 28),
        in_chans=1,
    )


def new_model(seed=0, **options):
    torch.manual_seed(seed)
    return cnmm.create_model("cnmm_tiny", **{"channels": 8, **options})


def weights(model):
    return model.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def folder(path):
    path.mkdir()
    return path


COMMAND = ["train", "--data", "fashion", "--model", "cnmm_tiny", "--epochs", "2", "--batch-size", "600", "--val", "600"]


def command(*args):
    return [sys.executable, "-m", "cnmm", *args]


def wait_for(path):
    wait_until(path.exists)


def wait_until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
