"""Why a request cannot be served, independent of the wire it came over."""

from yunque.core.errors import YunqueError


class RequestError(YunqueError):
    """The request is at fault; nothing of it ran. ``param`` names the field, where one is to blame."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestError):
    """Prompt and reply do not fit into the model's context, or into the cache of this engine."""

    code = "context_length_exceeded"


class Overloaded(YunqueError):
    """The queue is full: the same request may succeed after ``retry_after_s`` seconds."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(YunqueError):
    """The engine cannot make a token now: it is stopped, broken, or draining."""

    code = "unavailable"


class UnusableReply(YunqueError):
    """A server's answer does not have its documented shape, or contradicts itself; nothing of it is used."""

    code = "unusable_reply"
