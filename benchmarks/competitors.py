"""The engines beside ours, decoding the same weights: transformers' ``generate`` and llama.cpp's server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
import xllamacpp
from decoding import Pace
from engine_models import Subject

#: Tokens of every sequence in one pass of transformers' prefill: its memory grows with tokens x context.
PREFILL_TOKENS = 256


class Transformers:
    """``GlmMoeDsaForCausalLM`` with the subject's weights; the caches of its prompts are filled once and reused."""

    def __init__(self, subject: Subject) -> None:
        from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        data = {k: v for k, v in subject.config.to_hf().items() if k not in ("architectures", "model_type")}
        self._model: Any = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**data)).eval()
        own = self._model.state_dict()
        self._model.load_state_dict({k: v for k, v in subject.model.state_dict().items() if k in own}, strict=True)
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The cache of all tokens but the last: ``generate`` computes that one."""
        cache = None
        for chunk in torch.tensor(prompts)[:, :-1].split(PREFILL_TOKENS, dim=1):
            cache = self._model(chunk, cache=cache, use_cache=True, logits_to_keep=1).cache
        return cache

    def decode(self, prompts: Sequence[Sequence[int]], cache: Any, steps: int) -> Pace:
        """One call of ``generate``, greedy, timed from its first new token to its last; ``cache`` is left as it was."""
        tokens, clock = torch.tensor(prompts), _Clock()
        length = cache.get_seq_length()
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            cache=cache,
            use_cache=True,
            do_sample=False,
            max_new_tokens=steps + 1,
            streamer=clock,
        )
        cache.crop(length - cache.get_seq_length())
        assert len(clock.times) == steps + 2, f"{len(clock.times)} notes for the prompt and {steps + 1} tokens"
        return Pace(clock.times[-1] - clock.times[1], steps, steps * len(prompts))


class _Clock:
    """A streamer that notes when ``generate`` hands on the prompt and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.process_time())

    def end(self) -> None:
        pass


class LlamaCppServer:
    """llama.cpp's server in this process with its defaults (float16 cache, flash attention where it has it), one
    compute thread and a slot for each of ``batch`` requests of at most ``context`` tokens."""

    def __init__(self, subject: Subject, *, batch: int, context: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(subject.gguf)
        params.n_ctx = batch * context
        params.n_parallel = batch
        params.kv_unified = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.fit_params = params.warmup = params.ui = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self._clients = [httpx.Client(base_url=self._server.listening_address, timeout=1800) for _ in range(batch)]
        self._pool = ThreadPoolExecutor(batch)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[Pace, float]:
        """``steps`` decode steps of all prompts at once, in CPU seconds of the process; and the tokens per second of
        wall time that the server reports.

        The prompts are computed first and stay in their slots; a request for one token, which then takes a step of its
        last token and what a request costs, is subtracted.
        """
        self._ask(prompts, 1)
        one, _ = self._ask(prompts, 1)
        many, answers = self._ask(prompts, steps + 1)
        assert all(answer["tokens_predicted"] == steps + 1 for answer in answers)
        reported = sum(answer["timings"]["predicted_per_second"] for answer in answers)
        return Pace(many - one, steps, steps * len(prompts)), reported

    def close(self) -> None:
        """Stop listening."""
        for client in self._clients:
            client.close()
        self._pool.shutdown()
        del self._server

    def _ask(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[dict[str, Any]]]:
        started = time.process_time()
        answers = list(self._pool.map(lambda slot: self._post(slot, prompts[slot], count), range(len(prompts))))
        return time.process_time() - started, answers

    def _post(self, slot: int, prompt: Sequence[int], count: int) -> dict[str, Any]:
        body = {
            "prompt": list(prompt),
            "n_predict": count,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": True,
            "id_slot": slot,
        }
        response = self._clients[slot].post("/completion", json=body)
        response.raise_for_status()
        return response.json()
