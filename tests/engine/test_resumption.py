"""A reply that was begun elsewhere goes on as the uninterrupted one would have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import build
from builders_engine import Collector, engine_config, finish

from yunque.core.records import ToolSpec
from yunque.engine import EngineSettings, GenerationRequest, SamplingParams
from yunque.engine.core import EngineCore
from yunque.protocol.errors import ContextLengthExceeded, RequestError
from yunque.protocol.generation import Completion, Constraint, Finish, JsonConstraint, RegexConstraint, ToolConstraint
from yunque.text import train_bpe

TOKENIZER = train_bpe(["the page of a tree, the tree of pages " * 20], 330)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = ToolSpec.from_openai(
    {"type": "function", "function": {"name": "look", "parameters": {**SCHEMA, "required": ["b"]}}}, where="tool"
)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_new_tokens=24)


def make_core(num_drafts: int = 0) -> EngineCore:
    model = build(engine_config(3, vocab_size=TOKENIZER.vocab_size), 3).double()
    settings = EngineSettings(page_size=4, num_drafts=num_drafts)
    return EngineCore(model, settings, num_pages=256, tokenizer=TOKENIZER)


def run(core: EngineCore, prompt: tuple[int, ...], sampling: SamplingParams, made: tuple[int, ...] = ()) -> Completion:
    request = GenerationRequest("only", prompt + made, sampling, reply_start=len(prompt) if made else None)
    collector = Collector()
    core.enqueue(core.intake.prepare(request), collector)
    return finish(core, collector)[0]


def columns(reply: Completion, begin: int) -> dict[str, Any]:
    found = {"tokens": reply.tokens[begin:], "logprobs": reply.logprobs[begin:], "finish": reply.finish}
    kept = reply.columns.get("kept", ())
    return found | {"kept": kept[begin:], "stopped_by": reply.stopped_by}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    numbers = found.pop("logprobs"), expected.pop("logprobs")
    return found == expected and numbers[0] == pytest.approx(numbers[1], abs=1e-9)


PROMPT = tuple(TOKENIZER.encode("the page"))


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_new_tokens=24),
        replace(DRAWN, record_kept=True),
        replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, min_p=0.01),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, max_new_tokens=24),
    ],
    ids=["greedy", "seeded", "penalties", "greedy penalties"],
)
def test_a_reply_cut_anywhere_and_resumed_is_the_uninterrupted_one(sampling, num_drafts):
    core = make_core(num_drafts)
    whole = run(core, PROMPT, sampling)
    assert len(whole.tokens) == 24
    for cut in range(1, 25):
        rest = run(core, PROMPT, sampling, whole.tokens[:cut])
        assert same(columns(rest, 0), columns(whole, cut)), f"cut at {cut}"
    assert core.stats().pages_free + core.stats().pages_cached == 256


def test_a_stop_string_that_began_before_the_cut_is_found_after_it():
    core = make_core()
    plain = run(core, PROMPT, DRAWN)
    text = TOKENIZER.decode(list(plain.tokens))
    stop = next(text[at : at + 4] for at in range(12, len(text) - 4) if text.find(text[at : at + 4]) == at)
    sampling = replace(DRAWN, stop=(stop,))
    whole = run(core, PROMPT, sampling)
    assert (whole.finish, whole.stopped_by) == (Finish.STOP, stop)
    for cut in range(1, len(whole.tokens) + 1):
        rest = run(core, PROMPT, sampling, whole.tokens[:cut])
        assert same(columns(rest, 0), columns(whole, cut)), f"cut at {cut}"


@pytest.mark.parametrize("opens_thought", [False, True])
@pytest.mark.parametrize(
    "constraint",
    [JsonConstraint(SCHEMA), RegexConstraint("[a-f]{9}x?"), ToolConstraint((TOOL,), required=True, parallel=False)],
    ids=["json", "regex", "tools"],
)
def test_a_constrained_reply_goes_on_where_its_grammar_stood(constraint: Constraint, opens_thought: bool):
    core = make_core()
    special = TOKENIZER.special
    prompt = (*PROMPT, special["<think>"]) if opens_thought else PROMPT
    bias = {special["</think>"]: 6.0} if opens_thought else {}
    ends = frozenset(special.eos_ids)
    sampling = replace(DRAWN, max_new_tokens=60, constraint=constraint, stop_ids=ends, logit_bias=bias)
    whole = run(core, prompt, sampling)
    assert len(whole.tokens) > 8
    for cut in range(1, len(whole.tokens) + 1):
        rest = run(core, prompt, sampling, whole.tokens[:cut])
        assert same(columns(rest, 0), columns(whole, cut)), f"cut at {cut}"


def test_stop_ids_are_barred_until_the_whole_reply_is_long_enough():
    core = make_core()
    plain = run(core, PROMPT, replace(DRAWN, temperature=0))
    sampling = replace(DRAWN, temperature=0, stop_ids=frozenset(plain.tokens), min_new_tokens=9)
    whole = run(core, PROMPT, sampling)
    assert len(whole.tokens) > 9
    for cut in (1, 5, 8, 9):
        rest = run(core, PROMPT, sampling, whole.tokens[:cut])
        assert same(columns(rest, 0), columns(whole, cut)), f"cut at {cut}"


def test_a_reply_that_was_at_its_end_ends_at_once_and_computes_nothing():
    core = make_core()
    ended = run(core, PROMPT, replace(DRAWN, stop_ids=frozenset({7})), (5, 6, 7))
    assert (ended.tokens, ended.finish, ended.stopped_by) == ((), Finish.STOP, 7)
    assert run(core, PROMPT, replace(DRAWN, max_new_tokens=2), (5, 6)).finish is Finish.LENGTH
    assert core.stats().steps == 0


@pytest.mark.parametrize(
    ("sampling", "made", "message"),
    [
        (replace(DRAWN, stop_ids=frozenset({6})), (5, 6, 7), "2 ids are all of it"),
        (replace(DRAWN, max_new_tokens=2), (5, 6, 7), "more than max_tokens 2"),
        (replace(DRAWN, constraint=RegexConstraint("[0-9]+")), tuple(TOKENIZER.encode("7a")), "does not allow"),
    ],
)
def test_a_beginning_that_cannot_have_been_is_refused(sampling, made, message):
    with pytest.raises(RequestError, match=message):
        run(make_core(), PROMPT, sampling, made)


def test_a_resumed_reply_needs_its_prompt_and_room():
    core = make_core()
    with pytest.raises(RequestError, match="reply_start is 9"):
        core.intake.prepare(GenerationRequest("a", PROMPT, DRAWN, reply_start=9))
    with pytest.raises(RequestError, match="not given again"):
        core.intake.prepare(GenerationRequest("a", (1, 2), DRAWN, prompt_logprobs=True, reply_start=1))
    long = (1,) * (core.intake.max_model_len + 1)
    with pytest.raises(ContextLengthExceeded):
        core.intake.prepare(GenerationRequest("a", long, SamplingParams(), reply_start=1))
