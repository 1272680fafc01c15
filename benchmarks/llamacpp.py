"""llama.cpp as an oracle and a competitor: a GGUF file in its server, one thread, float32 cache, over loopback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import xllamacpp
from torch import Tensor

#: Added to one token's logit where the next token must be that one; reported log-probabilities do not see it.
_FORCED = 1e4


@dataclass(frozen=True)
class Greedy:
    """Tokens of one generation, and how many of the drafted ones were right (0 without an MTP layer in use)."""

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int


class LlamaCpp:
    """A server of its own in this process, on a free port of the loopback address; it ends with the object.

    ``drafts`` is the number of tokens that the file's MTP layer proposes at a time (0: the layer is not
    loaded). ``vocab_size`` is the model's, ``plain_token`` the id of any whole ASCII character: the server
    reports no log-probabilities for a token that is part of a character, so that one is forced where the
    distribution is wanted and not the token.
    """

    def __init__(self, file: Path, *, vocab_size: int, plain_token: int, context: int = 1024, drafts: int = 0) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.fit_params = params.warmup = params.ui = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        if drafts:
            params.load_mtp = True
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
            params.speculative.draft.n_max = drafts
            params.speculative.draft.cache_type_k = params.speculative.draft.cache_type_v = params.cache_type_k
        self._server = xllamacpp.Server(params)
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=300)
        self._vocab_size = vocab_size
        self._plain_token = plain_token

    def log_probs(self, tokens: Sequence[int], first: int) -> Tensor:
        """Log-probabilities [len(tokens) - first + 1, V] of what follows ``tokens[:n]``, n = ``first``, ...

        The first prefix is one prefill; each further token is one decode step on the cache.
        """
        return torch.stack([self._next(tokens[:n]) for n in range(first, len(tokens) + 1)])

    def greedy(self, prompt: Sequence[int], count: int) -> Greedy:
        """The ``count`` most likely tokens, ends of generation included."""
        answer = self._complete(prompt, n_predict=count, return_tokens=True, ignore_eos=False, cache_prompt=False)
        timings = answer["timings"]
        return Greedy(tuple(answer["tokens"]), timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """The file's tokenizer on ``text``; with ``special`` the spelling of a control token means that token."""
        body = {"content": text, "add_special": True, "parse_special": special}
        return self._post("/tokenize", body)["tokens"]

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The file's chat template on ``messages``, as the server's chat endpoint would use it."""
        return self._post("/apply-template", {"messages": list(messages), **options})["prompt"]

    def _next(self, prompt: Sequence[int]) -> Tensor:
        answer = self._complete(
            prompt,
            n_predict=1,
            n_probs=self._vocab_size,
            logit_bias=[[self._plain_token, _FORCED]],
            cache_prompt=True,
        )
        rows = answer["completion_probabilities"][0]["top_logprobs"]
        row = torch.full((self._vocab_size,), torch.nan)
        row[[entry["id"] for entry in rows]] = torch.tensor([entry["logprob"] for entry in rows])
        return row

    def _complete(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        return self._post("/completion", {"prompt": list(prompt), "temperature": 0.0, **options})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._client.post(path, json=body)
        if response.is_error:
            raise RuntimeError(f"llama.cpp {path}: {response.text}")
        return response.json()
