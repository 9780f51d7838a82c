import dataclasses
import itertools
import json
import math

import numpy as np
import onnx
import pytest
import torch

import cnmm
from cnmm._files import written_aside
from cnmm.evaluation.quality import Quality
from cnmm.export import network as export
from cnmm.export.network import check_quality, export_onnx, onnx_bytes, open_onnx, quality_of_file, stage_bytes
from cnmm.export.slim import slim, slim_cascade
from cnmm.export.stages import written_stage_macs
from cnmm.ladder import NetworkFile, read_ladder
from cnmm.lattice import build_lattice
from tests.helpers import preprocessing, random_points, refused, trained

openvino = pytest.importorskip("openvino")


def raw_images(config, num):
    return np.random.default_rng(num).integers(0, 256, (num, *config.input_size, config.in_chans), dtype=np.uint8)


def prepared(images, about):
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (about.mean, about.std))
    return ((x - mean) / std).float()


def answered(scores):
    """What a file answers for these scores: probabilities of an image, or the scores of its pixels."""
    return (scores if scores.dim() == 4 else scores.softmax(1)).numpy()


def by_onnxruntime(data, images):
    return open_onnx(data).run(None, {"image": images})[0]


def by_openvino(data, images):
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(data), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({"image": images})[0]


@pytest.mark.parametrize("name", cnmm.list_models())
def test_exported_equals_slim_on_both_runtimes(name):
    model = trained(name)
    about = preprocessing(model.config)
    for point in random_points(model, 2, seed=5):
        network = slim(model, point)
        data = onnx_bytes(network, about)
        for num in (1, 3):
            images = raw_images(model.config, num)
            with torch.no_grad():
                expected = answered(network(prepared(images, about)))
            for run in (by_onnxruntime, by_openvino):
                found = run(data, images)
                assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_file_describes_itself_and_fits_the_standard(tmp_path):
    model = trained("cnmm_tiny")
    about = preprocessing(model.config)
    export_onnx(slim(model, "e2c1"), tmp_path / "a.onnx", about)
    proto = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(proto, full_check=True)
    found = {prop.key: prop.value for prop in proto.metadata_props}
    assert json.loads(found["classes"]) == list(about.classes)
    assert json.loads(found["mean"]) == list(about.mean)
    assert json.loads(found["std"]) == list(about.std)
    assert (found["point"], found["precision"], json.loads(found["input_size"])) == ("e2c1", "float32", [28, 28])
    cost = cnmm.CostTable.of(model.config).point(cnmm.named_point(model, "e2c1"))
    assert (int(found["mixture_macs"]), int(found["mixture_params"])) == (cost.macs, cost.params)
    assert (int(found["macs"]), int(found["params"])) == counted(proto)
    assert (found["layout"], found["dtype"], found["colour_order"]) == ("NHWC", "uint8", "grey")
    assert (found["cnmm_version"], found["task"]) == (cnmm.__version__, "classification")
    assert "bicubic" in found["resize"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def counted(proto):
    """Multiply-adds of a file's convolutions, and the values that they hold, by onnx's own inference of shapes."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    sizes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim[2:]] for info in graph.value_info}
    sizes |= {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim[2:]] for info in graph.output}
    floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    held = {tensor.name: math.prod(tensor.dims) for tensor in floats}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    macs = sum(held[node.input[1]] * math.prod(sizes[node.output[0]]) for node in convolutions)
    return macs, sum(num for name, num in held.items() if name != "mean")


@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_b4s3", "cnmm_b5s4", "cnmm_full8"])
def test_costs_are_those_of_the_file(name):
    model = trained(name)
    for point in random_points(model, 4, seed=7):
        network = slim(model, point)
        proto = onnx.load_from_string(onnx_bytes(network, preprocessing(model.config)))
        assert (network.cost.macs, network.cost.params) == counted(proto)
        staged = slim_cascade(model, point)
        files = [onnx.load_from_string(data) for data, _ in stage_bytes(staged, preprocessing(model.config))]
        macs, asking = written_stage_macs(staged.graph)
        assert [counted(file)[0] for file in files] == list(macs)
        assert (sum(macs), set(asking)) == (staged.cost.macs, {0} if asking else set())


def said_macs(data):
    about = {entry.key: entry.value for entry in onnx.load_from_string(data).metadata_props}
    return int(about["macs"])


def test_an_answer_at_an_exit_costs_its_stages_and_one_head():
    model = trained("cnmm_seg_tiny", blocks=3)
    staged = slim_cascade(model)
    files = stage_bytes(staged, preprocessing(model.config))
    assert [head is None for _, head in files] == [False, False, True]
    stages, heads = ([said_macs(data) for data in part if data] for part in zip(*files, strict=True))
    macs, asking = written_stage_macs(staged.graph)
    assert list(asking) == heads
    assert list(itertools.accumulate(macs)) == [
        stages[0] + heads[0],
        stages[0] + stages[1] + heads[1],
        sum(stages),
    ]
    assert sum(macs) + sum(asking) == staged.cost.macs


def test_the_issue_s_figures_of_the_small_model():
    """cnmm_b4s3 e1c0: much of what the mixture counts is folded away."""
    model = trained("cnmm_b4s3")
    network = slim(model, "e1c0")
    assert (network.mixture_cost.macs, network.mixture_cost.params) == (1_516_544, 157_690)
    assert (network.cost.macs, network.cost.params) == (989_696, 21_626)


def chained(stages, images):
    """The answers of every exit, each stage fed with what the earlier ones made."""
    made, answers = {"image": images}, []
    for data in itertools.chain(*stages):
        if data is None:
            continue
        session = open_onnx(data)
        names = [output.name for output in session.get_outputs()]
        feed = {source.name: made[source.name] for source in session.get_inputs()}
        made.update(zip(names, session.run(names, feed), strict=True))
        answers += [made.pop(name) for name in ("probabilities", "logits") if name in made]
    return answers


@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_b4s3_c32", "cnmm_seg_tiny"])
def test_chained_stages_equal_the_exits_of_the_mixture(name):
    model = trained(name)
    about = preprocessing(model.config)
    images = raw_images(model.config, 3)
    for point in random_points(model, 3, seed=2):
        with torch.no_grad():
            expected = model.forward_exits(prepared(images, about), point)
        found = chained(stage_bytes(slim_cascade(model, point), about), images)
        assert len(found) == len(expected)
        for scores, answers in zip(expected.values(), found, strict=True):
            assert np.abs(answers - answered(scores)).max() < 1e-4 * np.abs(answers).max()


def test_a_stage_reads_only_what_it_needs():
    model = trained("cnmm_b4s3_c32")
    about = preprocessing(model.config)
    stages = [open_onnx(data) for data, _ in stage_bytes(slim_cascade(model, "e4a0"), about)]
    made = set()
    for session in stages:
        made |= {output.name for output in session.get_outputs()} - {"probabilities"}
    read = {source.name for session in stages for source in session.get_inputs()} - {"image"}
    assert made == read


def test_a_wrong_export_is_never_put_in_place(tmp_path, monkeypatch):
    model = trained("cnmm_tiny")
    written = export.onnx_model

    def wrong(graph, tensors, about, **metadata):
        return written(graph, {**tensors, "logits3.bias": tensors["logits3.bias"] + np.arange(10)}, about, **metadata)

    monkeypatch.setattr(export, "onnx_model", wrong)
    with pytest.raises(ValueError, match="differs from the one in torch"):
        export_onnx(slim(model), tmp_path / "a.onnx", preprocessing(model.config))
    assert not list(tmp_path.iterdir())


def test_existing_files_and_missing_folders_are_refused(tmp_path):
    network = slim(trained("cnmm_tiny"))
    about = preprocessing(network.config)
    (tmp_path / "a.onnx").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        export_onnx(network, tmp_path / "a.onnx", about)
    assert (tmp_path / "a.onnx").read_text() == "mine"
    with pytest.raises(ValueError, match="no folder"):
        export_onnx(network, tmp_path / "b" / "a.onnx", about)


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    def fail():
        with written_aside(tmp_path / "a") as aside:
            (aside / "x").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())
    with written_aside(tmp_path / "a") as aside:
        (aside / "x").write_text("x")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]
    with pytest.raises(ValueError, match="exists"), written_aside(tmp_path / "a"):
        pass


def test_int8_is_close_and_needs_images():
    model = trained("cnmm_tiny")
    about = preprocessing(model.config)
    network, images = slim(model), raw_images(model.config, 64)
    with pytest.raises(ValueError, match="--data"):
        onnx_bytes(network, about, precision="int8")
    plain, small = onnx_bytes(network, about), onnx_bytes(network, about, precision="int8", calibration=images)
    kinds = {node.op_type for node in onnx.load_from_string(small).graph.node}
    assert "QuantizeLinear" in kinds
    found, expected = by_onnxruntime(small, images), by_onnxruntime(plain, images)
    assert not np.array_equal(found, expected)
    assert np.abs(found - expected).max() < 0.15
    labels = expected.argmax(1)
    exact, near = (quality_of_file(data, [(images, labels)], model.config, "accuracy") for data in (plain, small))
    assert (exact.value, exact.n) == (1.0, 64)
    assert near.value > 0.8


def test_a_ladder_needs_to_know_its_images(tmp_path, trained_run):
    """Classes, mean and standard deviation travel with a loaded model; they are never made up."""
    run = cnmm.Run(trained_run)
    model = cnmm.load(trained_run)
    model.preprocessing = None
    line = refused(cnmm.export_ladder, model, run.frontier, tmp_path / "ladder", 2)
    assert "cnmm.load" in line
    assert "set model.preprocessing, for example" in line
    assert not list(tmp_path.iterdir())
    cnmm.export_ladder(model, run.frontier, tmp_path / "given", 1, preprocessing=run.preprocessing)
    cnmm.export_ladder(run.model, run.frontier, tmp_path / "own", 1)
    assert (tmp_path / "given" / "ladder.json").read_bytes() == (tmp_path / "own" / "ladder.json").read_bytes()
    assert read_ladder(tmp_path / "own").preprocessing == run.preprocessing


def test_a_ladder_counts_its_files(tmp_path, trained_run):
    """Macs, params, the full network and the cascade are those of the files; the mixture's stand beside them."""
    run = cnmm.Run(trained_run)
    ladder = run.export_ladder(tmp_path / "ladder", 4)
    for point in ladder.frontier.points:
        proto = onnx.load_from_string(ladder.networks[point.name].read())
        assert (point.macs, point.params) == counted(proto)
        measured = run.frontier[point.name]
        assert (point.mixture_macs, point.mixture_params) == (measured.macs, measured.params)
        assert (measured.written_macs, measured.written_params) == (point.macs, point.params)
        assert point.macs < measured.macs
    assert ladder.frontier.full_macs == slim(run.model).cost.macs
    stages = [counted(onnx.load_from_string(stage.read()))[0] for stage in ladder.stages]
    assert list(ladder.cascade.macs) == stages
    for row, before in zip(ladder.cascade.thresholds, run.frontier.cascade.thresholds, strict=True):
        assert row.average_macs == pytest.approx(np.dot(row.exits, np.cumsum(stages)))
        assert (row.confidence, row.quality) == (before.confidence, before.quality)
    with cnmm.Session(tmp_path / "ladder", cascade=False) as session:
        cheapest = session.points[0]
        assert session.choose(cheapest.macs) == cheapest
        assert cheapest.name in refused(session.choose, cheapest.macs - 1)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_a_ladder_knows_what_survives_of_the_lattice(tmp_path, request, task):
    run = cnmm.Run(request.getfixturevalue("trained_run" if task == "classification" else "scene_run"))
    ladder = run.export_ladder(tmp_path / "ladder", 3)
    found = ladder.lattice
    assert found.full == build_lattice(run.model.config)
    assert list(found.points) == [point.name for point in ladder.frontier.points]
    for name, edges in found.points.items():
        assert edges == cnmm.named_point(run.model, name).edges
    cascade = run.frontier.cascade
    assert found.cascade[-1] == cnmm.named_point(run.model, cascade.point).edges
    assert len(found.cascade) == len(cascade.exits)
    for fewer, more in itertools.pairwise(found.cascade):
        assert fewer < more
    assert read_ladder(tmp_path / "ladder").lattice == found


def test_a_ladder_whose_networks_are_not_as_good_as_measured_is_refused(tmp_path, own_run):
    """Statistics of another point, a wrong mean: whatever it is, nothing is put in place."""
    run = cnmm.Run(own_run)
    best = run.frontier.envelope()[-1]
    wrong = {name: tensor.flip(-1) * 2 for name, tensor in run.frontier.buffers[best.name].items()}
    run.__dict__["frontier"] = dataclasses.replace(run.frontier, buffers={**run.frontier.buffers, best.name: wrong})
    line = refused(run.export_ladder, tmp_path / "ladder", 1)
    assert best.name in line
    assert f"{best.quality:.4f}" in line
    assert not list(tmp_path.glob("*ladder*"))


def test_a_network_is_compared_with_the_images_it_was_measured_on(trained_run):
    """All of them: two images of difference are allowed; a part of them: what chance does."""
    point = dataclasses.replace(cnmm.Run(trained_run).frontier.points[0], quality=0.6, low=0.5, high=0.7, n=100)
    found = Quality(metric="accuracy", value=0.6, low=0, high=1, n=100, all={})
    for value, n in ((0.62, 100), (0.58, 100), (0.75, 25), (0.45, 25)):
        check_quality(point, dataclasses.replace(found, value=value, n=n))
    for value, n in ((0.63, 100), (0.57, 100), (0.1, 25)):
        assert "nothing was written" in refused(check_quality, point, dataclasses.replace(found, value=value, n=n))


def test_a_ladder_is_read_back_before_it_is_put_in_place(tmp_path, trained_run, monkeypatch):
    written = NetworkFile.write.__func__

    def damaged(cls, path, data, **tensors):
        file = written(cls, path, data, **tensors)
        path.write_bytes(data[:-1])
        return file

    monkeypatch.setattr(NetworkFile, "write", classmethod(damaged))
    assert "sha256" in refused(cnmm.Run(trained_run).export_ladder, tmp_path / "ladder", 1)
    assert not list(tmp_path.iterdir())


def test_an_int8_cascade_has_thresholds_of_its_own(tmp_path, trained_run):
    """Its stages are int8, its figures are what they do on held-out images; without images there is none."""
    run = cnmm.Run(trained_run)
    ladder = run.export_ladder(tmp_path / "ladder", 1, precision="int8")
    kinds = {node.op_type for stage in ladder.stages for node in onnx.load_from_string(stage.read()).graph.node}
    assert "QuantizeLinear" in kinds
    images, labels = run.images.held_out()
    answers = np.stack(chained([(stage.read(),) for stage in ladder.stages], images), 1)
    sure, right = answers.max(2), answers.argmax(2) == labels[:, None]
    (point,) = ladder.frontier.points
    assert point.float32_quality == pytest.approx(run.frontier[point.name].quality, abs=0.011)
    assert ladder.cascade.n == len(labels)
    for row in ladder.cascade.thresholds[:: len(ladder.cascade.thresholds) // 5]:
        gone = np.concatenate([sure[:, :-1] >= row.confidence, np.ones((len(labels), 1), bool)], 1).argmax(1)
        assert row.exits == pytest.approx(np.bincount(gone, minlength=sure.shape[1]) / len(labels))
    assert ladder.cascade.thresholds[0].quality <= right[:, 0].mean() + 1e-9
    cnmm.export_ladder(
        run.model, run.frontier, tmp_path / "blind", 1, precision="int8", calibration=run.images.training(64)
    )
    assert read_ladder(tmp_path / "blind").cascade is None


def test_an_int8_ladder_is_measured_on_its_own_images(tmp_path, trained_run):
    """The figures of its points are those of the int8 files, with the number of images that they were measured on."""
    run = cnmm.Run(trained_run)
    images, labels = run.images.held_out(60)
    cnmm.export_ladder(
        run.model,
        run.frontier,
        tmp_path / "ladder",
        2,
        precision="int8",
        calibration=run.images.training(64),
        validation=lambda: [(images, labels)],
    )
    ladder = read_ladder(tmp_path / "ladder")
    assert ladder.precision == "int8"
    for point in ladder.frontier.points:
        probabilities = by_onnxruntime(ladder.networks[point.name].read(), images)
        assert point.quality == (probabilities.argmax(1) == labels).mean()
        assert (point.n, point.raw_quality, point.test_quality) == (60, None, None)
