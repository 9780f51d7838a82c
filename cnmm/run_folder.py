"""Run folders: `config.json`, `model.safetensors` and `log.jsonl`, and how they are read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm._errors import UserError
from cnmm._files import FORMAT_VERSION, check_version, read_tensors, to_bytes, write_atomically, write_json
from cnmm.config import MixtureConfig, Preprocessing
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


def is_run(path: str | Path) -> bool:
    """Does this look like a run folder, or is it the name of a trained model?"""
    return (resolve(path) / CONFIG_FILE).is_file()


def save(model: Mixture, folder: str | Path, **about: Any) -> None:
    """Writes a run folder that `load` reads; `about` goes into config.json beside the model."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    write_json(Path(folder) / CONFIG_FILE, {"model": model.config.to_dict(), **about})


def save_weights(model: Mixture, folder: str | Path) -> None:
    """Replaces the weights of a run folder in one step."""
    write_atomically(Path(folder) / WEIGHTS_FILE, to_bytes(model.state_dict()))


def start_run(folder: str | Path, model: Mixture, *, resume: bool, **about: Any) -> None:
    """Makes a new run folder, or checks that an old one holds the same run."""
    path = Path(folder) / CONFIG_FILE
    config = json.loads(json.dumps({"format_version": FORMAT_VERSION, "model": model.config.to_dict(), **about}))
    if not path.exists():
        if resume:
            raise UserError(f"{folder}: nothing to resume ({CONFIG_FILE} is missing); remove --resume to start")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(path, config)
        return
    if not resume:
        raise UserError(f"{folder} already holds a run; go on with --resume, or choose another folder with --out")
    found = read_config(folder)
    for part in config:
        if found.get(part) != config[part]:
            field = _first_difference(found.get(part), config[part])
            raise UserError(f"{folder} holds another run: {part}{field}; use the same options, or another --out")


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f".{key} is {old.get(key)!r} there, {new.get(key)!r} now"
    return f" is {old!r} there, {new!r} now"


def append_log(folder: Path, line: Mapping[str, Any]) -> None:
    """One more line of log.jsonl."""
    with (folder / LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_log(folder: Path, step: int) -> None:
    """Drops the lines of log.jsonl that are newer than the checkpoint that training goes on from."""
    path = folder / LOG_FILE
    if path.exists():
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_atomically(path, "".join(kept).encode())


def load(folder: str | Path) -> Mixture:
    """The mixture of a run folder, in eval mode; or that of a trained model by name, such as `cnmm_b6s3.cifar10`."""
    folder = resolve(folder)
    config = load_config(folder)
    model: Mixture = require_torch().Mixture(config)
    state = _read_weights(folder, "pt")
    expected = model.state_dict()
    for name in sorted(expected.keys() | state.keys()):
        if name not in state or name not in expected or state[name].shape != expected[name].shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            wanted = tuple(expected[name].shape) if name in expected else "nothing"
            raise UserError(
                f"{Path(folder) / WEIGHTS_FILE}: {name!r} is {found} but {CONFIG_FILE} needs {wanted}; "
                "the two files are not of the same model"
            )
    model.load_state_dict(state)
    model.preprocessing = load_preprocessing(folder)
    model.orders = load_orders(folder, config)
    return model.eval()


def load_preprocessing(folder: str | Path) -> Preprocessing | None:
    """Classes, mean and standard deviation of the images that a run was trained on; None if it does not say."""
    about = read_config(folder)
    data = about.get("data")
    if data is None:
        return None
    try:
        return Preprocessing(
            classes=tuple(map(str, data["classes"])),
            mean=tuple(map(float, data["mean"])),
            std=tuple(map(float, data["std"])),
            size=load_config(folder).input_size,
            palette=tuple((int(red), int(green), int(blue)) for red, green, blue in data.get("palette", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{Path(folder) / CONFIG_FILE}: data: {error!r}; classes, mean and std must be there") from None


def load_plan(folder: str | Path) -> Plan:
    """Config and gates of a run folder, without its other weights and without torch."""
    folder = resolve(folder)
    config = load_config(folder)
    if config.mixing == "sum":
        return Plan(config)
    logits = _read_weights(folder, "np", only="gate_logits").get("gate_logits")
    needed = len(build_lattice(config).edges)
    if logits is None or logits.shape != (needed,):
        raise UserError(f"{Path(folder) / WEIGHTS_FILE}: must have 'gate_logits' with {needed} values")
    return Plan(config, tuple(float(value) for value in logits), load_orders(folder, config))


def load_config(folder: str | Path) -> MixtureConfig:
    """The model's config in a run folder."""
    data = read_config(folder)
    if "slim" in data:
        raise UserError(f"{folder}: a slim network, not a run folder; read it with cnmm.load_slim")
    try:
        return MixtureConfig.from_dict(data["model"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{Path(folder) / CONFIG_FILE}: {error}") from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """All of a run folder's config.json: the model and, if it was trained, how and on what."""
    path = resolve(folder) / CONFIG_FILE
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a run folder ({CONFIG_FILE} is missing){_names(folder)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise UserError(f"{path}: must be an object with the field 'model'")
    try:
        check_version(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
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
