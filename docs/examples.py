"""One runnable example for every public name of cnmm; the function's name is the public name.

`scripts/make_api.py` puts the bodies into docs/api.md, and `tests/test_api_docs.py` runs them. An example asks for what
it needs by the names of its parameters: what `given` makes, a tiny trained `run`, or an empty `folder`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cnmm


def given(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = cnmm.create_model("cnmm_tiny", num_classes=10)  # 3 blocks, 2 scales, 28x28 grey images
    images, labels = torch.rand(32, 1, 28, 28), torch.arange(32) % 10
    with torch.no_grad():
        model(images)  # some batch statistics; the model is untrained
    model.eval()
    model.preprocessing = cnmm.Preprocessing.plain(model.config)  # a trained run has its own
    frontier = cnmm.measure(model, [(images, labels)])
    cnmm.export_ladder(model, frontier, folder / "ladder", points=3)
    ladder = folder / "ladder"
    photos = (255 * images).byte().permute(0, 2, 3, 1).numpy()  # uint8 [N, height, width, channels]
    return {
        "model": model,
        "images": images,
        "labels": labels,
        "frontier": frontier,
        "ladder": ladder,
        "photos": photos,
    }


def given_run(folder: Path) -> Any:
    run = cnmm.train(data="fashion", out=folder / "run", model="cnmm_tiny", epochs=1, val=200)
    run.measure(images=100, points=8)
    return run


# Train a run, open it again


def train(folder):
    run = cnmm.train(data="fashion", out=folder / "run", model="cnmm_tiny", epochs=1, val=200)
    assert (run.folder / "model.safetensors").is_file()


def Run(run, folder):
    run = cnmm.Run(run.folder)
    point = run.choose("60%")
    print(point.name, point.macs, point.quality, point.metric)
    run.export_ladder(folder / "ladder", points=3)
    print(run.card())


def load(model, images, folder):
    cnmm.save(model, folder / "mine")
    loaded = cnmm.load(folder / "mine")
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def save(model, folder):
    cnmm.save(model, folder / "mine")  # config.json and model.safetensors


# Run a ladder, without torch


def Session(ladder, photos):
    with cnmm.Session(ladder, threads=1) as session:
        print(session.predict(photos, budget="60%").top(3)[0])
        print(session.predict(photos, confidence=0.9).exits)  # confident images leave early


def Prediction(ladder, photos):
    with cnmm.Session(ladder, threads=1) as session:
        answer = session.predict(photos)
    assert isinstance(answer, cnmm.Prediction)
    assert np.allclose(answer.probabilities.sum(axis=1), 1, atol=1e-4)
    print(answer.point, f"{answer.macs:,.0f} macs per image, {answer.time_ms:.1f} ms")


def bench(ladder):
    cnmm.bench(ladder, runtime="onnx", seconds=0.05)  # from now on budgets such as "5ms" work on this machine


# The zoo


def create_model():
    model = cnmm.create_model("cnmm_b6s3", num_classes=100)
    assert model.chain.count() == 672


def list_models():
    assert "cnmm_b6s3" in cnmm.list_models()
    assert cnmm.list_models("seg") == ["cnmm_seg_b5s5", "cnmm_seg_tiny"]


def register_model():
    @cnmm.register_model
    def my_model() -> cnmm.MixtureConfig:
        """My camera: 3 blocks, 32 channels."""
        return cnmm.MixtureConfig(name="my_model", blocks=3, channels=32)


def model_plan():
    plan = cnmm.model_plan("cnmm_b6s3", num_classes=100)  # without weights, and without torch
    assert plan.chain.count() == 672


# The mixture and its distribution


def MixtureConfig():
    config = cnmm.MixtureConfig(name="mine", blocks=3, scales=2, channels=32, num_classes=7, input_size=(64, 64))
    assert config.exit_numbers == (1, 2, 3)


def Preprocessing(model):
    about = cnmm.Preprocessing.plain(model.config)  # classes by number, values from 0 to 1
    assert about.image_shape == (28, 28, 1)
    assert cnmm.Preprocessing(classes=("cat", "dog"), mean=(0.5,), std=(0.25,), size=(28, 28)).channels == 1


def UserError():
    try:
        cnmm.create_model("cnmm_b6s4")
    except cnmm.UserError as error:  # what a user can mend, on one line; anything else is a bug
        print(error)  # unknown model 'cnmm_b6s4': the nearest names are cnmm_b6s3, ...


def Mixture(model, images):
    assert isinstance(model, cnmm.Mixture)
    with torch.no_grad():
        logits = model(images)  # the last exit, in expectation
        exits = model.forward_exits(images)  # {1: logits, 2: logits, 3: logits}
    assert logits.shape == exits[3].shape == (32, 10)


def Lattice(model):
    lattice = model.lattice
    assert isinstance(lattice, cnmm.Lattice)
    assert lattice.output - 1 == 6  # maps: 3 blocks of 2 scales


def Chain(model):
    chain = model.chain
    assert isinstance(chain, cnmm.Chain)
    assert chain.count() == 12  # networks in the mixture
    with torch.no_grad():
        flow = chain.flow(exit=3)  # the probability that a network uses each edge
    assert math.isclose(flow[0, 1], 1.0, abs_tol=1e-5)  # every network starts at the image


# Operating points and their cost


def OperatingPoint(model, images):
    point = cnmm.named_point(model, "e2c1")  # exit 2 after one cut: a value, which is passed to the model
    assert isinstance(point, cnmm.OperatingPoint)
    assert point.exit == 2
    with torch.no_grad():
        assert model(images, point=point).shape == (32, 10)


def cutting_order(model):
    order = cnmm.cutting_order(model, exit=3)
    assert order[4].name == "e3c4"  # exit 3 after 4 cuts
    by_mac = cnmm.cutting_order(model, exit=3, rule="flow_per_mac")
    assert by_mac[4].name == "e3m4"


def named_point(model):
    assert cnmm.named_point(model, "e3c4") == cnmm.cutting_order(model, exit=3)[4]


def CostTable():
    table = cnmm.CostTable.of(cnmm.model_plan("cnmm_b6s3").config)
    assert table.exit(6).macs == 95_360_000


# Frontiers and budgets


def measure(model, images, labels):
    frontier = cnmm.measure(model, [(images, labels)])
    print(len(frontier.points), "points,", len(frontier.envelope()), "on the envelope")


def Frontier(frontier):
    point = frontier.choose("60%")  # the best measured point within a budget
    assert point.macs <= 0.6 * frontier.full_macs


def Budget(frontier):
    budget = cnmm.Budget(kind="percent", value=60, text="60%")
    assert frontier.choose(budget) == frontier.choose("60%")


# Slim networks and export


def slim(model, frontier, images):
    small = cnmm.slim(model, frontier.choose("60%"))  # a plain nn.Module: batch normalisation folded, nothing dead
    with torch.no_grad():
        assert small(images).shape == (32, 10)


def save_slim(model, folder):
    cnmm.save_slim(cnmm.slim(model, cnmm.named_point(model, "e2c0")), folder / "small")


def load_slim(model, images, folder):
    cnmm.save_slim(cnmm.slim(model, cnmm.named_point(model, "e2c0")), folder / "small")
    small = cnmm.load_slim(folder / "small")
    with torch.no_grad():
        assert small(images).shape == (32, 10)


def export_onnx(model, folder):
    small = cnmm.slim(model, cnmm.named_point(model, "e2c0"))
    cnmm.export_onnx(small, folder / "small.onnx")  # uint8 images in, probabilities out


def export_ladder(model, frontier, folder):
    cnmm.export_ladder(model, frontier, folder / "ladder", points=3)
    assert (folder / "ladder" / "ladder.json").is_file()
