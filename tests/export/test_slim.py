import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cnmm
from cnmm.cascade import stage_macs
from cnmm.export.graph import cascade_graph, point_graph
from cnmm.export.slim import load_slim, save_slim, slim, slim_cascade

SIZES = {"cnmm_seg_b5s5": (64, 96), "cnmm_b5s4": (66, 70)}
"""Smaller than the models' own, to be quick; odd after halving, to be hard."""
RULES = ("flow", "flow_per_mac", "mean_flow")


def trained(name, **overrides):
    """A model whose every parameter and statistic differs from its initial value."""
    torch.manual_seed(0)
    model = cnmm.create_model(name, **({"input_size": SIZES[name]} if name in SIZES else {}), **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer in model.buffers():
            buffer.add_(0.4 * torch.rand_like(buffer))
    return model.eval()


def images(model, num=2):
    torch.manual_seed(1)
    return torch.randn(num, model.config.in_chans, *model.config.input_size)


def difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def random_points(model, num, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(items):
        return items[int(torch.randint(len(items), (), generator=generator))]

    for _ in range(num):
        yield draw(cnmm.cutting_order(model, draw(model.config.exit_numbers), rule=draw(RULES)))


@pytest.mark.parametrize("name", cnmm.list_models())
def test_slim_equals_the_mixture_at_random_points(name):
    model = trained(name)
    x = images(model)
    for point in [None, *random_points(model, 4)]:
        with torch.no_grad():
            expected = model(x, point)
            network = slim(model, point)
            assert difference(network(x), expected) < 1e-5
        assert not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in network.modules())


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_slim_equals_the_tiny_mixtures_anywhere(seed):
    for name in ("cnmm_tiny", "cnmm_seg_tiny"):
        model = trained(name)
        (point,) = random_points(model, 1, seed)
        x = images(model)
        with torch.no_grad():
            assert difference(slim(model, point)(x), model(x, point)) < 1e-5


@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_seg_tiny", "cnmm_b4s3_c32", "cnmm_b5s4"])
def test_cascade_equals_all_exits_of_its_edges(name):
    model = trained(name)
    x = images(model)
    for point in random_points(model, 4, seed=7):
        with torch.no_grad():
            found, expected = slim_cascade(model, point).forward_exits(x), model.forward_exits(x, point)
        assert found.keys() == expected.keys()
        for exit, scores in expected.items():
            assert difference(found[exit], scores) < 1e-5


@pytest.mark.parametrize("options", [{"mixing": "sum"}, {"exits": "last"}, {"num_classes": 3, "in_chans": 2}])
def test_variants(options):
    model = trained("cnmm_tiny", **options)
    x = images(model)
    with torch.no_grad():
        assert difference(slim(model)(x), model(x)) < 1e-5


def test_every_map_is_one_convolution_and_nothing_dead_is_left():
    model = trained("cnmm_b4s3_c32")
    point = cnmm.cutting_order(model, 3)[12]
    live = model.live_edges(point)
    maps = {j for _, j in live} - {model.lattice.output}
    network = slim(model, point)
    assert {name for name in network.layers if name.startswith("m")} == {f"m{j}" for j in maps}
    used = {name for step in network.graph.steps for name in step.inputs}
    assert {step.name for step in network.graph.steps} - used == {"logits3"}


def test_a_slim_network_shares_no_memory_with_its_mixture():
    model = trained("cnmm_tiny")
    network = slim(model, "e3c2")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_the_mixture_s_cost_is_that_of_the_point_and_the_network_s_its_own():
    model = trained("cnmm_tiny")
    table = cnmm.CostTable.of(model.config)
    for point in cnmm.cutting_order(model):
        network = slim(model, point)
        assert network.mixture_cost == table.point(point)
        assert network.cost.params == sum(parameter.numel() for parameter in network.parameters())
        assert network.cost.macs < table.point(point).macs


def test_a_point_may_be_given_by_name():
    model = trained("cnmm_tiny")
    assert slim(model, "e2c1").point == cnmm.named_point(model, "e2c1")
    with pytest.raises(ValueError, match="e9c1"):
        slim(model, "e9c1")


def test_stages_partition_the_steps_and_their_macs_add_up():
    model = trained("cnmm_b4s3_c32")
    for point in cnmm.cutting_order(model, rule="mean_flow")[::7]:
        made = cascade_graph(model.config, point)
        stages = made.stages()
        names = [step.name for stage in stages for step in stage]
        assert sorted(names) == sorted(step.name for step in made.steps)
        spent = stage_macs(model.config, point)
        table = cnmm.CostTable.of(model.config)
        assert sum(spent.values()) == table.total(model.live_edges(point), len(spent)).macs
        first = table.total(table.lattice.exit_edges(made.exits[0], point.edges))
        assert spent[made.exits[0]] == first.macs
        alone = point_graph(model.config, point)
        assert {step.name for step in alone.steps} <= {step.name for step in made.steps}


def test_saved_and_loaded_by_itself(tmp_path):
    model = trained("cnmm_tiny")
    for network in (slim(model, "e3c4"), slim_cascade(model, "e3a2")):
        folder = tmp_path / network.point.name
        save_slim(network, folder, note="x")
        with pytest.raises(ValueError, match=r"read it with cnmm\.load_slim"):
            cnmm.load(folder)
        again = load_slim(folder)
        assert again.point == network.point
        x = images(model)
        assert torch.equal(again(x), network(x))
        assert json.loads((folder / "config.json").read_text())["macs"] == network.cost.macs


def test_a_folder_that_is_no_slim_network_is_refused(tmp_path):
    model = trained("cnmm_tiny")
    cnmm.save(model, tmp_path / "run")
    with pytest.raises(ValueError, match="not a slim network"):
        load_slim(tmp_path / "run")
    save_slim(slim(model, "e3c4"), tmp_path / "a")
    save_slim(slim(model, "e2c0"), tmp_path / "b")
    weights = tmp_path / "a" / "model.safetensors"
    weights.write_bytes((tmp_path / "b" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not fit"):
        load_slim(tmp_path / "a")
    weights.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="safetensors"):
        load_slim(tmp_path / "a")
