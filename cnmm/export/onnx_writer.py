"""A slim network as ONNX, written node by node: no tracing, so that it depends on no version of torch.

uint8 images [N, height, width, channels] go in, class probabilities come out. The mean is subtracted inside the graph;
the division by the standard deviation is folded into the stem (zero padding stays zero).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm.config import Preprocessing
from cnmm.export.graph import Graph, Step
from cnmm.ladder import IMAGE, PROBABILITIES

Array = npt.NDArray[Any]
OPSET = 18
IR_VERSION = 10


def onnx_model(graph: Graph, tensors: Mapping[str, Array], about: Preprocessing, **metadata: object) -> Any:
    """The whole graph as one model: the probabilities of its last exit."""
    return _Writer(graph, tensors, about).model(graph.steps, graph.exits[-1], [], metadata)


def onnx_stages(graph: Graph, tensors: Mapping[str, Array], about: Preprocessing, **metadata: object) -> list[Any]:
    """One model per exit. Each reads what earlier ones made and gives what later ones read."""
    models, stages = [], graph.stages()
    for number, (steps, exit) in enumerate(zip(stages, graph.exits, strict=True)):
        later = {name for stage in stages[number + 1 :] for step in stage for name in step.inputs}
        carried = [step.name for step in steps if step.name in later]
        models.append(_Writer(graph, tensors, about).model(steps, exit, carried, {**metadata, "exit": exit}))
    return models


class _Writer:
    def __init__(self, graph: Graph, tensors: Mapping[str, Array], about: Preprocessing) -> None:
        self.graph, self.tensors, self.about = graph, tensors, about
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}

    def model(self, steps: Sequence[Step], exit: int, carried: Sequence[str], metadata: Mapping[str, object]) -> Any:
        from onnx import TensorProto, helper

        made = {step.name for step in steps}
        sources = sorted({name for step in steps for name in step.inputs} - made)
        inputs = []
        for name in sources:
            if name == IMAGE:
                inputs.append(helper.make_tensor_value_info(name, TensorProto.UINT8, ["N", *self._image_shape()]))
                self._prepare()
            else:
                inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *self._shape(name)]))
        for step in steps:
            self._write(step)
        self._node("Softmax", [f"logits{exit}"], PROBABILITIES, axis=1)
        shapes = {PROBABILITIES: self._shape(f"logits{exit}"), **{name: self._shape(name) for name in carried}}
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape]) for name, shape in shapes.items()
        ]
        constants = [_constant(name, value) for name, value in self.constants.items()]
        model = helper.make_model(
            helper.make_graph(self.nodes, self.graph.point.name, inputs, outputs, constants),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="cnmm",
        )
        helper.set_model_props(model, {key: str(value) for key, value in self._metadata(metadata).items()})
        return model

    def _metadata(self, more: Mapping[str, object]) -> dict[str, object]:
        about = self.about
        return {
            "model": self.graph.config.name,
            "point": self.graph.point.name,
            "classes": json.dumps(about.classes),
            "mean": json.dumps(about.mean),
            "std": json.dumps(about.std),
            "input_size": json.dumps(about.size),
            **more,
        }

    def _image_shape(self) -> tuple[int, int, int]:
        return (*self.about.size, self.graph.config.in_chans)

    def _prepare(self) -> None:
        """uint8 [N, H, W, C] to floats [N, C, H, W] of mean zero."""
        from onnx import TensorProto

        self._node("Transpose", [IMAGE], "planes", perm=[0, 3, 1, 2])
        self._node("Cast", ["planes"], "floats", to=TensorProto.FLOAT)
        mean = np.array(self.about.mean)[:, None, None] * 255
        self._node("Sub", ["floats", self._keep("mean", mean)], "prepared")

    def _write(self, step: Step) -> None:
        inputs = ["prepared" if name == IMAGE else name for name in step.inputs]
        act = step.activation
        out = f"{step.name}_linear" if act else step.name
        getattr(self, f"_{step.op}")(step, inputs, out)
        if act == "relu":
            self._node("Relu", [out], step.name)
        elif act == "prelu":
            slope = self._keep(f"{step.name}.slope", self.tensors[f"{step.name}.slope"][:, None, None])
            self._node("PRelu", [out, slope], step.name)

    def _conv(self, step: Step, inputs: list[str], out: str) -> None:
        weight = self.tensors[f"{step.name}.weight"]
        if step.inputs[0] == IMAGE:
            weight = weight / (np.array(self.about.std)[None, :, None, None] * 255)
        names = [*inputs, self._keep(f"{step.name}.weight", weight)]
        if step.bias:
            names.append(self._keep(f"{step.name}.bias", self.tensors[f"{step.name}.bias"]))
        self._node(
            "Conv",
            names,
            out,
            kernel_shape=list(step.shape[2:]),
            strides=[step.stride] * 2,
            pads=[step.padding] * 4,
            group=step.groups,
        )

    def _affine(self, step: Step, inputs: list[str], out: str) -> None:
        # As a convolution of every channel by itself: runtimes fuse the ReLU into it, and can run it in int8.
        names = [*inputs, self._keep(f"{step.name}.weight", self.tensors[f"{step.name}.weight"][:, None, None, None])]
        if step.bias:
            names.append(self._keep(f"{step.name}.bias", self.tensors[f"{step.name}.bias"]))
        self._node("Conv", names, out, kernel_shape=[1, 1], group=step.shape[0])

    def _concat(self, _: Step, inputs: list[str], out: str) -> None:
        self._node("Concat", inputs, out, axis=1)

    def _add(self, _: Step, inputs: list[str], out: str) -> None:
        self._node("Add", inputs, out)

    def _pool(self, step: Step, inputs: list[str], out: str) -> None:
        more: dict[str, Any] = {"ceil_mode": 1} if step.ceil else {}
        self._node(
            "MaxPool" if step.largest else "AveragePool", inputs, out, kernel_shape=[2, 2], strides=[2, 2], **more
        )

    def _mean(self, _: Step, inputs: list[str], out: str) -> None:
        self._node("GlobalAveragePool", inputs, out)

    def _linear(self, step: Step, inputs: list[str], out: str) -> None:
        # As a convolution, so that the pooled maps need not leave the layout that the runtime has chosen for them.
        weight = self._keep(f"{step.name}.weight", self.tensors[f"{step.name}.weight"][:, :, None, None])
        bias = self._keep(f"{step.name}.bias", self.tensors[f"{step.name}.bias"])
        self._node("Conv", [*inputs, weight, bias], f"{out}_map", kernel_shape=[1, 1])
        self._node("Flatten", [f"{out}_map"], out)

    def _resize(self, step: Step, inputs: list[str], out: str) -> None:
        assert step.size is not None
        # The batch stays as it is: only the last two axes are resized.
        sizes = self._keep(f"{step.name}.size", np.array(step.size, np.int64))
        self._node(
            "Resize", [*inputs, "", "", sizes], out, mode="linear", coordinate_transformation_mode="half_pixel",
            axes=[2, 3],
        )  # fmt: skip

    def _node(self, op: str, inputs: Iterable[str], output: str, **attributes: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def _keep(self, name: str, value: Array) -> str:
        self.constants[name] = value if value.dtype == np.int64 else value.astype(np.float32)
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.shapes[name]


def _constant(name: str, value: Array) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(value), name)
