import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cnmm import create_model, cutting_order, list_models, model_plan, named_point
from cnmm.cost import short_count
from cnmm.draw import _Scene, check_suffix, draw_lattice, save_picture
from cnmm.plan import Plan
from tests.helpers import python


def picture(figure, path):
    save_picture(figure, path)
    return path.read_bytes()


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("name", list_models())
def test_every_model_can_be_drawn(name):
    plan = model_plan(name)
    figure = draw_lattice(plan)
    assert isinstance(figure, Figure)
    assert words(figure).count(name) == 1
    for exit in plan.config.exit_numbers:
        assert f"exit {exit}" in words(figure)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_same_input_same_bytes(tmp_path, suffix):
    plan = model_plan("cnmm_tiny")
    first = picture(draw_lattice(plan), tmp_path / f"a{suffix}")
    assert picture(draw_lattice(plan), tmp_path / f"b{suffix}") == first
    figure = draw_lattice(plan)
    picture(figure, tmp_path / f"c{suffix}")
    assert picture(figure, tmp_path / f"c{suffix}") == first  # saving leaves no trace in the figure


def test_same_bytes_in_two_processes(tmp_path):
    code = """
import sys
from cnmm.cli.main import main
for file in sys.argv[1:]:
    assert main(["draw", "cnmm_tiny", "--point", "e3c4", "-o", file]) == 0
"""
    for seed in "12":
        files = [tmp_path / f"{seed}{suffix}" for suffix in (".svg", ".png")]
        done = python(code, *files, env={"PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
    for suffix in (".svg", ".png"):
        assert (tmp_path / f"1{suffix}").read_bytes() == (tmp_path / f"2{suffix}").read_bytes()


def test_svg_is_self_contained_xml_without_dates(tmp_path):
    text = picture(draw_lattice(model_plan("cnmm_tiny")), tmp_path / "a.svg").decode()
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    for element in root.iter():
        for name, value in element.attrib.items():
            assert "://" not in value
            if name.endswith("href"):
                assert value.startswith("#")
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", value))
    assert "<!DOCTYPE" not in text
    assert "date" not in text.lower()
    assert not re.search(r"20\d\d-\d\d", text)


def test_png_has_no_metadata(tmp_path):
    from PIL import Image

    data = picture(draw_lattice(model_plan("cnmm_tiny")), tmp_path / "a.png")
    assert Image.open(io.BytesIO(data)).info.keys() <= {"dpi"}


def test_a_point_is_drawn_differently(tmp_path):
    plan = model_plan("cnmm_b6s3")
    full = draw_lattice(plan)
    cut = draw_lattice(plan, named_point(plan, "e6c50"))
    assert picture(full, tmp_path / "a.svg") != picture(cut, tmp_path / "b.svg")
    assert "95.4 M macs  ·  672 networks in the mixture" in words(full)
    assert any(text.startswith("operating point e6c50  ·  ") for text in words(cut))
    assert "off" in words(cut)
    assert "off" not in words(full)


def test_cut_edges_are_dashed_and_live_edges_as_thick_as_their_flow():
    plan = model_plan("cnmm_b6s3")
    point = named_point(plan, "e6c50")
    flows = plan.chain.flow(point.exit, point.edges)
    scene = _Scene(plan.config, point, flows)
    drawn = {}  # by its curve, every edge has its own
    for patch in draw_lattice(plan, point).axes[0].patches:
        drawn[tuple(map(tuple, patch.get_path().vertices.tolist()))] = patch
    widths = []
    for edge in plan.chain.dag.edges:
        patch = drawn[tuple(scene.curve(edge))]
        assert (patch.get_linestyle() == "solid") == (edge in scene.live)
        if edge in scene.live:
            widths.append((flows[edge], patch.get_linewidth()))
    widths.sort()
    assert [width for _, width in widths] == sorted(width for _, width in widths)
    assert widths[-1][1] > 3 * widths[0][1]


@pytest.mark.parametrize("name", list_models())
def test_no_edge_crosses_a_map_or_leaves_the_picture(name):
    """Sampled along its curve, an edge stays outside of all maps but its own two, and inside of the picture."""
    plan = model_plan(name)
    scene = _Scene(plan.config, None, plan.chain.flow())
    output = plan.chain.dag.output
    width, height = scene.layout.size
    boxes = {node: scene.at(node) for node in range(1, output)}
    for edge in plan.chain.dag.edges:
        (ax, ay), (bx, by), (cx, cy), (dx, dy) = scene.curve(edge)
        for k in range(1, 40):
            t = k / 40
            a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
            x, y = a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy
            assert 0 < x < width
            assert 0 < y < height
            for node, ((mx, my), (w, h)) in boxes.items():
                if node not in edge:
                    assert abs(x - mx) > w / 2 or abs(y - my) > h / 2, (edge, node)


@pytest.mark.parametrize("point", [None, "last"])
@pytest.mark.parametrize("name", list_models())
def test_no_words_leave_the_picture(name, point):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    plan = model_plan(name)
    figure = draw_lattice(plan, point and cutting_order(plan)[-1])
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.axes[0].texts:
        box = text.get_window_extent(renderer)
        assert 0 < box.x0 < box.x1 < width, text
        assert 0 < box.y0 < box.y1 < height, text


def test_a_trained_mixture_is_drawn_with_its_gates(tmp_path):
    model = create_model("cnmm_tiny")
    plan = model_plan("cnmm_tiny")
    before = picture(draw_lattice(plan), tmp_path / "a.svg")
    assert picture(draw_lattice(model), tmp_path / "a.svg") == before
    model.gate_logits.detach().fill_(1.0)
    after = picture(draw_lattice(model), tmp_path / "a.svg")
    assert after != before
    trained = Plan(plan.config, tuple([1.0] * len(plan.chain.dag.edges)))
    assert picture(draw_lattice(trained), tmp_path / "a.svg") == after


def test_one_final_classifier_and_the_deterministic_variant():
    single = words(draw_lattice(model_plan("cnmm_tiny", exits="last")))
    assert [text for text in single if text.startswith("exit")] == ["exit 3"]
    for model in (model_plan("cnmm_tiny", mixing="sum"), create_model("cnmm_tiny", mixing="sum")):
        text = words(draw_lattice(model))
        assert "1.29 M macs  ·  all weights one" in text
        assert not any("networks" in word for word in text)


@pytest.mark.parametrize(("blocks", "scales"), [(1, 1), (1, 3), (2, 1)])
def test_the_smallest_lattices(blocks, scales, tmp_path):
    plan = model_plan("cnmm_tiny", blocks=blocks, scales=scales)
    assert picture(draw_lattice(plan), tmp_path / "a.png")


def test_a_point_of_another_model_is_refused():
    point = named_point(model_plan("cnmm_b6s3"), "e6c0")
    with pytest.raises(ValueError, match=r"'e6c0' has edge .* which 'cnmm_tiny' does not"):
        draw_lattice(model_plan("cnmm_tiny"), point)


def test_drawing_leaves_the_global_state_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture(draw_lattice(model_plan("cnmm_tiny")), tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before
    code = """
import sys
from cnmm.cli.main import main
assert main(sys.argv[1:]) == 0
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert python(code, "draw", "cnmm_tiny", "-o", tmp_path / "b.png").returncode == 0
    assert (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.00 k"),
        (288_064, "288 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (9_994_999, "9.99 M"),
        (9_996_000, "10.0 M"),
        (46_896_128, "46.9 M"),
        (99_960_000, "100 M"),
        (341_414_912, "341 M"),
        (2_671_411_200, "2.67 G"),
    ],
)
def test_short_count(value, text):
    assert short_count(value) == text


def test_suffixes():
    assert check_suffix(Path("a.SVG")) == ".svg"
    for name in ("a.pdf", "a", "a.svg.gz"):
        with pytest.raises(ValueError, match=r"\.svg or \.png"):
            check_suffix(Path(name))
