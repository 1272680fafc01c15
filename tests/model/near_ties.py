"""What transformers computes and keeps, and its selections imposed on ours where two keys score almost the same.

Their top-k leaves ties open. Where the k-th and the next score of a query are within 1e-5 of each other, relatively, a
differing selection of theirs is imposed on ours and counted; anywhere else it is a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from builders import run
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.model.forward import ForwardOutput, Replay
from yunque.model.transformer import Transformer
from yunque.ops.reference.attention import allowed
from yunque.ops.reference.selection import index_scores
from yunque.ops.rotary import rotary_phases
from yunque.ops.visibility import Selection

# Shapes: T tokens of the packed row, K kept keys, V vocabulary.


@dataclass
class Theirs:
    """What their class computed for one packed row."""

    model: Any
    layers: list[Tensor] = field(default_factory=list)
    selections: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, ours: Transformer) -> Theirs:
        """The same weights in their class; every tensor must find its place."""
        import transformers

        config = ours.config.to_hf()
        architecture = getattr(transformers, config.pop("architectures")[0])
        settings = architecture.config_class(**config)
        settings._experts_implementation = "eager"  # grouped products want aligned widths
        model = architecture(settings).eval()
        report = model.load_state_dict(ours.state_dict(), strict=False)
        assert not report.missing_keys
        assert not report.unexpected_keys
        return cls(model)

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep_layer)
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(self._keep_selection(number))

    def _keep_layer(self, module: Any, inputs: Any, output: Any) -> None:  # noqa: ARG002
        self.layers.append((output[0] if isinstance(output, tuple) else output)[0])

    def _keep_selection(self, number: int) -> Any:
        def keep(module: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG001
            self.selections[number] = output[0].long()

        return keep

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] of a packed row: positions start again with each document."""
        self.layers.clear()
        return self.model(batch.tokens_T[None], position_ids=batch.positions_T[None], use_cache=False).logits[0]

    def selection(self, layer: int, batch: PackedBatch, k: int) -> Selection:
        """Their choice as ours is written: they keep invisible keys too and mask them afterwards."""
        first_T, last_T = batch.document_start_T, torch.arange(batch.num_tokens)
        rows = self.selections[layer]
        rows = rows.masked_fill((rows < first_T[:, None]) | (rows > last_T[:, None]), batch.num_tokens)
        positions = rows.sort(dim=1).values - first_T[:, None]
        positions = positions.masked_fill(positions > (last_T - first_T)[:, None], -1)
        return Selection(torch.nn.functional.pad(positions, (0, k - positions.shape[1]), value=-1).int())


def open_rows(model: Transformer, out: ForwardOutput, layer: int, batch: PackedBatch) -> Tensor:
    """Bool [T]: the k-th and the next index score are within 1e-5, so that either may be kept."""
    config, block = model.config, model.model.layers[layer]
    below = model.model.embed_tokens(batch.tokens_T) if layer == 0 else out.trace.hidden[layer - 1]
    x = block.input_layernorm(below)
    latent = block.self_attn.q_a_layernorm(block.self_attn.q_a_proj(x))
    phase = rotary_phases(
        batch.positions_T, width=config.qk_rope_head_dim, theta=config.rope_theta, dtype=torch.float32
    )
    query = block.self_attn.indexer.queries(x, latent, phase)
    scores = index_scores(query.q_TJd, block.self_attn.indexer.keys(x, phase), query.w_TJ)
    visible = allowed(PackedView(batch).visibility, batch.num_tokens, None)
    ordered = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True).values
    if config.index_topk >= batch.num_tokens:
        return torch.zeros(batch.num_tokens, dtype=torch.bool)
    last, following = ordered[:, config.index_topk - 1], ordered[:, config.index_topk]
    return following.isfinite() & (last - following <= 1e-5 * last.abs())


def agreed_selections(ours: Transformer, theirs: Theirs, batch: PackedBatch) -> tuple[Replay, int, int]:
    """Impose their selection on layers where a tie was broken otherwise; (replay, rows imposed, rows compared)."""
    imposed: dict[int, Selection] = {}
    differing_rows = compared = 0
    k = ours.config.index_topk
    for layer in sorted(theirs.selections):
        with torch.no_grad():
            out = run(ours, batch, replay=Replay(imposed), always_score=True)
            selection, wanted = out.trace.selections[layer], theirs.selection(layer, batch, k)
            assert selection is not None
            differs_T = (selection.positions_TK != wanted.positions_TK).any(dim=1)
            closed_T = differs_T & ~open_rows(ours, out, layer, batch)
        assert not closed_T.any(), f"layer {layer} selects other keys in rows {closed_T.nonzero()[:, 0].tolist()}"
        compared += batch.num_tokens
        differing_rows += int(differs_T.sum())
        if differs_T.any():
            imposed[layer] = wanted
    return Replay(imposed), differing_rows, compared
