"""The loop around a client: tools, messages, turns; imports without torch."""

from yunque.agents.chat_client import BadCall, CallDelta, ChatClient, ChatEvent, ChatOptions, ChatReply, ChatUsage
from yunque.agents.http_chat import HttpChatClient
from yunque.agents.loop import LoopDone, LoopEnd, LoopEvent, ToolEnded, ToolStarted, TurnAdded, answer, converse
from yunque.agents.tool_files import load_tools
from yunque.agents.tools import Tool, ToolResult, Toolset

__all__ = [
    "BadCall",
    "CallDelta",
    "ChatClient",
    "ChatEvent",
    "ChatOptions",
    "ChatReply",
    "ChatUsage",
    "HttpChatClient",
    "LoopDone",
    "LoopEnd",
    "LoopEvent",
    "Tool",
    "ToolEnded",
    "ToolResult",
    "ToolStarted",
    "Toolset",
    "TurnAdded",
    "answer",
    "converse",
    "load_tools",
]
