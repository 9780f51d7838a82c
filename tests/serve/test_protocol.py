"""The protocol against a real server: by hand, byte by byte, and with Triton's own client."""

import gzip
import io
import json
import zlib

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

import cnmm
from cnmm.serve.about import ask_about, ask_cpu_ms
from cnmm.serve.open_loop import parse_url
from tests.runtime.ladders import CLASSES, SIZE
from tests.serve.servers import served

SHAPE = (SIZE, SIZE, 3)
ABOUT = {"operating_point", "exit", "macs", "queue_ms", "compute_ms", "expected_accuracy", "degraded"}


@pytest.fixture(scope="module")
def server(timed_ladder):
    with served(timed_ladder, "--cores", 2, "--runtime", "onnx", "--target-ms", 2000) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def session(timed_ladder):
    with cnmm.Session(timed_ladder, threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).integers(0, 256, (3, *SHAPE), np.uint8)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def infer(client, body, header=None, version=None, headers=()):
    path = "/v2/models/by_hand" + (f"/versions/{version}" if version else "") + "/infer"
    extra = {} if header is None else {"Inference-Header-Content-Length": str(header)}
    return client.post(path, content=body, headers={**extra, **dict(headers)})


def request(images, binary=True, **more):
    """A request for pixels: its body, and how much of it is JSON."""
    tensor = {"name": "image", "shape": list(images.shape), "datatype": "UINT8"}
    data = images.tobytes() if binary else b""
    tensor |= {"parameters": {"binary_data_size": len(data)}} if binary else {"data": images.ravel().tolist()}
    text = json.dumps({"inputs": [tensor], **more}).encode()
    return text + data, len(text) if binary else None


def refusal(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()["error"]


# For people


def test_an_image_file_is_classified(client, session, photo):
    answer = client.post("/predict?operating_point=e3c0&top=2", content=photo.read_bytes()).json()
    expected = session.predict(photo, point="e3c0").top(2)[0]
    assert [(row["label"], pytest.approx(row["p"], abs=1e-5)) for row in answer["top"]] == list(expected)
    assert answer.keys() >= {"top", "time_ms", *ABOUT}
    assert (answer["operating_point"], answer["exit"], answer["macs"]) == ("e3c0", 3, 4000)
    assert answer["expected_accuracy"] == 0.8
    form = client.post("/predict?operating_point=e3c0&top=2", files={"file": photo.read_bytes()}).json()
    assert form["top"] == answer["top"]


def test_pixels_at_the_ladders_size_are_taken_as_they_are(client, session, images):
    headers = {"content-type": "application/octet-stream"}
    answer = client.post("/predict?operating_point=e2c3&top=9", content=images[0].tobytes(), headers=headers).json()
    expected = session.predict(images[0], point="e2c3").top(9)[0]
    assert [row["label"] for row in answer["top"]] == [label for label, _ in expected]
    assert answer["top"][0]["p"] == pytest.approx(expected[0][1], abs=1e-5)


def test_without_a_wish_an_idle_server_gives_its_best(client, photo):
    answer = client.post("/predict", content=photo.read_bytes()).json()
    about = client.get("/about").json()
    assert answer["degraded"] is False
    assert answer["expected_accuracy"] == about["rows"][-1]["quality"]


def test_wishes(client, photo):
    def ask(**query):
        return client.post("/predict", params=query, content=photo.read_bytes())

    assert ask(budget="45%").json()["operating_point"] == "e2c3"
    assert ask(budget="acc:0.75").json()["operating_point"] == "e3c0"
    assert ask(min_confidence=0).json()["exit"] == 1
    assert ask(min_confidence=1).json()["exit"] == 3
    assert ask(timeout_ms=5000, priority=4).status_code == 200
    assert "did you mean budget" in refusal(ask(bugdet="45%"), 400)
    assert "one of e1c0, e2c3, e3c0" in refusal(ask(operating_point="e9c9"), 400)
    assert "cannot be combined" in refusal(ask(budget="45%", min_confidence=0.5), 400)
    assert "must be a number" in refusal(ask(timeout_ms="soon"), 400)
    assert "at least" in refusal(ask(timeout_ms=0.01), 400)


def test_what_is_no_image_is_refused_before_it_waits(client):
    assert "not a known image format" in refusal(client.post("/predict", content=b"hello"), 400)
    assert "no image" in refusal(client.post("/predict"), 400)
    assert "field `file`" in refusal(client.post("/predict", files={"other": b"hello"}), 400)
    bomb = io.BytesIO()
    Image.new("L", (6000, 6000)).save(bomb, "png")
    assert "pixels" in refusal(client.post("/predict", content=bomb.getvalue()), 400)


def test_about_says_what_a_page_needs(client):
    about = client.get("/about").json()
    assert about["classes"] == list(CLASSES)
    assert about["input"] == {"height": SIZE, "width": SIZE, "channels": 3, "any_size": False}
    assert [point["name"] for point in about["points"]] == ["e1c0", "e2c3", "e3c0"]
    assert {"exit", "cuts", "macs", "quality", "metric", "ms"} <= about["points"][0].keys()
    assert about["cascade"].keys() >= {"point", "exits", "macs", "thresholds"}
    assert (about["target_ms"], about["policy"], about["cores"], about["runtime"]) == (2000, "adaptive", 2, "onnx")
    assert about["lattice"].keys() == {"blocks", "scales", "points", "cascade"}


def test_about_says_what_a_load_test_needs(server, client):
    about, menu = client.get("/about").json(), ask_about(parse_url(server.url)).menu
    assert [(row.point, row.ms, row.quality) for row in menu.rows] == [
        (row["point"], row["ms"], row["quality"]) for row in about["rows"]
    ]
    assert menu.stage_ms == tuple(about["stage_ms"])
    assert len(menu.asking_ms) == 2


def test_the_page_runs_nothing_but_itself(client):
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]


def test_events_come_four_times_a_second(client, photo):
    client.post("/predict", content=photo.read_bytes())
    moments = []
    with client.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                moments.append(json.loads(line.removeprefix("data: ")))
            if len(moments) == 3:
                break
    names = {"t", "rate", "waiting", "budget_ms", "price", "p50_ms", "p99_ms", "expected_accuracy", "wanted_cores"}
    assert moments[0].keys() >= {*names, "slowdown", "shed", "answered", "last"}
    assert moments[0]["answered"] >= 1
    assert moments[0]["last"].keys() >= ABOUT
    assert 0.4 < moments[2]["t"] - moments[0]["t"] < 3


def test_metrics_have_their_names(client, photo):
    client.post("/predict?operating_point=e1c0", content=photo.read_bytes())
    text = client.get("/metrics").text
    for name in ("request_seconds", "queue_seconds", "compute_seconds"):
        assert f"cnmm_{name}_count" in text
    for name in ("waiting", "budget_ms", "price", "expected_accuracy", "wanted_cores", "slowdown"):
        assert f"\ncnmm_{name} " in text
    assert 'cnmm_requests_total{outcome="answered",point="e1c0"}' in text
    assert 'cnmm_exit_total{exit="1"}' in text


def test_a_load_test_hears_what_the_event_loop_computes(server, client, photo):
    before = ask_cpu_ms(parse_url(server.url))
    for _ in range(30):
        client.post("/predict?operating_point=e1c0", content=photo.read_bytes())
    assert 0 < before < ask_cpu_ms(parse_url(server.url))
    assert ask_cpu_ms(parse_url("http://127.0.0.1:9")) == 0  # a load test outlives its server


# For machines: golden bytes


def test_a_binary_request_byte_by_byte(client, session):
    """Written out by hand, so that no helper can be wrong on both sides."""
    pixels = bytes(range(192))
    head = (
        b'{"id":"q1","inputs":[{"name":"image","shape":[1,8,8,3],"datatype":"UINT8",'
        b'"parameters":{"binary_data_size":192}}],"outputs":[{"name":"probabilities","parameters":{"binary_data":true}},'
        b'{"name":"exit","parameters":{"binary_data":true}},{"name":"label","parameters":{"binary_data":true}}]}'
    )
    response = infer(client, head + pixels, len(head), "e1c0")
    assert response.headers["content-type"] == "application/octet-stream"
    size = int(response.headers["inference-header-content-length"])
    answer, rest = json.loads(response.content[:size]), response.content[size:]
    assert answer["id"] == "q1"
    assert (answer["model_name"], answer["model_version"]) == ("by_hand", "e1c0")
    assert answer["parameters"].keys() == ABOUT
    expected = session.predict(np.frombuffer(pixels, np.uint8).reshape(1, *SHAPE), point="e1c0")
    label = expected.top()[0][0][0].encode()
    assert answer["outputs"] == [
        {"name": "probabilities", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}},
        {"name": "exit", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "label", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 4 + len(label)}},
    ]
    assert np.allclose(np.frombuffer(rest[:16], "<f4"), expected.probabilities[0], atol=1e-6)
    assert rest[16:] == b"\x01\x00\x00\x00" + b"\x03\x00\x00\x00" + label


def test_a_raw_binary_request_is_the_tensor_alone(client, session, images, photo):
    response = infer(client, images.tobytes(), 0, "e3c0")
    size = int(response.headers["inference-header-content-length"])
    answer = json.loads(response.content[:size])
    assert answer["outputs"][0]["shape"] == [3, 4]
    found = np.frombuffer(response.content[size : size + 48], "<f4").reshape(3, 4)
    assert np.allclose(found, session.predict(images, point="e3c0").probabilities, atol=1e-6)
    response = infer(client, photo.read_bytes(), 0, "e3c0")
    size = int(response.headers["inference-header-content-length"])
    expected = session.predict(photo, point="e3c0").probabilities[0]
    assert np.allclose(np.frombuffer(response.content[size : size + 16], "<f4"), expected, atol=1e-6)


def test_json_tensors(client, session, images):
    expected = session.predict(images, point="e2c3").probabilities
    flat, _ = request(images, binary=False, outputs=[{"name": "probabilities"}])
    nested = json.loads(flat)
    nested["inputs"][0]["data"] = images.tolist()
    for body in (flat, json.dumps(nested).encode()):
        answer = infer(client, body, version="e2c3").json()
        assert np.allclose(answer["outputs"][0]["data"], expected.ravel(), atol=1e-6)
        assert "id" not in answer


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_requests(client, images, encoding, pack):
    body, size = request(images)
    plain = infer(client, body, size, "e2c3")
    packed = infer(client, pack(body), size, "e2c3", {"content-encoding": encoding})
    assert packed.status_code == plain.status_code == 200
    assert packed.json()["outputs"] == plain.json()["outputs"]


def test_a_bomb_is_refused(client):
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        bomb = pack(bytes(2**27))
        assert "unpack" in refusal(infer(client, bomb, 0, headers={"content-encoding": encoding}), 413)


def test_wrong_requests_are_400_and_say_why(client, images):
    good, size = request(images)
    head = json.loads(good[:size])

    def wrong(status=400, header=None, **changes):
        tensor = {**head["inputs"][0], **changes.pop("tensor", {})}
        text = json.dumps({**head, "inputs": [tensor], **changes}).encode()
        return refusal(infer(client, text + images.tobytes(), len(text) if header is None else header), status)

    assert "'image' of UINT8" in wrong(tensor={"name": "picture"})
    assert "'image' of UINT8" in wrong(tensor={"datatype": "FP32"})
    assert "[N, 8, 8, 3]" in wrong(tensor={"shape": [3, 8, 8, 4]})
    assert "576 bytes follow" in wrong(tensor={"parameters": {"binary_data_size": 575}})
    assert "were sent" in wrong(tensor={"shape": [2, 8, 8, 3]})
    assert "probabilities, label, exit" in wrong(outputs=[{"name": "scores"}])
    assert "unknown parameter" in wrong(parameters={"speed": 3})
    assert "a text" in wrong(id=7)
    assert "list of 1 values" in wrong(inputs=[])
    assert "JSON" in wrong(header=4)
    assert "body's length" in wrong(header=10**6)
    assert "body's length" in wrong(header="-1")
    assert "must be a JSON object" in refusal(infer(client, b"[]"), 400)
    assert "0 to 255" in refusal(infer(client, request(images.astype(int) + 1, binary=False)[0]), 400)
    assert "allow" in wrong(parameters={"timeout": 1})
    many = np.zeros((3000, *SHAPE), np.uint8)
    body, size = request(many, outputs=[{"name": "probabilities"}] * 16, parameters={"timeout": 10**9})
    assert infer(client, body, size, "e1c0").status_code == 200
    body, size = request(many, outputs=[{"name": "probabilities"}] * 16 + [{"name": "exit"}])
    assert "0 or more" in refusal(infer(client, body, size), 400)
    tensor = {"name": "image", "shape": [300], "datatype": "BYTES", "parameters": {"binary_data_size": 1200}}
    text = json.dumps({"inputs": [tensor]}).encode()
    assert "at most 256" in refusal(infer(client, text + bytes(1200), len(text)), 413)
    assert "binary data" in refusal(infer(client, b"[" + b"1," * 2**20 + b"1]"), 413)


def test_unknown_models_versions_and_addresses_are_404(client, images):
    body, size = request(images)
    assert "operating point: e1c0" in refusal(infer(client, body, size, "e9c9"), 404)
    assert "by_hand" in refusal(client.get("/v2/models/other"), 404)
    assert "/nowhere" in refusal(client.get("/nowhere"), 404)
    assert refusal(client.get("/predict"), 405)


# Triton's client


@pytest.fixture(scope="module")
def tritons(server):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


def test_tritons_client_sees_a_server(tritons):
    assert tritons.is_server_live()
    assert tritons.is_server_ready()
    assert tritons.is_model_ready("by_hand")
    assert tritons.is_model_ready("by_hand", "e2c3")
    assert not tritons.is_model_ready("by_hand", "e9c9")
    assert tritons.get_server_metadata()["name"] == "cnmm"
    assert "binary_tensor_data" in tritons.get_server_metadata()["extensions"]
    about = tritons.get_model_metadata("by_hand")
    assert about["versions"] == ["e1c0", "e2c3", "e3c0"]
    assert about["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, SIZE, SIZE, 3]}]
    assert tritons.get_model_metadata("by_hand", "e2c3")["name"] == "by_hand"
    assert tritons.get_model_config("by_hand")["input"][0]["data_type"] == "TYPE_UINT8"
    index = tritons.get_model_repository_index()
    assert {(row["name"], row["state"]) for row in index} == {("by_hand", "READY")}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
def test_tritons_client_infers(tritons, session, images, binary, packing):
    tensor = triton.InferInput("image", images.shape, "UINT8")
    tensor.set_data_from_numpy(images, binary_data=binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probabilities", "label", "exit")]
    found = tritons.infer(
        "by_hand",
        [tensor],
        model_version="e3c0",
        outputs=outputs,
        request_id="abc",
        request_compression_algorithm=packing,
        priority=2,
        timeout=10**6,
    )
    expected = session.predict(images, point="e3c0")
    assert np.allclose(found.as_numpy("probabilities"), expected.probabilities, atol=1e-6)
    labels = [label.decode() if binary else label for label in found.as_numpy("label").tolist()]
    assert labels == [row[0][0] for row in expected.top()]
    assert found.as_numpy("exit").tolist() == [3, 3, 3]
    assert found.get_response()["id"] == "abc"
    assert found.get_response()["model_version"] == "e3c0"


def test_tritons_client_sends_files_and_wishes(tritons, session, photo, images):
    contents = np.array([photo.read_bytes(), png(images[0])], object)
    tensor = triton.InferInput("image", contents.shape, "BYTES")
    tensor.set_data_from_numpy(contents)
    found = tritons.infer("by_hand", [tensor], parameters={"budget": "45%"})
    assert found.get_response()["parameters"]["operating_point"] == "e2c3"
    expected = np.concatenate([session.predict(one, point="e2c3").probabilities for one in (photo, images[0])])
    assert np.allclose(found.as_numpy("probabilities"), expected, atol=1e-6)
    best = triton.InferRequestedOutput("probabilities", class_count=2)
    found = tritons.infer("by_hand", [tensor], outputs=[best], model_version="e2c3").as_numpy("probabilities")
    assert found.shape == (2, 2)
    p, number, name = found[0][0].decode().split(":")
    assert (name, float(p)) == (CLASSES[int(number)], pytest.approx(expected[0].max(), abs=1e-5))


def test_tritons_client_gets_statistics_and_errors(tritons, images):
    tensor = triton.InferInput("image", images.shape, "UINT8")
    tensor.set_data_from_numpy(images)
    before = tritons.get_inference_statistics("by_hand", "e1c0")["model_stats"][0]["inference_count"]
    tritons.infer("by_hand", [tensor], model_version="e1c0")
    stats = tritons.get_inference_statistics("by_hand", "e1c0")["model_stats"][0]
    assert stats["inference_count"] == before + 3
    assert stats["inference_stats"]["success"]["ns"] > 0
    assert tritons.get_inference_statistics()["model_stats"]
    with pytest.raises(InferenceServerException, match="operating point"):
        tritons.infer("by_hand", [tensor], model_version="7")
    with pytest.raises(InferenceServerException, match="unknown parameter"):
        tritons.infer("by_hand", [tensor], parameters={"nice": True})
