"""Run folders: `config.json` and `model.safetensors`. Nothing here unpickles, and a folder is never half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm.config import FORMAT_VERSION, MixtureConfig
from cnmm.lattice import build_lattice
from cnmm.zoo import INSTALL_TRAIN, Plan, require_torch

if TYPE_CHECKING:
    from cnmm.mixture import Mixture

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def is_run(path: str | Path) -> bool:
    """Does this look like a run folder?"""
    return (Path(path) / CONFIG_FILE).is_file()


def save(model: Mixture, folder: str | Path) -> None:
    """Writes a run folder that `load` reads; each file is replaced in one step."""
    from safetensors.torch import save as to_bytes

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / WEIGHTS_FILE, to_bytes(tensors))
    config = {"format_version": FORMAT_VERSION, "model": model.config.to_dict()}
    write_atomically(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())


def load(folder: str | Path) -> Mixture:
    """The mixture of a run folder, in eval mode."""
    config = load_config(folder)
    model: Mixture = require_torch().Mixture(config)
    state = _read_weights(folder, "pt")
    expected = model.state_dict()
    for name in sorted(expected.keys() | state.keys()):
        if name not in state or name not in expected or state[name].shape != expected[name].shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            wanted = tuple(expected[name].shape) if name in expected else "nothing"
            raise ValueError(
                f"{Path(folder) / WEIGHTS_FILE}: {name!r} is {found} but {CONFIG_FILE} needs {wanted}; "
                "the two files are not of the same model"
            )
    model.load_state_dict(state)
    return model.eval()


def load_plan(folder: str | Path) -> Plan:
    """Config and gates of a run folder, without its other weights and without torch."""
    config = load_config(folder)
    if config.mixing == "sum":
        return Plan(config)
    logits = _read_weights(folder, "np", only="gate_logits").get("gate_logits")
    needed = len(build_lattice(config).edges)
    if logits is None or logits.shape != (needed,):
        raise ValueError(f"{Path(folder) / WEIGHTS_FILE}: 'gate_logits' with {needed} values is needed")
    return Plan(config, tuple(float(value) for value in logits))


def load_config(folder: str | Path) -> MixtureConfig:
    """The model's config in a run folder."""
    path = Path(folder) / CONFIG_FILE
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no run folder, {CONFIG_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise ValueError(f"{path}: an object with the field 'model' is needed")
    if data.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version={data.get('format_version')!r}, this version of cnmm reads {FORMAT_VERSION}; "
            "upgrade with: pip install -U cnmm"
        )
    try:
        return MixtureConfig.from_dict(data["model"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step: written aside, synced, renamed, and the folder synced."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_weights(folder: str | Path, framework: str, only: str | None = None) -> dict[str, Any]:
    path = Path(folder) / WEIGHTS_FILE
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading it needs safetensors; install it with: {INSTALL_TRAIN}") from None
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys() if only in (None, name)}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{folder}: no run folder, {WEIGHTS_FILE} is missing") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from None
