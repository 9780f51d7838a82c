"""All randomness of a training is a function of its seed, of what it is for, and of epoch and step."""

from __future__ import annotations

import hashlib

import torch


def seeded(seed: int, *key: object) -> torch.Generator:
    """A generator for one purpose: a function of the seed and the key, on any machine."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
