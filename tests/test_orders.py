import dataclasses
import json

import pytest
import torch

import cnmm
from cnmm.evaluation.damage import measure_orders
from cnmm.orders import ORDERS_FILE, load_orders, save_orders
from cnmm.run_folder import load_plan
from tests.helpers import complaint, refused, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a model and its orders, and the model."""
    folder = tmp_path_factory.mktemp("orders")
    model = trained("cnmm_tiny", channels=8)
    model.orders = measure_orders(model, torch.randn(16, 1, 28, 28, generator=torch.Generator().manual_seed(0)))
    cnmm.save(model, folder)
    save_orders(folder, model.orders)
    return folder, model


def test_orders_are_read_as_they_were_written(run):
    folder, model = run
    assert load_orders(folder, model.config) == model.orders
    loaded, plan = cnmm.load(folder), load_plan(folder)
    assert loaded.orders == plan.orders == model.orders
    for name in ("e3d0", "e2d1", f"e3d{len(model.orders[3])}"):
        assert cnmm.named_point(loaded, name) == cnmm.named_point(plan, name) == cnmm.named_point(model, name)
        assert cnmm.named_point(loaded, name).name == name


def test_a_folder_without_orders_has_none(run, tmp_path):
    cnmm.save(run[1], tmp_path)
    assert load_orders(tmp_path, run[1].config) is None
    assert cnmm.load(tmp_path).orders is None


def changed(text, **fields):
    return json.dumps({**json.loads(text), **fields})


def without_a_cut(text):
    data = json.loads(text)
    data["orders"][2]["cuts"].pop()
    return json.dumps(data)


def twice(text):
    data = json.loads(text)
    data["orders"][2]["cuts"][1] = data["orders"][2]["cuts"][0]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
        (lambda text: "[]", "must be an object"),
        (lambda text: changed(text, format_version=2), "format_version=2, this version of cnmm reads 1"),
        (lambda text: changed(text, rule="luck"), "rule='luck'"),
        (lambda text: changed(text, orders=[{"exit": 7, "cuts": []}]), "orders[0].exit=7"),
        (lambda text: changed(text, orders=[{"exit": 1, "cuts": [[1]]}]), "orders[0].cuts=[[1]]"),
        (lambda text: changed(text, orders=[{"exit": 1, "cuts": [[-1, 2]]}]), "orders[0].cuts=[[-1, 2]]"),
        (lambda text: changed(text, orders=[]), "exit 1 has no order"),
        (without_a_cut, "cuts do not lead to a single network"),
        (twice, "cannot be cut there"),
    ],
)
def test_corrupt_orders_are_refused_in_one_line(run, tmp_path, damaged, message):
    folder, model = run
    (tmp_path / ORDERS_FILE).write_text(damaged((folder / ORDERS_FILE).read_text()))
    words = refused(load_orders, tmp_path, model.config)
    assert message in words
    assert words.startswith(str(tmp_path / ORDERS_FILE))
    assert words.endswith(f"remove it, and measure again: cnmm frontier {tmp_path}")


def test_orders_of_another_model_are_refused(run):
    other = dataclasses.replace(run[1].config, blocks=4)
    assert "measure again: cnmm frontier" in refused(load_orders, run[0], other)


def test_the_command_line_refuses_them_in_one_line(run, capsys, tmp_path):
    cnmm.save(run[1], tmp_path / "run")
    assert "its cutting orders were not measured" in complaint(
        capsys, "draw", tmp_path / "run", "--point", "e3d1", "-o", tmp_path / "a.svg"
    )
    (tmp_path / "run" / ORDERS_FILE).write_text("{")
    assert ORDERS_FILE in complaint(capsys, "draw", tmp_path / "run", "--point", "e3d1", "-o", tmp_path / "a.svg")
