"""The records that flow through this package: texts, tokens with their mask, and the split."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text. ``source`` says where it is from ("notes/a.jsonl:12"); ``key`` decides its split."""

    text: str
    source: str
    key: str


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """Token ids of one document or conversation and, where only part of it is learned, one flag per token.

    ``mask[i]`` is 1 where the loss counts *predicting* token ``i``; ``mask`` None means that all tokens
    count.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None
    source: str

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != len(self.tokens):
            raise ValueError(f"{self.source}: {len(self.tokens)} tokens with a mask of {len(self.mask)}")


def split_of(key: str, held_out_share: float) -> Split:
    """The split a key falls in: held-out where its hash, as a number in [0, 1), is below ``held_out_share``.

    The same key always falls in the same split, whatever else is in the corpus; raising the share only moves
    keys from train to held-out.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"split").digest()
    return "held_out" if int.from_bytes(digest, "big") < held_out_share * 2**64 else "train"
