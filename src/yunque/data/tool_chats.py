"""Small synthetic conversations with tools, in OpenAI's shape, which a model of 1 M parameters can learn."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from yunque.core.checks import at_least, share
from yunque.core.seeds import Seeds
from yunque.data.documents import Split, split_of
from yunque.data.source import ChatSource

Row = dict[str, Any]

_CITIES = (
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Paris",
    "Delhi",
    "Quito",
    "Tokyo",
    "Milan",
    "Dakar",
    "Seoul",
    "Porto",
    "Accra",
    "Hanoi",
    "Perth",
    "Minsk",
    "Turin",
    "Basel",
    "Lagos",
    "Osaka",
    "Miami",
    "Malmo",
    "Cork",
    "Bonn",
)
_NAMES = (
    "Ana",
    "Ben",
    "Eva",
    "Leo",
    "Mia",
    "Tom",
    "Ida",
    "Max",
    "Zoe",
    "Sam",
    "Lea",
    "Jan",
    "Amy",
    "Kai",
    "Uma",
    "Ian",
)
_COLORS = ("red", "blue", "green", "black", "white", "gold", "pink", "gray")
_THINGS = ("lamp", "cup", "book", "chair", "pen", "door", "key", "box", "hat", "ring", "bell", "map")
_VERBS = ("buy", "find", "bring", "fix", "sell", "clean")
_SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")

#: Of every tool's possible arguments, the share that only held-out conversations use.
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ToolChatSource(ChatSource):
    """Settings of the generator; the same settings always give the same conversations.

    ``tools_shown`` is how many tools each conversation offers (those it needs among them); a conversation has 1 to
    ``max_questions`` questions; the shares are of questions answered without a tool or with reasoning.
    """

    kind: Literal["tools"] = "tools"
    num_train: int = 4000
    num_held_out: int = 200
    seed: int = 0
    tools_shown: int = 2
    max_questions: int = 2
    no_tool_share: float = 0.15
    reasoning_share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, num_train=self.num_train, num_held_out=self.num_held_out)
        if not 2 <= self.tools_shown <= len(_TOOLS):
            raise ValueError(f"tools_shown {self.tools_shown}; valid: 2 to {len(_TOOLS)}")
        at_least(1, max_questions=self.max_questions)
        share(no_tool_share=self.no_tool_share, reasoning_share=self.reasoning_share)


@dataclass(frozen=True)
class Tool:
    """One tool: what it is told to the model as, how people ask for it, and what it does."""

    name: str
    description: str
    parameters: Mapping[str, str]
    questions: tuple[str, ...]
    answer: str
    draw: Callable[[random.Random], dict[str, Any]]
    run: Callable[[Mapping[str, Any], random.Random], str]

    def spec(self) -> Row:
        """The tool in OpenAI's shape."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


_TOOLS = (
    Tool(
        "get_weather",
        "Weather of a city.",
        {"city": "string", "days": "integer"},
        ("What is the weather in {city} in {days} days?", "Weather in {city}, {days} days from now?"),
        "{city}: {result}.",
        lambda rng: {"city": rng.choice(_CITIES), "days": rng.randint(2, 14)},
        lambda _, rng: f"{rng.choice(_SKIES)}, {rng.randint(1, 35)} C",
    ),
    Tool(
        "add",
        "Add two numbers.",
        {"a": "integer", "b": "integer"},
        ("What is {a} plus {b}?", "Add {a} and {b}."),
        "The sum is {result}.",
        lambda rng: {"a": rng.randint(1, 99), "b": rng.randint(1, 99)},
        lambda arguments, _: str(arguments["a"] + arguments["b"]),
    ),
    Tool(
        "lookup",
        "Look up a key.",
        {"key": "string"},
        ("Look up {key}.", "What is stored under {key}?"),
        "{key} is {result}.",
        lambda rng: {"key": f"{rng.choice(_COLORS)}-{rng.randint(10, 99)}"},
        lambda _, rng: f"{rng.choice(_COLORS)} {rng.choice(_THINGS)}",
    ),
    Tool(
        "set_timer",
        "Start a timer.",
        {"minutes": "integer"},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
        "The timer runs for {minutes} minutes.",
        lambda rng: {"minutes": rng.randint(2, 120)},
        lambda _, rng: f"timer {rng.randint(1, 9)} started",
    ),
    Tool(
        "send_note",
        "Send a note to a person.",
        {"to": "string", "text": "string"},
        ("Tell {to} to {text}.", "Send {to} a note: {text}."),
        "I sent the note to {to}.",
        lambda rng: {"to": rng.choice(_NAMES), "text": f"{rng.choice(_VERBS)} the {rng.choice(_THINGS)}"},
        lambda _, __: "sent",
    ),
    Tool(
        "get_price",
        "Price of some items.",
        {"item": "string", "count": "integer"},
        ("What do {count} of {item} cost?", "Price of {item}, {count} pieces?"),
        "{count} of {item} cost {result}.",
        lambda rng: {"item": f"{rng.choice(_COLORS)} {rng.choice(_THINGS)}", "count": rng.randint(2, 20)},
        lambda _, rng: f"{rng.randint(3, 99)} euros",
    ),
)

_SMALL_TALK = (
    ("My name is {name}. I have a {color} {thing}.", "Hello {name}! A {color} {thing} is nice."),
    ("Say {color} {thing}, {name}.", "{color} {thing}, {name}."),
)


def tool_chats(settings: ToolChatSource, split: Split) -> Iterator[Row]:
    """The conversations of one split, as rows ``{"messages": [...], "tools": [...]}``.

    Arguments are drawn until their hash falls in the split, so that no call of a held-out conversation has
    the arguments of one in training, while every word and number of them is seen there.
    """
    number = settings.num_train if split == "train" else settings.num_held_out
    seeds = Seeds(settings.seed)
    for index in range(number):
        yield _conversation(seeds.python("tool chats", split, index), settings, split)


def _conversation(rng: random.Random, settings: ToolChatSource, split: Split) -> Row:
    needed = rng.sample(_TOOLS, settings.tools_shown)
    messages: list[Row] = []
    for turn in range(rng.randint(1, settings.max_questions)):
        thinks = rng.random() < settings.reasoning_share
        if rng.random() < settings.no_tool_share:
            messages += _small_talk(rng, split, thinks)
        else:
            messages += _tool_turn(rng, split, needed[turn % len(needed)], thinks, call_id=f"call_{turn + 1}")
    return {"messages": messages, "tools": [tool.spec() for tool in rng.sample(needed, len(needed))]}


def _tool_turn(rng: random.Random, split: Split, tool: Tool, thinks: bool, call_id: str) -> list[Row]:
    arguments = _drawn_in(split, tool.name, tool.draw, rng)
    result = tool.run(arguments, rng)
    function = {"name": tool.name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    answer = tool.answer.format(**arguments, result=result)
    return [
        {"role": "user", "content": rng.choice(tool.questions).format(**arguments)},
        _assistant("", f"I need {tool.name}." if thinks else None) | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
        _assistant(answer, "I have the result." if thinks else None),
    ]


def _small_talk(rng: random.Random, split: Split, thinks: bool) -> list[Row]:
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"name": rng.choice(_NAMES), "color": rng.choice(_COLORS), "thing": rng.choice(_THINGS)}

    words = _drawn_in(split, "small talk", draw, rng)
    question, answer = rng.choice(_SMALL_TALK)
    reasoning = "No tool is needed." if thinks else None
    return [
        {"role": "user", "content": question.format(**words)},
        _assistant(answer.format(**words), reasoning),
    ]


def _assistant(content: str, reasoning: str | None) -> Row:
    message: Row = {"role": "assistant", "content": content}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


def _drawn_in(split: Split, name: str, draw: Callable[[random.Random], dict[str, Any]], rng: random.Random) -> Row:
    while True:
        values = draw(rng)
        if split_of(json.dumps([name, values]), HELD_OUT_SHARE) == split:
            return values
