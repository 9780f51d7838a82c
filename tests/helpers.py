"""What tests of several rooms share: calling, complaining, other processes, and small real images."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import cnmm
from cnmm.cli import main as cli

ROOT = Path(__file__).resolve().parents[1]


def refused(function, *args, **options):
    """The one line of a UserError."""
    with pytest.raises(cnmm.UserError, match=r"^[^\n]+$") as caught:
        function(*args, **options)
    return str(caught.value)


def ask(capsys, *args):
    """The JSON object that a verb prints; its words, if any, go to stderr."""
    status = cli.main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def complaint(capsys, *args):
    """The one line that a verb complains with."""
    assert cli.main(list(map(str, args))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cnmm: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def in_new_process(*command, **options):
    """Runs a command to its end, with this clone's package; says nothing of its status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    settings = {"capture_output": True, "text": True, "timeout": 240, "check": False, **options}
    return subprocess.run([str(part) for part in command], env=environment, **settings)


def python(code, *args, missing=(), **options):
    """Runs code in a new interpreter where packages are `missing`, as if they were not installed."""
    block = f"""
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {tuple(missing)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
    return in_new_process(sys.executable, "-c", block + code if missing else code, *args, **options)


SMALL_SAMPLE = """
from cnmm.data import registry
_whole = registry.fashion_sample
registry.fashion_sample = lambda split: tuple(part[::6] for part in _whole(split))
"""
"""For code that trains on `fashion`: a sixth of the embedded sample."""


@contextlib.contextmanager
def small_sample():
    """The same in this process."""
    from cnmm.data import registry

    whole = registry.fashion_sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "fashion_sample", lambda split: tuple(part[::6] for part in whole(split)))
        yield


def pairwise(*axes):
    """Rows in which every pair of values of any two axes occurs: what the full product finds that no row of these does
    needs three particular values at once. Always the same rows.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(itertools.combinations(enumerate(row), 2))))
        left.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return chosen


RUN_CLI = "import sys; from cnmm.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""For `python`: the command line."""


def write_idx(path, array):
    """An array of bytes as Fashion-MNIST's files have it."""
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def write_fashion(folder, num_train, num_test):
    """The first images of each class of the embedded sample, in a folder that `fashion:DIR` opens."""
    import numpy as np

    from cnmm.data import fashion_sample

    folder.mkdir(parents=True)
    for prefix, split, num in (("train", "train", num_train), ("t10k", "test", num_test)):
        images, labels = fashion_sample(split)
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == k)[: num // 10] for k in range(10)]))
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images[chosen, ..., 0])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels[chosen].astype(np.uint8))
    return folder


SIZES = {"cnmm_seg_b5s5": (64, 96), "cnmm_b5s4": (66, 70)}
"""Smaller than the models' own, to be quick; odd after halving, to be hard."""
RULES = ("flow", "flow_per_mac", "mean_flow")


def trained(name, **overrides):
    """A model whose every parameter and statistic differs from its initial value."""
    import torch

    torch.manual_seed(0)
    model = cnmm.create_model(name, **({"input_size": SIZES[name]} if name in SIZES else {}), **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer in model.buffers():
            buffer.add_(0.4 * torch.rand_like(buffer))
    return model.eval()


def random_points(model, num, seed=0):
    """Operating points of any exit and rule."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(items):
        return items[int(torch.randint(len(items), (), generator=generator))]

    for _ in range(num):
        yield draw(cnmm.cutting_order(model, draw(model.config.exit_numbers), rule=draw(RULES)))


def made_up_ladder(folder, model, names, *, cascade, confidence=0.5, **options):
    """A ladder of some points of any model; their qualities only order them by macs, and `cascade` names its own."""
    from cnmm.cascade import Cascade, Threshold, asking_macs, stage_macs
    from cnmm.frontier import Frontier, FrontierPoint

    model.preprocessing = preprocessing(model.config)
    table = cnmm.CostTable.of(model.config)
    full = table.exit().macs
    metric = "miou" if model.config.task == "segmentation" else "accuracy"
    points = []
    for name in names:
        point = cnmm.named_point(model, name)
        cost = table.point(point)
        shape = {"rule": point.rule, "cuts": point.cuts, "exit": point.exit, "macs": cost.macs, "params": cost.params}
        share = {"quality": cost.macs / full, "low": 0.0, "high": 1.0, "metric": metric}
        points.append(FrontierPoint(name=name, n=1, split="none", statistics="raw", **shape, **share))
    staged = stage_macs(model.config, cnmm.named_point(model, cascade))
    spent = list(itertools.accumulate(staged.values()))
    rows = [
        Threshold(
            confidence=(value,) * (len(staged) - 1),
            average_macs=float(macs),
            quality=quality,
            exits=exits,
        )
        for value, macs, exits, quality in (
            (0.0, spent[0], (1.0, *(0.0,) * (len(staged) - 1)), 0.5),
            (confidence, sum(spent) / len(spent), (1 / len(staged),) * len(staged), 0.5),
            (1.1, spent[-1], (*(0.0,) * (len(staged) - 1), 1.0), 0.6),
        )
    ]
    about = {"point": cascade, "metric": metric, "n": 1, "split": "none", "thresholds": tuple(rows)}
    asking = (asking_macs(model.config),) * (len(staged) - 1)
    found = Cascade(exits=tuple(staged), macs=tuple(staged.values()), asking=asking, **about)
    frontier = Frontier(model=model.config.name, full_macs=full, points=tuple(points), cascade=found)
    cnmm.export_ladder(model, frontier, folder, len(names), **options)
    return folder


def preprocessing(config):
    """Made-up classes, mean, standard deviation and colours."""
    import numpy as np

    from cnmm.palette import default_palette

    rng = np.random.default_rng(3)
    return cnmm.Preprocessing(
        classes=tuple(f"class {k}" for k in range(config.num_classes)),
        mean=tuple(rng.uniform(0.3, 0.6, config.in_chans).tolist()),
        std=tuple(rng.uniform(0.1, 0.3, config.in_chans).tolist()),
        size=config.input_size,
        palette=default_palette(config.num_classes) if config.task == "segmentation" else (),
    )
