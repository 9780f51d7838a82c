"""Small ladder folders, made by hand: no torch, no training, random weights with a fixed seed.

`python -m tests.runtime.ladders DIR` makes one, with numpy and onnx alone.
"""

import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE, CLASSES = 8, ("cat", "dog", "emu", "fox")
POINTS = (("e1c0", 1, 1000, 0.5), ("e2c3", 2, 2000, 0.7), ("e3c0", 3, 4000, 0.8))
STAGE_MACS = (1000, 1500, 2500)
EDGES = {"e1c0": "11", "e2c3": "32", "e3c0": "b5"}
"""Of three blocks and one scale, from the lowest bit of the first digit: 0-1, 1-2, 1-3, 2-3, 1-4, 2-4, 3-4.
The third point lacks 1-3 and 2-4."""
STAGE_EDGES = ("11", "33", "b7")

GAINS = {"c2.weight": 12}
"""So that every exit is sure of some images, and of others not."""


def weights(name, *shape):
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    scale = GAINS.get(name, 1) / np.prod(shape[1:]) ** 0.5
    return numpy_helper.from_array((scale * generator.normal(size=shape)).astype(np.float32), name)


def entry(channels):
    """uint8 [N, H, W, C] to float [N, C, H, W] in -1..1."""
    scale = numpy_helper.from_array(np.float32(1 / 64), "scale")
    return [
        helper.make_node("Cast", ["image"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["x"], perm=[0, 3, 1, 2]),
    ], [scale]


def block(source, target, in_chans, name):
    nodes = [
        helper.make_node("Conv", [source, f"{name}.weight"], [f"{name}.conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [f"{name}.conv"], [target]),
    ]
    return nodes, [weights(f"{name}.weight", 6, in_chans, 3, 3)]


def classifier(source, name):
    nodes = [
        helper.make_node("GlobalAveragePool", [source], [f"{name}.pooled"]),
        helper.make_node("Flatten", [f"{name}.pooled"], [f"{name}.flat"]),
        helper.make_node("MatMul", [f"{name}.flat", f"{name}.weight"], [f"{name}.logits"]),
        helper.make_node("Softmax", [f"{name}.logits"], ["probabilities"], axis=1),
    ]
    return nodes, [weights(f"{name}.weight", 6, len(CLASSES))]


def model(parts, inputs, outputs, channels):
    nodes, initial = [], []
    for more_nodes, more_initial in parts:
        nodes += more_nodes
        initial += more_initial

    def info(name):
        if name == "image":
            return helper.make_tensor_value_info(name, TensorProto.UINT8, ["N", SIZE, SIZE, channels])
        shape = ["N", len(CLASSES)] if name == "probabilities" else ["N", 6, SIZE, SIZE]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(nodes, "g", [info(name) for name in inputs], [info(name) for name in outputs], initial)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def network(depth, channels=3):
    """The exit after `depth` blocks, as one network."""
    parts = [entry(channels), block("x", "h1", channels, "b1")]
    parts += [block(f"h{n - 1}", f"h{n}", 6, f"b{n}") for n in range(2, depth + 1)]
    return model([*parts, *joined(depth)], ["image"], ["probabilities"], channels)


def joined(depth):
    """Exit 3 reads blocks 1 and 3 side by side, so that a tensor is carried over a stage."""
    if depth < 3:
        return [classifier(f"h{depth}", f"c{depth}")]
    nodes = [
        helper.make_node("Concat", ["h1", "h3"], ["both"], axis=1),
        helper.make_node("Conv", ["both", "j.weight"], ["joined"]),
    ]
    return [(nodes, [weights("j.weight", 6, 12, 1, 1)]), classifier("joined", "c3")]


def stages(channels=3):
    """The three exits again, as stages: (file content, inputs, outputs)."""
    signatures = [
        (["image"], ["probabilities", "h1"]),
        (["h1"], ["probabilities", "h2"]),
        (["h1", "h2"], ["probabilities"]),
    ]
    parts = [
        [entry(channels), block("x", "h1", channels, "b1"), *joined(1)],
        [block("h1", "h2", 6, "b2"), *joined(2)],
        [block("h2", "h3", 6, "b3"), *joined(3)],
    ]
    return [(model(part, *names, channels), *names) for part, names in zip(parts, signatures, strict=True)]


def make_ladder(folder, *, channels=3, cascade=True, copies=1):
    """A ladder of three points (or more, the same networks under other names) and a cascade; returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    points = []
    for copy in range(copies):
        for name, exit, macs, quality in POINTS:
            name, macs = (name, macs) if copy == 0 else (f"{name}{copy}", macs + copy)
            points.append(
                {"name": name, "rule": "flow", "cuts": 0, "exit": exit, "macs": macs, "params": 10}
                | {"quality": quality + copy / 1e3, "metric": "accuracy"}
                | {"low": 0.4, "high": 0.9, "n": 100, "split": "validation", "statistics": "re-estimated"}
                | written(folder, f"{name}.onnx", network(exit, channels))
            )
    manifest = {
        "format_version": 1,
        "kind": "ladder",
        "model": "by_hand",
        "task": "classification",
        "classes": list(CLASSES),
        "input": {"height": SIZE, "width": SIZE, "channels": channels, "mean": [0.5] * channels, "std": [1] * channels},
        "full_macs": 5000,
        "precision": "float32",
        "points": sorted(points, key=lambda point: point["macs"]),
        "cascade": make_cascade(folder, channels) if cascade else None,
        "lattice": {
            "blocks": 3,
            "scales": 1,
            "points": {point["name"]: EDGES[point["name"][:4]] for point in points},
            "cascade": list(STAGE_EDGES) if cascade else [],
        },
    }
    write(folder, manifest)
    return manifest


def make_cascade(folder, channels):
    table = [(0.0, 1000.0, 0.5), (0.5, 2000.0, 0.6), (0.9, 4000.0, 0.75), (1.1, 5000.0, 0.8)]
    names = ("confidence", "average_macs", "quality", "exits")
    rows = [dict(zip(names, ([t, 1.1 * t], a, q, [1, 0, 0]), strict=True)) for t, a, q in table]
    return {
        "point": "e3c0",
        "exits": [1, 2, 3],
        "macs": STAGE_MACS,
        "metric": "accuracy",
        "stages": [
            {**written(folder, f"stage{number + 1}.onnx", content), "inputs": inputs, "outputs": outputs}
            for number, (content, inputs, outputs) in enumerate(stages(channels))
        ],
        "thresholds": rows,
        "n": 100,
        "split": "validation",
    }


def written(folder, name, content):
    (folder / name).write_bytes(content)
    checksum = hashlib.sha256(content).hexdigest()
    return {"file": name, "sha256": checksum, "inputs": ["image"], "outputs": ["probabilities"]}


def write(folder, manifest):
    (folder / "ladder.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    make_ladder(Path(sys.argv[1]))
