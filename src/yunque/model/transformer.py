"""The whole model: embedding, decoder layers, multi-token prediction, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from yunque.model.attention import Attention
from yunque.model.block import DecoderLayer, MTPLayer
from yunque.model.cache import CacheView
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode, ForwardOutput, LayerOutput, SideLosses, Step, Trace
from yunque.model.layers import GatedMLP, Linear, RMSNorm
from yunque.ops.rotary import rotary_phases
from yunque.ops.rows import pad_rows
from yunque.ops.visibility import Selection

# Shapes: T tokens, D model, V vocabulary.

DEFAULT_MODE = ForwardMode()


@dataclass(frozen=True)
class MTPState:
    """What one prediction step hands to the next: its post-norm hidden states [T, D] and its selection."""

    hidden_TD: Tensor
    selection: Selection | None
    step: int


class Backbone(nn.Module):
    """Parameters under ``model.``: embedding, layers (the MTP layer last), final norm."""

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size)
        )
        layers: list[DecoderLayer] = [
            DecoderLayer(config, i, invariant=invariant) for i in range(config.num_hidden_layers)
        ]
        if config.num_nextn_predict_layers:
            layers.append(MTPLayer(config, invariant=invariant))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A GLM-5 model. The same module trains on packed batches and decodes through a cache view.

    Parameters are uninitialised: call ``init_weights`` or load a checkpoint. ``batch_invariant`` makes the result
    for a token independent, to the bit, of which other tokens are computed beside it, at a cost in speed.
    """

    def __init__(self, config: ModelConfig, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.config = config
        self.batch_invariant = batch_invariant
        self.model = Backbone(config, invariant=batch_invariant)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, invariant=batch_invariant)

    def forward(self, tokens_T: Tensor, view: CacheView, mode: ForwardMode = DEFAULT_MODE) -> ForwardOutput:
        """Run the main layers over ``tokens_T`` (int64), whose earlier rows ``view`` holds."""
        step = self._step(view, mode)
        side, trace = SideLosses(self.config.n_routed_experts), Trace() if mode.trace else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mode.indexer_only):
            x_TD = self._embed(tokens_T)
            selection: Selection | None = None
            for layer in self._main_layers():
                out = _run(layer, x_TD, step, selection, reuse=False)
                x_TD, selection = out.hidden_TD, out.selection
                side.add(layer.layer, out)
                if trace is not None:
                    trace.add(layer.layer, out, step.num_tokens)
            hidden_TD = self.model.norm(x_TD)[: step.num_tokens]
        return ForwardOutput(hidden_TD, side, trace)

    def predict_next(
        self, previous: MTPState, next_tokens_T: Tensor, view: CacheView, mode: ForwardMode = DEFAULT_MODE
    ) -> tuple[MTPState, LayerOutput]:
        """One multi-token-prediction step.

        Row t joins ``previous.hidden_TD[t]`` (step 0: the main model's output after its final norm; later the
        previous step's output after ``shared_head.norm``) with the embedding of ``next_tokens_T[t]``, the token
        that follows what the state has seen. The new state's ``logits`` predict the token after that. Later steps
        reuse the first step's selection where the config says so. Raises ``ValueError`` for a model without MTP.
        """
        if not self.config.num_nextn_predict_layers:
            raise ValueError("this model has no MTP layer (num_nextn_predict_layers is 0)")
        layer = self.model.layers[-1]
        assert isinstance(layer, MTPLayer)
        step = self._step(view, mode)
        reuse = previous.step > 0 and self.config.index_share_for_mtp_iteration
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mode.indexer_only):
            hidden_TD = pad_rows(previous.hidden_TD) if self.batch_invariant else previous.hidden_TD
            x_TD = layer.join(self._embed(next_tokens_T), hidden_TD)
            out = _run(layer, x_TD, step, previous.selection if reuse else None, reuse=reuse)
            hidden_TD = layer.shared_head["norm"](out.hidden_TD)[: step.num_tokens]
        return MTPState(hidden_TD, out.selection, previous.step + 1), out

    def join_projections(self) -> Transformer:
        """Lay weights that read one input side by side, so that inference makes fewer and larger products.

        Values, names and training do not change; do it once the weights are on their device in their type. A
        batch-invariant model keeps its separate products. Returns the model itself.
        """
        if not self.batch_invariant:
            for module in self.modules():
                if isinstance(module, Attention | GatedMLP):
                    module.join()
        return self

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Next-token logits fp32 [T, V] (or wider) of final hidden states."""
        out = self.lm_head(hidden_TD)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def _main_layers(self) -> list[DecoderLayer]:
        layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        return layers[: self.config.num_hidden_layers]

    def _step(self, view: CacheView, mode: ForwardMode) -> Step:
        config = self.config
        dtype = self.model.norm.weight.dtype
        phase_TF = rotary_phases(view.positions_T, width=config.qk_rope_head_dim, theta=config.rope_theta, dtype=dtype)
        num_tokens = view.positions_T.shape[0]
        if self.batch_invariant:
            phase_TF = pad_rows(phase_TF)
        return Step(view, phase_TF, mode, num_tokens=num_tokens, index_grad=torch.is_grad_enabled())

    def _embed(self, tokens_T: Tensor) -> Tensor:
        x_TD: Tensor = self.model.embed_tokens(tokens_T)
        return pad_rows(x_TD) if self.batch_invariant else x_TD


def _run(layer: DecoderLayer, x_TD: Tensor, step: Step, below: Selection | None, *, reuse: bool) -> LayerOutput:
    if not (step.mode.checkpoint and torch.is_grad_enabled()):
        return layer(x_TD, step, below, reuse=reuse)
    out = checkpoint(layer, x_TD, step, below, reuse=reuse, use_reentrant=False)
    assert isinstance(out, LayerOutput)
    return out


def shift_within_documents(column_T: Tensor, document_start_T: Tensor, by: int, fill: int | float) -> Tensor:
    """``column[t + by]`` where that row belongs to the same document, else ``fill``."""
    shifted = F.pad(column_T[by:], (0, min(by, column_T.shape[0])), value=fill)
    starts = F.pad(document_start_T[by:], (0, min(by, column_T.shape[0])), value=-1)
    return torch.where(starts == document_start_T, shifted, torch.full_like(shifted, fill))
