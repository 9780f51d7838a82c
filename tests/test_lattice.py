import pytest

from cnmm import MixtureConfig, OperatingPoint, model_plan
from cnmm.chain import count_networks
from cnmm.lattice import build_lattice, full_dag, map_sizes, network_point, reached_exits, stem_sizes
from tests.reference import all_edges, enumerate_networks


def plan(name, **options):
    return model_plan(name, **options).chain.dag


def test_b6s3_has_the_known_numbers():
    lattice = plan("cnmm_b6s3")
    assert len([(i, j) for i, j in lattice.edges if i > 0 and j < lattice.output]) == 87
    assert [count_networks(lattice, exit) for exit in range(1, 7)] == [1, 6, 24, 80, 240, 672]


def test_the_other_paper_models_have_the_known_numbers():
    assert count_networks(plan("cnmm_b12s3")) == 159_744
    assert count_networks(plan("cnmm_seg_b5s5")) == 2_016


@pytest.mark.parametrize("task", ["classification", "segmentation"])
@pytest.mark.parametrize(("blocks", "scales"), [(1, 1), (1, 3), (3, 1), (2, 2), (4, 3), (3, 4)])
def test_edges_and_networks_are_the_references(task, blocks, scales):
    config = MixtureConfig(name="any", task=task, blocks=blocks, scales=scales)
    lattice = build_lattice(config)
    assert set(lattice.edges) == set(all_edges(config))
    for exit in range(1, blocks + 1):
        assert count_networks(lattice, exit) == len(enumerate_networks(config, exit))
        assert lattice.exit_edges(exit) <= set(all_edges(config, exit))


@pytest.mark.parametrize("blocks", range(1, 9))
def test_one_scale_is_the_full_dag_of_section_3(blocks):
    """Its node t is our map t + 1, node 0 being the stem's map H_1."""
    lattice, full = plan("cnmm_full8", blocks=blocks), full_dag(blocks)
    assert {(i - 1, j - 1) for i, j in lattice.edges if i > 0} == set(full.edges)
    assert [node - 1 for node in lattice.exits] == list(full.exits)
    for exit in range(1, blocks + 1):
        assert count_networks(lattice, exit) == count_networks(full, exit) == 2 ** (exit - 1)


def test_maps_are_numbered_block_by_block():
    lattice = plan("cnmm_b6s3")
    assert [(lattice.block(node), lattice.scale(node)) for node in (1, 2, 3, 4, 18)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (5, 2),
    ]
    assert lattice.inputs[5] == (1, 2, 4)
    assert lattice.falls((1, 5))
    assert not lattice.falls((2, 5))


@pytest.mark.parametrize(
    ("stride", "size", "stem", "maps"),
    [
        (1, (32, 32), [(32, 32), (32, 32), (32, 32)], [(32, 32), (16, 16), (8, 8)]),
        (1, (31, 17), [(31, 17), (31, 17), (31, 17)], [(31, 17), (16, 9), (8, 5)]),
        (2, (31, 17), [(31, 17), (16, 9), (16, 9)], [(16, 9), (8, 5), (4, 3)]),
        (4, (33, 18), [(33, 18), (17, 9), (9, 5)], [(9, 5), (5, 3), (3, 2)]),
    ],
)
def test_sizes_round_up(stride, size, stem, maps):
    config = MixtureConfig(name="any", stem_stride=stride)
    assert stem_sizes(config, size) == stem
    assert map_sizes(config, size) == maps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "detection"}, "task='detection': must be one of classification, segmentation"),
        ({"stem_stride": 3}, "stem_stride=3: must be one of 1, 2, 4"),
        ({"blocks": 0}, "blocks=0: must be a whole number from 1 to 64"),
        ({"scales": 1.5}, "scales=1.5: must be a whole number from 1 to 8"),
        ({"num_classes": True}, "num_classes=True"),
        ({"channels": 30}, "channels=30: must be a multiple of 4, for example channels=32"),
        ({"input_size": (3, 32)}, "input_size=3x32 is too small.* at least 4x4"),
        ({"input_size": (32,)}, r"input_size=\(32,\): must be a list of 2 values, each a whole number"),
        ({"blocks": 100_000}, "blocks=100000: must be a whole number from 1 to 64"),
        ({"blocks": 64, "scales": 8, "input_size": (512, 512)}, "512 maps, must be at most 256"),
        ({"channels": 10**9}, "channels=1000000000"),
        ({"name": 3}, "name=3: must be a text on one line"),
        ({"name": "a\x1b[31m"}, "name='a.x1b.31m': must be a text"),
        ({"gate_init": "random"}, "gate_init='random'"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MixtureConfig(**{"name": "any", **options})


def test_config_survives_json():
    config = MixtureConfig(name="any", input_size=(24, 40))
    assert MixtureConfig.from_dict({**config.to_dict(), "input_size": [24, 40]}) == config
    with pytest.raises(ValueError, match="unknown field depth; it was written by a later version"):
        MixtureConfig.from_dict({**config.to_dict(), "depth": 3})


def test_one_network_is_an_operating_point():
    lattice = plan("cnmm_b6s3")
    point = network_point(lattice, (0, 1, 2, 3, 19), exit=1)
    assert point.edges == {(0, 1), (1, 2), (2, 3), (3, 19)}
    assert point.name == "e1n0-1-2-3-19"
    with pytest.raises(ValueError, match="edge 2->6 does not exist at exit 1"):
        network_point(lattice, (0, 1, 2, 6, 19), exit=1)
    with pytest.raises(ValueError, match="must lead from 0 to 19"):
        network_point(lattice, (0, 1, 2, 3), exit=1)
    with pytest.raises(ValueError, match="no edges"):
        OperatingPoint(exit=1, edges=frozenset(), name="empty")


def test_exits_that_edges_reach():
    lattice = plan("cnmm_tiny")  # three blocks of two maps, exits at the maps 2, 4 and 6; the output is 7
    config = model_plan("cnmm_tiny").config
    assert reached_exits(config, lattice) == (1, 2, 3)
    assert reached_exits(config, lattice, 2) == (1, 2)
    late = [(0, 1), (1, 3), (3, 4), (4, 6), (4, 7), (6, 7)]
    assert reached_exits(config, lattice, 3, late) == (2, 3)
    single = model_plan("cnmm_tiny", exits="last").config
    assert reached_exits(single, lattice, 3, late) == (3,)
