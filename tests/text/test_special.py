import pytest

from yunque.core.errors import TemplateError
from yunque.text import CONTROL_TOKENS, RELEASED_IDS, TAG_TOKENS, SpecialTokens, Tokenizer


def test_ids_are_those_of_the_tokenizer_whatever_they_are() -> None:
    every = (*CONTROL_TOKENS, *TAG_TOKENS)
    ids = {token: 154820 + 3 * i for i, token in enumerate(every)} | RELEASED_IDS
    special = SpecialTokens.find(ids.get)
    assert {token: special[token] for token in every} == ids
    assert special.eos_ids == (154820, 154827, 154829)


def test_missing_tokens_are_named_except_the_one_no_format_uses() -> None:
    ids = {token: i for i, token in enumerate((*CONTROL_TOKENS, *TAG_TOKENS))}
    del ids["<eop>"]
    assert "<eop>" not in SpecialTokens.find(ids.get).ids
    del ids["<arg_key>"], ids["[gMASK]"]
    with pytest.raises(TemplateError, match=r"lacks \[gMASK\], <arg_key>;"):
        SpecialTokens.find(ids.get)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|user|>hi<|assistant|><think>", True),
        ("<|user|>hi<|assistant|><think>half a thought", True),
        ("<|user|>hi<|assistant|><think></think>", False),
        ("<|user|>hi<|assistant|></think>", False),
        ("<|assistant|><think>old</think>x<|user|>hi<|assistant|>", False),
        ("<|assistant|><think>cut off<|user|>hi<|assistant|>", False),
        ("<|user|>hi<|assistant|><think>x<tool_call>", False),
        ("", False),
    ],
)
def test_a_prompt_says_whether_its_answer_starts_mid_thought(tokenizer: Tokenizer, prompt: str, opens: bool) -> None:
    """vllm-project/vllm#31319, waybarrios/vllm-mlx#725: the opening tag is in the prompt, not the output."""
    assert tokenizer.special.opens_reasoning(tokenizer.encode_with_special(prompt)) is opens
