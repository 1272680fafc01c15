"""A folder that we write and one that transformers writes hold the same model: equal logits, loaded by the other.

Weights that leave nothing at a neutral value, and weights after a few steps of training, indexers included. Where two
keys score almost the same, either may be kept: in rows that differ their selection is imposed on ours, and such rows
may be one in a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build, draw_config, largest_difference, random_batch, random_documents, run
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.forward import Replay
from yunque.model.objectives import LanguageModelLoss, LossConfig
from yunque.model.transformer import Transformer
from yunque.ops.visibility import Selection
from yunque.weights import load_model, save_model

pytestmark = pytest.mark.xdist_group("transformers")

TOLERANCE = 1e-5
STEPS = 12


def drawn(seed: int, *, num_nextn_predict_layers: int = 0) -> ModelConfig:
    """An architecture that transformers has too; with 32 index heads no score is exactly 0, so ties are rare."""
    fixed = {"index_n_heads": 32, "latent_norm_eps": 1e-6, "num_nextn_predict_layers": num_nextn_predict_layers}
    return draw_config(seed, **fixed)


def trained(model: Transformer) -> Transformer:
    """The model after a few steps that move every parameter; fails where one stood still."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = LanguageModelLoss(LossConfig(index_kl_weight=1.0))
    for step in range(STEPS):
        out = loss(model, random_batch(model.config, [40, 17, 23], seed=step))
        optimizer.zero_grad(set_to_none=True)
        (out.sum / out.count).backward()
        optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    return model


def load_theirs(folder: Path, *, dropped: str = "") -> Any:
    """Their class as its users get it, from the folder alone; only tensors named ``dropped...`` found no place."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="eager",  # grouped products want aligned widths
        output_loading_info=True,
    )
    model, report = loaded
    unexpected = report.pop("unexpected_keys")
    assert not any(report.values()), report
    assert bool(unexpected) == bool(dropped)
    assert all(name.startswith(dropped) for name in unexpected), unexpected
    return model.eval()


def logits_of_theirs(model: Any, tokens: list[int]) -> tuple[Tensor, dict[int, Selection]]:
    """Logits [T, V] of one pass, and what each of their indexers kept, written as ours is."""
    kept: dict[int, Selection] = {}
    hooks = []
    for layer, block in enumerate(model.model.layers):
        if block.self_attn.indexer is not None:

            def keep(module: Any, inputs: Any, output: Tensor, layer: int = layer) -> None:  # noqa: ARG001
                kept[layer] = selection_of(output[0])

            hooks.append(block.self_attn.indexer.register_forward_hook(keep))
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, kept


def selection_of(keys_TK: Tensor) -> Selection:
    """Visible keys ascending, then -1: they keep later keys too where fewer are visible, and mask them afterwards."""
    num_tokens = keys_TK.shape[0]
    later_TK = keys_TK > torch.arange(num_tokens)[:, None]
    positions_TK = keys_TK.masked_fill(later_TK, num_tokens).sort(dim=1).values
    return Selection(positions_TK.masked_fill(positions_TK == num_tokens, -1).int())


def differing_rows(mine: Mapping[int, Selection | None], theirs: Mapping[int, Selection]) -> dict[int, int]:
    """How many queries of each layer kept other keys; layers without any are left out."""
    counts = {}
    for layer, selection in theirs.items():
        own = mine[layer]
        assert own is not None, f"layer {layer} has no selection"
        counts[layer] = int((own.positions_TK != selection.positions_TK).any(dim=1).sum())
    return {layer: count for layer, count in counts.items() if count}


@torch.no_grad()
def compare(ours: Transformer, theirs: Any) -> None:
    """Logits agree on prompts shorter than, as long as and longer than index_topk, and so do the selections."""
    topk, rows, differing = ours.config.index_topk, 0, 0
    for number, length in enumerate((topk - 1, topk, topk + 1, 3 * topk + 2, 8 * topk)):
        (tokens,) = random_documents(ours.config, [length], seed=number)
        wanted, kept = logits_of_theirs(theirs, tokens)
        batch = PackedBatch.from_documents([tokens])
        out = run(ours, batch)
        if length > topk:
            imposed: dict[int, Selection] = {}
            while different := differing_rows(out.trace.selections, kept):
                layer = min(different)  # what it keeps decides the scores of the layers above
                differing += different[layer]
                imposed[layer] = kept[layer]
                out = run(ours, batch, replay=Replay(imposed))
            rows += length * len(kept)
        assert largest_difference(ours.logits(out.hidden_TD), wanted) <= TOLERANCE, f"{length} tokens, topk {topk}"
    assert differing <= 0.01 * rows, f"{differing} of {rows} selections differ"


@pytest.mark.parametrize("is_trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("seed", [0, 3, 5, 6])
def test_model_goes_through_both_folders_with_equal_logits(tmp_path, seed, is_trained):
    config = drawn(seed)
    ours = build(config, seed)
    if is_trained:
        ours = trained(ours)
    theirs = load_theirs(save_model(tmp_path / "ours", config, ours.state_dict()))
    compare(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs")
    assert back.config == config
    compare(back, theirs)


def test_their_class_drops_the_prediction_layer_and_keeps_the_model(tmp_path):
    """The layer is still ours to keep: what they write back says by its config that it holds one, and is refused."""
    config = drawn(2, num_nextn_predict_layers=1)
    ours = trained(build(config, 2))
    mtp = f"model.layers.{config.num_hidden_layers}."
    theirs = load_theirs(save_model(tmp_path / "ours", config, ours.state_dict()), dropped=mtp)
    compare(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="set num_nextn_predict_layers = 0"):
        load_model(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", config=replace(config, num_nextn_predict_layers=0))
    compare(back, theirs)
