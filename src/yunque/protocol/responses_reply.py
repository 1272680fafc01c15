"""OpenAI's Responses API: a reply's items as numbered stream events, and the same reply whole."""

from collections.abc import Mapping
from typing import Any, Literal

from yunque.protocol.responses import ResponsesRequest, ToolChoiceParam

Status = Literal["completed", "incomplete"]


def usage(*, prompt_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """Counts in the shape of the Responses API: cached and reasoning tokens are parts of the others."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }


def envelope(request: ResponsesRequest, *, model: str, response_id: str, created_at_s: int) -> dict[str, Any]:
    """A response without output: what the request asked for, as the API repeats it."""
    choice = request.tool_choice
    form = request.text.format if request.text is not None else None
    reasoning = request.reasoning.model_dump() if request.reasoning is not None else {"effort": None, "summary": None}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at_s,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": reasoning,
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)},
        "tool_choice": choice.model_dump(exclude_unset=True)
        if isinstance(choice, ToolChoiceParam)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


class ResponseBuilder:
    """Items of one reply in the order in which they were written. Each method gives the stream events it causes, with
    rising ``sequence_number``; ``whole`` is the reply that the stream's last event carries.

    A call goes out as it grows: its arguments are text, and unfinished text is no valid JSON. One that turns out to be
    unusable ends ``incomplete`` and is not part of ``whole``.
    """

    def __init__(self, envelope: Mapping[str, Any], *, thought_as_summary: bool = False) -> None:
        self._response = dict(envelope)
        self._suffix = str(envelope["id"]).partition("_")[2]
        self._thought_as_summary = thought_as_summary
        self._output: list[dict[str, Any]] = []
        self._next_index = 0
        self._next_number = 0
        self._open: dict[str, Any] | None = None
        self._written: list[str] = []

    def start(self) -> list[dict[str, Any]]:
        """Begin the response."""
        return [
            self._event("response.created", response=dict(self._response)),
            self._event("response.in_progress", response=dict(self._response)),
        ]

    def thinking(self, text: str) -> list[dict[str, Any]]:
        """The thought goes on."""
        return self._write("reasoning", text)

    def text(self, text: str) -> list[dict[str, Any]]:
        """The answer goes on."""
        return self._write("message", text)

    def begin_call(self, call_id: str, name: str) -> list[dict[str, Any]]:
        """A call of a function begins."""
        return self._begin("function_call", {"call_id": call_id, "name": name, "arguments": ""})

    def arguments(self, text: str) -> list[dict[str, Any]]:
        """The JSON of the call's arguments goes on."""
        return [self._delta("response.function_call_arguments.delta", text)]

    def end_call(self) -> list[dict[str, Any]]:
        """The call is complete."""
        return self._close("completed")

    def void_call(self) -> list[dict[str, Any]]:
        """The call cannot be used."""
        closed = self._close("incomplete")
        self._output.pop()
        return closed

    def end(self, usage: Mapping[str, Any], *, is_cut: bool) -> list[dict[str, Any]]:
        """End the response: complete, or cut at a limit of length."""
        status: Status = "incomplete" if is_cut else "completed"
        closed = self._close(status)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        self._response |= {"status": status, "output": self._output, "usage": dict(usage), **details}
        return [*closed, self._event(f"response.{status}", response=dict(self._response))]

    def fail(self, message: str) -> list[dict[str, Any]]:
        """End the response with an error: what came before it is right, but not all."""
        closed = self._close("incomplete")
        error = {"code": "server_error", "message": message}
        self._response |= {"status": "failed", "output": self._output, "error": error}
        return [*closed, self._event("response.failed", response=dict(self._response))]

    @property
    def whole(self) -> dict[str, Any]:
        """The reply of a request without ``stream``; complete after ``end``."""
        return self._response

    def _write(self, kind: Literal["reasoning", "message"], text: str) -> list[dict[str, Any]]:
        begun: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != kind:
            fields = {"summary": []} if kind == "reasoning" else {"role": "assistant", "content": []}
            begun = self._begin(kind, fields)
            begun.append(self._part_event("added", ""))
        if kind == "message":
            return [*begun, self._delta("response.output_text.delta", text, content_index=0, logprobs=[])]
        if self._thought_as_summary:
            return [*begun, self._delta("response.reasoning_summary_text.delta", text, summary_index=0)]
        return [*begun, self._delta("response.reasoning_text.delta", text, content_index=0)]

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        closed = self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = {"type": kind, "id": f"{prefix}_{self._suffix}_{self._next_index}", "status": "in_progress", **fields}
        self._open, self._written = item, []
        self._output.append(item)
        return [*closed, self._event("response.output_item.added", output_index=self._next_index, item=dict(item))]

    def _close(self, status: Literal["completed", "incomplete"]) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item, text = self._open, "".join(self._written)
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._placed("response.function_call_arguments.done", arguments=text, name=item["name"])]
        elif item["type"] == "message":
            item["content"] = [_output_text(text)]
            done = self._placed("response.output_text.done", content_index=0, text=text, logprobs=[])
            events = [done, self._part_event("done", text)]
        elif self._thought_as_summary:
            item["summary"] = [{"type": "summary_text", "text": text}]
            done = self._placed("response.reasoning_summary_text.done", summary_index=0, text=text)
            events = [done, self._part_event("done", text)]
        else:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            done = self._placed("response.reasoning_text.done", content_index=0, text=text)
            events = [done, self._part_event("done", text)]
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._next_index, item=dict(item)))
        self._open = None
        self._next_index += 1
        return events

    def _part_event(self, change: Literal["added", "done"], text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "message":
            return self._placed(f"response.content_part.{change}", content_index=0, part=_output_text(text))
        if self._thought_as_summary:
            part = {"type": "summary_text", "text": text}
            return self._placed(f"response.reasoning_summary_part.{change}", summary_index=0, part=part)
        part = {"type": "reasoning_text", "text": text}
        return self._placed(f"response.content_part.{change}", content_index=0, part=part)

    def _delta(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        self._written.append(text)
        return self._placed(kind, **fields, delta=text)

    def _placed(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the open item."""
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._next_index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._next_number = self._next_number, self._next_number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
