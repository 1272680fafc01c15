"""From a checkpoint to what an engine is made of: model, tokenizer, and as many pages as the memory allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from yunque.core.errors import ConfigError, unknown
from yunque.engine.page_store import bytes_per_token
from yunque.engine.pages import pages_for
from yunque.engine.settings import EngineSettings
from yunque.model.transformer import Transformer
from yunque.ops.device import free_memory_bytes, pick_device
from yunque.text import Tokenizer
from yunque.weights import find_checkpoint, load_model

DTYPES = ("float32", "bfloat16")
#: Share of the free memory that the cache may take unless told otherwise.
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Loaded:
    """The parts of an engine, and one line about their sizes for people."""

    model: Transformer
    tokenizer: Tokenizer | None
    settings: EngineSettings
    num_pages: int
    model_name: str
    summary: str


def load_parts(
    path: Path | str,
    settings: EngineSettings,
    *,
    dtype: str | None,
    device: str,
    cache_bytes: int | None,
    batch_invariant: bool,
) -> Loaded:
    """Read the checkpoint at ``path`` and size the cache; see ``Engine.load``."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(unknown("dtype", dtype, DTYPES))
    folder, target = find_checkpoint(path), pick_device(device)
    wanted = None if dtype is None else getattr(torch, dtype)
    model = load_model(folder, dtype=wanted, device=target, batch_invariant=batch_invariant).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.join_projections()
    if settings.num_drafts and not model.config.num_nextn_predict_layers:
        raise ConfigError(f"num_drafts is {settings.num_drafts}, but this model has no MTP layer; valid: 0")
    settings = replace(
        settings, max_model_len=min(settings.max_model_len or 2**62, model.config.max_position_embeddings)
    )
    free = free_memory_bytes(target)
    num_pages, summary = size_cache(model, settings, cache_bytes=cache_bytes, free_bytes=free)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    return Loaded(model, tokenizer, settings, num_pages, _name(Path(path)), summary)


def size_cache(
    model: Transformer, settings: EngineSettings, *, cache_bytes: int | None, free_bytes: int
) -> tuple[int, str]:
    """How many pages to allot, and a line that says what they cost and hold.

    Raises ``ConfigError`` when they would not hold one request of ``max_model_len`` tokens.
    """
    assert settings.max_model_len is not None
    dtype = model.lm_head.weight.dtype
    per_token = bytes_per_token(model.config, dtype, with_mtp=settings.num_drafts > 0)
    page_bytes = per_token * settings.page_size
    full = pages_for(settings.max_model_len, settings.page_size)
    limit = int(free_bytes * MEMORY_SHARE) if cache_bytes is None else cache_bytes
    num_pages = min(limit // page_bytes, full * settings.max_running)
    if num_pages < full:
        raise ConfigError(
            f"{limit / 2**20:.0f} MiB of cache hold {num_pages * settings.page_size} tokens, fewer than max_model_len "
            f"{settings.max_model_len}, which takes {full * page_bytes / 2**20:.0f} MiB; lower it or give more memory"
        )
    summary = (
        f"cache: {num_pages * settings.page_size} tokens in {num_pages} pages, "
        f"{num_pages * page_bytes / 2**20:.0f} MiB ({per_token} bytes a token), of {free_bytes / 2**20:.0f} MiB free; "
        f"max_model_len {settings.max_model_len}; {str(dtype).removeprefix('torch.')}"
    )
    return num_pages, summary


def _name(path: Path) -> str:
    """What to call a model: its folder, or its run where the folder has a general name."""
    path = path.resolve()
    return path.parent.name if path.name in ("model", "snapshots", "checkpoint") and path.parent.name else path.name
