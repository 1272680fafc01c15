"""Random numbers of a request, made from its seed and a position alone, whatever else is computed beside it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a number is for: each purpose has a stream of its own, so a new one never shifts another."""

    TOKEN = 0
    """The draw of a token from the target distribution, and of a draft that is coupled with it."""
    DRAFT = 1
    """The draw of a draft for rejection, which must be independent of what the target would draw."""
    ACCEPT = 2
    """Whether a draft is accepted."""
    RESIDUAL = 3
    """The draw of the token that replaces a rejected draft."""


class NoiseSource:
    """Counter-based noise (NumPy's Philox 4x64; Salmon et al. 2011), one generator used again and again.

    Key: the seed (mod 2**64) and the purpose. Counter: the block within a position, then the position. Only raw
    bits are taken from NumPy: these are the same in every release of it.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=np.zeros(2, np.uint64))
        self._state: Any = self._bits.state

    def gumbel(
        self, seed: int, position: int, vocab_size: int, purpose: Purpose = Purpose.TOKEN
    ) -> NDArray[np.float32]:
        """Standard Gumbel noise [vocab_size]: -log(-log u) with u of 52 bits in (0, 1), worked out in fp64."""
        # An odd multiple of 2**-53 is exact in fp64 and neither 0 nor 1, so both logarithms are finite.
        uniform_V = ((self._raw(seed, position, vocab_size, purpose) >> np.uint64(12)) + 0.5) * 2.0**-52
        np.log(uniform_V, out=uniform_V)
        np.negative(uniform_V, out=uniform_V)
        np.log(uniform_V, out=uniform_V)
        return np.negative(uniform_V).astype(np.float32)

    def uniform(self, seed: int, position: int, purpose: Purpose) -> float:
        """One number in (0, 1), of 52 bits."""
        return (int(self._raw(seed, position, 1, purpose)[0] >> np.uint64(12)) + 0.5) * 2.0**-52

    def _raw(self, seed: int, position: int, count: int, purpose: Purpose) -> NDArray[np.uint64]:
        counter_and_key = self._state["state"]
        counter_and_key["counter"][:] = (0, position, 0, 0)
        counter_and_key["key"][:] = (seed % 2**64, purpose)
        self._state["buffer_pos"] = 4  # nothing left over from the call before
        self._bits.state = self._state
        return self._bits.random_raw(count)


def noise(seed: int, position: int, vocab_size: int, purpose: Purpose = Purpose.TOKEN) -> NDArray[np.float32]:
    """The Gumbel noise with which the token at ``position`` is drawn: argmax(log-probability + noise)."""
    return NoiseSource().gumbel(seed, position, vocab_size, purpose)
