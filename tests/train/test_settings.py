"""Run files: resolution of the model, overrides into stages, and refusals that name the nearest valid
choice."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from training_runs import nano_run

from yunque.core.config import to_mapping
from yunque.core.errors import ConfigError
from yunque.text.tokenizer import train_bpe
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"steps = ", "not TOML: Invalid value"),
        (b"name = 'caf\xe9'", "not TOML: 'utf-8' codec can't decode byte 0xe9"),
        (b"deep = " + b"[" * 100_000, "not TOML: maximum recursion depth exceeded"),
    ],
)
def test_a_file_that_holds_no_tables_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_run(path, ["seed=3"])
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_folder_in_place_of_a_run_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory"


def test_what_is_wrong_comes_behind_the_file_and_the_overrides_it_was_read_with(tmp_path: Path) -> None:
    path = _write(tmp_path, sede=3)
    wrong = "unknown key 'sede'; did you mean 'seed'"
    for overrides, source in (
        ([], f"{path}"),
        (["seed=4", "stage.*.tokens=256"], f"{path} with seed=4 stage.*.tokens=256"),
    ):
        with pytest.raises(ConfigError) as error:
            load_run(path, overrides)
        assert str(error.value).startswith(f"{source}: {wrong}")


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


def test_two_stages_of_one_name_are_refused_with_the_name_whatever_is_overridden(tmp_path: Path) -> None:
    first = nano_run()["stage"][0]
    path = _write(tmp_path, stage=[first, first])
    for overrides in ([], ["stage.*.tokens=256"], ["stage.pretrain.tokens=256"], ["seed=3"]):
        with pytest.raises(ConfigError, match=r"two stages are called 'pretrain'; give each a name of its own"):
            load_run(path, overrides)
    named = _write(tmp_path, stage=[first, first | {"name": "more"}])
    assert [stage.tokens for stage in load_run(named, ["stage.*.tokens=256"]).stage] == [256, 256]


# --- numbers ---

#: Any integer is a seed; 0 means something of its own where it is allowed at all.
ANY_INTEGER = {("seed",), ("data", "sources", "chats", "seed")}
Leaf = tuple[tuple[str | int, ...], int | float]


def _full_run() -> dict[str, Any]:
    """A run that says every number that a run file can hold, its defaults included."""
    base = nano_run()
    base["stage"][0] |= {
        "batch_ramp": {"start_tokens": 64, "over_tokens": 256},
        "mixture": {"phases": [{"weights": {"text": 1.0}, "until_tokens": 10_000}]},
        "mtp_weight": [[0, 0.3], [256, 0.1]],
        "optimizer": {},
    }
    base["model"] |= {"eos_token_id": [0], "pad_token_id": 0, "latent_norm_eps": 1e-6}
    sources = base["data"]["sources"]
    sources["talks"] = {"kind": "conversations", "path": "talks"}
    sources["table"] = {"kind": "parquet", "path": "table"}
    return to_mapping(run_from_mapping(base))


def _numbers(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, (*place, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _with(run: dict[str, Any], place: tuple[str | int, ...], value: float) -> dict[str, Any]:
    changed = copy.deepcopy(run)
    table: Any = changed
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    return changed


def test_no_number_of_a_run_may_be_negative_or_not_finite() -> None:
    """Every number of every table, found by walking the resolved run: a new one is covered when it is added."""
    run = _full_run()
    leaves = [(place, number) for place, number in _numbers(run) if place not in ANY_INTEGER]
    assert len(leaves) > 120
    for place, number in leaves:
        wrong = (-5,) if isinstance(number, int) else (-5.0, math.nan, math.inf, -math.inf)
        for value in wrong:
            with pytest.raises(ConfigError) as error:
                run_from_mapping(_with(run, place, value))
            key = [part for part in place if isinstance(part, str)][-1]
            assert key in str(error.value), (place, value, str(error.value))
            assert str(value) in str(error.value), (place, value, str(error.value))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tokenizer.vocab_size=-5", r"\[tokenizer\]: vocab_size is -5; it must be at least 274"),
        ("tokenizer.vocab_size=273", "vocab_size is 273; it must be at least 274"),
        ("tokenizer.vocab_size=513", "model.vocab_size is 512, below the 513 of tokenizer.vocab_size"),
        ("tokenizer.max_bytes=0", "max_bytes is 0; it must be a finite number, 1 or more"),
        ("stage.sft.packing_buffer=0", r"\[stage\[4\]\]: packing_buffer is 0; .* 1 or more"),
        ("stage.sft.sequence_length=1", "sequence_length is 1; .* 2 or more"),
        ("stage.sft.rope_theta=0.0", "rope_theta is 0.0; it must be a finite number above 0"),
        ("stage.pretrain.mtp_weight=nan", "mtp_weight is nan"),
        ("stage.pretrain.schedule.lr_peak=inf", r"\[stage\[0\].schedule\]: lr_peak is inf"),
        ("model.eos_token_id=[512]", r"model.eos_token_id: 512 is no token; valid: 0..511"),
        ("model.pad_token_id=512", r"model.pad_token_id: 512 is no token; valid: 0..511"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_place_and_the_range(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(_write(tmp_path), [override])


def test_the_smallest_tokenizer_that_a_run_may_ask_for_can_be_trained() -> None:
    smallest = run_from_mapping(nano_run(tokenizer={"vocab_size": 274, "sources": ["text"]})).tokenizer.vocab_size
    assert train_bpe(["text"], smallest).vocab_size == 274
    with pytest.raises(ConfigError, match="too small"):
        train_bpe(["text"], smallest - 1)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "..\\x", "-n", ".hidden", "a b", "new\n"])
def test_a_run_is_named_by_what_can_be_a_folder_of_runs(name: str) -> None:
    with pytest.raises(ConfigError, match="it becomes a folder"):
        run_from_mapping(nano_run(name=name))


@pytest.mark.parametrize("name", ["nano", "glm-5", "v1.2_b", "实验"])
def test_the_folder_of_a_run_lies_in_runs(name: str) -> None:
    assert run_from_mapping(nano_run(name=name)).folder == Path("runs") / name
