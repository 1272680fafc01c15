import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from yunque.core.records import ToolSpec
from yunque.engine.constraints import Constraints, Matcher
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Constraint, JsonConstraint, RegexConstraint, ToolConstraint
from yunque.text import ParsedTurn, Tokenizer, TurnParser, train_bpe

CORPUS = [
    "The assistant thinks, then answers. def f(x): return x + 1\n",
    "get_weather(city='Paris', days=2) -> 21 degrees, sunny; naïve café 東京 😀\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}\n',
    "</arg_value></tool_call><tool_call>true false null 12 345",
]
TOKENIZER = train_bpe(CORPUS * 4, 450)
CONSTRAINTS = Constraints(TOKENIZER)
ENDS = {TOKENIZER.id_of(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")}
OBSERVATION = TOKENIZER.id_of("<|observation|>")


def spec(name: str, parameters: dict[str, Any]) -> ToolSpec:
    return ToolSpec.from_openai({"name": name, "parameters": parameters})


WEATHER = spec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["°C", 'F "old"', "K\n"]},
            "where": {"$ref": "#/$defs/point"},
            "level": {"enum": ["low", 3, None, True, {"a": [1]}]},
        },
        "required": ["days", "city"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "up": {"type": "boolean"}, "at": {"$ref": "#/$defs/tag"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "tag": {"type": "string", "maxLength": 4},
        },
    },
)
MIXED = spec(
    "get",
    {
        "properties": {
            "any": {},
            "either": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 6}]},
            "name": {"type": ["string", "null"], "pattern": "^[a-z]+\\d?$|^X/"},
            "list": {"type": "array", "items": {"type": ["integer", "string"]}, "maxItems": 3},
            "part": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5, "pattern": "e"}]},
        },
        "required": ["either"],
    },
)
NOTHING = spec("get_time", {})
TOOLS = (WEATHER, MIXED, NOTHING)


def generated(matcher: Matcher, seed: int, *, length: int = 60, hurry: float = 6.0) -> list[int]:
    """The reply of a model of random logits, up to its end; after ``length`` tokens it leans towards an end.

    Tokens that open nothing (closing tags, quotes, brackets, ends) then get ``hurry`` more.
    """
    generator = np.random.default_rng(seed)
    closing = [TOKENIZER.find(token) for token in ("</think>", "</arg_value>", "</tool_call>", "}", "]", '"', "°", "0")]
    tokens: list[int] = []
    while not matcher.is_finished:
        logits = generator.normal(size=TOKENIZER.vocab_size) * 2
        logits[TOKENIZER.id_of("<tool_call>")] += 1
        if len(tokens) > length:
            logits[[*ENDS, *(token for token in closing if token is not None)]] += hurry * (len(tokens) / length)
        mask = matcher.mask()
        token = int(np.where(mask, logits, -np.inf).argmax()) if mask is not None else int(logits.argmax())
        assert (token in ENDS) <= matcher.is_complete
        assert matcher.accept(token)
        tokens.append(token)
        assert len(tokens) < 3000
    assert tokens[-1] in ENDS
    return tokens


def turn_of(tokens: list[int], *, in_reasoning: bool = False, tools: tuple[ToolSpec, ...] = TOOLS) -> ParsedTurn:
    parser = TurnParser(TOKENIZER, tools, in_reasoning=in_reasoning)
    parser.feed(*tokens)
    return parser.finish()


def accepts(constraint: Constraint, text: str, *, after_reasoning: bool = False) -> bool:
    """Whether the whole of ``text`` (tags are tokens) can be written, and the reply can end there."""
    matcher = CONSTRAINTS.compile(constraint, after_reasoning=after_reasoning)
    return all(map(matcher.accept, TOKENIZER.encode_with_special(text))) and matcher.is_complete


SCHEMAS = [
    {},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z]{2,8}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "é", 3]}, "minItems": 1, "maxItems": 3},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "$defs": {
            "node": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}}}
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["any object", "nested"])
def test_random_models_write_json_that_validates(schema):
    matcher = CONSTRAINTS.compile(JsonConstraint(schema), after_reasoning=False)
    for seed in range(100):
        turn = turn_of(generated(matcher.copy(), seed))
        assert turn.stop in ("<|endoftext|>", "<|user|>")
        assert not turn.failures
        value = json.loads(turn.content)
        assert isinstance(value, dict)
        jsonschema.validate(value, schema)


@pytest.mark.parametrize("required", [True, False])
def test_random_models_write_tool_calls_that_parse_and_validate(required):
    matcher = CONSTRAINTS.compile(ToolConstraint(TOOLS, required=required), after_reasoning=False)
    names: set[str] = set()
    keys: set[str] = set()
    with_calls = 0
    for seed in range(100):
        tokens = generated(matcher.copy(), seed)
        turn = turn_of(tokens)
        for call in turn.tool_calls:
            tool = next(tool for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(call.arguments, tool.parameters)
            names.add(call.name)
            keys |= call.arguments.keys()
        assert (turn.stop == "<|observation|>") == bool(turn.tool_calls)
        with_calls += bool(turn.tool_calls)
        if required:
            assert tokens[0] == TOKENIZER.id_of("<tool_call>")
            assert turn.content == ""
    assert names == {"get_weather", "get", "get_time"}
    assert keys == {"city", "days", "unit", "where", "level", "any", "either", "name", "list", "part"}
    assert with_calls == 100 if required else 0 < with_calls < 100


def test_one_call_at_most_where_calls_may_not_be_parallel():
    constraint = ToolConstraint((NOTHING,), required=True, parallel=False)
    one = "<tool_call>get_time</tool_call>"
    assert accepts(constraint, one)
    assert accepts(constraint, one + "<|observation|>")
    assert not accepts(constraint, one + one)
    assert accepts(ToolConstraint((NOTHING,)), one + one + "<|observation|>")


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ([("city", "7"), ("days", "3")], True),
        ([("days", "3"), ("city", "")], True),
        ([("days", "3"), ("unit", "K\n"), ("city", 'a "b"\n<tool_call>')], True),
        ([("city", "x")], False),
        ([("city", "x"), ("days", "15")], False),
        ([("city", "x"), ("days", '"3"')], False),
        ([("city", "x"), ("days", "3"), ("city", "y")], False),
        ([("city", "x"), ("days", "3"), ("colour", "red")], False),
        ([("city", "x"), ("days", "3"), ("unit", "C")], False),
        ([("city", "x"), ("days", "3"), ("where", '{"x": 1, "at": "abcd"}')], True),
        ([("city", "x"), ("days", "3"), ("where", '{"x":1,"at":"abcde"}')], False),
        ([("city", "x"), ("days", "3"), ("where", '{"up": true}')], False),
        ([("city", "x"), ("days", "3"), ("level", "low")], True),
        ([("city", "x"), ("days", "3"), ("level", '{"a": [1]}')], True),
        ([("city", "x"), ("days", "3"), ("level", "high")], False),
    ],
)
def test_arguments_come_in_any_order_typed_by_their_schemas(arguments, is_allowed):
    text = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments)
    # Spelled by ordinary tokens, a tag inside a value is text.
    tokens = [TOKENIZER.id_of("<tool_call>"), *TOKENIZER.encode("get_weather")]
    for part in re.split(r"(</?arg_(?:key|value)>)", text):
        tokens += [TOKENIZER.id_of(part)] if part.startswith(("<arg", "</arg")) else TOKENIZER.encode(part)
    tokens += [TOKENIZER.id_of("</tool_call>"), OBSERVATION]
    matcher = CONSTRAINTS.compile(ToolConstraint(TOOLS), after_reasoning=False)
    assert all(map(matcher.accept, tokens)) is is_allowed
    if is_allowed:
        assert turn_of(tokens).tool_calls[0].arguments.keys() == {key for key, _ in arguments}


def test_a_value_of_any_type_reads_back_as_the_type_it_was_allowed_as():
    def value(name: str, text: str) -> bool:
        either = "" if name == "either" else "<arg_key>either</arg_key><arg_value>9</arg_value>"
        call = f"<tool_call>get{either}<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
        return accepts(ToolConstraint(TOOLS), call)

    assert [value("either", text) for text in ("9", "7up", "true", "4", " 4", "toolong", "")] == [
        True, True, False, False, False, False, True,
    ]  # fmt: skip
    assert [value("any", text) for text in ('{"a": [1, "b"]}', "{a}", "null", "nulls", "1e5", "-", '"q"')] == [
        True, False, True, True, True, True, True,
    ]  # fmt: skip
    assert [value("name", text) for text in ("abc", "abc4", "X/y", "Xy", "4", "null")] == [
        True, True, True, False, False, True,
    ]  # fmt: skip
    assert [value("part", text) for text in ("e", "he", "hello", "helloo", "hall")] == [
        False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "constraint", [JsonConstraint(SCHEMAS[1]), RegexConstraint("[0-9]{3}"), ToolConstraint(TOOLS, required=True)]
)
def test_the_thought_is_free_but_the_reply_cannot_end_in_it(constraint):
    matcher = CONSTRAINTS.compile(constraint, after_reasoning=True)
    thought = TOKENIZER.encode_with_special('{"not": json <arg_key> \n') + [
        token for token in range(256) if token not in ENDS
    ]
    for token in thought:
        assert matcher.accept(token)
    mask = matcher.mask()
    assert mask is not None
    barred = set(np.flatnonzero(~mask).tolist())
    is_tools = isinstance(constraint, ToolConstraint)
    assert barred == ENDS | (set() if is_tools else {TOKENIZER.id_of("<tool_call>")})
    assert not matcher.is_complete
    assert not matcher.accept(OBSERVATION)
    assert matcher.accept(TOKENIZER.id_of("</think>"))
    turn = turn_of(
        [*TOKENIZER.encode("hm</think"), TOKENIZER.id_of("</think>"), *generated(matcher, 5)], in_reasoning=True
    )
    assert turn.reasoning == "hm</think"
    assert not turn.failures
    assert bool(turn.tool_calls) is is_tools


def test_calls_may_leave_the_thought_and_a_choice_bars_nothing_in_it():
    """InternLM/lmdeploy#4737: a call emitted directly from the thought."""
    matcher = CONSTRAINTS.compile(ToolConstraint(TOOLS), after_reasoning=True)
    assert matcher.mask() is None
    assert matcher.is_complete
    tokens = TOKENIZER.encode_with_special("so<tool_call>get_time</tool_call><|observation|>")
    assert all(map(matcher.accept, tokens))
    assert matcher.is_finished
    turn = turn_of(tokens, in_reasoning=True)
    assert turn.reasoning == "so"
    assert [call.name for call in turn.tool_calls] == ["get_time"]


def test_ends_are_allowed_exactly_when_the_constraint_is_complete():
    matcher = CONSTRAINTS.compile(RegexConstraint("ab?(c|d)*"), after_reasoning=False)
    for text, is_complete in [("", False), ("a", True), ("b", True), ("c", True), ("d", True)]:
        assert all(map(matcher.accept, TOKENIZER.encode(text)))
        mask = matcher.mask()
        assert mask is not None
        assert matcher.is_complete is is_complete
        assert [bool(mask[token]) for token in sorted(ENDS)] == [
            is_complete and token != OBSERVATION for token in sorted(ENDS)
        ]
    calls = CONSTRAINTS.compile(ToolConstraint(TOOLS), after_reasoning=False)
    ended_by_text, ended_by_call = calls.copy(), calls.copy()
    assert ended_by_text.accept(TOKENIZER.id_of("<|user|>"))
    assert ended_by_text.is_finished
    assert not calls.accept(OBSERVATION)
    assert all(map(ended_by_call.accept, TOKENIZER.encode_with_special("<tool_call>get_time</tool_call>")))
    assert not ended_by_call.accept(TOKENIZER.id_of("<|user|>"))
    assert ended_by_call.accept(OBSERVATION)
    assert ended_by_call.is_finished


@pytest.mark.parametrize("after_reasoning", [False, True])
def test_random_models_write_either_calls_or_the_form_that_is_asked_for(after_reasoning):
    constraint = ToolConstraint(TOOLS, output=JsonConstraint(SCHEMAS[1]))
    start = CONSTRAINTS.compile(constraint, after_reasoning=after_reasoning)
    kinds = {"calls": 0, "json": 0}
    for seed in range(40):
        tokens = generated(start.copy(), seed, length=30)
        turn = turn_of(tokens, in_reasoning=after_reasoning)
        if turn.tool_calls:
            assert turn.content == ""
            assert tokens[-1] == OBSERVATION
            kinds["calls"] += 1
        else:
            jsonschema.validate(json.loads(turn.content), SCHEMAS[1])
            assert tokens[-1] != OBSERVATION
            kinds["json"] += 1
    assert min(kinds.values()) > 3


def test_text_of_a_form_has_no_calls_behind_it_and_calls_no_text_before_them():
    constraint = ToolConstraint((NOTHING,), parallel=False, output=RegexConstraint("ab?"))
    call = "<tool_call>get_time</tool_call>"
    assert accepts(constraint, "a")
    assert accepts(constraint, "ab<|user|>")
    assert accepts(constraint, call)
    assert accepts(constraint, f"hm</think>{call}", after_reasoning=True)
    assert accepts(constraint, f"hm{call}<|observation|>", after_reasoning=True)
    for wrong in ("", "b", "ab<|observation|>", f"a{call}", f"{call}a", f"{call}{call}", f"{call}<|user|>"):
        assert not accepts(constraint, wrong), wrong
    assert not accepts(constraint, "hm<|user|>", after_reasoning=True)


def test_without_stop_ids_a_complete_reply_is_finished_by_itself():
    matcher = Constraints(TOKENIZER, stop_ids=()).compile(RegexConstraint("ab"), after_reasoning=False)
    assert matcher.accept(TOKENIZER.encode("a")[0])
    assert not matcher.is_finished
    assert matcher.accept(TOKENIZER.encode("b")[0])
    assert matcher.is_finished


@pytest.mark.parametrize(
    ("constraint", "after_reasoning"),
    [
        (ToolConstraint(TOOLS), True),
        (ToolConstraint(TOOLS, required=True), False),
        (JsonConstraint(SCHEMAS[1]), True),
        (ToolConstraint(TOOLS, output=JsonConstraint(SCHEMAS[1])), False),
        (ToolConstraint(TOOLS, output=RegexConstraint("[a-z]{3,40}")), True),
    ],
)
def test_rollback_restores_every_mask_and_a_copy_goes_its_own_way(constraint, after_reasoning):
    start = CONSTRAINTS.compile(constraint, after_reasoning=after_reasoning)
    for seed in range(6):
        tokens = generated(start.copy(), seed, length=25)
        matcher, masks = start.copy(), []
        for token in tokens:
            masks.append(matcher.mask())
            assert matcher.accept(token)
        generator = np.random.default_rng(seed)
        place = len(tokens)
        for _ in range(12):
            back = int(generator.integers(0, place + 1))
            matcher.rollback(back)
            place -= back
            if place < len(tokens):
                assert np.array_equal(matcher.mask(), masks[place])
                drafts = tokens[place : place + 4]
                for mask, expected in zip(matcher.masks(drafts), masks[place : place + 5], strict=False):
                    assert np.array_equal(mask, expected)
            twin = matcher.copy()
            ahead = int(generator.integers(0, len(tokens) - place + 1))
            assert all(map(matcher.accept, tokens[place : place + ahead]))
            assert all(map(twin.accept, tokens[place:]))
            assert twin.is_finished
            place += ahead


def test_a_draft_that_is_not_allowed_changes_nothing():
    matcher = CONSTRAINTS.compile(RegexConstraint("[0-9]+"), after_reasoning=False)
    digit, letter = TOKENIZER.encode("4")[0], TOKENIZER.encode("x")[0]
    masks = matcher.masks([digit, letter, digit])
    assert [mask is not None for mask in masks] == [True, True, False, False]
    assert not matcher.accept(letter)
    assert not matcher.accept(TOKENIZER.vocab_size + 3)
    assert not matcher.accept(-1)
    assert matcher.accept(digit)
    assert matcher.is_complete


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (JsonConstraint({"type": "objekt"}), "objekt"),
        (JsonConstraint({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (JsonConstraint({"type": "string", "format": "nonsense"}), "nonsense"),
        (JsonConstraint({"not": {"type": "string"}}), "not"),
        (JsonConstraint({"const": {1, 2}}), "written as JSON"),
        (JsonConstraint({"enum": ["x" * 200_000]}), "bytes; at most 131072"),
        (JsonConstraint({"properties": {f"k{i}": {"type": "string"} for i in range(4000)}}), "too big"),
        (JsonConstraint(_deep(300)), "recursion"),
        (JsonConstraint(_deep(3000)), "recursion"),
        (JsonConstraint({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "cannot be compiled"),
        (RegexConstraint("(unclosed"), "unclosed"),
        (RegexConstraint("a(?=b)"), "look-around"),
        (ToolConstraint(()), "at least one tool"),
        (
            ToolConstraint((NOTHING, spec("bad", {"properties": {"x": {"type": "array", "items": {"not": {}}}}}))),
            "'bad'",
        ),
        (ToolConstraint((spec("bad", {"properties": {"x": {"type": "string", "pattern": "a(?=b)"}}}),)), "'bad'"),
        (ToolConstraint((spec("bad", {"properties": {"x": False}}),)), "'bad' has the parameter 'x'"),
        (ToolConstraint((spec("bad", {"anyOf": [{"required": ["x"]}]}),)), "'bad' has 'anyOf'"),
        (ToolConstraint((spec("bad", {"type": "array"}),)), "'bad' has parameters of type 'array'"),
        (ToolConstraint((spec("bad", {"properties": {f"k{i}": {} for i in range(65)}}),)), "65 parameters"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_name_in_bounded_time(constraint, reason):
    start = time.perf_counter()
    with pytest.raises(RequestError, match="(?i)" + re.escape(reason)):
        CONSTRAINTS.compile(constraint, after_reasoning=False)
    assert time.perf_counter() - start < 2


def test_a_pattern_that_explodes_ends_its_request_in_bounded_time():
    matcher = CONSTRAINTS.compile(RegexConstraint("((a{1,999}){1,999}){1,999}"), after_reasoning=False)
    token = TOKENIZER.encode("a")[0]
    start = time.perf_counter()
    with pytest.raises(RequestError, match="cannot be followed"):
        all(matcher.accept(token) and matcher.mask() is not None for _ in range(100))
    assert time.perf_counter() - start < 2


def test_a_thousand_properties_are_within_the_limits():
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1000)}}
    start = time.perf_counter()
    assert accepts(JsonConstraint(schema), '{"k3": 1, "k998":2}<|user|>')
    assert time.perf_counter() - start < 4


def test_without_the_extra_the_engine_imports_and_a_constrained_request_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for constraint in (JsonConstraint(), RegexConstraint("a"), ToolConstraint(TOOLS)):
        with pytest.raises(RequestError, match=r"yunque\[serve\]"):
            Constraints(TOKENIZER).compile(constraint, after_reasoning=False)


def test_a_vocabulary_with_holes_keeps_them_barred():
    class Holed(Tokenizer):
        """Two ids less in the middle, as in vocabularies with reserved places."""

        def token_bytes(self, token_id: int) -> bytes:
            return super().token_bytes(-1 if token_id in (300, 301) else token_id)

    tokenizer = Holed(TOKENIZER._engine)
    matcher = Constraints(tokenizer).compile(RegexConstraint("(?s:.*)"), after_reasoning=False)
    mask = matcher.mask()
    assert mask is not None
    assert len(mask) == TOKENIZER.vocab_size
    assert not mask[[300, 301]].any()
    assert mask[299]
    assert not matcher.accept(300)


def test_threads_compile_at_once_and_none_waits_for_another():
    """A known grammar is found at once while other threads compile costly ones."""
    constraints = Constraints(TOKENIZER)
    constraints.compile(JsonConstraint({"type": "object"}), after_reasoning=False)

    def wide(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{number}_{i}": {"type": "string"} for i in range(300)}}

    with ThreadPoolExecutor(4) as pool:
        costly = [pool.submit(constraints.compile, JsonConstraint(wide(n)), after_reasoning=False) for n in range(40)]
        longest_s, asked = 0.0, 0
        while not all(task.done() for task in costly):
            begin_s = time.perf_counter()
            constraints.compile(JsonConstraint({"type": "object"}), after_reasoning=False)
            longest_s, asked = max(longest_s, time.perf_counter() - begin_s), asked + 1
        assert all(isinstance(task.result(), Matcher) for task in costly)
    assert asked > 40
    assert longest_s < 0.3
    assert len(constraints._grammars) <= 32
