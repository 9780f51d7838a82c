"""The package as a whole: its layers, and the snippets that its documents show."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re

import pytest
from PIL import Image

import cnmm
from cnmm.cli import main as cli
from cnmm.cli.models import shape_text
from cnmm.cost import short_count
from cnmm.zoo import describe_model, summary
from tests.helpers import ROOT, SMALL_SAMPLE, python
from tests.imports import HEAVY, MAY_IMPORT, TORCH_FREE_PAPER, WITHOUT_TORCH, edges, imports, levels, modules, room


def test_every_module_has_its_room():
    for module in modules():
        assert room(module) in MAY_IMPORT or module in ("__init__", "__main__"), module


@pytest.mark.parametrize("module", sorted(set(modules()) - {"__init__", "__main__"}))
def test_a_room_imports_only_what_it_may(module):
    here = room(module)
    for other in edges()[module]:
        assert room(other) == here or room(other) in MAY_IMPORT[here], f"{module} imports {other}"


def test_there_is_no_cycle():
    assert levels()


@pytest.mark.parametrize("module", sorted(set(modules()) - {"__init__", "__main__"}))
def test_light_modules_do_not_import_torch(module):
    if room(module) in WITHOUT_TORCH or module in TORCH_FREE_PAPER:
        names = {name.split(".")[0] for name in imports(modules()[module], top_level_only=True)}
        assert not names & HEAVY


@pytest.mark.parametrize("module", sorted(modules()))
def test_modules_and_functions_are_short(module):
    text = modules()[module].read_text("utf-8")
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 60, node.name


@pytest.mark.parametrize("module", sorted(modules()))
def test_private_names_stay_in_their_class(module):
    for node in ast.walk(ast.parse(modules()[module].read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            assert owner in ("self", "cls") or owner.split(".")[0] in ("torch", "os") or owner[0] == "_", node.lineno


def test_importing_the_package_does_not_import_torch():
    code = "import sys, cnmm, cnmm.cli.main; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert python(code).stdout == "[]\n"


# Public names


def test_the_table_of_public_names_is_all_there_is():
    assert cnmm.__all__ == sorted(cnmm._HOMES)
    shown = set()  # what type checkers see
    for node in ast.parse(modules()["__init__"].read_text("utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            shown = {(alias.name, part.module) for part in node.body for alias in part.names}
    assert shown == {(name, f"cnmm.{home}") for name, home in cnmm._HOMES.items()}


@pytest.mark.parametrize("name", cnmm.__all__)
def test_a_public_name_comes_from_its_home_and_says_what_it_is(name):
    value = getattr(cnmm, name)
    assert (value.__module__, value.__name__) == (f"cnmm.{cnmm._HOMES[name]}", name)
    assert value.__doc__
    assert name in dir(cnmm)


def test_no_module_is_named_like_a_public_name_of_its_namespace():
    for package in ("", *sorted({name.rpartition(".")[0] for name in modules() if "." in name})):
        path = modules()[package or "__init__"]
        inside = {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == package}
        lines = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
        bound = {alias.asname or alias.name for node in lines for alias in node.names}
        assert not inside & (bound | (set() if package else set(cnmm.__all__))), package or "cnmm"


VERBS = {
    "models": ["list_models", "model_plan", "zoo.describe_model", "zoo.summary"],
    "info": ["model_plan", "run_folder.load_plan", "CostTable.exit", "zoo.summary"],
    "draw": ["model_plan", "named_point", "draw.draw_lattice", "draw.save_picture"],
    "train": ["train"],
    "evaluate": ["Run", "Run.evaluate"],
    "frontier": ["Run", "Run.measure", "Run.plot"],
    "choose": ["Run", "Run.choose", "frontier.find_frontier", "Frontier.choose"],
    "slim": ["Run", "Run.slim"],
    "export": ["Run", "Run.export", "Run.export_ladder"],
    "bench": ["bench"],
    "predict": [
        *("Session", "Session.predict", "runtime.session.predict_once", "Prediction.top"),
        *("runtime.drawing.draw_labels", "runtime.drawing.compare_budgets"),
        "runtime.records.predict_to_file",
    ],
    "report": ["Run", "Run.report"],
    "serve": ["serve.listen.serve", "serve.ray_serve.serve_with_ray"],
    "simulate": ["serve.simulate.simulate"],
    "loadtest": ["serve.loadtest.loadtest"],
}
"""What does the work of each verb, as a name inside cnmm."""
SPELLED = {
    "run": "folder",
    "plot": "path",
    "top": "k",
    "ladder": "points",
    "skip_bad": "skip_bad",
    "engine": "replicas",
}
"""Flags whose parameter has another name."""


def found(dotted):
    """A name inside cnmm: public, or that of a module."""
    for number in range(dotted.count(".") + 1):
        parts = dotted.split(".")
        try:
            value = importlib.import_module(".".join(["cnmm", *parts[:number]]))
            return functools.reduce(getattr, parts[number:], value)
        except (AttributeError, ModuleNotFoundError):
            continue
    raise AssertionError(f"there is no cnmm.{dotted}")


def test_every_verb_can_be_called_from_python():
    assert VERBS.keys() == cli.VERBS.keys()
    assert all(callable(found(name)) for names in VERBS.values() for name in names)


@pytest.mark.parametrize(
    "verb",
    [
        *("evaluate", "frontier", "choose", "slim", "export", "bench", "predict", "report"),
        *("serve", "simulate", "loadtest"),
    ],
)
def test_every_flag_is_a_parameter(verb):
    """What a verb can be told, its functions can be told."""
    parameters = {name for dotted in VERBS[verb] for name in inspect.signature(found(dotted)).parameters}
    for field in dataclasses.fields(cli.VERBS[verb]):
        if field.name not in ("common", "source"):
            assert SPELLED.get(field.name, field.name) in parameters, field.name


def test_a_verb_parses_calls_and_prints():
    """It has no loops over images, no numbers of its own, nothing that a library should do: a few lines."""
    for module in (name for name in modules() if name.startswith("cli.")):
        for node in ast.walk(ast.parse(modules()[module].read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "answer":
                assert not any(isinstance(part, ast.For | ast.While) for part in ast.walk(node)), module
                assert len(node.body) <= 12, module


def zoo_table():
    """The zoo as README shows it; the numbers are those of `cnmm models`."""
    lines = ["| model | maps | edges | networks | macs | params | input | |", "|---|---|---|---|---|---|---|---|"]
    for name in cnmm.list_models():
        row = summary(cnmm.model_plan(name))
        cells = [f"`{name}`", row["maps"], row["edges"], f"{row['networks']:,}"]
        cells += [short_count(row["macs"]), short_count(row["params"]), shape_text(row), describe_model(name)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def test_readme_shows_the_zoo_as_it_is():
    assert zoo_table() in (ROOT / "README.md").read_text("utf-8")


RUN_AS_ONE = ("README.md", "docs/quickstart.md", "docs/concepts.md", "docs/paper-map.md", "CONTRIBUTING.md")
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("models/*/README.md"))),
)


@pytest.mark.parametrize("document", RUN_AS_ONE)
def test_the_snippets_of_the_documents_run(document, tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text("utf-8"), re.DOTALL)
    assert snippets
    code = "\n".join(snippets)
    Image.new("L", (60, 40), 128).save(tmp_path / "photo.jpg")
    done = python(SMALL_SAMPLE + code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def links(document):
    text = (ROOT / document).read_text("utf-8")
    inline = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", text)
    named = re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE)
    return [next(part for part in target if part) for target in inline], dict(named)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_the_documents_lead_somewhere(document):
    inline, named = links(document)
    for link in (*inline, *named.values()):
        if "://" not in link:
            assert ((ROOT / document).parent / link).exists(), link


def test_the_paper_map_names_what_is_there():
    text = (ROOT / "docs" / "paper-map.md").read_text("utf-8")
    _, named = links("docs/paper-map.md")
    for words, reference in re.findall(r"\[`([^`]+)`\]\[([\w-]+)\]", text):
        path = ROOT / "docs" / named[reference]
        name = words.split(".")[-1]
        there = re.search(rf"^ *(def|class) {name}\b|^{name}\b.*=", path.read_text("utf-8"), re.MULTILINE)
        assert there or name == path.stem, f"{words} is not in {named[reference]}"


def test_contributing_names_what_is_there():
    """Lines such as "- `cnmm/zoo.py`: ... `register_model`" of the section "How to add"."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## How to add")[1].split("\n## ")[0]
    lines = re.findall(r"^- `([\w/]+\.\w+)`: (.*)$", section, re.MULTILINE)
    assert len(lines) >= 15
    for file, words in lines:
        text = (ROOT / file).read_text("utf-8")
        for name in re.findall(r"`([A-Za-z]\w+)`", words):
            assert re.search(rf"\b{name}\b", text), f"{file} has no {name}"
