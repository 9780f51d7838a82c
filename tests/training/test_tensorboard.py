"""Event files for TensorBoard, read back by Google's own protocol buffers."""

import importlib.util
import itertools
import struct

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import cnmm
from cnmm.training import tensorboard
from cnmm.training.tensorboard import Curves, crc32c
from tests.helpers import write_fashion
from tests.training.helpers import lines

TYPES = {"double": 1, "float": 2, "int64": 3, "string": 9, "enum": 5, "message": 11}
EVENT = {"wall_time": (1, "double"), "step": (2, "int64"), "file_version": (3, "string"), "summary": (5, "Summary")}
MESSAGES = {
    "Value": {"tag": (1, "string"), "simple_value": (2, "float")},
    "Summary": {"value": (1, "Value", "repeated")},
    "SessionLog": {"status": (1, "enum")},
    "Event": {**EVENT, "session_log": (7, "SessionLog")},
}
"""As tensorboard's event.proto and summary.proto number them."""


def event_class():
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="test", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, *repeated) in fields.items():
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = TYPES.get(kind, TYPES["message"])
            if kind not in TYPES:
                added.type_name = f".test.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Event"))


def unmasked(value):
    value = value - 0xA282EAD8 & 0xFFFFFFFF
    return (value >> 17 | value << 15) & 0xFFFFFFFF


def events(path):
    data, kind = path.read_bytes(), event_class()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        message, rest = data[12 : 12 + length], data[12 + length :]
        assert unmasked(struct.unpack("<I", data[8:12])[0]) == crc32c(data[:8])
        assert unmasked(struct.unpack("<I", rest[:4])[0]) == crc32c(message)
        yield kind.FromString(message)
        data = rest[4:]


def test_checksums_are_those_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, appendix B.4, and its examples
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_a_run_has_curves_where_tensorboard_is_installed(tmp_path, monkeypatch):
    """What log.jsonl says; a training that goes on begins a file of its own."""
    spec = f"fashion:{write_fashion(tmp_path / 'images', 100, 20)}"
    options = {"model": "cnmm_tiny", "channels": 8, "blocks": 2, "batch_size": 40, "ladder_rule": "flow"}
    monkeypatch.setattr(tensorboard, "is_installed", lambda: False)
    cnmm.train(spec, tmp_path / "run", **options, epochs=1)
    assert not (tmp_path / "run" / "tensorboard").exists()
    monkeypatch.setattr(tensorboard, "is_installed", lambda: True)
    cnmm.train(spec, tmp_path / "run", **options, epochs=2, overwrite=True)
    cnmm.train(spec, tmp_path / "run", **options, epochs=3, resume=True)
    files = sorted((tmp_path / "run" / "tensorboard").iterdir())
    found = [list(events(file)) for file in files]
    assert [[event.step for event in part] for part in found] == [[0, 1, 1, 2], [0, 3, 3]]
    for version, start, *rest in found:
        assert version.file_version == "brain.Event:2"
        assert start.session_log.status == 1
        assert all(event.summary.value for event in rest)
    figures = [event for part in found for event in part if event.summary.value]
    assert all(one.wall_time <= other.wall_time for one, other in itertools.pairwise(figures))
    for event, line in zip(figures, lines(tmp_path / "run"), strict=True):
        values = {value.tag: value.simple_value for value in event.summary.value}
        assert values["loss"] == pytest.approx(line["loss"])
        assert values["accuracy/exit 2"] == pytest.approx(line["quality"]["2"])
        assert values["gradients/stem"] == pytest.approx(line["gradients"]["stem"])


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_reads_it(tmp_path, trained_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from cnmm.training.progress import EpochResult

    curves = Curves(tmp_path)
    for line in lines(trained_run):
        del line["step"]
        curves.add(EpochResult(**line))
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in reader.Scalars("loss")] == pytest.approx([x["loss"] for x in lines(trained_run)])
