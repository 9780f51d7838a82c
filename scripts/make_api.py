"""Writes docs/api.md: every public name with its signature, its docstring and its example of docs/examples.py.

python scripts/make_api.py            # from the root of the repository, after a docstring has changed
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cnmm  # noqa: E402

ADDRESS = re.compile(r"<function \S+ at 0x[0-9a-f]+>|<factory>")
"""Defaults that have no short name, and another one in every process."""
INTRO = """# API

Every public name of `cnmm`. Written by `python scripts/make_api.py` from the docstrings and from `docs/examples.py`; a
test runs every example and checks that this page is up to date.

{contents}

Examples begin with these lines, where `folder` is an empty folder:

```python
{imports}

{given}
```
"""
RUN = """`run` is a small trained run:

```python
{run}
```
"""


def load_examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cnmm_examples", ROOT / "docs" / "examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page() -> str:
    """All of docs/api.md."""
    examples = load_examples()
    names = ordered(examples)
    contents = " · ".join(f"[`{name}`](#{name.lower()})" for name in names)
    parts = [INTRO.format(contents=contents, imports=imports(examples), given=body(examples.given))]
    if "train" in names:
        parts.append(RUN.format(run=body(examples.given_run)))
    parts += [entry(name, getattr(examples, name)) for name in names]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def imports(examples: ModuleType) -> str:
    tree = ast.parse(inspect.getsource(examples))
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import))


def ordered(examples: ModuleType) -> list[str]:
    """The public names, in the order of their examples. Examples of names that are not public are left out."""
    written = [name for name, value in vars(examples).items() if inspect.isfunction(value)]
    missing = sorted(set(cnmm.__all__) - set(written))
    if missing:
        raise SystemExit(f"docs/examples.py has no example of {', '.join(missing)}")
    return [name for name in written if name in cnmm.__all__]


def entry(name: str, example: Any) -> str:
    thing = getattr(cnmm, name)
    parts = [f"## {name}", code(signature(f"cnmm.{name}", thing)), own_doc(thing)]
    if inspect.isclass(thing):
        parts += [fields(thing), members(thing)]
    parts += ["Example:", code(body(example))]
    return "\n\n".join(part for part in parts if part)


class Words(str):
    """An annotation as it is written, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, thing: Any) -> str:
    """The call as one would write it; long ones have one parameter per line."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"{name}(message)"
    found = inspect.signature(thing)
    returned = inspect.Signature.empty if inspect.isclass(thing) else Words(found.return_annotation)
    found = found.replace(return_annotation=returned)
    kept = [
        parameter.replace(annotation=Words(parameter.annotation))
        for parameter in found.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    text = ADDRESS.sub("...", str(found.replace(parameters=kept)))
    if len(name) + len(text) <= 110:
        return name + text
    words = [ADDRESS.sub("...", str(parameter)) for parameter in kept]
    for number, parameter in enumerate(kept):
        if parameter.kind is parameter.KEYWORD_ONLY:
            words.insert(number, "*")
            break
    returns = "" if returned is found.empty else f" -> {returned!r}"
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns}"


def fields(thing: type) -> str:
    """Fields of a dataclass; the string below a field says what it is."""
    if not dataclasses.is_dataclass(thing):
        return ""
    told = field_docs(thing)
    lines = [
        f"- `{field.name}: {field.type}`" + (f": {told[field.name]}" if field.name in told else "")
        for field in dataclasses.fields(thing)
        if not field.name.startswith("_")
    ]
    return "\n".join(["Fields:", "", *lines])


def field_docs(thing: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found, last = {}, None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last], last = " ".join(str(node.value.value).split()), None
        else:
            last = None
    return found


def members(thing: type) -> str:
    """Public methods and properties that the class itself, or another class of the package, defines."""
    found: dict[str, Any] = {}
    for owner in reversed(thing.__mro__):
        if owner.__module__.startswith("cnmm"):
            found |= {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    known = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    lines = []
    for name, value in found.items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(plain):
            call = " ".join(signature(name, plain).split()).replace("( ", "(").replace(", )", ")")
            lines.append(f"- `{call}`{told(plain)}")
        elif (isinstance(value, property) or hasattr(value, "attrname")) and name not in known:
            lines.append(f"- `{name}`{told(value)}")
    return "\n".join(["Members:", "", *lines]) if lines else ""


def own_doc(thing: Any) -> str:
    """Its docstring, and never one that it inherits."""
    return inspect.cleandoc(thing.__doc__ or "")


def told(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    text = own_doc(thing)
    return ": " + " ".join(text.split("\n\n")[0].split()) if text else ""


def body(function: Any) -> str:
    """What a function does, without its first line and a last `return` of what it made."""
    source = inspect.getsource(function)
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    last = node.body[-1]
    lines = source.splitlines()[node.body[0].lineno - 1 - decorators(node.body[0]) :]
    if isinstance(last, ast.Return):
        lines = source.splitlines()[node.body[0].lineno - 1 : last.lineno - 1]
    return textwrap.dedent("\n".join(lines)).strip()


def decorators(node: ast.stmt) -> int:
    """Lines of decorators above a definition: its own line number does not count them."""
    listed = getattr(node, "decorator_list", [])
    return node.lineno - listed[0].lineno if listed else 0


def code(text: str) -> str:
    return f"```python\n{text}\n```"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page(), "utf-8")
    print("docs/api.md")
