"""ONNX files from anywhere: whatever leads to a tensor in another file is found, with and without the package onnx."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from cnmm import _onnx
from cnmm.runtime import latency
from cnmm.runtime.session import Session
from tests.helpers import refused
from tests.runtime.ladders import make_ladder, network

RUNTIMES = [name for name in latency.RUNTIMES if latency.runtime_version(name)]


def outside(name="w", file="weights.bin"):
    """A tensor whose values are in another file."""
    tensor = numpy_helper.from_array(np.ones((6, 4), np.float32), name)
    external_data_helper.set_external_data(tensor, file)
    tensor.ClearField("raw_data")
    return tensor


def graph(nodes=(), initial=(), name="g"):
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 4])
    return helper.make_graph(list(nodes), name, [], [out], list(initial))


def constant(**attributes):
    return helper.make_node("Constant", [], ["y"], **attributes)


def hidden_places():
    """Models with an external tensor at every place where ONNX allows tensors."""
    sparse = onnx.SparseTensorProto(values=outside(), indices=numpy_helper.from_array(np.zeros(1, np.int64), "i"))
    branch = helper.make_node("If", ["c"], ["y"], then_branch=graph([constant(value=outside())]), else_branch=graph())
    inner = helper.make_node("If", ["c"], ["y"], then_branch=graph([branch]), else_branch=graph())
    with_sparse = graph()
    with_sparse.sparse_initializer.append(sparse)
    lists = onnx.NodeProto(op_type="Odd", attribute=[onnx.AttributeProto(name="a", type=9, tensors=[outside()])])
    function = helper.make_function("d", "f", [], ["y"], [constant(value=outside())], [helper.make_opsetid("", 18)])
    training = helper.make_model(graph())
    training.training_info.append(onnx.TrainingInfoProto(algorithm=graph(initial=[outside()])))
    located = graph(initial=[outside()])
    located.initializer[0].ClearField("external_data")
    return {
        "initializer": helper.make_model(graph(initial=[outside()])),
        "location alone": helper.make_model(located),
        "constant": helper.make_model(graph([constant(value=outside())])),
        "sparse constant": helper.make_model(graph([constant(sparse_value=sparse)])),
        "sparse initializer": helper.make_model(with_sparse),
        "list of tensors": helper.make_model(graph([lists])),
        "branch": helper.make_model(graph([branch])),
        "branch of a branch": helper.make_model(graph([inner])),
        "function": helper.make_model(graph(), functions=[function]),
        "training": training,
    }


@pytest.mark.parametrize("place", hidden_places())
def test_external_data_is_found(place):
    data = hidden_places()[place].SerializeToString()
    assert "external data" in refused(_onnx.check_self_contained, data)


def test_networks_of_ours_are_self_contained():
    for exit in (1, 2, 3):
        _onnx.check_self_contained(network(exit))


def test_other_spellings_of_the_same_message_are_found():
    """Numbers may be written longer than needed, and what is given twice is merged by a reader."""
    tensor = b"\x42\x01w" + b"\x70\x81\x80\x00"  # name; data_location = 1 in three bytes
    as_graph = b"\x2a" + bytes([len(tensor)]) + tensor
    model = b"\x3a\x00" + b"\x3a" + bytes([len(as_graph)]) + as_graph  # two graphs
    assert onnx.load_from_string(model).graph.initializer[0].data_location == 1
    assert "external data" in refused(_onnx.check_self_contained, model)
    wide = tensor.replace(b"\x81\x80\x00", b"\x81\x80\x80\x80\x10")  # 2**32 + 1, read as 1
    as_graph = b"\x2a" + bytes([len(wide)]) + wide
    model = b"\x3a" + bytes([len(as_graph)]) + as_graph
    assert onnx.load_from_string(model).graph.initializer[0].data_location == 1
    assert "external data" in refused(_onnx.check_self_contained, model)


@pytest.mark.parametrize(
    "data",
    [b"", b"<net>", b"\x00", b"\x3a", b"\x3a\x7f", b"\x3b", b"\xff" * 20, b"\x08\x01", b"\xff\xff\xff\xff\x7f\x00"],
)
def test_what_is_no_network_is_refused(data):
    assert "not an ONNX file" in refused(_onnx.check_self_contained, data)


def test_a_message_that_never_ends_is_refused():
    deep = b""
    for _ in range(60):  # a graph in an attribute of a node, again and again
        deep = _message(5, _message(6, _message(1, deep)))
    assert "nested" in refused(_onnx.check_self_contained, _message(7, _message(1, deep)))
    assert "1,000,000 fields" in refused(_onnx.check_self_contained, _message(7, b"\x50\x00" * 1_000_001))


def _message(number, content):
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes([*length, size]) + content


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("part", ["point", "stage"])
def test_no_runtime_sees_external_data(tmp_path, monkeypatch, runtime, part):
    """The file is there, in the working folder, and the checksum is that of the manifest."""
    manifest = make_ladder(tmp_path / "ladder")
    entry = manifest["points"][0] if part == "point" else manifest["cascade"]["stages"][0]
    path = tmp_path / "ladder" / entry["file"]
    model = onnx.load(path)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "b1.weight")
    (tmp_path / "secret").write_bytes(weight.raw_data)
    external_data_helper.set_external_data(weight, "secret")
    weight.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "ladder" / "ladder.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)
    assert "external data" in refused(Session, Path("ladder"), runtime=runtime, threads=1)


@pytest.mark.parametrize("name", ["ladder.json", "e1c0.onnx"])
def test_links_that_leave_the_ladder_are_refused(tmp_path, name):
    make_ladder(tmp_path / "ladder")
    path = tmp_path / "ladder" / name
    path.rename(tmp_path / "ladder" / "other")
    path.symlink_to("other")
    Session(tmp_path / "ladder", threads=1, points=["e1c0"], cascade=False).close()
    (tmp_path / "ladder" / "other").rename(tmp_path / "other")
    path.unlink()
    path.symlink_to(tmp_path / "other")
    line = refused(Session, tmp_path / "ladder", threads=1)
    assert line.startswith(f"{path}: is a link to a file outside of the folder")
