"""One assistant turn asked of an engine: a chat in, steps of neutral events out. Every chat dialect stands on it.

A dialect reads its request into a ``ChatTurn``; then::

    turn = await conversations.prepare(chat)            # RequestError, ContextLengthExceeded, ...
    steps = conversations.start(turn)                   # Overloaded, ...: still before the first byte of the reply
    async with contextlib.aclosing(steps):              # leaving aborts the request and frees its pages
        async for step in steps: ...                    # or: whole = await collect(steps)
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

from yunque.core.errors import DataError, TemplateError, unknown
from yunque.core.records import Message, ToolSpec
from yunque.protocol.errors import ContextLengthExceeded, RequestError
from yunque.protocol.generation import (
    Constraint,
    EngineService,
    GenerationRequest,
    JsonConstraint,
    RegexConstraint,
    SamplingParams,
    ToolConstraint,
)
from yunque.serve.long_texts import LongTexts
from yunque.serve.turn_reader import CallEnd, CallStart, CallVoid, TurnEvent, TurnReader
from yunque.serve.turn_steps import FinishedTurn, TurnEnd, TurnObserver, TurnStep, TurnSteps, Usage, collect
from yunque.text import ReasoningDelta, Rendered, Renderer, TemplateKwargs, TextDelta, ToolCallDelta

__all__ = [
    "CallEnd",
    "CallStart",
    "CallVoid",
    "ChatTurn",
    "Conversations",
    "FinishedTurn",
    "PreparedTurn",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallDelta",
    "ToolChoice",
    "TurnEnd",
    "TurnEvent",
    "TurnObserver",
    "TurnStep",
    "TurnSteps",
    "Usage",
    "collect",
]

BARRED = -1e9
"""The logit bias of a token that must not be sampled."""


@dataclass(frozen=True)
class ToolChoice:
    """``auto``: text or calls; ``none``: no call; ``required``: at least one; ``named``: one call of ``name``."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ChatTurn:
    """What a client asks for, in no dialect. ``template`` holds ``chat_template_kwargs`` (enable_thinking,
    clear_thinking, reasoning_effort); ``output`` is the form that the answer must have; ``sampling`` has neither the
    chat format's stop ids nor a constraint: ``Conversations.prepare`` adds them. ``resumed`` are ids that the reply
    begins with (another engine made them)."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    output: JsonConstraint | RegexConstraint | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    resumed: tuple[int, ...] = ()


@dataclass(frozen=True)
class PreparedTurn:
    """A turn ready for the engine: its prompt, whether that opened a thought, and the complete sampling settings."""

    prompt: tuple[int, ...]
    opens_reasoning: bool
    tools: tuple[ToolSpec, ...]
    sampling: SamplingParams
    session: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    resumed: tuple[int, ...] = ()


class Conversations:
    """Turns of one engine in one chat format."""

    def __init__(self, service: EngineService, renderer: Renderer, observer: TurnObserver | None = None) -> None:
        self.service = service
        self.renderer = renderer
        self.long_texts = LongTexts(renderer.tokenizer)
        self._observer = observer
        self.live: WeakValueDictionary[str, TurnSteps] = WeakValueDictionary()
        """Replies that may still run, by request id: where an abort finds them."""

    async def prepare(self, chat: ChatTurn) -> PreparedTurn:
        """Render a chat and complete its sampling settings. Raises ``RequestError`` for what cannot be asked."""
        constraint, bias = self._constraint(chat)
        size = sum(len((message.content or "").strip()) for message in chat.messages)
        self.long_texts.check_fits(size, self.service.info.max_model_len, param="messages")
        rendered = await self.render(chat)
        prompt = rendered.tokens
        if len(prompt) >= self.service.info.max_model_len:
            raise ContextLengthExceeded(
                f"the conversation has {len(prompt)} tokens and the model's context "
                f"{self.service.info.max_model_len}: no reply fits",
                param="messages",
            )
        if constraint is not None:
            await self.service.prepare(constraint)
        special = self.renderer.tokenizer.special
        sampling = replace(
            chat.sampling,
            stop_ids=chat.sampling.stop_ids | frozenset(special.eos_ids),
            logit_bias={**chat.sampling.logit_bias, **bias},
            constraint=constraint,
        )
        return PreparedTurn(
            prompt,
            rendered.opens_reasoning,
            chat.tools,
            sampling,
            session=chat.session,
            priority=chat.priority,
            cache_salt=chat.cache_salt,
            resumed=chat.resumed,
        )

    async def render(self, chat: ChatTurn, *, add_generation_prompt: bool = True) -> Rendered:
        """The ids of a chat; a long one is rendered in a thread. Raises ``RequestError``."""
        texts = (len(message.content or "") + len(message.reasoning or "") for message in chat.messages)
        objects = (*(tool.raw for tool in chat.tools), *(message.tool_calls for message in chat.messages))
        size = sum(texts) + sum(len(repr(shown)) for shown in objects)
        try:
            options = TemplateKwargs(**chat.template)  # the renderer checks keys and values
            render = partial(
                self.renderer.render,
                chat.messages,
                chat.tools,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
            return await self.long_texts.run(render, size)
        except TemplateError as error:
            param = "chat_template_kwargs" if chat.messages else "messages"
            raise RequestError(str(error), param=param) from error
        except DataError as error:
            raise RequestError(str(error), param="messages") from error

    def start(self, turn: PreparedTurn, *, request_id: str | None = None, choice: int = 0) -> "TurnSteps":
        """Submit a turn at once (raises what ``EngineService.submit`` raises) and give its steps.

        ``choice`` numbers the replies to one request: each has its own seed.
        """
        sampling = turn.sampling
        if sampling.seed is not None and choice:
            sampling = replace(sampling, seed=sampling.seed + choice)
        request = GenerationRequest(
            id=f"{request_id or uuid.uuid4().hex}-{choice}",
            tokens=turn.prompt + turn.resumed,
            sampling=sampling,
            session=turn.session,
            priority=turn.priority,
            cache_salt=turn.cache_salt,
            reply_start=len(turn.prompt) if turn.resumed else None,
        )
        reader = TurnReader(self.renderer.tokenizer, turn.tools, in_reasoning=turn.opens_reasoning, stops=sampling.stop)
        deltas = self.service.submit(request)
        steps = TurnSteps(deltas, reader, len(turn.prompt), self._observer, resumed=turn.resumed)
        self.live[request.id] = steps
        return steps

    def _constraint(self, chat: ChatTurn) -> tuple[Constraint | None, Mapping[int, float]]:
        """The form of the reply, and the tokens barred from it.

        Tools stay in the prompt when they must not be called, so that its cached prefix holds: the token that opens
        a call is barred instead. Free calls are constrained only where asked for (``strict``, or one call at most):
        a constraint changes the distribution that the tokens are drawn from.
        """
        choice, tools = chat.tool_choice, chat.tools
        match choice.mode:
            case "named" | "required" if not tools:
                raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
            case "named":
                named = tuple(tool for tool in tools if tool.name == choice.name)
                if not named:
                    message = unknown("tool", str(choice.name), (tool.name for tool in tools))
                    raise RequestError(message, param="tool_choice")
                return ToolConstraint(named[:1], required=True, parallel=False), {}
            case "required":
                return ToolConstraint(tools, required=True, parallel=chat.parallel_tool_calls), {}
            case "none" if tools:
                return chat.output, {self.renderer.tokenizer.special["<tool_call>"]: BARRED}
            case "auto" if tools and chat.output is not None:
                return ToolConstraint(tools, parallel=chat.parallel_tool_calls, output=chat.output), {}
            case "auto" if tools and (not chat.parallel_tool_calls or any(map(_is_strict, tools))):
                return ToolConstraint(tools, parallel=chat.parallel_tool_calls), {}
            case _:
                return chat.output, {}


def _is_strict(tool: ToolSpec) -> bool:
    return tool.function.get("strict") is True or tool.raw.get("strict") is True
