"""The peers by name; `python -m peers.zoo` prints them with their cost.

`msdnet_even10` and `msdnet_lin5` are the paper's for CIFAR. The other two are `msdnet_lin5` at a quarter of the macs,
3 to 13 M as `cnmm_b4s3` has them: by a stride in front, as `cnmm_b4s3` does it, or by half of the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cnmm._errors import UserError
from cnmm.data import DataSet
from peers.espnetv2 import ESPNetv2
from peers.msdnet import MSDNet, MSDNetConfig
from peers.network import Peer, exit_costs, num_params
from peers.plain import Plain
from peers.slimmable import Slimmable

LIN5 = partial(MSDNetConfig, blocks=5, base=1, step=1, growth_mode="lin_grow")

PEERS: dict[str, Callable[..., Peer]] = {
    "plain_118m": partial(Plain, (64, 256, 256)),
    "plain_33m": partial(Plain, (32, 128, 128)),
    "plain_12m": partial(Plain, (16, 72, 96)),
    "plain_6m": partial(Plain, (8, 48, 96)),
    "plain_3m": partial(Plain, (6, 24, 48)),
    "msdnet_even10": partial(MSDNet, MSDNetConfig(blocks=10, base=4, step=2)),
    "msdnet_lin5": partial(MSDNet, LIN5()),
    "msdnet_lin5_s2": partial(MSDNet, LIN5(stride=2, width=20)),
    "msdnet_lin5_narrow": partial(MSDNet, LIN5(width=10, growth=3, head=64)),
    "slimmable_12m": partial(Slimmable, (16, 72, 96)),
}


SEGMENTATION: dict[str, Callable[..., Peer]] = {
    f"espnetv2_s{scale:g}": partial(ESPNetv2, scale) for scale in (0.5, 1.0, 1.5, 2.0)
}
"""Those that label pixels."""


def table() -> str:
    """Every peer with the macs of its exits and its parameters: ten classes of 32x32 images, or eleven of 360x480."""
    lines = ["| peer | macs of its exits (M) | all exits one after another (M) | params (M) |", "|---|---|---|---|"]
    for peers, classes, size in ((PEERS, 10, (32, 32)), (SEGMENTATION, 11, (360, 480))):
        for name, make in peers.items():
            network = make(num_classes=classes)
            costs = exit_costs(network, size)
            exits = " / ".join(f"{cost.macs / 1e6:.1f}" for cost in costs)
            in_all = f"{sum(cost.stage for cost in costs) / 1e6:.1f}" if network.nested else ""
            lines.append(f"| `{name}` | {exits} | {in_all} | {num_params(network) / 1e6:.2f} |")
    return "\n".join(lines) + "\n"


def create_peer(name: str, data: DataSet) -> Peer:
    """A new peer for the images and classes of a data set."""
    if name not in (*PEERS, *SEGMENTATION):
        raise UserError(f"unknown peer {name!r}: must be one of {', '.join([*PEERS, *SEGMENTATION])}")
    if (name in SEGMENTATION) != bool(data.palette):
        does, needs = ("pixels" if pixels else "images" for pixels in (name in SEGMENTATION, bool(data.palette)))
        raise UserError(f"{name} labels {does}, {data.spec} labels {needs}; choose another peer")
    make = SEGMENTATION[name] if data.palette else PEERS[name]
    return make(num_classes=len(data.classes), in_chans=data.in_chans)


if __name__ == "__main__":
    print(table(), end="")
