"""Which tokens a constraint leaves at each place of a reply: thought, text, tool calls, or one JSON value."""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yunque.core.errors import DataError, TemplateError
from yunque.core.records import ToolSpec
from yunque.engine.tool_grammar import call_grammar
from yunque.engine.vocabulary import Vocabulary
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Constraint, JsonConstraint, RegexConstraint, ToolConstraint
from yunque.text import SpecialTokens, Tokenizer

# Shapes: V vocabulary.

MAX_GRAMMAR_BYTES = 128 * 1024
"""A larger schema, pattern or set of tools is refused before it is compiled."""

_LIMITS = {
    "max_grammar_size": 15_000,  # about 1,000 properties; compiling ends within about 0.3 s
    "initial_lexer_fuel": 1_000_000,
    "max_items_in_row": 8_000,
    "step_lexer_fuel": 200_000,  # a mask takes at most about 20 ms
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # each 1 to 2 kB
    "verbose_errors": False,  # errors go to the client: no grammar in them
}
_CACHED_GRAMMARS = 32
_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_WHITE_SPACE = r"[ \t\n\r]{1,64}"


class _Phase(Enum):
    THOUGHT = auto()
    TEXT = auto()
    FIRST_CALL = auto()
    CALL = auto()
    AFTER_CALL = auto()
    BODY = auto()
    BODY_OR_CALL = auto()
    ENDED = auto()


@dataclass(frozen=True)
class _Place:
    """A phase without a grammar: the tokens it allows (None: all), and those that lead out of it."""

    allowed_V: NDArray[np.bool_] | None
    moves: Mapping[int, _Phase]

    def next(self, token: int, here: _Phase) -> _Phase | None:
        if self.allowed_V is not None and not (0 <= token < len(self.allowed_V) and self.allowed_V[token]):
            return None
        return self.moves.get(token, here)


@dataclass(frozen=True)
class _Plan:
    """A compiled constraint. ``call`` and ``body`` are grammars before their first tokens; matchers work on copies.
    ``tool_call`` opens a call where there could be a body."""

    places: Mapping[_Phase, _Place]
    ends: frozenset[int]
    vocab_size: int
    call: Any = None
    body: Any = None
    tool_call: int | None = None

    def grammar(self, phase: _Phase) -> Any:
        """What a phase begins with; None if it has no grammar."""
        if phase in (_Phase.BODY, _Phase.BODY_OR_CALL):
            return _copy(self.body)
        return _copy(self.call) if phase is _Phase.CALL else None


@dataclass(frozen=True)
class _Left:
    """That a phase was left with the token of this number."""

    token_number: int
    phase: _Phase
    grammar: Any


class Matcher:
    """Follows one reply. ``masks``, ``rollback`` and ``copy`` serve drafts; a rejected token changes nothing."""

    def __init__(self, plan: _Plan, phase: _Phase) -> None:
        self._plan = plan
        self._num_tokens = 0
        self._left: list[_Left] = []
        self._phase = phase
        self._grammar: Any = plan.grammar(phase)

    def mask(self) -> NDArray[np.bool_] | None:
        """The tokens that may come next [V], not to be written to; None if every token may.

        Raises ``RequestError`` if the constraint has become too complex or leaves nothing.
        """
        place = self._plan.places.get(self._phase)
        if place is not None:
            return place.allowed_V
        bits = np.frombuffer(self._grammar.compute_bitmask(), np.uint8)
        self._check()
        allowed_V = np.unpackbits(bits, count=self._plan.vocab_size, bitorder="little").view(np.bool_)
        if self._phase is not _Phase.CALL and self._plan.ends:
            allowed_V[list(self._plan.ends)] = self._grammar.is_accepting()
        if self._phase is _Phase.BODY_OR_CALL:
            allowed_V[self._plan.tool_call] = True
        if not self.is_complete and not allowed_V.any():
            raise RequestError("the constraint leaves no token that could come next", param="constraint")
        return allowed_V

    def accept(self, token: int) -> bool:
        """Read the next token; False, and nothing changes, if it is not allowed."""
        place, left = self._plan.places.get(self._phase), self._grammar
        if place is not None:
            phase = place.next(token, self._phase)
        elif self._phase is _Phase.BODY_OR_CALL and token == self._plan.tool_call:
            phase = _Phase.CALL
        elif self._phase is _Phase.BODY_OR_CALL and token not in self._plan.ends:
            self._grammar = _copy(left)
            phase = _Phase.BODY if self._reads(token) else None
            if phase is None:
                self._grammar = left
        elif self._phase is not _Phase.CALL and token in self._plan.ends:
            phase = _Phase.ENDED if self._grammar.is_accepting() else None
        elif not self._reads(token):
            phase = None
        else:
            ends_call = self._phase is _Phase.CALL and self._grammar.is_accepting()
            phase = _Phase.AFTER_CALL if ends_call else self._phase
        if phase is None:
            return False
        if phase is not self._phase:
            self._left.append(_Left(self._num_tokens, self._phase, left))
            if (self._phase, phase) != (_Phase.BODY_OR_CALL, _Phase.BODY):
                self._grammar = self._plan.grammar(phase)
            self._phase = phase
        self._num_tokens += 1
        return True

    def _reads(self, token: int) -> bool:
        if 0 <= token < self._plan.vocab_size and self._grammar.try_consume_tokens([token]) > 0:
            return True
        self._check()
        return False

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.bool_] | None]:
        """``mask`` here and after each of ``drafts``; the state stays.

        What follows a draft that is not allowed or ends the reply is never drawn: its masks are None.
        """
        ahead = self._fork()
        masks = [ahead.mask()]
        for draft in drafts:
            if not ahead.accept(draft) or ahead.is_finished:
                break
            masks.append(ahead.mask())
        return masks + [None] * (len(drafts) + 1 - len(masks))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` accepted tokens."""
        assert 0 <= num_tokens <= self._num_tokens, f"{num_tokens} of {self._num_tokens} tokens"
        target = self._num_tokens - num_tokens
        while self._left and self._left[-1].token_number >= target:
            left = self._left.pop()
            self._phase, self._grammar, self._num_tokens = left.phase, left.grammar, left.token_number
            if left.phase is _Phase.CALL:  # its grammar read the token that ended the call
                self._grammar.rollback(1)
        if self._grammar is not None and self._num_tokens > target:
            self._grammar.rollback(self._num_tokens - target)
        self._num_tokens = target

    def copy(self) -> Matcher:
        """A matcher in the same state that goes its own way."""
        twin = self._fork()
        twin._left = [_Left(left.token_number, left.phase, _copy(left.grammar)) for left in self._left]
        return twin

    def _fork(self) -> Matcher:
        """A copy that cannot be rolled back behind this place."""
        twin = Matcher(self._plan, _Phase.ENDED)
        twin._num_tokens, twin._phase, twin._grammar = self._num_tokens, self._phase, _copy(self._grammar)
        return twin

    @property
    def is_complete(self) -> bool:
        """Whether the reply may end here."""
        place = self._plan.places.get(self._phase)
        if place is not None:
            return self._phase in (_Phase.ENDED, _Phase.AFTER_CALL) or _Phase.ENDED in place.moves.values()
        return self._phase is not _Phase.CALL and self._grammar.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow: an end was accepted, or the reply is complete and no token may come."""
        if self._phase is _Phase.BODY:
            return not self._plan.ends and self._grammar.is_stopped()
        place = self._plan.places.get(self._phase)
        return place is not None and place.allowed_V is not None and not place.allowed_V.any()

    def _check(self) -> None:
        if self._grammar.is_error():
            reason = _reason(self._grammar.get_error())
            raise RequestError(f"the constraint cannot be followed: {reason}", param="constraint")


class Constraints:
    """Compiles constraints for one tokenizer and keeps what is costly: its tokens as a tree, recent grammars. Threads
    may compile at once; none waits for another.

    ``stop_ids`` are what ends a reply; None means the GLM tokens that do, as far as the vocabulary has them.
    ``<|observation|>`` then ends only a reply with tool calls, the others only one without.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int] | None = None) -> None:
        self._tokenizer = tokenizer
        found = {tokenizer.find(token) for token in _ENDS} if stop_ids is None else set(stop_ids)
        self._ends = frozenset(token for token in found if token is not None)
        self._grammars: OrderedDict[str, Any] = OrderedDict()
        self._touching = Lock()

    def compile(self, constraint: Constraint, *, after_reasoning: bool) -> Matcher:
        """A matcher at the start of a reply.

        ``after_reasoning``: the prompt opened ``<think>``; what stands before ``</think>`` is free, except that
        the reply cannot end there while the constraint still asks for something. Raises ``RequestError`` for a
        schema or pattern that is too large, wrong or not supported, and where the extra is not installed.
        """
        if isinstance(constraint, ToolConstraint):
            return self._tool_calls(constraint, after_reasoning=after_reasoning)
        phase = _Phase.THOUGHT if after_reasoning else _Phase.BODY
        places = {_Phase.ENDED: self._ended}
        if after_reasoning:
            tool_call = self._tokenizer.find("<tool_call>")
            barred = self._ends if tool_call is None else {*self._ends, tool_call}
            moves = {self._id_of("</think>"): _Phase.BODY}
            places[_Phase.THOUGHT] = _Place(self._all_but(barred), moves)
        ends = self._ends_of_text or self._ends
        return Matcher(_Plan(places, ends, self._tokenizer.vocab_size, body=self._body(constraint)), phase)

    def _tool_calls(self, constraint: ToolConstraint, *, after_reasoning: bool) -> Matcher:
        tool_call = self._id_of("<tool_call>")
        grammar = self._call_grammar(constraint)
        is_bound = constraint.required or constraint.output is not None
        start = _Phase.FIRST_CALL if constraint.required else _Phase.BODY_OR_CALL if is_bound else _Phase.TEXT
        calls = {tool_call: _Phase.CALL}
        text_ends = dict.fromkeys(self._ends_of_text or self._ends, _Phase.ENDED)
        after = dict.fromkeys(self._ends_of_calls or self._ends, _Phase.ENDED)
        after |= calls if constraint.parallel else {}
        words = self._all_but(self._tokenizer.added_ids)
        places = {
            _Phase.FIRST_CALL: _Place(self._only(calls), calls),
            _Phase.TEXT: _Place(words | self._only({*calls, *text_ends}), {**calls, **text_ends}),
            _Phase.AFTER_CALL: _Place(self._only(after), after),
            _Phase.ENDED: self._ended,
        }
        if after_reasoning:
            allowed_V = self._all_but(self._ends) if is_bound else None
            moves = {**calls, self._id_of("</think>"): start}
            if not is_bound:
                moves |= dict.fromkeys(self._ends, _Phase.ENDED)
            places[_Phase.THOUGHT] = _Place(allowed_V, moves)
        vocab_size, ends = self._tokenizer.vocab_size, frozenset[int]()
        body = None if start is not _Phase.BODY_OR_CALL or constraint.output is None else self._body(constraint.output)
        if body is not None:
            ends = self._ends_of_text or self._ends
        plan = _Plan(places, ends, vocab_size, call=grammar, body=body, tool_call=tool_call)
        return Matcher(plan, _Phase.THOUGHT if after_reasoning else start)

    def _body(self, constraint: JsonConstraint | RegexConstraint) -> Any:
        if isinstance(constraint, RegexConstraint):
            return self._compiled("regex", constraint.pattern)
        schema = {**(constraint.schema or {"type": "object"})}
        # White space is bounded: a model that is unsure of the next token could write it for ever.
        schema["x-guidance"] = {"whitespace_pattern": _WHITE_SPACE}
        try:
            return self._compiled("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema cannot be written as JSON: {error}", param="constraint") from error

    def _call_grammar(self, constraint: ToolConstraint) -> Any:
        try:
            special = self._tokenizer.special
        except TemplateError as error:
            raise RequestError(str(error), param="tools") from error
        grammar = call_grammar(constraint.tools, special, self._library.regex_to_lark)
        try:
            return self._compiled("lark", grammar)
        except RequestError:
            for tool in constraint.tools:
                self._blame(tool, special)
            raise

    def _blame(self, tool: ToolSpec, special: SpecialTokens) -> None:
        """Raise with the tool's name the error that its grammar alone has, if any."""
        try:
            self._compiled("lark", call_grammar([tool], special, self._library.regex_to_lark))
        except RequestError as error:
            raise RequestError(f"tool {tool.name!r}: {error}", param="tools") from error

    def _compiled(self, kind: str, text: str) -> Any:
        """The grammar of ``text`` before its first token; not to be advanced."""
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the constraint takes {len(text.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are compiled",
                param="constraint",
            )
        key = f"{kind} {text}"
        with self._touching:
            known = self._grammars.get(key)
        compiled = self._new_grammar(kind, text) if known is None else known
        with self._touching:
            self._grammars[key] = compiled
            self._grammars.move_to_end(key)
            if len(self._grammars) > _CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return compiled

    def _new_grammar(self, kind: str, text: str) -> Any:
        matcher = self._library.LLMatcher
        grammar = getattr(matcher, f"grammar_from_{kind}")(text)
        limits = self._library.LLParserLimits(**_LIMITS)
        compiled = matcher(self._tokens, grammar, log_level=0, limits=limits)
        trial = compiled.deep_copy()
        trial.compute_bitmask()  # also finds a grammar that admits nothing
        if trial.is_error():
            reason = _reason(trial.get_error())
            raise RequestError(f"the constraint cannot be compiled: {reason}", param="constraint")
        return compiled

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError as error:
            raise RequestError(
                "constraints need the llguidance package; install the extra: pip install 'yunque[serve]'",
                param="constraint",
            ) from error

    @cached_property
    def _tokens(self) -> Any:
        """The vocabulary in llguidance's form; its end token is an id of our own after the last real one."""
        wrapper = self._library.TokenizerWrapper(Vocabulary(self._tokenizer))
        return self._library.LLTokenizer(wrapper, eos_token=self._tokenizer.vocab_size)

    @cached_property
    def _ends_of_calls(self) -> frozenset[int]:
        return self._ends & {self._tokenizer.find("<|observation|>")}

    @cached_property
    def _ends_of_text(self) -> frozenset[int]:
        return self._ends - self._ends_of_calls

    @cached_property
    def _ended(self) -> _Place:
        return _Place(self._only(()), {})

    def _only(self, ids: Iterable[int]) -> NDArray[np.bool_]:
        allowed_V = np.zeros(self._tokenizer.vocab_size, np.bool_)
        allowed_V[list(ids)] = True
        return allowed_V

    def _all_but(self, ids: Iterable[int]) -> NDArray[np.bool_]:
        return ~self._only(ids)

    def _id_of(self, tag: str) -> int:
        try:
            return self._tokenizer.id_of(tag)
        except DataError as error:
            raise RequestError(f"the constraint needs the tag {tag}: {error}", param="constraint") from error


def _copy(grammar: Any) -> Any:
    return None if grammar is None else grammar.deep_copy()


def _reason(message: str) -> str:
    """The line of llguidance's message that says why; the others quote the input and point into it."""
    lines = message.strip().splitlines() or ["no reason is given"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
