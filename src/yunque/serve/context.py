"""What the routes of one server share."""

import asyncio
from dataclasses import dataclass

from yunque.protocol.generation import EngineService
from yunque.protocol.http_errors import HttpError, problem
from yunque.serve.conversation import THREAD_ABOVE_CHARS, Conversations
from yunque.serve.metrics import ServerMetrics
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer


@dataclass(frozen=True)
class ServeContext:
    """Engine, chat format, settings, metrics, and the conversations on top of them."""

    service: EngineService
    renderer: Renderer
    settings: ServeSettings
    metrics: ServerMetrics
    conversations: Conversations

    def model(self, name: str | None) -> str:
        """The served model's name; 404 where a request names another one."""
        served = self.service.info.model_name
        if name is not None and name != served and not self.settings.accepts_any_model:
            message = f"model {name[:100]!r} is not served here; valid: {served}"
            raise HttpError(problem(404, message, code="model_not_found", param="model"))
        return served

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; an id that a padded model samples beyond the vocabulary is U+FFFD."""
        return self.renderer.tokenizer.decode_bytes([token_id])

    def token_text(self, token_id: int) -> str:
        """Its bytes as text, what is not UTF-8 as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    async def encode(self, text: str) -> list[int]:
        """The ids of trusted text, in which a special token's spelling means that token. A long text is encoded in a
        thread, so that the event loop goes on."""
        encode = self.renderer.tokenizer.encode_with_special
        return await asyncio.to_thread(encode, text) if len(text) > THREAD_ABOVE_CHARS else encode(text)
