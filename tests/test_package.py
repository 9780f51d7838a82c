"""The package as a whole: its layers, and the snippets that its documents show."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cnmm
from cnmm.cli import shape_text, summary
from cnmm.cost import short_count
from cnmm.zoo import describe_model

ROOT = Path(__file__).parent.parent
LAYERS = [
    "config",
    "lattice",
    "chain",
    "cost",
    "prune",
    "distributed",
    "blocks",
    "mixture",
    "zoo",
    "recipes",
    "checkpoint",
    "graph",
    "cascade",
    "budget",
    "frontier",
    "latency",
    "ladder",
    "blocked",
    "runtime",
    "early_exit",
    "session",
    "evaluate",
    "train",
    "calibrate",
    "measure",
    "slim",
    "onnx_graph",
    "export",
    "runs",
    "draw",
    "plot",
    "report",
    "terminal",
    "verbs",
    "verbs_budget",
    "verbs_export",
    "verbs_serve",
    "cli",
    "__main__",
]
"""From the bottom to the top. A module imports only from modules below it; `data` stands apart."""
WITH_NUMPY = {"runtime", "early_exit", "session", "onnx_graph", "export"}
WITH_TORCH = {"distributed", "blocks", "mixture", "evaluate", "train", "calibrate", "measure", "slim", "runs", "report"}
WITHOUT_TORCH = set(LAYERS) - WITH_TORCH


def imports(path, *, top_level_only=False):
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "cnmm")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_module_has_its_layer():
    modules = {path.stem for path in (ROOT / "cnmm").glob("*.py")} - {"__init__"}
    assert modules == set(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_only_lead_downwards(module):
    for name in imports(ROOT / "cnmm" / f"{module}.py"):
        if name.startswith("cnmm.") and name.split(".")[1] in LAYERS:
            other = name.split(".")[1]
            # Annotations and create_model name what zoo and checkpoint build: looked up late, never at import.
            if other == "mixture" and module in ("zoo", "checkpoint"):
                continue
            # A session makes the ladder of a run folder itself, where torch is installed.
            if (module, other) == ("session", "runs"):
                continue
            assert LAYERS.index(other) < LAYERS.index(module), f"{module} imports {other}"


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_light_modules_do_not_import_torch(module):
    names = set(imports(ROOT / "cnmm" / f"{module}.py", top_level_only=True))
    heavy = {"torch", "matplotlib", "safetensors", "onnxruntime", "openvino", "numpy"}
    heavy -= {"numpy"} if module in WITH_NUMPY else set()
    assert not {name.split(".")[0] for name in names} & heavy


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
