"""The peers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cnmm._errors import UserError
from cnmm.data import DataSet
from peers.network import Peer
from peers.plain import Plain

PEERS: dict[str, Callable[..., Peer]] = {
    "plain_118m": partial(Plain, (64, 256, 256)),
    "plain_33m": partial(Plain, (32, 128, 128)),
    "plain_12m": partial(Plain, (16, 72, 96)),
    "plain_6m": partial(Plain, (8, 48, 96)),
    "plain_3m": partial(Plain, (6, 24, 48)),
}


def create_peer(name: str, data: DataSet) -> Peer:
    """A new peer for the images and classes of a data set."""
    if name not in PEERS:
        raise UserError(f"unknown peer {name!r}: must be one of {', '.join(PEERS)}")
    return PEERS[name](num_classes=len(data.classes), in_chans=data.in_chans)
