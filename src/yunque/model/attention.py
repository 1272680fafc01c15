"""Multi-head latent attention over a pool of latent rows, dense or over the indexer's selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from yunque.model.config import ModelConfig
from yunque.model.forward import Step
from yunque.model.indexer import Indexer, IndexQuery
from yunque.model.layers import Linear, RMSNorm
from yunque.model.projection import JoinedProjection, Projected
from yunque.ops.blockwise.expanded_attention import attend_expanded
from yunque.ops.blockwise.index_kl import index_kl
from yunque.ops.blockwise.invariant_attention import attend_invariant, select_invariant
from yunque.ops.blockwise.latent_attention import attend_latent
from yunque.ops.blockwise.selection import select
from yunque.ops.paged_rows import Rows, first_rows, require_plain
from yunque.ops.reference.index_kl import AttentionTarget
from yunque.ops.rotary import rotate
from yunque.ops.rows import pad_rows, per_head
from yunque.ops.visibility import Selection, Visibility

# Shapes: T tokens, P pool rows, D model, H heads, E query/key width, N and V widths of the two halves of kv_b per
# head (keys without rotation, values), Q query latent, C latent, R latent + rotary width, F rotary pairs.

#: How much longer a multiply takes over gathered rows than inside a fused kernel, forward and backward (measured:
#: 4 to 7 on two cores, by shape and number of threads).
GATHER_COST = 5.5


@dataclass(frozen=True)
class AttentionOutput:
    """Output [T, D], the selection it used (``None``: all visible keys) and the indexer's KL loss."""

    out_TD: Tensor
    selection: Selection | None
    index_kl: Tensor | None


class Attention(nn.Module):
    """MLA (DeepSeek-V2 report, 2.1) with an optional lightning indexer.

    Cached rows are [normed latent | rotated key]; the absorbed form attends to them directly, the expanded form
    first makes keys and values per head. Both are exact; the cheaper one for the shapes at hand is taken.
    """

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.invariant = invariant
        D, H = config.hidden_size, config.num_attention_heads
        self.q_a_proj = Linear(D, config.q_lora_rank, invariant=invariant)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_eps)
        self.q_b_proj = Linear(config.q_lora_rank, H * config.qk_head_dim, invariant=invariant)
        self.kv_a_proj_with_mqa = Linear(D, config.latent_dim, invariant=invariant)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_eps)
        self.kv_b_proj = Linear(
            config.kv_lora_rank, H * (config.qk_nope_head_dim + config.v_head_dim), invariant=invariant
        )
        self.o_proj = Linear(H * config.v_head_dim, D, invariant=invariant)
        self.indexer = Indexer(config, invariant=invariant) if config.has_indexer(layer) else None
        self.scale = config.qk_head_dim**-0.5
        self._joined: JoinedProjection | None = None

    def join(self) -> None:
        """Lay the weights that read one input side by side; see ``JoinedProjection``."""
        self._joined = None if self.invariant else JoinedProjection(self)

    def forward(self, x_TD: Tensor, step: Step, below: Selection | None, *, reuse: bool = False) -> AttentionOutput:
        """``x_TD`` is the normed input, ``below`` the selection of the nearest full layer below: shared layers use
        it, and with ``reuse`` (later MTP steps) so does a layer that owns an indexer."""
        mode, visibility = step.mode, step.view.visibility
        is_sparse = mode.attention == "sparse"
        has_loss = mode.index_loss_T is not None
        imposed = mode.imposed_selection(self.layer) if is_sparse else None
        scores = (
            is_sparse and imposed is None and (visibility.max_visible > self.config.index_topk or mode.always_score)
        )
        with_keys = self.indexer is not None and (is_sparse or has_loss)
        with_query = with_keys and not reuse and (scores or has_loss)
        projected = self._project(x_TD, step, with_keys=with_keys, with_query=with_query)
        pool_PR = step.view.write(self.layer, "latent", projected.rows_TR)
        selection, loss = imposed or below, None
        if projected.index_keys_Td is not None:
            keys_Pd = step.view.write(self.layer, "index", projected.index_keys_Td)
            if not reuse:
                query = projected.index_query
                selection = self._select(query, keys_Pd, step) if scores and query is not None else imposed
                if has_loss:
                    loss = self._index_loss(projected, keys_Pd, pool_PR, selection, step)
        out_TX = self._attend(projected, pool_PR, visibility, selection).flatten(1)
        return AttentionOutput(self.o_proj(pad_rows(out_TX) if self.invariant else out_TX), selection, loss)

    def _project(self, x_TD: Tensor, step: Step, *, with_keys: bool, with_query: bool) -> Projected:
        """Queries, rows to cache and the indexer's part of the ``num_tokens`` rows of the step."""
        joined = self._joined
        if joined is not None and joined.is_current and not torch.is_grad_enabled():
            return joined(x_TD, step.phase_TF, with_keys=with_keys, with_query=with_query)
        config, phase_TF = self.config, step.phase_TF
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim
        latent_TQ = self.q_a_layernorm(self.q_a_proj(x_TD))
        q_THE = self.q_b_proj(latent_TQ).view(x_TD.shape[0], heads, config.qk_head_dim)
        q_nope, q_rope = q_THE.split_with_sizes((config.qk_nope_head_dim, rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_TD).split_with_sizes((config.kv_lora_rank, rope), dim=-1)
        both = torch.cat((q_rope, k_rope[:, None]), dim=1)
        q_turned, k_turned = rotate(both, phase_TF, interleaved=config.rope_interleave).split_with_sizes(
            (heads, 1), dim=1
        )
        rows_TR = torch.cat((self.kv_a_layernorm(latent), k_turned[:, 0]), dim=-1)
        keys_Td, query = None, None
        if self.indexer is not None and with_keys:
            with torch.set_grad_enabled(step.mode.index_loss_T is not None and step.index_grad):
                keys_Td = self.indexer.keys(x_TD, phase_TF)
                query = self.indexer.queries(x_TD, latent_TQ, phase_TF) if with_query else None
        return Projected(q_nope, q_turned, rows_TR, keys_Td, query).first(step.num_tokens)

    def _index_loss(
        self, projected: Projected, keys_Pd: Rows, pool_PR: Rows, selection: Selection | None, step: Step
    ) -> Tensor:
        """The indexer's KL loss to the head-summed attention."""
        query, weights_T = projected.index_query, step.mode.index_loss_T
        assert query is not None
        assert weights_T is not None
        folded_THR = self._absorb(projected, self._kv_up()[0])
        target = AttentionTarget(folded_THR.detach(), require_plain(pool_PR).detach(), self.scale)
        with torch.set_grad_enabled(step.index_grad):
            return index_kl(
                query.q_TJd,
                require_plain(keys_Pd),
                query.w_TJ,
                [target],
                step.view.visibility,
                weights_T=weights_T,
                selection=selection,
            ).sum

    def _select(self, query: IndexQuery, keys_Pd: Rows, step: Step) -> Selection:
        visibility, topk = step.view.visibility, self.config.index_topk
        if self.invariant:
            return select_invariant(query.q_TJd, keys_Pd, query.w_TJ, visibility, topk)
        return select(query.q_TJd, keys_Pd, query.w_TJ, visibility, topk, always_score=step.mode.always_score)

    def _kv_up(self) -> tuple[Tensor, Tensor]:
        """The two halves of kv_b per head: keys [H, N, C] and values [H, V, C]."""
        config = self.config
        rows = (config.qk_nope_head_dim, config.v_head_dim)
        weight = self.kv_b_proj.weight.view(config.num_attention_heads, sum(rows), config.kv_lora_rank)
        key_HNC, value_HVC = weight.split_with_sizes(rows, dim=1)
        return key_HNC, value_HVC

    def _absorb(self, projected: Projected, key_HNC: Tensor) -> Tensor:
        """Queries against latent rows: [q_nope W_k | q_rope], [T, H, R]."""
        folded_THC = per_head(projected.nope_THN, key_HNC, invariant=self.invariant)
        return torch.cat((folded_THC, projected.rope_THF), dim=-1)

    def _attend(
        self, projected: Projected, pool_PR: Rows, visibility: Visibility, selection: Selection | None
    ) -> Tensor:
        """Attention output per head [T, H, V] by the form that needs fewer operations."""
        num_queries = projected.rows_TR.shape[0]
        if self.invariant or self._latent_is_cheaper(num_queries, visibility, selection is not None):
            attend = attend_invariant if self.invariant else attend_latent
            key_HNC, value_HVC = self._kv_up()
            out_THC = attend(
                self._absorb(projected, key_HNC),
                pool_PR,
                visibility,
                scale=self.scale,
                value_dim=self.config.kv_lora_rank,
                selection=selection,
            )
            return per_head(out_THC, value_HVC.transpose(1, 2), invariant=self.invariant)
        q_THE = torch.cat((projected.nope_THN, projected.rope_THF), dim=-1)
        k_PHE, v_PHV = self._expand(first_rows(pool_PR, visibility.num_rows))
        return attend_expanded(q_THE, k_PHE, v_PHV, visibility, scale=self.scale, selection=selection)

    def _expand(self, pool_PR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [P, H, E] and values [P, H, V] per head of latent rows."""
        config = self.config
        latent, rope = pool_PR.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        heads = self.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1))
        nope, value_PHV = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        rope = rope[:, None].expand(-1, config.num_attention_heads, -1)
        return torch.cat((nope, rope), dim=-1), value_PHV

    def _latent_is_cheaper(self, num_queries: int, visibility: Visibility, selected: bool) -> bool:
        """Compare multiplications per head: folding and attending to latents against expanding and attending."""
        config = self.config
        up = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
        expanded = visibility.num_rows * up
        expanded += num_queries * visibility.mean_visible * (config.qk_head_dim + config.v_head_dim)
        seen = GATHER_COST * config.index_topk if selected else visibility.mean_visible
        latent = num_queries * (up + seen * (config.latent_dim + config.kv_lora_rank))
        return latent < expanded
