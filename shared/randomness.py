"""One generator per purpose, so that no random number depends on what else was drawn before it."""

import hashlib

import torch


def generator(*key: object) -> torch.Generator:
    """A CPU generator whose stream depends on `key` alone, e.g. `generator(seed, "batches")`.

    Python's own hash() differs from process to process; SHA-256 doesn't.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode("utf-8")).digest()
    return torch.Generator().manual_seed(
        int.from_bytes(digest[:8], "little") >> 1
    )  # 63 bits: never negative
