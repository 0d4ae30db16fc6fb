"""Randomness from a seed and a count, so that a resume needs no stream to be rewound."""

from __future__ import annotations

from hashlib import blake2b


def mixed(seed: int, index: int, salt: str = "") -> int:
    """A 64-bit number from a study's seed, a count and what it is for; unrelated for any two inputs."""
    return int.from_bytes(blake2b(f"{seed}:{index}:{salt}".encode(), digest_size=8).digest(), "little")
