"""Run files: resolution of the model, overrides into stages, and refusals that name the nearest valid
choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from training_runs import nano_run

from yunque.core.config import to_mapping
from yunque.core.errors import ConfigError
from yunque.train.settings import load_run, run_from_mapping
from yunque.train.stages import DsaSparse, DsaWarmup, Sft


def _write(folder: Path, **changes) -> Path:
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(nano_run(**changes)))
    return path


def test_a_run_file_reads_back_equal_from_its_resolved_form(tmp_path: Path) -> None:
    run = load_run(_write(tmp_path))
    assert run_from_mapping(to_mapping(run)) == run
    assert run.model.vocab_size == 512
    assert run.model.hidden_size == 32
    assert [stage.title for stage in run.stage] == ["pretrain", "midtrain", "dsa_warmup", "dsa_sparse", "sft"]


def test_a_new_rope_base_holds_from_its_stage_on() -> None:
    run = run_from_mapping(nano_run())
    assert [run.model_at(i).rope_theta for i in range(5)] == [10_000.0, *[40_000.0] * 4]


def test_overrides_reach_one_stage_or_all_and_the_model(tmp_path: Path) -> None:
    path = _write(tmp_path)
    run = load_run(path, ["stage.sft.tokens=8192", "model.hidden_size=48", "stage.pretrain.schedule.lr_peak=1e-3"])
    assert run.stage[4].tokens == 8192
    assert run.stage[0].tokens == 512
    assert run.stage[0].schedule.lr_peak == 1e-3
    assert run.model.hidden_size == 48
    assert [stage.tokens for stage in load_run(path, ["stage.*.tokens=256"]).stage] == [256] * 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage.pretrian.tokens=1", "unknown stage 'pretrian'; did you mean 'pretrain'"),
        ("stage.sft.tokenz=1", r"unknown key 'tokenz' in \[stage\[4\]\]; did you mean 'tokens'"),
        ("model.preset=tinny", "unknown model preset 'tinny'; did you mean 'tiny'"),
        ("model.hiden_size=8", "did you mean 'hidden_size'"),
        ("optimizer.kind=moun", "unknown value 'moun' in optimizer.kind; did you mean 'muon'"),
        ("stage.sft.kind=stf", "unknown kind 'stf'"),
        ("stage.sft.sources=['chat']", "unknown source 'chat' in stage 'sft'; did you mean 'chats'"),
        ("model.max_position_embeddings=1024", "2048 exceeds the model's max_position_embeddings 1024"),
        ("stage.sft.microbatches=3", "2048 is not divisible by microbatches 3"),
        ("stage.sft.microbatches=4", r"microbatch of 512 tokens .* below sequence_length 2048"),
        ("model.num_nextn_predict_layers=0", "the model has no MTP layer"),
        ("stage.dsa_warmup.mtp_weight=0.1", "unknown key 'mtp_weight'"),
        ("tokenizer.path=somewhere", "either path"),
        ("tokenizer.sources=['chats']", "holds conversations"),
        ("stage.midtrain.name=pretrain", "two stages are called 'pretrain'"),
        ("stage.midtrain.name='../x'", r"name is '\.\./x'; it becomes a folder"),
        ("stage.pretrain.schedule.warmup_tokens=512", "leaves nothing of 512 tokens"),
    ],
)
def test_a_wrong_run_is_refused_with_the_file_and_the_valid_choice(tmp_path: Path, override: str, message: str) -> None:
    path = _write(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        load_run(path, [override])
    assert str(error.value).startswith(str(path))


def test_stages_train_what_they_are_for() -> None:
    run = run_from_mapping(nano_run())
    by_title = {stage.title: stage for stage in run.stage}
    assert [stage.attends for stage in run.stage] == ["dense", "dense", "dense", "sparse", "sparse"]
    assert all(role.startswith("indexer") for role in by_title["dsa_warmup"].trainable)
    assert not any(role.startswith("indexer") for role in by_title["pretrain"].trainable)
    assert any(role.startswith("indexer") for role in by_title["dsa_sparse"].trainable)
    assert not any(role.startswith("indexer") for role in by_title["sft"].trainable)
    assert isinstance(by_title["dsa_warmup"], DsaWarmup)
    assert isinstance(by_title["dsa_sparse"], DsaSparse)
    assert isinstance(by_title["sft"], Sft)


def test_loss_weights_follow_their_steps(tmp_path: Path) -> None:
    """GLM-4.5's switch points: MTP 0.3 then 0.1, balancing rate 0.001 then 0."""
    overrides = [
        "stage.pretrain.mtp_weight=[[0, 0.3], [256, 0.1]]",
        "stage.pretrain.router_bias_rate=[[0, 1e-3], [384, 0]]",
    ]
    stage = load_run(_write(tmp_path), overrides).stage[0]
    weights = [stage.weights_at(tokens) for tokens in (0, 255, 256, 384)]
    assert [w.mtp for w in weights] == [0.3, 0.3, 0.1, 0.1]
    assert [w.router_bias_rate for w in weights] == [1e-3, 1e-3, 1e-3, 0.0]


def test_an_sft_indexer_needs_sparse_attention(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs attention = 'sparse'"):
        load_run(_write(tmp_path), ["stage.sft.attention=dense", "stage.sft.index_kl_weight=1"])
