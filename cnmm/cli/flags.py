"""Flags made of the fields of `MixtureConfig` and `TrainConfig`: names, types, defaults and help texts have one home.

The defaults of `cnmm train` are those of its recipe, so `--recipe` is read before the flags are made. Torch-free.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import tyro
from tyro.conf import arg

from cnmm.config import VARIANT, MixtureConfig
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import recipe

MODEL = (*VARIANT, "num_classes", "in_chans", "input_size")
DEFAULT_RECIPE = "quick"

_METAVARS = {"stem_stride": "{1,2,4}", "input_size": "HEIGHT WIDTH", "teacher": "FILE.onnx|RUN"}
_NONE = {
    "group": "the whole batch",
    "teacher": "none",
    "workers": "cores - 1 if the images do not fit into memory",
}
"""What None stands for, where it is a default."""

V = TypeVar("V")


class Flags:
    """A group of flags; every generated one is a dataclass with this base."""

    words: ClassVar[frozenset[str]] = frozenset()
    """The flags of the command line: one that repeats its default was given, too."""

    def given(self) -> dict[str, Any]:
        """The values that were given."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        values = {field.name: (getattr(self, field.name), field.default) for field in fields}
        return {name: value for name, (value, default) in values.items() if value != default or name in self.words}


def model_flags(names: Iterable[str] = MODEL) -> type[Flags]:
    """Flags of a model's fields, none of them given: which model it is, is known later."""
    return _flags("ModelFlags", MixtureConfig, dict.fromkeys(names), "the model's own")


def variant_flags() -> type[Flags]:
    """The flags of a model that `cnmm train` has."""
    return model_flags(VARIANT)


def training_flags(name: str = DEFAULT_RECIPE, args: Sequence[str] = ()) -> type[Flags]:
    """Flags of all fields of a recipe, with its values as defaults; `args`: a command line that gives some."""
    values = {field.name: getattr(recipe(name), field.name) for field in dataclasses.fields(TrainConfig)}
    del values["recipe"]
    made = _flags("TrainingFlags", TrainConfig, values, "the recipe's")
    made.words = frozenset(
        word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word.startswith("--")
    )
    return made


def asked_recipe(args: Sequence[str]) -> str:
    """The recipe that a command line names; where it is not well-formed, the parser will say so."""
    found = DEFAULT_RECIPE
    for word, following in itertools.pairwise([*args, ""]):
        if word == "--recipe" and following and not following.startswith("-"):
            found = following
        elif word.startswith("--recipe="):
            found = word.removeprefix("--recipe=")
    return found


def with_flags(verb: type[V], **groups: type[Flags]) -> type[V]:
    """The verb where some of its groups of flags are these."""
    fields = [(name, group, dataclasses.field(default=group())) for name, group in groups.items()]
    namespace = {"__doc__": verb.__doc__, "__module__": verb.__module__}
    return dataclasses.make_dataclass(
        verb.__name__, fields, bases=(verb,), namespace=namespace, frozen=True, kw_only=True
    )


def _flags(name: str, config: type, defaults: Mapping[str, Any], none: str) -> type[Flags]:
    """A dataclass of flags for some fields of a config; `none` is said of a default that is not a value."""
    hints, texts = typing.get_type_hints(config), field_texts(config)
    fields = []
    for field, default in defaults.items():
        kind = hints[field] if default is not None else hints[field] | None
        hint = f"(default: {_NONE.get(field, none) if default is None else default})"
        marks: list[Any] = [arg(help=texts.get(field, ""), help_behavior_hint=hint, metavar=_METAVARS.get(field))]
        if hints[field] is bool:  # a value, for the default may be either
            marks.append(tyro.conf.FlagConversionOff)
        fields.append((field, Annotated[kind, *marks], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(name, fields, bases=(Flags,), frozen=True, kw_only=True)


@functools.cache
def field_texts(config: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each on one line: the strings that follow them in its source."""
    try:
        (tree,) = ast.parse(inspect.getsource(config)).body
    except OSError:  # installed without sources
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
