"""Forward passes of the engine: one over all decoding sequences, one for each chunk of a prompt."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from yunque.engine.page_store import PagedView, PageStore
from yunque.engine.sampler import score
from yunque.engine.sequence import Sequence
from yunque.model.transformer import Transformer

# Shapes: T tokens of the pass, D model, V vocabulary.

#: Rows of logits formed at once for the log-probabilities of a prompt.
SCORED_ROWS = 256


@dataclass(frozen=True)
class Pass:
    """One forward pass: hidden states [T, D] after the final norm, and the view that holds its rows.

    ``counts`` are the tokens of each sequence in it, in order.
    """

    hidden_TD: Tensor
    view: PagedView
    counts: tuple[int, ...]


class Runner:
    """Runs the model on sequences whose pages are in ``store``. Call it under ``torch.inference_mode``."""

    def __init__(self, model: Transformer, store: PageStore) -> None:
        self.model = model
        self.store = store

    def decode(self, sequences: Many[Sequence], num_drafts: Many[int]) -> tuple[Pass, Tensor]:
        """The last token of every sequence and its drafts; logits [T, V] after each of them."""
        tokens = [
            token
            for seq, count in zip(sequences, num_drafts, strict=True)
            for token in (seq.tokens[-1], *seq.drafts[:count])
        ]
        counts = tuple(count + 1 for count in num_drafts)
        spans = [seq.span(seq.num_computed, count) for seq, count in zip(sequences, counts, strict=True)]
        done = self._run(tokens, self.store.view(spans), counts)
        return done, self.model.logits(done.hidden_TD)

    def prefill(self, seq: Sequence, start: int, count: int) -> Pass:
        """``count`` known tokens of one sequence from position ``start`` on."""
        return self._run(seq.tokens[start : start + count], self.store.view([seq.span(start, count)]), (count,))

    def last_logits(self, done: Pass) -> Tensor:
        """Logits [1, V] after the last token of a pass."""
        return self.model.logits(done.hidden_TD[-1:])

    def prompt_logprobs(self, seq: Sequence, start: int, done: Pass) -> list[float]:
        """Log-probabilities, under the request's settings without penalties, of the prompt tokens that follow those
        of a pass which began at ``start``."""
        following = seq.tokens[start + 1 : min(start + done.counts[0] + 1, seq.num_prompt)]
        out: list[float] = []
        for begin in range(0, len(following), SCORED_ROWS):
            part = following[begin : begin + SCORED_ROWS]
            logits_TV = self.model.logits(done.hidden_TD[begin : begin + len(part)])
            out += score(logits_TV, part, seq.request.sampling).tolist()
        return out

    def _run(self, tokens: Many[int], view: PagedView, counts: tuple[int, ...]) -> Pass:
        tokens_T = torch.tensor(tokens, dtype=torch.int64).to(self.store.device)
        return Pass(self.model(tokens_T, view).hidden_TD, view, counts)
