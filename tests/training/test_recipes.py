import dataclasses

import pytest

import cnmm
from cnmm.training.optim import cyclic_rate, learning_rate
from cnmm.training.recipes import list_recipes, recipe, recipe_variant
from cnmm.training.scene_batches import crop_size


def test_recipes_of_the_paper_are_the_papers():
    for name in ("cifar10", "cifar100"):
        config = recipe(name)
        assert (config.epochs, config.batch_size, config.lr, config.weight_decay) == (300, 64, 0.1, 1e-4)
        assert (config.momentum, config.nesterov, config.warmup, config.decay_all) == (0.9, False, 0.0, True)
        assert (config.gates, config.temperature, config.exit_weights) == ("relaxed", 2.0, "linear")
        assert (config.ladder_start, config.statistics) == (1.0, "raw")
    assert list_recipes() == ["quick", "long", "cifar10", "cifar100", "street", "cityscapes"]


def test_the_recipe_for_cityscapes_is_the_papers():
    config = recipe("cityscapes")
    assert (config.optimizer, config.epochs, config.batch_size, config.lr) == ("sgd", 200 + 10, 6, 0.1)
    assert (config.momentum, config.weight_decay, config.decay_all) == (0.9, 1e-4, True)
    assert (config.gates, config.temperature, config.statistics) == ("relaxed", 2.0, "raw")
    assert (config.scene_crop, config.zoom, config.flip) == ((384, 768), (0.75, 1.1), True)
    assert [crop_size(config, epoch) for epoch in (0, 199, 200, 209)] == [(384, 768)] * 2 + [(512, 1024)] * 2


def test_the_cyclic_schedule_is_that_of_the_code_that_the_paper_cites():
    """lr(0) = eta; then eta * (5 - ((e - 1) mod 5)), constant within an epoch, and eta is halved at milestones."""
    config = recipe("cityscapes")
    assert [cyclic_rate(0.1, epoch, lowest=True) for epoch in range(8)] == pytest.approx(
        [0.1, 0.5, 0.4, 0.3, 0.2, 0.1, 0.5, 0.4]
    )
    for epoch in range(210):
        eta = 0.1
        for milestone in (30, 60, 90, 120, 150, 170, 190):
            eta = eta / 2 if epoch >= milestone else eta
        expected = eta if epoch == 0 else eta * (5 - ((epoch - 1) % 5))
        for step in (0, 100, 494):
            rate = learning_rate(config, (epoch * 495 + step) / (210 * 495))
            assert rate == pytest.approx(expected), (epoch, step)
    highest = recipe("cityscapes", cycle_lr="highest")
    assert [learning_rate(highest, epoch / 210) for epoch in (0, 1, 5, 31)] == pytest.approx([0.02, 0.1, 0.02, 0.05])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0: must be a whole number"),
        ({"batch_size": 1}, "batch_size=1: must be a whole number from 2 to"),
        ({"lr": 0.0}, "lr=0.0: must be a number above 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"ladder_start": 1.5}, "ladder_start=1.5: must be a number between 0 and 1"),
        ({"gates": "soft"}, "gates='soft': must be one of expectation, relaxed, hard"),
        ({"val": -1}, "val=-1"),
        ({"optimizer": "adam"}, "optimizer='adam': must be one of sgd, muon"),
        ({"matrix_lr": 0.0}, "matrix_lr=0.0: must be a number above 0"),
        ({"ladder_rule": "luck"}, "ladder_rule='luck': must be one of flow, damage, all"),
        ({"teacher_weight": 2}, "teacher_weight=2: must be a number between 0 and 1"),
        ({"statistics": "new"}, "statistics='new': must be one of re-estimated, raw"),
        ({"statistics": "raw", "average": 0.9}, "average=0.9 with statistics='raw'"),
        ({"workers": -1}, "workers=-1: must be a whole number from 0 to 256, or null"),
        ({"workers": 1.5}, "workers=1.5: must be"),
        ({"zoom": (2.0, 1.0)}, r"zoom=\(2.0, 1.0\): must be two positive numbers, the smaller first"),
        ({"scene_crop": (0, 5)}, r"scene_crop=\(0, 5\): must be a list of 2 values, each a whole number"),
        ({"final_epochs": 15}, "final_epochs=15: must be 0 to epochs=14"),
        ({"class_weights": "rare"}, "class_weights='rare': must be one of equal, balanced, inverse_log"),
        ({"warmup": 1}, "warmup=1: must be a number of at least 0 and below 1"),
        ({"group": -3}, "group=-3: must be a whole number from 1"),
        ({"crop": 10**9}, "crop=1000000000: must be a whole number from 0 to 256"),
        ({"seed": 10**30}, "seed=1000000000000000000000000000000: must be a whole number"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"lr": 10**400}, "lr=1000"),
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"flip": 1}, "flip=1: must be true or false"),
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
