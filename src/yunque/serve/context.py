"""What the routes of one server share."""

from dataclasses import dataclass
from functools import partial

from yunque.protocol.generation import EngineService
from yunque.protocol.http_errors import HttpError, problem
from yunque.serve.conversation import Conversations
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
        """The ids of trusted text, in which a special token's spelling means that token."""
        encode = partial(self.renderer.tokenizer.encode_with_special, text)
        return await self.conversations.long_texts.run(encode, len(text))

    async def encode_prompt(self, text: str, *, param: str) -> tuple[int, ...]:
        """The same for a prompt: ``ContextLengthExceeded`` for a text that is far too long."""
        self.conversations.long_texts.check_fits(len(text), self.service.info.max_model_len, param=param)
        return tuple(await self.encode(text))
