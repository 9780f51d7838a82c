"""The application inside this process: for other servers, and what a process of its own would hide."""

import asyncio
import io
import json
import os
import shutil
import signal
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.serve import engine as engine_module
from cnmm.serve import pool as pool_module
from cnmm.serve import protocol as protocol_module
from cnmm.serve import served as served_module
from cnmm.serve.app import create_app
from cnmm.serve.page import read_page
from cnmm.serve.protocol import parse_inference
from tests.helpers import RUN_CLI, complaint, made_up_ladder, python, refused, trained
from tests.serve.servers import served

SIZE = (24, 32)


@asynccontextmanager
async def running(ladder, **options):
    """The application with its workers, and a client."""
    app = create_app(ladder, **{"cores": 1, "target_ms": 2000, "runtime": "onnx", **options})
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
    ):
        yield app.state.engine, client


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


# Pixels


@pytest.fixture(scope="module")
def pixel_ladder(tmp_path_factory):
    model = trained("cnmm_seg_tiny", blocks=2, num_classes=5, input_size=SIZE)
    return made_up_ladder(tmp_path_factory.mktemp("pixels") / "a", model, ("e1c0", "e2c0"), cascade="e2c0")


def test_pixels_are_labelled(pixel_ladder, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    same = np.random.default_rng(1).integers(0, 256, (2, *SIZE, 3), np.uint8)

    async def story():
        async with running(pixel_ladder) as (_, client):
            where = "/predict?operating_point=e2c0"
            shares = (await client.post(where, content=png(picture))).json()
            drawn = await client.post(where, content=png(picture), headers={"accept": "image/png"})
            raw = {"content-type": "application/octet-stream"}
            plain = (await client.post(where, content=same[0].tobytes(), headers=raw)).json()
            tensor = {"name": "image", "shape": list(same.shape), "datatype": "UINT8", "data": same.ravel().tolist()}
            body = {"inputs": [tensor], "outputs": [{"name": "label_map"}, {"name": "shares"}]}
            maps = (await client.post("/v2/models/cnmm_seg_tiny/versions/e2c0/infer", json=body)).json()
            about = (await client.get("/about")).json()
            return shares, drawn, plain, maps, about

    shares, drawn, plain, maps, about = asyncio.run(story())
    with cnmm.Session(pixel_ladder, threads=1) as session:
        one, two = session.predict([picture], point="e2c0"), session.predict(same, point="e2c0")
    found = {row["label"]: row["share"] for row in shares["shares"]}
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)
    expected = dict(zip(session.classes, one.probabilities[0].tolist(), strict=True))
    assert found == pytest.approx({label: share for label, share in expected.items() if share}, abs=1e-5)
    assert shares["size"] == [40, 50]
    assert drawn.headers["content-type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawn.content))), one.labels[0])
    assert json.loads(drawn.headers["cnmm-answer"])["operating_point"] == "e2c0"
    assert plain["size"] == list(SIZE)
    assert maps["outputs"][0]["shape"] == [2, *SIZE]
    assert np.array_equal(np.array(maps["outputs"][0]["data"]).reshape(2, *SIZE), two.labels)
    assert np.allclose(np.array(maps["outputs"][1]["data"]).reshape(2, 5), two.probabilities)
    assert about["task"] == "segmentation"
    assert len(about["palette"]) == 5
    manifest = json.loads((pixel_ladder / "ladder.json").read_text())
    assert about["lattice"] == manifest["lattice"]
    assert manifest["lattice"]


# What the engine does


def test_one_server_after_the_other_leaves_no_worker(timed_ladder, photo):
    async def story():
        async with running(timed_ladder, cores=2) as (engine, client):
            pids = engine.pids()
            assert len(pids) == 2
            assert (await client.post("/predict", content=photo.read_bytes())).status_code == 200
            assert engine.wanted_cores() >= 0
        return pids

    for pid in asyncio.run(story()) + asyncio.run(story()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_request_that_ends_workers_is_told_so(timed_ladder, photo, monkeypatch):
    """Each time it is given to one, that one is killed."""
    send = engine_module.Pool.send

    def kill(pool, number, words, parts):
        if len(parts[0]) == photo.stat().st_size:
            pool.kill(number)
        else:
            send(pool, number, words, parts)

    monkeypatch.setattr(engine_module.Pool, "send", kill)

    async def story():
        async with running(timed_ladder, target_ms=60_000) as (_, client):
            bad = await client.post("/predict", content=photo.read_bytes())
            good = await client.post("/predict", content=png(np.zeros((9, 9, 3), np.uint8)))
            return bad, good

    bad, good = asyncio.run(story())
    assert (bad.status_code, good.status_code) == (500, 200)
    assert "workers end" in bad.json()["error"]


def test_a_worker_that_hangs_is_ended_and_its_request_answered(timed_ladder, photo, monkeypatch):
    monkeypatch.setattr(engine_module, "HUNG_MS", 500.0)

    async def story():
        async with running(timed_ladder) as (engine, client):
            (worker,) = engine.pids()
            os.kill(worker, signal.SIGSTOP)
            answer = await client.post("/predict", content=photo.read_bytes())
            return worker, engine.pids(), answer.status_code

    stopped, now, status = asyncio.run(story())
    assert status == 200
    assert stopped not in now


def test_memory_for_requests_is_bounded(timed_ladder, photo, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_BYTES", 1000)

    async def story():
        async with running(timed_ladder) as (engine, client):
            found = await client.post("/predict", content=bytes(2000))
            assert engine.bytes == 0
            again = await client.post("/predict", content=bytes(900))
            assert engine.bytes == 0
            return found, again

    found, again = asyncio.run(story())
    assert (found.status_code, again.status_code) == (503, 400)
    assert "memory" in found.json()["error"]


def test_slow_moments_reach_the_controller(timed_ladder, photo):
    """The made-up menu promises far less than a worker in another process takes."""

    async def story():
        async with running(timed_ladder) as (engine, client):
            for _ in range(10):
                await client.post("/predict?operating_point=e1c0", content=photo.read_bytes())
            return engine.controller.slowdown

    assert asyncio.run(story()) > 1.05


def test_the_same_controller_as_in_the_simulator(timed_ladder):
    app = create_app(timed_ladder, runtime="onnx", policy="fixed:e2c3", cores=3)
    controller = app.state.engine.controller
    assert type(controller).__module__ == "cnmm.serve.controller"
    assert (controller.policy.rule, controller.policy.point) == ("fixed", "e2c3")
    assert "fixed:POINT" in refused(create_app, timed_ladder, runtime="onnx", policy="quick")


def test_answers_of_much_json_are_refused_beforehand(timed_ladder, monkeypatch):
    """Writing them would hold up everybody."""
    ladder = served_module.open_served(timed_ladder, runtime="onnx")
    tensor = {"name": "image", "shape": [2, 8, 8, 3], "datatype": "UINT8", "data": [0] * 384}

    def ask(**more):
        return parse_inference(json.dumps({"inputs": [tensor], **more}).encode(), None, None, ladder)

    assert ask().ask.pictures.images == 2
    monkeypatch.setattr(protocol_module, "MOST_NUMBERS", 11)  # two images with four probabilities, a label and an exit
    assert "12 numbers in JSON" in refused(ask)
    assert ask(outputs=[{"name": "probabilities"}])
    assert ask(parameters={"binary_data_output": True})


def test_a_head_that_was_seen_before_says_nothing_of_the_body_or_the_version(timed_ladder):
    ladder = served_module.open_served(timed_ladder, runtime="onnx")
    tensor = {"name": "image", "shape": [1, 8, 8, 3], "datatype": "UINT8", "parameters": {"binary_data_size": 192}}
    head = json.dumps({"inputs": [tensor]}).encode()

    def ask(pixels, version=None):
        return parse_inference(head + pixels, str(len(head)), version, ladder).ask

    for value in (1, 2, 1):
        assert bytes(ask(bytes([value]) * 192).pictures.parts[0]) == bytes([value]) * 192
    assert ask(bytes(192)).knobs.row is None
    assert ask(bytes(192), "e2c3").knobs.row.point == "e2c3"
    assert "191 bytes follow" in refused(ask, bytes(191))


# What is measured, shipped and said


def test_what_was_not_measured_is_measured_and_said(hand_made_ladder, tmp_path, said, monkeypatch):
    monkeypatch.setattr(served_module, "MEASURE_S", 0.01)
    folder = shutil.copytree(hand_made_ladder, tmp_path / "ladder")
    first = create_app(folder, runtime="onnx").state.engine.menu
    assert any("was not measured; measuring it now with one thread (onnx)" in line for line in said)
    said.clear()
    assert create_app(folder, runtime="onnx").state.engine.menu == first
    assert not said


def test_the_examples_of_a_ladder_are_passed_on(timed_ladder, photo, tmp_path):
    folder = shutil.copytree(timed_ladder, tmp_path / "ladder")
    (folder / "examples").mkdir()
    shutil.copy(photo, folder / "examples" / "a cat.png")

    async def story():
        async with running(folder) as (_, client):
            (example,) = (await client.get("/examples")).json()
            return example, await client.get(example["url"]), await client.get("/examples/other.png")

    example, file, missing = asyncio.run(story())
    assert example["name"] == "a cat.png"
    assert file.content == photo.read_bytes()
    assert missing.status_code == 404


def test_a_page_may_run_its_own_scripts_only(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<style>p {}</style><script>alert(1)</script><script>alert(2)</script>")
    policy = read_page(path).headers["content-security-policy"]
    assert policy.count("'sha256-") == 3
    assert "'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='" in policy  # of "alert(1)", by openssl
    assert "unsafe" not in policy


def test_a_ladder_that_cannot_be_loaded_is_one_line(timed_ladder, tmp_path, capsys):
    folder = shutil.copytree(timed_ladder, tmp_path / "ladder")
    (folder / "e1c0.onnx").write_bytes(b"other")
    assert "sha256" in complaint(capsys, "serve", folder, "--port", 0, "--runtime", "onnx")
    assert "ladder.json missing" in complaint(capsys, "serve", tmp_path, "--port", 0)


def test_a_ladder_that_is_replaced_meanwhile_is_not_mixed_in(timed_ladder, photo, tmp_path, said, monkeypatch):
    monkeypatch.setattr(pool_module, "PAUSE_S", 0.1)
    folder = shutil.copytree(timed_ladder, tmp_path / "ladder")

    async def story():
        async with running(folder, cores=2) as (engine, client):
            manifest = json.loads((folder / "ladder.json").read_text())
            (folder / "ladder.json").write_text(json.dumps({**manifest, "model": "another"}))
            first, second = engine.pids()
            os.kill(first, signal.SIGKILL)
            while not any("was replaced" in line for line in said):
                await asyncio.sleep(0.05)
            answer = await client.post("/predict", content=photo.read_bytes())
            return second, engine.pids(), answer.status_code

    second, left, status = asyncio.run(story())
    assert left == [second]
    assert status == 200


def test_the_server_needs_no_torch_and_says_what_it_needs(timed_ladder):
    code = "import cnmm.serve.listen, cnmm.serve.worker"
    assert python(code, missing=("torch", "onnx", "matplotlib", "safetensors", "openvino")).returncode == 0
    done = python(RUN_CLI, "serve", timed_ladder, missing=("starlette",))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert 'pip install "cnmm[serve]"' in done.stderr


@pytest.mark.slow
def test_a_run_is_served_as_a_ladder(own_run, photo):
    with served(own_run, "--cores", 1, "--runtime", "onnx") as server:
        assert httpx.post(f"{server.url}/predict", content=photo.read_bytes()).json()["top"]
        status, said = server.end(signal.SIGINT)
    assert status == 0
    assert "measuring it now" in said
    assert (own_run / "latency.json").is_file()


def test_a_port_in_use_is_one_line(timed_ladder, capsys):
    with served(timed_ladder, "--cores", 1, "--runtime", "onnx") as server:
        assert "choose another --port" in complaint(capsys, "serve", timed_ladder, "--port", server.address[1])
        said = "".join(server.said)
        assert f"curl --data-binary @cat.jpg {server.url}/predict" in said
        assert "images/s at its best" in said
