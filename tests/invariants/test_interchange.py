"""A folder that we write and one that transformers writes hold the same model: equal logits, loaded by the other.

Weights that leave nothing at a neutral value, and weights after a few steps of training, indexers included. Where two
keys score almost the same, either may be kept: there their selection is imposed on ours, in at most one row of a
hundred.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build, draw_config, largest_difference, random_batch, random_documents, run
from near_ties import Theirs, agreed_selections

from yunque.core.errors import CheckpointError
from yunque.engine import Engine, EngineSettings, SamplingParams
from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.objectives import LanguageModelLoss, LossConfig
from yunque.model.transformer import Transformer
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


def load_theirs(folder: Path, *, dropped: str = "") -> Theirs:
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
    return Theirs(model.eval())


@torch.no_grad()
def compare(ours: Transformer, theirs: Theirs) -> None:
    """Logits agree on prompts shorter than, as long as and longer than index_topk, and so do the selections."""
    topk, compared, imposed = ours.config.index_topk, 0, 0
    for number, length in enumerate((topk - 1, topk, topk + 1, 3 * topk + 2, 8 * topk)):
        batch = PackedBatch.from_documents(random_documents(ours.config, [length], seed=number))
        wanted = theirs.logits(batch)
        replay, num_imposed, num_compared = agreed_selections(ours, theirs, batch)
        got = ours.logits(run(ours, batch, replay=replay).hidden_TD)
        assert largest_difference(got, wanted) <= TOLERANCE, f"{length} tokens, topk {topk}"
        if length > topk:
            compared, imposed = compared + num_compared, imposed + num_imposed
    assert imposed <= 0.01 * compared, f"{imposed} of {compared} selections differ"


@pytest.mark.parametrize("is_trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("seed", [0, 3, 5, 6])
def test_model_goes_through_both_folders_with_equal_logits(tmp_path, seed, is_trained):
    config = drawn(seed)
    ours = build(config, seed)
    if is_trained:
        ours = trained(ours)
    theirs = load_theirs(save_model(tmp_path / "ours", config, ours.state_dict()))
    compare(ours, theirs)
    theirs.model.save_pretrained(tmp_path / "theirs")
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
    theirs.model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="set num_nextn_predict_layers = 0"):
        load_model(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", config=replace(config, num_nextn_predict_layers=0))
    compare(back, theirs)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_engine_writes_the_greedy_text_of_their_generate(tmp_path, num_drafts):
    """Trained weights, prompts past index_topk, in one batch; a text may part at a near-tie of the two best logits."""
    config = drawn(2, num_nextn_predict_layers=1)
    ours = trained(build(config, 2))
    mtp = f"model.layers.{config.num_hidden_layers}."
    theirs = load_theirs(save_model(tmp_path / "ours", config, ours.state_dict()), dropped=mtp).model
    prompts = random_documents(config, [5, 30, 60], seed=2)
    sampling, near_ties = SamplingParams(temperature=0, max_new_tokens=40), 0
    with Engine.load(tmp_path / "ours", EngineSettings(num_drafts=num_drafts, page_size=4)) as engine:
        for prompt in prompts:
            got = list(engine.generate(prompt, sampling).tokens)
            out = theirs.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=40, max_new_tokens=40)
            expected = out[0, len(prompt) :].tolist()
            if got != expected:
                first = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
                logits = theirs(torch.tensor([prompt + got[:first]]), use_cache=False).logits[0, -1]
                best, second = logits.topk(2).values.tolist()
                assert best - second < 1e-3, f"prompt of {len(prompt)}: {got} is not {expected}"
                near_ties += 1
    assert near_ties <= 1
