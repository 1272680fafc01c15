"""The served weights: exchanged in place, and told apart by hashes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.transformer import Transformer
from yunque.weights import load_tensors, open_any
from yunque.weights.matching import match


class PartlyReplaced(CheckpointError):
    """Reading broke off: the served tensors are of two versions, and nothing may be made with them."""


def replace_weights(model: Transformer, source: str) -> None:
    """Fill ``model`` from a checkpoint folder, tensor by tensor in place.

    Raises ``CheckpointError`` before anything is changed when the folder is not a whole checkpoint of this
    architecture, ``PartlyReplaced`` when reading breaks off.
    """
    checkpoint = open_any(source)
    theirs, ours = checkpoint.config.to_hf(), model.config.to_hf()
    differing = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"{source}: {key} is {theirs.get(key)!r}, the served model's is {ours.get(key)!r}: "
            "weights of another architecture cannot be loaded into a running engine"
        )
    state = model.state_dict()
    match(checkpoint, state, (), exact=False)
    try:
        load_tensors(checkpoint, state)
    except (OSError, CheckpointError) as error:
        raise PartlyReplaced(f"the weights of {source} were read in part: {error}") from error


def hashes(model: Transformer) -> dict[str, str]:
    """SHA-256 of the bytes of every tensor, by its name in ``state_dict``."""
    return {name: _sha256(tensor) for name, tensor in model.state_dict().items()}


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
