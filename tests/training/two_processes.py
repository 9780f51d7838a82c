"""Run by torchrun (tests/test_distributed.py): two processes with half a batch each against one with all of it."""

import sys

import torch
import torch.nn.functional as F

from cnmm import create_model, distributed
from cnmm.training.ladder_tuning import Ladder, tunes_ladder
from cnmm.training.objective import training_loss
from cnmm.training.optim import Optimizer, average_gradients, take_step
from cnmm.training.recipes import recipe
from tests.training.helpers import SGD

BATCH = 8


def scores(model, x, labels):
    logits = model.forward_exits(x)
    return sum(F.cross_entropy(score, labels) for score in logits.values())


def compare(name, options):
    torch.manual_seed(0)
    alone = create_model(name, **options).double()
    together = create_model(name, **options).double()
    together.load_state_dict(alone.state_dict())
    size = (20, 24) if alone.config.task == "classification" else (40, 36)
    x = torch.randn(BATCH, alone.config.in_chans, *size, dtype=torch.float64)
    shape = (BATCH,) if alone.config.task == "classification" else (BATCH, *size)
    labels = torch.randint(alone.config.num_classes, shape)
    half = slice(distributed.rank() * BATCH // 2, (distributed.rank() + 1) * BATCH // 2)
    for config in (
        None,
        recipe("quick", batch_size=BATCH, gates="relaxed", group=3, ladder_start=0.0),
        recipe("quick", batch_size=BATCH, gates="hard", group=1),
        recipe("cifar10", batch_size=BATCH, group=None),
    ):
        if config is not None and alone.config.task == "segmentation":
            continue
        ladder = Ladder(alone) if config is not None and tunes_ladder(alone, config, 0.5) else None
        for model, part in ((alone, slice(None)), (together, half)):
            model.zero_grad()
            if model is alone:
                with distributed.paused():
                    loss = (
                        scores(model, x, labels)
                        if config is None
                        else training_loss(model, x, labels, config, at=(0, 0), ladder=ladder)
                    )
                    loss.backward()
            else:
                loss = (
                    scores(model, x[part], labels[part])
                    if config is None
                    else training_loss(model, x[part], labels[part], config, at=(0, 0), ladder=ladder)
                )
                loss.backward()
                average_gradients(model)
        check(alone, together)
    if alone.config.task == "classification":
        compare_steps(alone, together, x, labels, half)


def compare_steps(alone, together, x, labels, half):
    """Steps with everything that `quick` has, and of SGD."""
    for options in ({}, SGD):
        config = recipe("quick", **options, batch_size=BATCH, ladder_start=0.5, precision="float32", warmup=0.0)
        optimizers, ladder = [Optimizer(model, config) for model in (alone, together)], Ladder(alone)
        for step in range(3):
            part = step / 4
            about = {"at": (0, step), "ladder": ladder if tunes_ladder(alone, config, part) else None}
            with distributed.paused():
                loss = training_loss(alone, x, labels, config, **about)
                take_step(alone, optimizers[0], loss, config, part=part)
            loss = training_loss(together, x[half], labels[half], config, **about)
            take_step(together, optimizers[1], loss, config, part=part)
        for (name, a), (_, b) in zip(alone.named_parameters(), together.named_parameters(), strict=True):
            assert (a - b).norm() < 1e-5 * (1 + a.norm()), (name, (a - b).norm(), a.norm())


def check(alone, together):
    whole = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
    for (name, a), (_, b) in zip(alone.named_parameters(), together.named_parameters(), strict=True):
        if a.grad is not None:
            assert (a.grad - b.grad).norm() < 1e-8 * a.grad.norm() + 1e-12 * whole, name
    for (name, a), (_, b) in zip(alone.named_buffers(), together.named_buffers(), strict=True):
        assert (a - b).norm() < 1e-10 * (1 + a.norm()), name  # some means are zero


def main():
    torch.set_num_threads(1)
    distributed.start()
    assert distributed.world_size() == 2
    compare("cnmm_tiny", {})
    compare("cnmm_seg_tiny", {})
    if distributed.rank() == 0:
        print("equal")
    distributed.end()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
