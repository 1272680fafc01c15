"""``/v1/models``, ``/tokenize`` and ``/detokenize``: what a client must know to count and to render by itself."""

from typing import Any

from fastapi import APIRouter

from yunque.protocol.errors import RequestError
from yunque.protocol.openai import DetokenizeRequest, TokenizeRequest, messages_of, tools_of
from yunque.protocol.openai_replies import model_card
from yunque.protocol.sampling_fields import token_ids
from yunque.serve.answers import JsonResponse, StrictJsonRoute
from yunque.serve.context import ServeContext
from yunque.serve.conversation import ChatTurn


def tokenizing_routes(context: ServeContext) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.get("/v1/models", tags=["OpenAI"], summary="The served model")
    async def models() -> JsonResponse:
        return JsonResponse({"object": "list", "data": [model_card(context.service.info)]})

    @router.get("/v1/models/{name:path}", tags=["OpenAI"], summary="One model")
    async def model(name: str) -> JsonResponse:
        context.model(name)
        return JsonResponse(model_card(context.service.info))

    @router.post("/tokenize", tags=["tokens"], summary="The ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest) -> JsonResponse:
        context.model(body.model)
        tokens = await _tokens(body, context)
        reply: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": context.service.info.max_model_len,
            "tokens": tokens,
            "token_strs": [context.token_text(token) for token in tokens] if body.return_token_strs else None,
        }
        return JsonResponse(reply)

    @router.post("/detokenize", tags=["tokens"], summary="The text of ids")
    async def detokenize(body: DetokenizeRequest) -> JsonResponse:
        context.model(body.model)
        given = body.tokens
        tokens = token_ids(given, param="tokens", vocab_size=context.service.info.vocab_size) if given else ()
        text = context.renderer.tokenizer.decode(tokens)
        return JsonResponse({"prompt": text, "text": text})

    return router


async def _tokens(body: TokenizeRequest, context: ServeContext) -> list[int]:
    texts = [text for text in (body.prompt, body.text) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise RequestError("give one of prompt, text and messages", param="prompt")
    if texts:
        return await context.encode(texts[0])
    options = {"enable_thinking": context.settings.enable_thinking} | (body.chat_template_kwargs or {})
    chat = ChatTurn(messages_of(body.messages or ()), tools_of(body.tools), template=options)
    rendered = await context.conversations.render(chat, add_generation_prompt=body.add_generation_prompt)
    return list(rendered.tokens)
