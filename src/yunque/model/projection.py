"""What attention makes of its input, and the inference form that makes it with few, large products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from yunque.model.indexer import KEY_NORM_EPS, IndexQuery
from yunque.model.layers import JoinedWeights
from yunque.ops.rotary import rotate
from yunque.ops.rows import layer_norm, rms_norm

if TYPE_CHECKING:
    from yunque.model.attention import Attention

# Shapes: T tokens, D model, H heads, N and F query widths without and with rotation, R latent + rotary width,
# d index width, J index heads; "phase" has the complex rotary phases.


@dataclass(frozen=True)
class Projected:
    """``nope_THN`` and ``rope_THF`` (rotated): the queries' two parts. ``rows_TR``: what the cache keeps, [normed
    latent | rotated key]. ``index_keys_Td`` and ``index_query``: the indexer's, where they were asked for."""

    nope_THN: Tensor
    rope_THF: Tensor
    rows_TR: Tensor
    index_keys_Td: Tensor | None = None
    index_query: IndexQuery | None = None

    def first(self, count: int) -> Projected:
        """Without the rows of padding behind ``count`` tokens."""
        if self.rows_TR.shape[0] == count:
            return self
        return Projected(
            self.nope_THN[:count],
            self.rope_THF[:count],
            self.rows_TR[:count],
            None if self.index_keys_Td is None else self.index_keys_Td[:count],
            None if self.index_query is None else self.index_query.first(count),
        )


class JoinedProjection:
    """The projections of one attention layer for inference: one product over the layer's input (query and key
    latents, index keys and head weights), one over the query latent (queries, index queries), one rotation.

    The same numbers as the separate products up to rounding; see ``JoinedWeights`` for what happens to parameters.
    """

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._config = attention.config
        indexer = attention.indexer
        self._own_weights = indexer is not None and indexer.weights_proj.weight.dtype.itemsize >= 4
        inner, outer = [attention.q_a_proj, attention.kv_a_proj_with_mqa], [attention.q_b_proj]
        if indexer is not None:
            inner += [indexer.wk, indexer.weights_proj] if self._own_weights else [indexer.wk]
            outer.append(indexer.wq_b)
        self._inner, self._outer = JoinedWeights(*inner), JoinedWeights(*outer)
        config = self._config
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        self._sizes = (self._inner.sizes[0], latent, rope, *self._inner.sizes[2:])
        self._one_rotation = indexer is not None and config.rope_interleave == config.indexer_rope_interleave

    @property
    def is_current(self) -> bool:
        """Whether the layer's parameters still lie side by side."""
        return self._inner.is_current and self._outer.is_current

    def __call__(self, x_TD: Tensor, phase_TF: Tensor, *, with_keys: bool, with_query: bool) -> Projected:
        """Project [T, D]; the indexer's part only as far as it is asked for."""
        attention, config = self._attention, self._config
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim
        query, latent, k_rope, *index = F.linear(x_TD, self._inner.weight).split_with_sizes(self._sizes, dim=-1)
        query = rms_norm(query, attention.q_a_layernorm.weight, config.latent_eps)
        weight = self._outer.weight if with_query else attention.q_b_proj.weight
        up = F.linear(query, weight)
        q_THE = up[:, : self._outer.sizes[0]].view(-1, heads, config.qk_head_dim)
        nope, q_rope = q_THE.split_with_sizes((config.qk_nope_head_dim, rope), dim=-1)
        key = self._normed_key(index[0])[:, None] if with_keys else q_rope[:, :0]
        index_q = up[:, self._outer.sizes[0] :].view(up.shape[0], -1, max(config.index_head_dim, 1))
        parts = (q_rope, k_rope[:, None], *((key[..., :rope],) if with_keys else ()))
        turned = self._rotate((*parts, index_q[..., :rope]) if with_query else parts, phase_TF)
        rows_TR = torch.cat(
            (rms_norm(latent, attention.kv_a_layernorm.weight, config.latent_eps), turned[1][:, 0]), dim=-1
        )
        projected = Projected(nope, turned[0], rows_TR)
        if not with_keys:
            return projected
        keys = torch.cat((turned[2][:, 0], key[:, 0, rope:]), dim=-1)
        if not with_query:
            return Projected(nope, turned[0], rows_TR, keys)
        q_TJd = torch.cat((turned[3], index_q[..., rope:]), dim=-1)
        return Projected(nope, turned[0], rows_TR, keys, IndexQuery(q_TJd, self._head_weights(x_TD, index)))

    def _normed_key(self, key: Tensor) -> Tensor:
        indexer = self._attention.indexer
        assert indexer is not None
        return layer_norm(key, indexer.k_norm.weight, indexer.k_norm.bias, KEY_NORM_EPS)

    def _head_weights(self, x_TD: Tensor, index: list[Tensor]) -> Tensor:
        indexer = self._attention.indexer
        assert indexer is not None
        return index[1] * indexer.weight_scale if self._own_weights else indexer.head_weights(x_TD)

    def _rotate(self, parts: tuple[Tensor, ...], phase_TF: Tensor) -> tuple[Tensor, ...]:
        """Each part rotated; all in one go when the indexer pairs dimensions as attention does."""
        config = self._config
        if len(parts) == 2 or self._one_rotation:
            return _rotate_together(parts, phase_TF, interleaved=config.rope_interleave)
        own = _rotate_together(parts[:2], phase_TF, interleaved=config.rope_interleave)
        return *own, *_rotate_together(parts[2:], phase_TF, interleaved=config.indexer_rope_interleave)


def _rotate_together(parts: tuple[Tensor, ...], phase_TF: Tensor, *, interleaved: bool) -> tuple[Tensor, ...]:
    sizes = [part.shape[1] for part in parts]
    return rotate(torch.cat(parts, dim=1), phase_TF, interleaved=interleaved).split_with_sizes(sizes, dim=1)
