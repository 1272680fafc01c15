"""Policy clients over HTTP: our server, SGLang's and vLLM's token endpoints; imports without torch."""

from yunque.protocol.clients.settings import HttpSettings
from yunque.protocol.clients.sglang import SGLangClient
from yunque.protocol.clients.transport import JsonTransport
from yunque.protocol.clients.vllm import VLLMClient
from yunque.protocol.clients.yunque import YunqueClient

__all__ = ["HttpSettings", "JsonTransport", "SGLangClient", "VLLMClient", "YunqueClient"]
