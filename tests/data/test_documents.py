import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.data.documents import TokenDocument, split_of


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_raising_the_share_only_moves_keys_to_held_out(key: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert (split_of(key, low), split_of(key, high)) != ("held_out", "train")


def test_split_shares_are_what_was_asked_for() -> None:
    held_out = sum(split_of(f"package/module_{i}.py", 0.2) == "held_out" for i in range(10_000))
    assert abs(held_out / 10_000 - 0.2) < 0.02
    assert split_of("a", 0.0) == "train"
    assert split_of("a", 1.0) == "held_out"


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.txt: 3 tokens with a mask of 2"):
        TokenDocument(np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.uint8), "a.txt")
