"""The two runtimes, onnxruntime and OpenVINO, behind one thing: a chain of ONNX files that images walk through.

A whole network is a chain of one. A cascade is a chain of stages: after each of them the caller says which images go
on. Chains are thread-safe, and after they are made, walking loads, compiles and keeps nothing.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import scratch_folder
from cnmm.ladder import ANSWERS, IMAGE, LOGITS, NetworkFile, stage_files
from cnmm.runtime.latency import PACKAGES, RUNTIMES
from cnmm.runtime.nchwc import without_conversions

Images = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
Ask = Callable[[], Floats]
"""Gives the answers of an exit, probabilities [n, classes] or scores of pixels [n, classes, H, W], which are only lent
until the walk goes on or ends. Where they cost something, they are made by the call."""
Walk = Generator[Ask, Indices | None, None]
"""Runs a stage and yields what answers at its exit, to be called or not; is sent the rows that go on, or None for all
of them."""

MOST_THREADS = 256
CHUNK_PIXELS = 16384
"""Pixels of one pass: 16 images of 32x32. Larger passes are slower per image (their maps leave the cache), and smaller
ones leave a cascade with single images after the first exits."""


class Chain(Protocol):
    """ONNX files that run one after the other."""

    def walk(self, images: Images) -> Walk:
        """At most `Runtime.chunk` images; to leave early, close the generator."""


class Runtime(Protocol):
    """What makes chains."""

    @property
    def chunk(self) -> int:
        """Most images of one walk."""

    def chain(self, stages: Sequence[NetworkFile]) -> Chain:
        """Loads, compiles and warms up."""


def check_threads(threads: int) -> int:
    """A number of threads that a runtime can start."""
    found: int = _fields.checked(threads, "threads", _fields.whole(1, MOST_THREADS))
    return found


def open_runtime(
    name: str, *, threads: int, precision: str, image_shape: tuple[int, int, int], any_size: bool = False
) -> Runtime:
    """A runtime with so many threads; `image_shape` is [H, W, C], where H and W may vary with `any_size`."""
    if name not in RUNTIMES:
        raise UserError(f"runtime {name!r}: must be one of {', '.join(RUNTIMES)}")
    threads = check_threads(threads)
    if precision not in ("float32", "bfloat16"):
        raise UserError(f"precision {precision!r}: must be float32 or, with openvino, bfloat16")
    if name == "openvino":
        return OpenVino(threads, precision, image_shape, any_size)
    if precision != "float32":
        raise UserError(f"precision {precision!r}: onnxruntime computes in float32; use runtime openvino")
    return OnnxRuntime(threads, image_shape)


def _import(name: str) -> Any:
    package = PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError:
        fix = 'pip install "cnmm[openvino]"' if name == "openvino" else f"pip install {package}"
        raise UserError(f"runtime {name!r} needs the package {package}; install it with: {fix}") from None


@contextmanager
def _refusing(stage: NetworkFile, runtime: str) -> Iterator[None]:
    """Whatever a runtime raises becomes one line that names the file."""
    try:
        yield
    except Exception as error:  # runtimes raise classes of their own, and RuntimeError
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{stage.path}: {runtime} refuses it: {reason}") from None


# onnxruntime


PROVIDERS = ("CPUExecutionProvider",)
_arena_lock = threading.Lock()
_arena_is_there = False


def _share_arena(ort: Any) -> None:
    """One arena for all sessions of this process that ask for it; sessions of other libraries do not notice."""
    global _arena_is_there
    with _arena_lock:
        if not _arena_is_there:
            _arena_is_there = True
            about = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            with suppress(Exception):  # somebody else registered one: it serves as well
                ort.create_and_register_allocator(about, None)


class OnnxRuntime:
    """Sessions of onnxruntime, whose threads sleep between calls; with one thread there are none but the caller's.

    Its one pool for all sessions of a process is no way to share threads: once it exists, onnxruntime refuses every
    session that does not ask for it, those of other libraries too. Memory they do share: one arena, grown when chains
    are made. Without one, batches of 16 take 1.7 times as long (docs/log.md).
    """

    def __init__(self, threads: int, image_shape: tuple[int, int, int]) -> None:
        self._ort = _import("onnx")
        self._image_shape = image_shape
        self.chunk = max(1, CHUNK_PIXELS // (image_shape[0] * image_shape[1]))
        self._threads = threads
        _share_arena(self._ort)

    def chain(self, stages: Sequence[NetworkFile]) -> Chain:
        files = stage_files(stages)
        chain = _OnnxChain(stages, [self._session(file, self._options()) for file in files], self._image_shape)
        if len(stages) > 1:
            with suppress(Exception):  # whatever it is: without it, stages are slower and as right
                chain = self._without_conversions(stages, chain)
        for ask in chain.walk(np.zeros((self.chunk, *self._image_shape), np.uint8)):
            ask()
        return chain

    def _without_conversions(self, stages: Sequence[NetworkFile], chain: _OnnxChain) -> _OnnxChain:
        """The same chain, whose stages hand over maps in onnxruntime's own layout."""
        optimised, files = [], stage_files(stages)
        with scratch_folder() as folder:
            for number, file in enumerate(files):
                path = folder / f"{number}.onnx"
                self._session(file, self._options(path))
                optimised.append(path.read_bytes())
        final = self._options()
        final.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Heads begin with resizing, which onnxruntime does in the plain layout.
        plain = {IMAGE, *ANSWERS, *(name for stage in stages if stage.head for name in stage.head.inputs)}
        quicker = without_conversions(optimised, plain)
        sessions = [self._ort.InferenceSession(data, final, providers=PROVIDERS) for data in quicker]
        faster = _OnnxChain(stages, sessions, self._image_shape)
        image = np.random.default_rng(0).integers(0, 256, (1, *self._image_shape), np.uint8)
        asked = zip(chain.walk(image), faster.walk(image), strict=True)
        return faster if all(np.allclose(old(), new(), atol=1e-6) for old, new in asked) else chain

    def _options(self, optimised: Path | None = None) -> Any:
        """`optimised`: where to leave the network as onnxruntime has optimised it for this machine."""
        options = self._ort.SessionOptions()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.log_severity_level = 4
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        # Waiting threads spin for the next piece of a network, which is faster, but not for the next call.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        return options

    def _session(self, stage: NetworkFile, options: Any) -> Any:
        data = stage.read()
        with _refusing(stage, "onnxruntime"):
            session = self._ort.InferenceSession(data, options, providers=PROVIDERS, enable_fallback=0)
        _check_names(stage, [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()])
        return session


class _OnnxChain:
    def __init__(
        self, stages: Sequence[NetworkFile], sessions: Sequence[Any], image_shape: tuple[int, int, int]
    ) -> None:
        """`sessions`: of the files of all stages, heads among them."""
        self._stages = tuple(stages)
        self._sessions = dict(zip(stage_files(stages), sessions, strict=True))
        self._carried = tuple(_carried(stages, number) for number in range(1, len(stages) + 1))
        self._lane_is_free = threading.Lock()
        self._bind(np.zeros((1, *image_shape), np.uint8))

    def _bind(self, image: Images) -> None:
        """A fixed place for every tensor of one image: no copies between stages, and less to do per call."""
        tensors: dict[str, npt.NDArray[Any]] = {IMAGE: image}
        self._image, self._lane = image, []
        for stage in self._stages:
            run = self._bound(stage, tensors)
            self._lane.append((run, self._bound(stage.head, tensors) if stage.head else None))
        self._tensors = tensors  # the bindings know only addresses

    def _bound(self, file: NetworkFile, tensors: dict[str, npt.NDArray[Any]]) -> Ask:
        """Runs a file and hands out the first tensor that it makes."""
        session = self._sessions[file]
        with _refusing(file, "onnxruntime"):
            made = session.run(list(file.outputs), {name: tensors[name] for name in file.inputs})
            outputs = {name: np.array(value) for name, value in zip(file.outputs, made, strict=True)}
            binding = session.io_binding()
            for name in file.inputs:
                _point_to(binding.bind_input, name, tensors[name])
            for name, value in outputs.items():
                _point_to(binding.bind_output, name, value)
            session.run_with_iobinding(binding)
        tensors |= outputs
        first = outputs[file.outputs[0]]

        def run() -> Floats:
            session.run_with_iobinding(binding)
            return _lent(first)

        return run

    def walk(self, images: Images) -> Walk:
        if images.shape != self._image.shape or not self._lane_is_free.acquire(blocking=False):
            yield from self._walk_anywhere(images)
            return
        try:
            self._image[...] = images
            for run, head in self._lane:
                found = run()
                yield head or _giving(found)
        finally:
            self._lane_is_free.release()

    def _walk_anywhere(self, images: Images) -> Walk:
        """With tensors of its own: for several images, another size, or while another thread is in the lane."""
        tensors: dict[str, npt.NDArray[Any]] = {IMAGE: images}

        def run(file: NetworkFile) -> Floats:
            outputs = self._sessions[file].run(list(file.outputs), {name: tensors[name] for name in file.inputs})
            tensors.update(zip(file.outputs, outputs, strict=True))
            return tensors[file.outputs[0]]

        for stage, carried in zip(self._stages, self._carried, strict=True):
            found = run(stage)
            keep = yield partial(run, stage.head) if stage.head else _giving(found)
            tensors = {name: tensors[name] if keep is None else tensors[name][keep] for name in carried}


def _giving(answers: Floats) -> Ask:
    return lambda: answers


def _lent(answers: Floats) -> Floats:
    """A copy of the few numbers of a classification; scores of pixels as they are, until the next image."""
    return answers.copy() if answers.ndim == 2 else answers


def _carried(stages: Sequence[NetworkFile], done: int) -> tuple[str, ...]:
    """Tensors that the first `done` stages made and later ones read."""
    made = {IMAGE, *(name for stage in stages[:done] for name in stage.outputs)}
    return tuple(sorted(made & {name for file in stage_files(stages[done:]) for name in file.inputs}))


def _point_to(bind: Any, name: str, tensor: npt.NDArray[Any]) -> None:
    bind(name, "cpu", 0, tensor.dtype.type, tensor.shape, tensor.ctypes.data)


# OpenVINO


class OpenVino:
    """Networks compiled by OpenVINO for one image at a time.

    With a fixed batch of 1 a network is faster than with an open one, image by image it is no slower than in batches,
    and a new batch size never builds new kernels. A compiled network runs one request at a time whatever is asked of
    it, so a chain has one request per stage, and callers wait for each other.
    """

    chunk = 1

    def __init__(self, threads: int, precision: str, image_shape: tuple[int, int, int], any_size: bool) -> None:
        self._openvino = _import("openvino")
        self._core = self._openvino.Core()
        self._image_shape, self._any_size = image_shape, any_size
        abilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision == "bfloat16" and "BF16" not in abilities:
            raise UserError("precision 'bfloat16': OpenVINO does not offer it on this CPU; use float32")
        self._settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",  # its own default varies by CPU
            "ENABLE_CPU_PINNING": False,  # or all networks and processes would queue for the same cores
        }

    def chain(self, stages: Sequence[NetworkFile]) -> Chain:
        requests = {file: self._request(file) for file in stage_files(stages)}
        image = np.zeros((1, *self._image_shape), np.uint8)
        if self._any_size:
            return _AnySizeChain(self._openvino.Tensor, stages, requests, image)
        tensors: dict[str, Any] = {}
        asks: dict[NetworkFile, Ask] = {}
        for file, request in requests.items():
            with _refusing(file, "OpenVINO"):
                for name in file.inputs:
                    if name in tensors:
                        request.set_tensor(name, tensors[name])
                tensors |= {name: request.get_tensor(name) for name in (*file.inputs, *file.outputs)}
            asks[file] = _running(request, tensors[file.outputs[0]].data)
        place: Images = tensors[IMAGE].data
        if place.shape != image.shape:
            raise UserError(f"{stages[0].path}: takes {place.shape[1:]}, the manifest says {self._image_shape}")
        return _OpenVinoChain([(asks[stage], asks[stage.head] if stage.head else None) for stage in stages], place)

    def _request(self, stage: NetworkFile) -> Any:
        data = stage.read()
        _check_graph(stage, data)
        with _refusing(stage, "OpenVINO"):
            model = self._core.read_model(data, b"")
        _check_names(stage, _names(model.inputs, stage.inputs), _names(model.outputs, stage.outputs))
        with _refusing(stage, "OpenVINO"):
            return self._compile(model).create_infer_request()

    def _compile(self, model: Any) -> Any:
        """For one image; maps travel between stages channels-last, as the convolutions want them."""
        ov = self._openvino
        model.reshape({port.any_name: ov.PartialShape([1, *list(port.partial_shape)[1:]]) for port in model.inputs})
        steps = importlib.import_module("openvino.preprocess").PrePostProcessor(model)
        for ports, find in ((model.inputs, steps.input), (model.outputs, steps.output)):
            for port in ports:
                if port.any_name not in (IMAGE, LOGITS) and len(port.partial_shape) == 4:
                    find(port.any_name).tensor().set_layout(ov.Layout("NHWC"))
                    find(port.any_name).model().set_layout(ov.Layout("NCHW"))
        model = steps.build()
        _join_channels_last(model)
        return self._core.compile_model(model, "CPU", self._settings)


def _check_graph(stage: NetworkFile, data: bytes) -> None:
    """Has onnxruntime look at a network first: OpenVINO's reader crashes where a graph is malformed."""
    ort = _import("onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with _refusing(stage, "onnxruntime"):
        ort.InferenceSession(data, options, providers=PROVIDERS, enable_fallback=0)


def _join_channels_last(model: Any) -> None:
    """Concatenates maps that come from earlier stages as they lie in memory, instead of turning each of them first."""
    ops = importlib.import_module("openvino.opset13")

    def before_turning(source: Any) -> Any:
        """The input of the network that `source` is a transposition of, if it is one."""
        node = source.get_node()
        origin = node.input(0).get_source_output() if node.get_type_name() == "Transpose" else None
        return origin if origin is not None and origin.get_node().get_type_name() == "Parameter" else None

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Concat" or node.get_attributes()["axis"] != 1:
            continue
        sources = [node.input(number).get_source_output() for number in range(node.get_input_size())]
        origins = [before_turning(source) for source in sources]
        if len(sources[0].partial_shape) != 4 or all(origin is None for origin in origins):
            continue
        turned = [
            ops.transpose(source, np.array([0, 2, 3, 1])).output(0) if origin is None else origin
            for source, origin in zip(sources, origins, strict=True)
        ]
        joined = ops.transpose(ops.concat(turned, 3), np.array([0, 3, 1, 2]))
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(joined.output(0))
    model.validate_nodes_and_infer_types()


def _running(request: Any, first: Floats) -> Ask:
    """Runs a request and hands out the first tensor that it makes."""

    def run() -> Floats:
        request.infer(share_outputs=True)
        return _lent(first)

    return run


class _OpenVinoChain:
    def __init__(self, stages: Sequence[tuple[Ask, Ask | None]], image: Images) -> None:
        self._stages = tuple(stages)
        self._image = image
        self._lock = threading.Lock()
        for ask in self.walk(np.zeros_like(image)):
            ask()

    def walk(self, images: Images) -> Walk:
        with self._lock:
            self._image[...] = images
            for run, head in self._stages:
                found = run()
                yield head or _giving(found)


class _AnySizeChain:
    """Networks whose tensors have another size with every image, and so no place of their own."""

    def __init__(
        self, tensor: Any, stages: Sequence[NetworkFile], requests: Mapping[NetworkFile, Any], image: Images
    ) -> None:
        self._tensor, self._stages, self._requests = tensor, tuple(stages), requests
        self._lock = threading.Lock()
        for ask in self.walk(image):
            ask()

    def walk(self, images: Images) -> Walk:
        with self._lock:
            tensors = {IMAGE: self._tensor(np.ascontiguousarray(images))}

            def run(file: NetworkFile) -> Floats:
                request = self._requests[file]
                for name in file.inputs:
                    request.set_tensor(name, tensors[name])
                request.infer(share_outputs=True)
                tensors.update({name: request.get_tensor(name) for name in file.outputs})
                found: Floats = tensors[file.outputs[0]].data
                return found

            for stage in self._stages:
                found = run(stage)
                yield partial(run, stage.head) if stage.head else _giving(found)


def _names(ports: Sequence[Any], wanted: Sequence[str]) -> list[str]:
    """A tensor may have several names in OpenVINO: the one that we use, if it is among them."""
    return [next((name for name in wanted if name in port.names), port.any_name) for port in ports]


def _check_names(stage: NetworkFile, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    if set(inputs) != set(stage.inputs) or set(outputs) != set(stage.outputs):
        found, wanted = f"{sorted(inputs)} -> {sorted(outputs)}", f"{sorted(stage.inputs)} -> {sorted(stage.outputs)}"
        raise UserError(f"{stage.path}: its tensors are {found}; must be {wanted}")
