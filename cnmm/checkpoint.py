"""Run folders: `config.json`, `model.safetensors`, `log.jsonl` and `checkpoints/`. Nothing here unpickles.

Files and checkpoints are written aside, synced and renamed: what is there is complete. One checkpoint is one folder,
`checkpoints/step-00001234`; the newest that can be read wins, and two are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cnmm.config import FORMAT_VERSION, MixtureConfig
from cnmm.lattice import build_lattice
from cnmm.zoo import INSTALL_TRAIN, Plan, require_torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cnmm.mixture import Mixture

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
LOG_FILE = "log.jsonl"
CHECKPOINTS = "checkpoints"


def is_run(path: str | Path) -> bool:
    """Does this look like a run folder?"""
    return (Path(path) / CONFIG_FILE).is_file()


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
            raise ValueError(f"{folder}: nothing to resume, {CONFIG_FILE} is missing; leave --resume out to start")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(path, config)
        return
    if not resume:
        raise ValueError(f"{folder} already holds a run; go on with --resume, or choose another folder with --out")
    found = read_config(folder)
    for part in config:
        if found.get(part) != config[part]:
            field = _first_difference(found.get(part), config[part])
            raise ValueError(f"{folder} holds another run: {part}{field}; use the same options, or another --out")


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f".{key} is {old.get(key)!r} there, {new.get(key)!r} now"
    return f" is {old!r} there, {new!r} now"


def save_state(
    folder: Path, model: Mixture, optimizer: torch.optim.Optimizer, average: Mapping[str, Tensor], step: int
) -> None:
    """Writes a checkpoint after `step` steps and removes all but the two newest."""
    parent = folder / CHECKPOINTS
    parent.mkdir(exist_ok=True)
    final = parent / f"step-{step:08d}"
    if final.exists():
        return
    aside = Path(tempfile.mkdtemp(dir=parent, prefix=".aside-"))
    try:
        write_atomically(aside / STATE_FILE, to_bytes(_state(model, optimizer, average)))
        write_json(aside / "state.json", {"step": step})
        os.chmod(aside, 0o755)
        os.replace(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync_folder(parent)
    for old in [*sorted(parent.glob("step-*"))[:-2], *parent.glob(".aside-*")]:
        shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, model: Mixture, optimizer: torch.optim.Optimizer, average: Mapping[str, Tensor]) -> int:
    """Puts the newest readable checkpoint back and returns its number of steps; 0 if there is none yet."""
    import torch

    problems = []
    for path in sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            step = int(json.loads((path / "state.json").read_text("utf-8"))["step"])
            state = read_tensors(path / STATE_FILE, "pt")
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{path}: {error}")
            continue
        targets = _state(model, optimizer, average)
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in targets.items()}:
            raise ValueError(f"{path}: its tensors are not those of this model; choose another folder with --out")
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(state[name])
        return step
    if problems:
        raise ValueError(f"no checkpoint can be read: {'; '.join(problems)}")
    return 0


def _state(model: Mixture, optimizer: torch.optim.Optimizer, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors that a training goes on from, by name; momentum that is not there yet is zero."""
    import torch

    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"average.{name}": tensor for name, tensor in average.items()}
    for name, parameter in model.named_parameters():
        slot = optimizer.state[parameter]
        if slot.get("momentum_buffer") is None:
            slot["momentum_buffer"] = torch.zeros_like(parameter)
        state[f"momentum.{name}"] = slot["momentum_buffer"]
    return state


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
    data = read_config(folder)
    if "slim" in data:
        raise ValueError(f"{folder}: a slim network, no run folder; cnmm.load_slim reads it")
    try:
        return MixtureConfig.from_dict(data["model"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(folder) / CONFIG_FILE}: {error}") from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """All of a run folder's config.json: the model and, if it was trained, how and on what."""
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
    return data


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
    _sync_folder(path.parent)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """A JSON file with its format version."""
    write_atomically(path, (json.dumps({"format_version": FORMAT_VERSION, **data}, indent=2) + "\n").encode())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save as to_bytes

    return to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _read_weights(folder: str | Path, framework: str, only: str | None = None) -> dict[str, Any]:
    path = Path(folder) / WEIGHTS_FILE
    if not path.exists() and (Path(folder) / CHECKPOINTS).is_dir():
        raise ValueError(f"{folder}: its training has not ended; go on with: cnmm train ... --out {folder} --resume")
    return read_tensors(path, framework, only)


def read_tensors(path: Path, framework: str, only: str | None = None) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading it needs safetensors; install it with: {INSTALL_TRAIN}") from None
    try:
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys() if only in (None, name)}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no run folder, {path.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from None
