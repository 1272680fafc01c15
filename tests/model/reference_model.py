"""A second GLM-5 in float64, written for reading: whole matrices, one expert at a time, no tiles and no cache.

It shares nothing with the package but the parameter names, so that the two can judge each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig

# Letters of the products: t query, s key, d model, h head, e query width, n/r its two parts, v value width,
# c latent, q query latent, j index head, i index width, x expert width.


@dataclass
class Pass:
    """One pass over a batch: how to run, and what layers left beside their output.

    ``weight_T`` weighs the index loss of each query; ``kept`` are bool [T, T], a row per query.
    """

    batch: PackedBatch
    weight_T: Tensor
    dense: bool = False
    kept: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    index_kl: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position_T: Tensor, theta: float, *, neighbours: bool) -> Tensor:
    """Pairs of the last axis turned by position * theta^(-2 f / width), the angles rounded to fp32."""
    width = x.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angle = torch.outer(position_T.float(), frequency)
    cos, sin = angle.cos().double(), angle.sin().double()
    out = torch.empty_like(x)
    for f in range(width // 2):
        a, b = (2 * f, 2 * f + 1) if neighbours else (f, f + width // 2)
        c, s = (part[:, f].view(-1, *[1] * (x.dim() - 2)) for part in (cos, sin))
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def best(scores_TT: Tensor, seen_TT: Tensor, k: int) -> Tensor:
    """Bool [T, T]: the k best seen keys of each query, ties to the lowest position."""
    kept = torch.zeros_like(seen_TT)
    for t, (row, seen) in enumerate(zip(scores_TT.tolist(), seen_TT.tolist(), strict=True)):
        keys = [s for s, is_seen in enumerate(seen) if is_seen]
        for s in sorted(keys, key=lambda s: (-row[s], s))[:k]:
            kept[t, s] = True
    return kept


class ReferenceModel:
    """``parameters`` are the module's state, in float64; call ``requires_grad_`` on them to differentiate."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self.p = {name: tensor.detach().double().clone() for name, tensor in parameters.items()}

    def forward(self, run: Pass) -> Tensor:
        """Hidden states after the final norm."""
        c = self.config
        x, kept = self.p["model.embed_tokens.weight"][run.batch.tokens_T], None
        for layer in range(c.num_hidden_layers):
            x, kept = self.layer(layer, x, run, kept)
            run.hidden[layer] = x
        return rms(x, self.p["model.norm.weight"], c.rms_norm_eps)

    def mtp(self, hidden: Tensor, run: Pass, steps: int) -> list[Tensor]:
        """Post-norm states of the unrolled prediction steps; row t of step k has seen token t + k."""
        c, p, layer, batch = self.config, self.p, self.config.num_hidden_layers, run.batch
        name, states, kept = f"model.layers.{layer}.", [], None
        for step in range(1, steps + 1):
            ahead = torch.zeros_like(batch.tokens_T)
            for t in range(len(ahead) - step):
                if batch.document_start_T[t] == batch.document_start_T[t + step]:
                    ahead[t] = batch.tokens_T[t + step]
            embedded = rms(p["model.embed_tokens.weight"][ahead], p[name + "enorm.weight"], c.rms_norm_eps)
            carried = rms(hidden, p[name + "hnorm.weight"], c.rms_norm_eps)
            x = torch.cat((embedded, carried), -1) @ p[name + "eh_proj.weight"].T
            x, kept = self.layer(layer, x, run, kept if c.index_share_for_mtp_iteration else None)
            hidden = rms(x, p[name + "shared_head.norm.weight"], c.rms_norm_eps)
            states.append(hidden)
        return states

    def layer(self, layer: int, x: Tensor, run: Pass, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """One decoder layer; ``kept`` is the selection to reuse, for layers that share one."""
        p, eps, name = self.p, self.config.rms_norm_eps, f"model.layers.{layer}."
        is_shared = not self.config.has_indexer(layer)
        reused = kept if is_shared or layer == self.config.num_hidden_layers else None
        out, kept = self.attention(layer, rms(x, p[name + "input_layernorm.weight"], eps), run, reused)
        run.kept[layer] = kept
        x = x + out
        return x + self.mlp(layer, rms(x, p[name + "post_attention_layernorm.weight"], eps), run), kept

    def attention(self, layer: int, x: Tensor, run: Pass, reused: Tensor | None) -> tuple[Tensor, Tensor]:
        c, p, position = self.config, self.p, run.batch.positions_T
        name, heads = f"model.layers.{layer}.self_attn.", c.num_attention_heads
        same = run.batch.document_start_T[:, None] == run.batch.document_start_T
        seen = same & (torch.arange(len(x))[:, None] >= torch.arange(len(x)))

        latent_q = rms(x @ p[name + "q_a_proj.weight"].T, p[name + "q_a_layernorm.weight"], c.latent_eps)
        up_q = p[name + "q_b_proj.weight"].unflatten(0, (heads, c.qk_head_dim))
        q_nope, q_rope = torch.einsum("tq,heq->the", latent_q, up_q).split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        low, k_rope = (x @ p[name + "kv_a_proj_with_mqa.weight"].T).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        latent = rms(low, p[name + "kv_a_layernorm.weight"], c.latent_eps)
        up = p[name + "kv_b_proj.weight"].unflatten(0, (heads, c.qk_nope_head_dim + c.v_head_dim))
        k_nope = torch.einsum("sc,hnc->shn", latent, up[:, : c.qk_nope_head_dim])
        value = torch.einsum("sc,hvc->shv", latent, up[:, c.qk_nope_head_dim :])
        q_rope = turned(q_rope, position, c.rope_theta, neighbours=c.rope_interleave)
        k_rope = turned(k_rope, position, c.rope_theta, neighbours=c.rope_interleave)
        logits = torch.einsum("thn,shn->hts", q_nope, k_nope) + torch.einsum("thr,sr->hts", q_rope, k_rope)
        logits = logits / c.qk_head_dim**0.5

        if not c.has_indexer(layer) or reused is not None:
            kept = seen if run.dense or reused is None else reused
        else:
            scores = self.index_scores(name + "indexer.", x.detach(), latent_q.detach(), position)
            kept = seen if run.dense else best(scores, seen, c.index_topk)
            target = logits.detach().masked_fill(~kept, -torch.inf).softmax(-1).mean(0)
            guess = scores.masked_fill(~kept, -torch.inf).log_softmax(-1).masked_fill(~kept, 0.0)
            run.index_kl.append(run.weight_T.double() @ (torch.xlogy(target, target) - target * guess).sum(-1))
        probability = logits.masked_fill(~kept, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shv->thv", probability, value).flatten(1)
        return out @ p[name + "o_proj.weight"].T, kept

    def index_scores(self, name: str, x: Tensor, latent_q: Tensor, position: Tensor) -> Tensor:
        c, p = self.config, self.p
        q = (latent_q @ p[name + "wq_b.weight"].T).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        raw = x @ p[name + "wk.weight"].T
        centred = raw - raw.mean(-1, keepdim=True)
        k = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        k = k * p[name + "k_norm.weight"] + p[name + "k_norm.bias"]
        rope, layout = c.qk_rope_head_dim, c.indexer_rope_interleave
        q, k = (
            torch.cat((turned(a[..., :rope], position, c.rope_theta, neighbours=layout), a[..., rope:]), -1)
            for a in (q, k)
        )
        weight = x @ p[name + "weights_proj.weight"].T / c.index_n_heads**0.5
        return torch.einsum("tj,tjs->ts", weight, torch.einsum("tji,si->tjs", q, k).relu() / c.index_head_dim**0.5)

    def mlp(self, layer: int, x: Tensor, run: Pass) -> Tensor:
        c, p, name = self.config, self.p, f"model.layers.{layer}.mlp."
        if c.is_dense(layer):
            return self.gated(x, *(p[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down")))
        score = (x @ p[name + "gate.weight"].T).sigmoid()
        chosen = self.choose(score.detach() + p[name + "gate.e_score_correction_bias"])
        weight = score * chosen
        if c.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        out = self.gated(x, *(p[f"{name}shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")))
        for expert in range(c.n_routed_experts):
            gate, up = p[name + "experts.gate_up_proj"][expert].split(c.moe_intermediate_size)
            down = p[name + "experts.down_proj"][expert]
            out = out + c.routed_scaling_factor * weight[:, expert, None] * self.gated(x, gate, up, down)
        run.balance.append(self.balance(score, chosen, run.batch))
        return out

    def gated(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = x @ gate.T
        return (inner * inner.sigmoid() * (x @ up.T)) @ down.T

    def choose(self, choice: Tensor) -> Tensor:
        """Bool [T, E]: the best experts of the best groups."""
        c, chosen = self.config, torch.zeros_like(choice, dtype=torch.bool)
        size = c.n_routed_experts // c.n_group
        for t, row in enumerate(choice.tolist()):
            groups = [sorted(row[g * size : (g + 1) * size])[-2:] for g in range(c.n_group)]
            kept = sorted(range(c.n_group), key=lambda g: (-sum(groups[g]), g))[: c.topk_group]
            experts = [e for e in range(len(row)) if e // size in kept]
            chosen[t, sorted(experts, key=lambda e: (-row[e], e))[: c.num_experts_per_tok]] = True
        return chosen

    def balance(self, score: Tensor, chosen: Tensor, batch: PackedBatch) -> Tensor:
        """E / (k n) * sum over experts of (times chosen) * (mean share), each document by its loss weight."""
        c, total = self.config, torch.zeros((), dtype=torch.float64)
        share = score / score.sum(-1, keepdim=True)
        for start in batch.document_start_T.unique().tolist():
            rows = batch.document_start_T == start
            load = chosen[rows].double().sum(0) * c.n_routed_experts / (c.num_experts_per_tok * int(rows.sum()))
            weight = (batch.loss_mask_T * (batch.targets_T >= 0))[rows].sum()
            total = total + weight * (load * share[rows].mean(0)).sum()
        return total
