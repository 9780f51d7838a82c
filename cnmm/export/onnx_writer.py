"""A slim network as ONNX, written node by node: no tracing, so that it depends on no version of torch.

uint8 images [N, height, width, channels] go in. Class probabilities come out; of segmentation, the scores of every
pixel, [N, classes, height, width], because a softmax over as many values takes a third of onnxruntime's time. The mean
is subtracted inside the graph; the division by the standard deviation is folded into the stem, where zero padding stays
zero.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm import __version__
from cnmm._files import FORMAT_VERSION
from cnmm.config import Preprocessing
from cnmm.export.graph import Graph, Step
from cnmm.ladder import IMAGE, LOGITS, PROBABILITIES

Array = npt.NDArray[Any]
OPSET = 18
IR_VERSION = 10
RESIZE_RULE = "scale by the larger of height/image_height and width/image_width, bicubic; then crop at the centre"
"""How images of another size are fitted (`cnmm.data.images.fit_image`), in words for whoever reads the file."""


def onnx_model(
    graph: Graph, tensors: Mapping[str, Array], about: Preprocessing, *, any_size: bool = False, **metadata: object
) -> Any:
    """The whole graph as one model: the answer of its last exit. `any_size`: images may have any height and width."""
    return _Writer(graph, tensors, about, any_size).model(graph.steps, metadata, exit=graph.exits[-1])


def onnx_stages(
    graph: Graph, tensors: Mapping[str, Array], about: Preprocessing, *, any_size: bool = False, **metadata: object
) -> list[tuple[Any, Any | None]]:
    """One model per exit, and another one for its answer where that is worth leaving out (`Graph.heads`).

    Each reads what earlier ones made and gives what later ones read.
    """

    def writer() -> _Writer:
        return _Writer(graph, tensors, about, any_size)

    models, stages = [], graph.stages()
    for number, (stage, head, exit) in enumerate(zip(stages, graph.heads(), graph.exits, strict=True)):
        steps = [step for step in stage if step not in head]
        later = {name for step in (*head, *itertools.chain(*stages[number + 1 :])) for name in step.inputs}
        carried = [step.name for step in steps if step.name in later]
        said = {**metadata, "exit": exit}
        first = writer().model(steps, said, exit=None if head else exit, carried=carried)
        models.append((first, writer().model(head, said, exit=exit) if head else None))
    return models


class _Writer:
    def __init__(self, graph: Graph, tensors: Mapping[str, Array], about: Preprocessing, any_size: bool) -> None:
        self.graph, self.tensors, self.about, self.any_size = graph, tensors, about, any_size
        self.segments = graph.config.task == "segmentation"
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.sizes: dict[int, str] = {}  # by halvings: names of heights and widths that follow from the image's

    def model(
        self,
        steps: Sequence[Step],
        metadata: Mapping[str, object],
        *,
        exit: int | None = None,
        carried: Sequence[str] = (),
    ) -> Any:
        """Gives the answer of an exit, if one is named, and the tensors that are carried to other models."""
        from onnx import TensorProto, helper

        made = {step.name for step in steps}
        sources = {name for step in steps for name in step.inputs} - made
        if IMAGE in sources:
            self._prepare()
        scores, answer = f"logits{exit}", LOGITS if self.segments else PROBABILITIES
        for step in steps:
            self._write(step, answer if self.segments and step.name == scores else step.name)
        if exit is not None and not self.segments:
            self._node("Softmax", [scores], answer, axis=1)
        if self.sizes:
            sources.add(IMAGE)
        inputs = [self._floats(name, name) for name in sorted(sources - {IMAGE})]
        if IMAGE in sources:
            shape = ["N", *self._sides(IMAGE, self.about.size), self.graph.config.in_chans]
            inputs.insert(0, helper.make_tensor_value_info(IMAGE, TensorProto.UINT8, shape))
        outputs = [self._floats(name, name) for name in carried]
        if exit is not None:
            outputs.insert(0, self._floats(answer, scores))
        constants = [_constant(name, value) for name, value in self.constants.items()]
        model = helper.make_model(
            helper.make_graph(self.nodes, self.graph.point.name, inputs, outputs, constants),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="cnmm",
        )
        about = {**self._metadata(steps), **metadata}
        helper.set_model_props(model, {key: str(value) for key, value in about.items()})
        return model

    def _floats(self, name: str, shaped_like: str) -> Any:
        """What a float tensor of the model is called and how it is shaped."""
        from onnx import TensorProto, helper

        width, *size = self._shape(shaped_like)
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width, *self._sides(name, size)])

    def _sides(self, name: str, size: Sequence[int]) -> Sequence[int | str]:
        """Height and width of a tensor, or names for them."""
        return [f"{name}.{side}" for side in ("height", "width")] if self.any_size and size else size

    def _metadata(self, steps: Sequence[Step]) -> dict[str, object]:
        """What somebody needs to know who has the file alone: what to feed it, and what its answers mean."""
        about, cost = self.about, self.graph.cost_of(steps)
        return {
            "cnmm_version": __version__,
            "format_version": FORMAT_VERSION,
            "model": self.graph.config.name,
            "task": self.graph.config.task,
            "point": self.graph.point.name,
            "macs": cost.macs,
            "params": cost.params,
            "classes": json.dumps(about.classes),
            "input_size": json.dumps(about.size),
            "layout": "NHWC",
            "dtype": "uint8",
            "colour_order": "grey" if about.channels == 1 else "RGB" if about.channels == 3 else "unknown",
            "resize": RESIZE_RULE,
            "mean": json.dumps(about.mean),
            "std": json.dumps(about.std),
            "normalisation": "inside the network: (value / 255 - mean) / std",
        }

    def _prepare(self) -> None:
        """uint8 [N, H, W, C] to floats [N, C, H, W] of mean zero."""
        from onnx import TensorProto

        self._node("Transpose", [IMAGE], "planes", perm=[0, 3, 1, 2])
        self._node("Cast", ["planes"], "floats", to=TensorProto.FLOAT)
        mean = np.array(self.about.mean)[:, None, None] * 255
        self._node("Sub", ["floats", self._keep("mean", mean)], "prepared")

    def _write(self, step: Step, name: str) -> None:
        """The nodes of a step, which make the tensor `name`."""
        inputs = ["prepared" if source == IMAGE else source for source in step.inputs]
        if step.activation == "prelu":
            self._write_prelu(step, inputs, name)
            return
        out = f"{name}_linear" if step.activation else name
        getattr(self, f"_{step.op}")(step, inputs, out)
        if step.activation:
            self._node("Relu", [out], name)

    def _write_prelu(self, step: Step, inputs: list[str], name: str) -> None:
        """prelu(y) = slope * y + relu((1 - slope) * y) for slopes up to 1: onnxruntime need not leave its own layout.

        It would for the node PRelu. A scale and shift before it costs nothing: both terms take it in.
        """
        slope, source = self.tensors[f"{step.name}.slope"], inputs[0]
        scale, shift = np.ones_like(slope), None
        whole = slope.max() > 1
        if step.op == "affine" and not whole:
            scale, shift = self.tensors[f"{step.name}.weight"], self.tensors[f"{step.name}.bias"]
        elif step.op != "activate":
            source = f"{name}_linear"
            getattr(self, f"_{step.op}")(step, inputs, source)
        if whole:
            self._node("PRelu", [source, self._keep(f"{name}.slope", slope[:, None, None])], name)
            return
        for part, share in (("linear", slope), ("above", 1 - slope)):
            moved = None if shift is None else share * shift
            self._scale(f"{name}.{part}", share * scale, moved, source, f"{name}_{part}_part")
        self._node("Relu", [f"{name}_above_part"], f"{name}_above")
        self._node("Add", [f"{name}_linear_part", f"{name}_above"], name)

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
        bias = self.tensors[f"{step.name}.bias"] if step.bias else None
        self._scale(step.name, self.tensors[f"{step.name}.weight"], bias, inputs[0], out)

    def _scale(self, name: str, weight: Array, bias: Array | None, source: str, out: str) -> None:
        # As a convolution of every channel by itself: runtimes fuse the ReLU into it, and can run it in int8.
        names = [source, self._keep(f"{name}.weight", weight[:, None, None, None])]
        if bias is not None:
            names.append(self._keep(f"{name}.bias", bias))
        self._node("Conv", names, out, kernel_shape=[1, 1], group=len(weight))

    def _concat(self, _: Step, inputs: list[str], out: str) -> None:
        self._node("Concat", inputs, out, axis=1)

    def _add(self, _: Step, inputs: list[str], out: str) -> None:
        self._node("Add", inputs, out)

    def _pool(self, step: Step, inputs: list[str], out: str) -> None:
        odd = self.any_size or any(side % 2 for side in self._shape(step.inputs[0])[1:])
        more: dict[str, Any] = {"ceil_mode": 1} if odd else {}
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
        # All four axes are named: onnxruntime loses sizes of two of them where it turns int8 maps channels-last.
        how = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
        if self.any_size:
            self._node("Shape", inputs, f"{out}.kept", end=2)
            self._node("Concat", [f"{out}.kept", self._halved(step.halvings)], f"{out}.size", axis=0)
            self._node("Resize", [*inputs, "", "", f"{out}.size"], out, **how)
            return
        sides = zip(self._shape(step.inputs[0])[1:], self._shape(step.name)[1:], strict=True)
        factors = np.array([1, 1, *(_factor(before, after) for before, after in sides)], np.float32)
        self._node("Resize", [*inputs, "", self._keep(f"{step.name}.scales", factors)], out, **how)

    def _halved(self, times: int) -> str:
        """The name of the image's height and width, halved so many times, rounding up."""
        if times in self.sizes:
            return self.sizes[times]
        name = self.sizes[times] = f"size{times}"
        if times == 0:
            self._node("Shape", [IMAGE], name, start=1, end=3)
        else:
            one, two = (self._keep(word, np.array([value], np.int64)) for word, value in (("one", 1), ("two", 2)))
            self._node("Add", [self._halved(times - 1), one], f"{name}.more")
            self._node("Div", [f"{name}.more", two], name)
        return name

    def _node(self, op: str, inputs: Iterable[str], output: str, **attributes: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def _keep(self, name: str, value: Array) -> str:
        self.constants[name] = value if value.dtype == np.int64 else value.astype(np.float32)
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.shapes[name]


def _factor(before: int, after: int) -> np.float32:
    """By how much a side grows: whole where it can be, so that onnxruntime resizes in its own layout.

    Runtimes round what it makes of the side down, so a factor that falls short by rounding is raised by a hair.
    """
    factor = np.float32(after / before)
    while before * float(factor) < after:
        factor = np.nextafter(factor, np.float32(np.inf))
    return factor


def _constant(name: str, value: Array) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(value), name)
