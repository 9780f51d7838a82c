"""The package as a whole: its layers, and the snippets that its documents show."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import cnmm
from cnmm.cli.models import shape_text
from cnmm.cost import short_count
from cnmm.zoo import describe_model, summary
from tests.imports import HEAVY, MAY_IMPORT, TORCH_FREE_PAPER, WITHOUT_TORCH, edges, imports, levels, modules, room

ROOT = Path(__file__).parent.parent


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
    code = "import sys, cnmm, cnmm.cli; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
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
