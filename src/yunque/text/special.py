"""The GLM control tokens: their names, their released ids, and their ids in a given tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yunque.core.errors import TemplateError

CONTROL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
"""Tokens that never stand in text shown to anyone: document marks and role markers."""

TAG_TOKENS: tuple[str, ...] = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Tokens that structure a turn. A released tokenizer does not flag them as special, so that engines which
parse decoded text still see them."""

RELEASED_IDS: dict[str, int] = {
    "<|endoftext|>": 154820,
    "<|user|>": 154827,
    "<|assistant|>": 154828,
    "<|observation|>": 154829,
    "<think>": 154841,
    "</think>": 154842,
    "<tool_call>": 154843,
    "</tool_call>": 154844,
    "<arg_key>": 154847,
    "</arg_key>": 154848,
    "<arg_value>": 154849,
    "</arg_value>": 154850,
}
"""Ids published for GLM-5 to GLM-5.3. The other tokens' ids were not published: a tokenizer file has them."""

_UNUSED = frozenset({"<eop>"})


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the tokens that the chat formats are made of, in one tokenizer.

    There is no end-of-turn token: the next role marker ends a turn, or ``<|endoftext|>`` at the end of
    everything.
    """

    ids: dict[str, int]

    @staticmethod
    def find(id_of: Callable[[str], int | None]) -> "SpecialTokens":
        """Look every token up; TemplateError names those the tokenizer does not have."""
        found = {token: id_of(token) for token in (*CONTROL_TOKENS, *TAG_TOKENS)}
        missing = [token for token, token_id in found.items() if token_id is None and token not in _UNUSED]
        if missing:
            raise TemplateError(
                f"the tokenizer lacks {', '.join(missing)}; the GLM chat formats need them as single tokens"
            )
        return SpecialTokens({token: token_id for token, token_id in found.items() if token_id is not None})

    def __getitem__(self, token: str) -> int:
        """The id of one of CONTROL_TOKENS or TAG_TOKENS."""
        return self.ids[token]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids at which generation stops: ``<|endoftext|>`` (also used as padding), user, observation."""
        return self["<|endoftext|>"], self["<|user|>"], self["<|observation|>"]

    @property
    def pad_id(self) -> int:
        """The id that fills unused places: the released checkpoints use ``<|endoftext|>``."""
        return self["<|endoftext|>"]

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether what follows ``prompt`` starts inside a thought: its last turn opened ``<think>``.

        The opening tag is part of the prompt, so the output does not show it (vllm-project/vllm#31319); and
        whether it is there depends on the format, not on what was asked for (smg-project/smg#2538).
        """
        closing = {self[token] for token in ("</think>", "<tool_call>", "<|assistant|>")}
        for token_id in reversed(prompt):
            if token_id == self["<think>"]:
                return True
            if token_id in closing:
                return False
        return False
