import dataclasses

import pytest

import cnmm
from cnmm.training.recipes import list_recipes, recipe, recipe_variant


def test_recipes_of_the_paper_are_the_papers():
    for name in ("cifar10", "cifar100"):
        config = recipe(name)
        assert (config.epochs, config.batch_size, config.lr, config.weight_decay) == (300, 64, 0.1, 1e-4)
        assert (config.momentum, config.nesterov, config.warmup, config.decay_all) == (0.9, False, 0.0, True)
        assert (config.gates, config.temperature, config.exit_weights) == ("relaxed", 2.0, "linear")
        assert (config.ladder_start, config.statistics) == (1.0, "raw")
    assert list_recipes() == ["quick", "long", "cifar10", "cifar100"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0: must be a whole number"),
        ({"batch_size": 1}, "batch_size=1: must be at least 2"),
        ({"lr": 0.0}, "lr=0.0: must be positive"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"ladder_start": 1.5}, "ladder_start=1.5: must be between 0 and 1"),
        ({"gates": "soft"}, "gates='soft': must be one of expectation, relaxed, hard"),
        ({"val": -1}, "val=-1"),
        ({"optimizer": "adam"}, "optimizer='adam': must be one of sgd, muon"),
        ({"matrix_lr": 0.0}, "matrix_lr=0.0: must be positive"),
        ({"ladder_rule": "luck"}, "ladder_rule='luck': must be one of flow, damage, all"),
        ({"teacher_weight": 2}, "teacher_weight=2: must be between 0 and 1"),
        ({"statistics": "new"}, "statistics='new': must be one of re-estimated, raw"),
        ({"statistics": "raw", "average": 0.9}, "average=0.9 with statistics='raw'"),
        ({"workers": -1}, "workers=-1: must be a whole number, 0, or None"),
        ({"workers": 1.5}, "workers=1.5: must be"),
        ({"learning_rate": 1}, "unknown training option 'learning_rate'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        recipe("quick", **options)


def test_long_is_quick_for_hours():
    assert dataclasses.replace(recipe("quick"), recipe="long", epochs=42, crop=4) == recipe("long")
    assert recipe_variant("quick") == recipe_variant("long") == {"gate_init": "uniform"}


def test_a_recipe_chooses_the_initial_gates_unless_told(fashion_folder, tmp_path):
    options = {"model": "cnmm_tiny", "channels": 8, "epochs": 1, "batch_size": 100, "val": 100, "ladder_start": 1.0}
    found = {}
    for name, more in (("quick", {}), ("told", {"gate_init": "half"}), ("paper", {"recipe": "cifar10"})):
        run = cnmm.train(f"fashion:{fashion_folder}", tmp_path / name, **options, **more)
        found[name] = run.model.config.gate_init
    assert found == {"quick": "uniform", "told": "half", "paper": "half"}
    again = cnmm.train(f"fashion:{fashion_folder}", tmp_path / "next", init=tmp_path / "told", **options)
    assert again.model.config.gate_init == "half"  # trained weights keep their gates
    assert again.config.stem_init == "random"  # and their stem


def test_unknown_recipes_list_the_known():
    with pytest.raises(ValueError, match="unknown recipe 'slow': must be one of quick, long, cifar10, cifar100"):
        recipe("slow")
