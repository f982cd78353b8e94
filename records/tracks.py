"""Holds what is fixed in each track: target, data, vocabulary and validation. Needs nothing but Python.

A run with other values does not belong to the track, whatever its log or its script says. compare.py reads
the logs' values, and referee.py the script's.
"""

from collections.abc import Mapping
from typing import Any

# The names are those of the script's Config. A loss per token means something only with the vocabulary. The
# target is in nats per token. Everything else is free, the micro-batches too. The data's fingerprint is not
# here, because the corpora of `cpu` and `words` are the Python library, which differs between versions.
TRACKS: dict[str, dict[str, Any]] = {
    "cpu": {
        "target": 1.07,
        "data": "data/local",
        "vocab_size": 257,
        "val_slice_tokens": 4096,
        "val_slices": 128,
    },
    "words": {
        "target": 2.5,
        "data": "data/words",
        "vocab_size": 50257,
        "val_slice_tokens": 512,
        "val_slices": 128,
    },
    "gpt2-small": {
        "target": 3.28,
        "data": "data/fineweb10B",
        "vocab_size": 50257,
        "val_slice_tokens": 262144,
        "val_slices": 40,
    },
}
# CopyPointer and the record before it were made for this one, and keep it.
FORMER_TARGETS = {"words": 2.9}


def differences(track: str, settings: Mapping[str, Any], is_listed: bool = False) -> list[str]:
    """Returns a clause for each setting that is not the track's, such as "val_slices is 1, not 128".

    `settings` are a log's config, or a script's Config as a dict. A listed record may have a former target.
    """
    clauses = []
    for name, value in TRACKS[track].items():
        found = settings.get(name)
        allowed = [value]
        if is_listed and name == "target":
            allowed.append(FORMER_TARGETS.get(track, value))
        if found not in allowed:
            clauses.append(f"{name} is {found}, not {value}")
    return clauses
