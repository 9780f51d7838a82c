import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cnmm.export.network import stage_bytes
from cnmm.export.slim import slim_cascade
from cnmm.ladder import NetworkFile
from cnmm.prune import cutting_order
from cnmm.runtime import engines as runtime
from cnmm.runtime import nchwc as blocked
from cnmm.runtime.engines import OnnxRuntime
from cnmm.runtime.nchwc import NotBlocked, without_conversions
from tests.helpers import preprocessing, trained

PLAIN = ("image", "probabilities")
SHAPE = (32, 32, 3)


def stages_in(folder, model, point):
    """The stages of a cascade, written to files."""
    folder.mkdir(exist_ok=True)
    stages = []
    for number, (data, _) in enumerate(stage_bytes(slim_cascade(model, point), preprocessing(model.config)), start=1):
        graph = onnx.load_from_string(data).graph
        names = [tuple(value.name for value in values) for values in (graph.input, graph.output)]
        path = folder / f"stage{number}.onnx"
        stages.append(NetworkFile.write(path, data, inputs=names[0], outputs=names[1]))
    return stages


def optimised(stages, folder, image_shape=SHAPE):
    """The files as onnxruntime has optimised them for this machine."""
    found = []
    for stage in stages:
        OnnxRuntime(1, image_shape)._session(stage, OnnxRuntime(1, image_shape)._options(folder / "optimised.onnx"))
        found.append((folder / "optimised.onnx").read_bytes())
    return found


def op_types(data):
    return [node.op_type for node in onnx.load_from_string(data).graph.node]


@pytest.fixture(scope="module")
def model():
    return trained("cnmm_b4s3")


@pytest.fixture(scope="module")
def stages(model, tmp_path_factory):
    stages = stages_in(tmp_path_factory.mktemp("stages"), model, "e4a0")
    if "ReorderOutput" not in op_types(optimised(stages[:1], stages[0].path.parent)[0]):
        pytest.skip("onnxruntime has no blocked layout on this CPU")
    return stages


def as_they_are(monkeypatch, stages):
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "without_conversions", refuse)
        return OnnxRuntime(1, SHAPE).chain(stages)


def refuse(*_):
    raise NotBlocked("by a test")


def walked(chain, images, seed=0):
    """The answers of all stages, where some images leave after each of them."""
    rng, walk = np.random.default_rng(seed), chain.walk(images)
    answers = [next(walk)()]
    left = len(images)
    try:
        while True:
            keep = np.sort(rng.permutation(left)[: max(1, left - 1)]) if left > 1 else None
            left = left if keep is None else len(keep)
            answers.append(walk.send(keep)())
    except StopIteration:
        return answers


def test_no_conversion_is_left_between_stages(stages, tmp_path):
    before = optimised(stages, tmp_path)
    after = without_conversions(before, PLAIN)
    for old, new in zip(before, after, strict=True):
        gone = [op for op in op_types(old) if not op.startswith("Reorder")]
        assert [op for op in op_types(new) if not op.startswith("Reorder")] == gone
        assert op_types(new).count("ReorderInput") == 0
        assert op_types(new).count("ReorderOutput") == 1  # of the scores
    assert sum(map(len, map(op_types, before))) - sum(map(len, map(op_types, after))) > 30


@pytest.mark.parametrize("cuts", [0, 5, -1])
def test_the_answers_are_the_same_bit_by_bit(model, stages, tmp_path, monkeypatch, cuts):
    point = cutting_order(model, rule="mean_flow")[cuts]
    stages = stages_in(tmp_path / "stages", model, point.name)
    plain, chain = as_they_are(monkeypatch, stages), OnnxRuntime(1, SHAPE).chain(stages)
    carried = [name for stage in stages for name in stage.outputs if name not in PLAIN]
    assert any((chain._tensors[name] != plain._tensors[name]).any() for name in carried) == (len(stages) > 1)
    rng = np.random.default_rng(1)
    for num in (1, 1, 6):
        images = rng.integers(0, 256, (num, *SHAPE), dtype=np.uint8)
        found, expected = walked(chain, images), walked(plain, images)
        assert len(found) == len(stages)
        for new, old in zip(found, expected, strict=True):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_b4s3_c32"])
def test_channels_that_do_not_fill_a_block(name, stages, tmp_path):
    model = trained(name)
    config = model.config
    last = config.exit_numbers[-1]
    small = stages_in(tmp_path, model, f"e{last}a0")
    shape = (*config.input_size, config.in_chans)
    with pytest.raises(NotBlocked):
        without_conversions(optimised(small, tmp_path, shape), PLAIN)
    images = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    assert len(walked(OnnxRuntime(1, shape).chain(small), images)) == len(small)


def test_files_that_differ_are_not_used(model, stages, monkeypatch):
    """Should onnxruntime come to mean something else by its layout, the stages stay as they are."""
    real, calls = without_conversions, []

    def wrong(files, plain):
        calls.append(len(files))
        protos = [onnx.load_from_string(data) for data in real(files, plain)]
        for proto in protos:
            for tensor in proto.graph.initializer:
                if tensor.name.endswith("m1.bias"):
                    value = onnx.numpy_helper.to_array(tensor) + 1
                    tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        return [proto.SerializeToString() for proto in protos]

    monkeypatch.setattr(runtime, "without_conversions", wrong)
    images = np.random.default_rng(0).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
    found = walked(OnnxRuntime(1, SHAPE).chain(stages), images)
    assert calls == [len(stages)]
    for new, old in zip(found, walked(as_they_are(monkeypatch, stages), images), strict=True):
        np.testing.assert_array_equal(new, old)


def test_nowhere_to_write(stages, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(runtime, "scratch_folder", full)
    images = np.zeros((1, *SHAPE), np.uint8)
    assert len(walked(OnnxRuntime(1, SHAPE).chain(stages), images)) == len(stages)


def test_messages_are_kept_as_they_are(stages):
    for stage in stages:
        data = stage.read()
        assert blocked._message(blocked._fields(data)) == data


def graph_of(*nodes, inputs=("z",), outputs=("probabilities", "y")):
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16, 4, 4]) for name in names]
        for names in (inputs, outputs)
    ]
    return helper.make_model(helper.make_graph(nodes, "g", *values)).SerializeToString()


def to_plain(source, made, channels=16, **more):
    return helper.make_node("ReorderOutput", [source], [made], domain="com.microsoft.nchwc", channels=channels, **more)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([helper.make_node("Relu", ["z"], ["y"])], "Relu y reads"),
        ([helper.make_node("Concat", ["z", "w"], ["y"], axis=1)], "Concat y reads"),
        ([helper.make_node("Concat", ["z", "z"], ["y"], axis=2)], "Concat y reads"),
        ([helper.make_node("Relu", ["w"], ["y"])], "y is not made by convolutions"),
        ([to_plain("a", "y", channels=10)], "y has 10 channels"),
        ([to_plain("a", "y", channels_last=1)], "y is turned"),
        ([to_plain("a", "y"), to_plain("a", "x")], "two names"),
        ([helper.make_node("ReorderInput", ["z"], ["a"]), to_plain("a", "y"), to_plain("b", "x")], "two names"),
        ([to_plain("a", "y"), helper.make_node("Relu", ["y"], ["x"])], "y is not made by"),
    ],
)
def test_graphs_that_need_their_conversions(nodes, words):
    outputs = ("probabilities", "y", "x") if words == "two names" else ("probabilities", "y")
    with pytest.raises(NotBlocked, match=words):
        without_conversions([graph_of(*nodes, inputs=("z", "image"), outputs=outputs)], PLAIN)


def test_names_of_what_stays_and_what_leaves():
    nodes = [
        helper.make_node("ReorderInput", ["z"], ["b"], domain="com.microsoft.nchwc"),
        helper.make_node("Conv", ["b"], ["a"]),
        to_plain("a", "y"),
        helper.make_node("Concat", ["z", "y"], ["c"], axis=1),
        helper.make_node("ReorderInput", ["c"], ["d"], domain="com.microsoft.nchwc"),
        helper.make_node("Conv", ["d", "a"], ["probabilities"]),
    ]
    (data,) = without_conversions([graph_of(*nodes)], PLAIN)
    found = [(node.op_type, *node.input, *node.output) for node in onnx.load_from_string(data).graph.node]
    assert found == [("Conv", "z", "y"), ("Concat", "z", "y", "c"), ("Conv", "c", "y", "probabilities")]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x3a\x05ab", b"\x3d\x00\x00\x00\x00", bytes(range(256))])
def test_what_is_no_network(data):
    with pytest.raises(NotBlocked):
        without_conversions([data], PLAIN)
