"""Run folders: `config.json`, `model.safetensors` and `log.jsonl`, and how they are read and written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import (
    FORMAT_VERSION,
    inside,
    named,
    parse_json,
    read_json,
    read_regular,
    read_tensors,
    to_bytes,
    write_atomically,
    write_json,
)
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.cost import CostTable
from cnmm.lattice import build_lattice
from cnmm.orders import load_orders
from cnmm.plan import Plan, require_torch
from cnmm.pretrained import list_pretrained, resolve

if TYPE_CHECKING:
    from cnmm.mixture import Mixture

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
LOG_FILE = "log.jsonl"
CHECKPOINTS = "checkpoints"
_MEASURED = ("frontier.*", "statistics*.safetensors", "orders.json", "latency.json", "report.html")
_WRITTEN = (
    "checkpoints",
    "tensorboard",
    "log.jsonl",
    "held_out.json",
    "teacher.safetensors",
    WEIGHTS_FILE,
    CONFIG_FILE,
)
"""What a run folder may hold: of a frontier, and of a training; config.json, by which it is known, goes last."""
_MOST_LOG = 2**30
_NOT_THE_SAME = "the two files are not of the same model"

_SECTIONS: dict[str, _fields.Check] = {
    "model": _fields.OBJECT,
    "train": _fields.OBJECT,
    "data": _fields.OBJECT,
    "slim": _fields.OBJECT,
    "init": _fields.PATH,
    "epochs_before": _fields.list_of(_fields.COUNT),
}
"""Of config.json: the model, and what else is there; more may be beside them."""
_DATA: dict[str, _fields.Check] = {
    "classes": _fields.list_of(_fields.TEXT, least=1),
    "mean": _fields.list_of(_fields.NUMBER, least=1),
    "std": _fields.list_of(_fields.NUMBER, least=1),
    "palette": _fields.list_of(_fields.COLOUR),
}
_NAMED: dict[str, _fields.Check] = {"name": _fields.or_null(_fields.TEXT), "spec": _fields.or_null(_fields.PATH)}


def is_run(path: str | Path) -> bool:
    """Does this look like a run folder, or is it the name of a trained model?"""
    return (resolve(path) / CONFIG_FILE).is_file()


def is_slim(path: str | Path) -> bool:
    """Does this folder hold a slim network?"""
    return is_run(path) and "slim" in read_config(path)


def save(model: Mixture, folder: str | Path, **about: Any) -> None:
    """Writes a run folder that `load` reads; `about` goes into config.json beside the model."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    write_json(Path(folder) / CONFIG_FILE, {"model": model.config.to_dict(), **about})


def save_weights(model: Mixture, folder: str | Path) -> None:
    """Replaces the weights of a run folder in one step."""
    write_atomically(Path(folder) / WEIGHTS_FILE, to_bytes(model.state_dict()))


def has_steps(folder: str | Path) -> bool:
    """Does a run folder hold anything that was trained? If not, nothing is lost by starting anew."""
    folder = Path(folder)
    return (folder / WEIGHTS_FILE).exists() or any((folder / CHECKPOINTS).glob("step-*"))


def _clear(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def start_run(
    folder: str | Path,
    model: Mixture,
    *,
    resume: bool = False,
    overwrite: bool = False,
    defaults: Mapping[str, Any] | None = None,
    **about: Any,
) -> None:
    """Makes a new run folder, or checks that an old one holds the same run. `about` is what config.json says.

    A run may go on for more epochs than it was begun with: then what was measured of it is removed. `defaults`: of
    options of the training that a run from before them does not name.
    """
    folder = Path(folder)
    config = json.loads(json.dumps({"format_version": FORMAT_VERSION, "model": model.config.to_dict(), **about}))
    if has_steps(folder) and not overwrite:
        if not resume:
            raise UserError(
                f"{folder} already holds a run; go on with --resume, replace it with --overwrite, "
                "or choose another folder with --out"
            )
        _go_on(folder, config, defaults or {})
        return
    if (folder / CONFIG_FILE).exists() or has_steps(folder):
        if "slim" in read_config(folder):  # or it is nothing of ours
            raise UserError(f"{folder} holds a slim network, not a run; choose another folder with --out")
        _clear(folder, *_MEASURED, *(["README.md"] if overwrite else []), *_WRITTEN)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_FILE, config)


def _go_on(folder: Path, config: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Checks that a run folder holds this run; with more epochs than before, it says so from now on."""
    found = read_config(folder)
    for name in config.get("train", {}).keys() - found.get("train", {}).keys() & defaults.keys():
        found.get("train", {})[name] = defaults[name]
    before, now = (each.get("train", {}).get("epochs") for each in (found, config))
    longer = isinstance(before, int) and isinstance(now, int) and now > before
    if longer:
        found["train"]["epochs"] = now
    for part in config:
        if found.get(part) != config[part]:
            field = _first_difference(found.get(part), config[part])
            raise UserError(f"{folder} holds another run: {part}{field}; use the same options, or another --out")
    if longer:
        if not any((folder / CHECKPOINTS).glob("step-*")):
            raise UserError(
                f"{folder}: it has no checkpoint to go on from; start another run from its weights: --init {folder}"
            )
        _clear(folder, *_MEASURED)
        write_json(folder / CONFIG_FILE, {**found, "epochs_before": [*found.get("epochs_before", []), before]})


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f".{key} is {old.get(key)!r} there, {new.get(key)!r} now"
    return f" is {old!r} there, {new!r} now"


def append_log(folder: Path, line: Mapping[str, Any]) -> None:
    """One more line of log.jsonl."""
    path = folder / LOG_FILE
    with named(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_log(folder: Path, step: int) -> None:
    """Drops the lines of log.jsonl that are newer than the checkpoint that training goes on from."""
    if (folder / LOG_FILE).exists():
        kept = [text + b"\n" for text, line in _log_lines(folder) if line["step"] <= step]
        write_atomically(folder / LOG_FILE, b"".join(kept))


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl, each an object with the number of steps; none without a log."""
    return [line for _, line in _log_lines(Path(folder))]


def _log_lines(folder: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line as it stands there and what it says; a last line that was not finished does not count."""
    path = folder / LOG_FILE
    try:
        with inside(path):
            lines = read_regular(path, _MOST_LOG).split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for number, text in enumerate(lines, start=1):
        with inside(f"{path}, line {number}", fix="remove this line"):
            line = parse_json(text, finite=False)
            _fields.checked(line, "line", _fields.OBJECT)
            _fields.get(line, "step", _fields.COUNT)
        yield text, line


def load(folder: str | Path) -> Mixture:
    """The mixture of a run folder, in eval mode; or that of a trained model by name, such as `cnmm_b6s3.cifar10`."""
    folder = resolve(folder)
    config, path = load_config(folder), Path(folder) / WEIGHTS_FILE
    state = _read_weights(folder, "pt")
    with inside(path):
        _check_weights(state, config)
        model: Mixture = require_torch().Mixture(config)
        expected = model.state_dict()
        for name in sorted(expected.keys() | state.keys()):
            if name not in state or name not in expected or state[name].shape != expected[name].shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                wanted = tuple(expected[name].shape) if name in expected else "nothing"
                raise UserError(f"{name!r} is {found} but {CONFIG_FILE} needs {wanted}; {_NOT_THE_SAME}")
    model.load_state_dict(state)
    model.preprocessing = load_preprocessing(folder)
    model.orders = load_orders(folder, config)
    return model.eval()


def _check_weights(state: Mapping[str, Any], config: MixtureConfig) -> None:
    """Before anything of their size is made: are there enough of them, and are they numbers?"""
    needed, found = CostTable.of(config).exit().params, sum(tensor.numel() for tensor in state.values())
    if found < needed:
        raise UserError(f"{found:,} values, but {CONFIG_FILE} needs {needed:,} and more; {_NOT_THE_SAME}")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{name!r} has values that are not finite; train again")


def load_preprocessing(folder: str | Path) -> Preprocessing | None:
    """Classes, mean and standard deviation of the images that a run was trained on; None if it does not say."""
    path, data, config = Path(folder) / CONFIG_FILE, read_config(folder).get("data"), load_config(folder)
    if data is None:
        return None
    with inside(path):
        listed = _fields.get_all({"palette": (), **data}, _DATA, "data.")
        about = Preprocessing(**listed, size=config.input_size)
        with inside("data"):
            about.check_fits(config)
    return about


def load_plan(folder: str | Path) -> Plan:
    """Config and gates of a run folder, without its other weights and without torch."""
    folder = resolve(folder)
    config = load_config(folder)
    if config.mixing == "sum":
        return Plan(config)
    logits = _read_weights(folder, "np", only="gate_logits").get("gate_logits")
    needed, logits = len(build_lattice(config).edges), _fields.plain(logits)
    if not _fields.list_of(_fields.NUMBER, needed)[0](logits):
        raise UserError(f"{Path(folder) / WEIGHTS_FILE}: must have 'gate_logits' with {needed} finite values")
    return Plan(config, tuple(map(float, logits)), load_orders(folder, config))


def load_config(folder: str | Path) -> MixtureConfig:
    """The model's config in a run folder."""
    data = read_config(folder)
    if "slim" in data:
        raise UserError(f"{folder}: a slim network, not a run folder; read it with cnmm.load_slim")
    with inside(Path(folder) / CONFIG_FILE):
        return MixtureConfig.from_dict(data["model"], "model.")


def read_config(folder: str | Path) -> dict[str, Any]:
    """All of a run folder's config.json: the model and, if it was trained, how and on what."""
    path = resolve(folder) / CONFIG_FILE
    try:
        data = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: not a run folder ({CONFIG_FILE} is missing){_names(folder)}") from None
    with inside(path):
        _fields.get_all(data, {name: _SECTIONS[name] for name in _SECTIONS if name in data or name == "model"})
        _fields.get_all(data.get("data", {}), _NAMED, "data.")
    return data


def _names(folder: str | Path) -> str:
    """What to say where a trained model's name may have been meant."""
    if len(Path(folder).parts) > 1:
        return ""
    return f", nor one of the trained models: {', '.join(list_pretrained()) or 'none is at hand'}"


def _read_weights(folder: str | Path, framework: str, only: str | None = None) -> dict[str, Any]:
    path = Path(folder) / WEIGHTS_FILE
    if not path.exists() and (Path(folder) / CHECKPOINTS).is_dir():
        raise UserError(f"{folder}: its training has not ended; go on with: cnmm train ... --out {folder} --resume")
    return read_tensors(path, framework, only)
