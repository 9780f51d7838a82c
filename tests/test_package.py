"""The package as a whole: its layers, and the snippets that its documents show."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", ["README.md", "docs/concepts.md"])
def test_the_snippets_of_the_documents_run(document, tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text("utf-8"), re.DOTALL)
    assert snippets
    code = "\n".join(snippets)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_of_the_documents_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", path.read_text("utf-8")):
        link = next(part for part in target if part)
        if "://" not in link:
            assert (path.parent / link).exists(), link
