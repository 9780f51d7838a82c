"""Two operating points of a run that labels pixels, on the same test images: the difference and its 95 % interval.

    python -m benchmarks.paired models/cnmm_seg_b5s5.camvid e5c0 e4c0 --data camvid:DIR

Images are drawn with replacement, the same ones for both points, so that hard images do not count as noise.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

import cnmm
from cnmm.evaluation.segmentation import Segmentation, metric_values
from cnmm.run import Run

RESAMPLES = 2000


@torch.no_grad()
def counts(run: Run, name: str) -> torch.Tensor:
    """Of every test image [N, 3, K]: what `metric_values` needs."""
    point = cnmm.named_point(run.model, name)
    model, task, found = run.settled(point), Segmentation(), []
    for images, labels in run.images.prepared.batches(*run.images.split("test")):
        found.append(task.counts(model(images, point), labels, run.model.config.num_classes))
    return torch.cat(found).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("points", nargs=2, metavar="POINT")
    parser.add_argument("--data", help="where its images are, if not where it says")
    arguments = parser.parse_args()
    run = Run(arguments.run, data=arguments.data)
    first, second = (counts(run, name) for name in arguments.points)
    times = np.random.default_rng(0).multinomial(len(first), np.full(len(first), 1 / len(first)), RESAMPLES)
    drawn = [
        metric_values(torch.einsum("rn,nck->rck", torch.from_numpy(times).double(), some)) for some in (first, second)
    ]
    answer = {"points": arguments.points, "n": len(first)}
    for metric in ("miou", "pixel_accuracy"):
        values = [metric_values(some.sum(0))[metric].item() for some in (first, second)]
        low, high = np.quantile((drawn[0][metric] - drawn[1][metric]).numpy(), [0.025, 0.975]).tolist()
        answer[metric] = {"values": values, "difference": values[0] - values[1], "low": low, "high": high}
        print(
            f"{metric}: {100 * values[0]:.2f} and {100 * values[1]:.2f}, {100 * (values[0] - values[1]):+.2f}", end=" "
        )
        print(f"({100 * low:+.2f} to {100 * high:+.2f})")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
