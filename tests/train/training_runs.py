"""Run files for tests, as mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yunque


def nano_run(**changes: Any) -> dict[str, Any]:
    """A five-stage run of the smallest model on a little code and synthetic conversations."""
    rate = {"kind": "constant", "lr_peak": 3e-3}
    common = {"tokens": 512, "sequence_length": 64, "tokens_per_step": 128, "sources": ["text"]}
    base: dict[str, Any] = {
        "name": "nano",
        "device": "cpu",
        "model": {"preset": "nano", "vocab_size": 512, "max_position_embeddings": 2048},
        "tokenizer": {"vocab_size": 512, "sources": ["text"], "max_bytes": 200_000},
        "data": {
            "held_out_batches": 2,
            "held_out_share": 0.2,
            "sources": {
                "text": {"kind": "code", "path": str(Path(yunque.__file__).parent / "core")},
                "chats": {"kind": "tools", "num_train": 40, "num_held_out": 20},
            },
        },
        "stage": [
            {
                "kind": "pretrain",
                "schedule": {"kind": "cosine", "lr_peak": 1e-2, "warmup_tokens": 128},
                **common,
            },
            {
                "kind": "midtrain",
                "schedule": {"kind": "linear", "lr_peak": 3e-3},
                **common,
                "rope_theta": 40_000.0,
            },
            {"kind": "dsa_warmup", "schedule": rate, **common},
            {"kind": "dsa_sparse", "schedule": rate, **common},
            {
                "kind": "sft",
                "schedule": rate,
                **common,
                "sources": ["chats"],
                "sequence_length": 2048,
                "tokens_per_step": 2048,
                "tokens": 4096,
            },
        ],
    }
    return base | changes
