"""Drafts by the multi-token-prediction layer, and which of them stand."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Literal

import torch
from torch import Tensor

from yunque.engine.acceptance import Accepted, coupled, rejection
from yunque.engine.noise import NoiseSource, Purpose
from yunque.engine.runner import Pass, Runner
from yunque.engine.sampler import Drawn, RowSampling, Sampler
from yunque.engine.sequence import NewToken, Sequence
from yunque.model.transformer import MTPState
from yunque.ops.ranking import best
from yunque.ops.visibility import Selection

# Shapes: T tokens of a pass, S sequences, D model, V vocabulary.

#: ``coupled``: a draft stands while it is what would have been drawn anyway, so the reply of a seed is the same with
#: and without drafts. ``rejection``: drafts stand as often as an exact rule can let them; the distribution is the
#: same, the reply of a seed is not.
Acceptance = Literal["coupled", "rejection"]


class Drafter:
    """Proposes up to ``num_drafts`` tokens for every sequence after a pass."""

    def __init__(self, runner: Runner, sampler: Sampler, *, num_drafts: int, acceptance: Acceptance) -> None:
        self._runner = runner
        self._sampler = sampler
        self._num_drafts = num_drafts
        self._acceptance = acceptance

    def propose(self, sequences: Many[Sequence], done: Pass, starts: Many[int]) -> None:
        """Set ``drafts`` (and ``draft_laws``) of sequences whose tokens after ``done`` are known.

        ``starts`` are the positions at which each sequence's part of the pass began; its pages hold the rows of the
        prediction layer too, which this writes for every token of the pass. A later draft is left out where the
        sequence's pages end.
        """
        model = self._runner.model
        next_tokens, last_rows, begin = [], [], 0
        for seq, start, count in zip(sequences, starts, done.counts, strict=True):
            following = seq.tokens[start + 1 : start + 1 + count]
            last_rows.append(begin + len(following) - 1)
            next_tokens += following + [0] * (count - len(following))
            begin += count
        device = done.hidden_TD.device
        next_T = torch.tensor(next_tokens, dtype=torch.int64, device=device)
        state, _ = model.predict_next(MTPState(done.hidden_TD, None, 0), next_T, done.view)
        if len(last_rows) != begin:
            state = _rows_of(state, torch.tensor(last_rows, device=device))
        active = [seq for seq in sequences if seq.finish is None]
        if len(active) != len(sequences):
            kept = [i for i, seq in enumerate(sequences) if seq in active]
            state = _rows_of(state, torch.tensor(kept, dtype=torch.int64, device=device))
        if active:
            self._unroll(active, state)

    def _unroll(self, sequences: list[Sequence], state: MTPState) -> None:
        model, drafts = self._runner.model, [[] for _ in sequences]
        laws: list[Tensor] = []
        limit = min(self._num_drafts, *(_room(seq) for seq in sequences))
        for ahead in range(limit):
            if ahead:
                spans = [seq.span(len(seq.tokens) - 2 + ahead, 1) for seq in sequences]
                last_T = torch.tensor([d[-1] for d in drafts], device=state.hidden_TD.device)
                state, _ = model.predict_next(state, last_T, self._runner.store.view(spans))
            rows = [seq.row_after(tuple(d)) for seq, d in zip(sequences, drafts, strict=True)]
            tokens, law_SV = self._draw(model.logits(state.hidden_TD), rows)
            if law_SV is not None:
                laws.append(law_SV)
            for own, token in zip(drafts, tokens, strict=True):
                own.append(token)
        for i, (seq, own) in enumerate(zip(sequences, drafts, strict=True)):
            seq.drafts = tuple(own)
            seq.draft_laws = torch.stack([law[i] for law in laws]) if laws else None

    def _draw(self, logits_SV: Tensor, rows: list[RowSampling]) -> tuple[list[int], Tensor | None]:
        if self._acceptance == "coupled":
            return self._sampler.draw(logits_SV, rows).tokens_B.tolist(), None
        law_SV = self._sampler.laws(logits_SV, rows)
        return best(law_SV + self._sampler.noise(rows, law_SV, Purpose.DRAFT)).tolist(), law_SV


class Verifier:
    """Turns the logits after each sequence's last token and drafts into the tokens that it gains."""

    def __init__(self, sampler: Sampler, acceptance: Acceptance) -> None:
        self._sampler = sampler
        self._acceptance = acceptance
        self._noise = NoiseSource()

    def gain(self, sequences: Many[Sequence], num_drafts: Many[int], logits_TV: Tensor) -> list[list[NewToken]]:
        """New tokens by sequence: the drafts that stand and one more. Counts drafts in the sequences."""
        rows = [row for seq, count in zip(sequences, num_drafts, strict=True) for row in seq.rows(count)]
        by_rejection = self._acceptance == "rejection" and any(num_drafts)
        law_TV = self._sampler.laws(logits_TV, rows) if by_rejection else None
        drawn = self._sampler.draw(logits_TV, rows)
        told = _told(drawn)
        gained, begin = [], 0
        for seq, count in zip(sequences, num_drafts, strict=True):
            part = told[begin : begin + count + 1]
            if count and law_TV is not None and not seq.row.is_greedy:
                accepted = self._reject(seq, count, law_TV[begin : begin + count + 1])
                part = _retold(accepted, logits_TV[begin:], law_TV[begin:], part)
            else:
                accepted = coupled(seq.drafts[:count], [new.token for new in part])
                part = part[: accepted.num_drafts + 1]
            seq.drafted += count
            seq.accepted += accepted.num_drafts
            gained.append(part)
            begin += count + 1
        return gained

    def _reject(self, seq: Sequence, count: int, law_KV: Tensor) -> Accepted:
        assert seq.draft_laws is not None
        return rejection(
            seq.drafts[:count],
            seq.draft_laws[:count],
            law_KV,
            seed=seq.row.seed,
            position=len(seq.tokens),
            noise=self._noise,
        )


def _room(seq: Sequence) -> int:
    """Drafts that can still be of use: the reply has room, and the pages have rows for the prediction layer."""
    in_pages = seq.capacity - len(seq.tokens) + 2
    return max(0, min(in_pages, seq.max_total - len(seq.tokens) - 1))


def _rows_of(state: MTPState, rows: Tensor) -> MTPState:
    selection = state.selection
    if selection is not None:
        selection = Selection(selection.positions_TK[rows])
    return MTPState(state.hidden_TD[rows], selection, state.step)


def _told(drawn: Drawn) -> list[NewToken]:
    columns = (drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), drawn.model_logprobs_B.tolist())
    if not drawn.top and not drawn.kept:
        return [NewToken(*values) for values in zip(*columns, strict=True)]
    nothing = (None,) * len(columns[0])
    return [NewToken(*values) for values in zip(*columns, drawn.top or nothing, drawn.kept or nothing, strict=True)]


def _retold(accepted: Accepted, logits_KV: Tensor, law_KV: Tensor, drawn: list[NewToken]) -> list[NewToken]:
    """The tokens that stand after rejection, with their own log-probabilities."""
    out = []
    for i, token in enumerate(accepted.tokens):
        model_logprob = float(torch.log_softmax(logits_KV[i], -1)[token])
        out.append(NewToken(token, float(law_KV[i, token]), model_logprob, drawn[i].top, drawn[i].kept))
    return out
