"""docs/api.md is what the docstrings say now, and every example in it runs."""

import importlib.util
import inspect

import pytest

import cnmm
from tests.helpers import ROOT, small_sample


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api = load(ROOT / "scripts" / "make_api.py")
examples = make_api.load_examples()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return examples.given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with small_sample():
        return examples.given_run(tmp_path_factory.mktemp("given"))


def test_the_page_is_up_to_date():
    stored = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert stored == make_api.page(), "run: python scripts/make_api.py"


def test_every_public_name_says_what_it_is():
    for name in cnmm.__all__:
        assert inspect.getdoc(getattr(cnmm, name)), name


@pytest.mark.parametrize("name", cnmm.__all__)
def test_the_example_runs(name, request, tmp_path, monkeypatch):
    monkeypatch.setattr(cnmm.zoo, "_REGISTRY", dict(cnmm.zoo._REGISTRY))  # an example registers a model
    example = getattr(examples, name)
    needed = {}
    for parameter in inspect.signature(example).parameters:
        if parameter == "folder":
            needed[parameter] = tmp_path
        elif parameter == "run":
            needed[parameter] = request.getfixturevalue("run")
        else:
            needed[parameter] = request.getfixturevalue("given")[parameter]
    with small_sample():
        example(**needed)
