"""The OpenAPI document, and a fuzzer that takes it at its word."""

import warnings

import httpx
import pytest

from tests.serve.servers import served


@pytest.fixture(scope="module")
def server(timed_ladder):
    with served(timed_ladder, "--cores", 1, "--runtime", "onnx", "--target-ms", 5000) as server:
        yield server


def test_every_address_is_in_the_document(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    with_names = {"model": "by_hand", "version": "e1c0"}
    for path, methods in document["paths"].items():
        if "get" in methods and path != "/events":
            response = httpx.get(server.url + path.format(**with_names))
            assert response.status_code == 200, path
            kinds = methods["get"]["responses"]["200"]["content"]
            assert response.headers["content-type"].partition(";")[0] in {kind.partition(";")[0] for kind in kinds}


@pytest.mark.slow
def test_a_fuzzer_finds_no_5xx(server):
    """schemathesis: made-up requests of all kinds, right and wrong, by the document."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st

        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen = set()
    for made in schema.get_all_operations():
        operation = made.ok()
        if operation.path == "/events":  # it never ends
            continue

        @settings(
            max_examples=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)))
        def ask(case):
            response = case.call(timeout=30)
            seen.add(response.status_code)
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            if response.status_code >= 400:
                assert response.json()["error"]

        ask()
    assert {200, 400} <= seen
