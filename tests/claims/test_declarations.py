"""Every declared training can be built, and every claim names what there is."""

import dataclasses

import pytest

from benchmarks.claims.claims import CLAIMS
from benchmarks.claims.measures import KINDS
from benchmarks.claims.runner import measuring_minutes
from benchmarks.claims.store import fingerprint
from benchmarks.claims.trainings import SCALES
from cnmm.config import VARIANT
from cnmm.training.recipes import recipe
from cnmm.zoo import model_plan
from peers.recipes import peer_recipe
from peers.zoo import PEERS, SEGMENTATION

TRAININGS = [
    pytest.param(scale, training, id=f"{name}-{training.name}")
    for name, scale in SCALES.items()
    for training in scale.trainings
]


@pytest.mark.parametrize(("scale", "training"), TRAININGS)
def test_a_training_builds_its_config(scale, training):
    assert training.data in scale.data
    fields = {**training.fields, "seed": training.seed}
    if training.how == "peer":
        assert training.network in (SEGMENTATION if training.data == "scenes" else PEERS)
        fields.pop("minutes", None)
        assert peer_recipe(training.network, training.recipe, **fields).seed == training.seed
    elif training.how != "given":
        variant = {name: fields.pop(name) for name in VARIANT if name in fields}
        plan = model_plan(training.network, **variant)
        assert (plan.config.task == "segmentation") == (training.data == "scenes")
        assert recipe(training.recipe, **fields).seed == training.seed
        assert bool(training.of) == (training.how == "slim")
        assert not training.of or scale.of(training.of)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_claim_names_runs_of_its_scale(scale):
    used = set()
    for claim in CLAIMS:
        for case in claim.cases:
            for need in case.needs.values() if scale.name in case.scales else ():
                kind, _, role = need.partition(":")
                assert kind in KINDS
                assert scale.of(role), f"{claim.key} needs {role}"
                used.update(training.name for training in scale.of(role))
            case.label.format_map(scale.titles)
    assert used == {training.name for training in scale.trainings}, "trained for nothing"


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_names_are_unique_and_slim_runs_come_after_what_they_are_cut_from(scale):
    names = [training.name for training in scale.ordered()]
    assert len(set(names)) == len(names) == len(scale.trainings)
    for training in scale.trainings:
        if training.of:
            assert names.index(training.name) > names.index(scale.of(training.of)[0].name)


def test_the_cpu_scale_takes_ten_hours_at_most():
    scale = SCALES["cpu"]
    measuring = sum(measuring_minutes(training, scale) for training in scale.trainings)
    assert scale.minutes + measuring <= 600
    assert max(training.minutes for training in scale.trainings) <= 25


def test_the_full_scale_is_the_papers():
    for role, epochs in (("cifar10_sampled", 300), ("cifar100_sampled", 300), ("scenes_sampled", 210)):
        training = SCALES["full"].of(role)[0]
        config = recipe(training.recipe, **training.fields)
        assert (config.epochs, config.gates, config.optimizer) == (epochs, "relaxed", "sgd")
    assert SCALES["full"].of("cifar10_b6") == SCALES["full"].of("cifar10_sampled")


def test_what_does_not_change_a_result_does_not_make_it_stale():
    training = SCALES["cpu"].of("cifar10_quick")[0]
    declared = fingerprint(training.declared())
    for same in ({"minutes": 99.0}, {"priority": 9}, {"also": ("b",)}):
        assert fingerprint(dataclasses.replace(training, **same).declared()) == declared
    for other in ({"seed": 5}, {"fields": {"epochs": 3}}, {"recipe": "long"}, {"network": "cnmm_b6s3"}):
        assert fingerprint(dataclasses.replace(training, **other).declared()) != declared
