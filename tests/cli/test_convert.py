"""``yunque convert`` keeps every bit, both ways."""

from pathlib import Path

import pytest
import torch

from yunque.cli.main import main
from yunque.weights import load_model


def test_hugging_face_to_snapshot_and_back_keeps_every_bit(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "snap"), "--to", "snapshot"]) == 0
    assert main(["convert", str(tmp_path / "snap"), str(tmp_path / "back")]) == 0
    before, after = load_model(checkpoint).state_dict(), load_model(tmp_path / "back").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_dtype_converts_all_but_the_router(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    model = load_model(tmp_path / "half")
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {kind for name, kind in kinds.items() if ".mlp.gate." in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if ".mlp.gate." not in name} == {torch.bfloat16}


def test_an_existing_target_is_refused_unless_overwrite(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "out")
    assert main(["convert", str(checkpoint), target]) == 0
    assert main(["convert", str(checkpoint), target]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), target, "--overwrite"]) == 0


def test_shard_size_must_be_positive(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "x"), "--shard-gb", "0"]) == 2
    assert "--shard-gb is 0.0" in capsys.readouterr().err


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_s_snapshots_are_never_the_target(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither as a checkpoint folder nor as a snapshot to start from, whether or not overwriting is asked for."""
    store = tmp_path / "snapshots"
    assert main(["convert", str(checkpoint), str(store), "--to", "snapshot"]) == 0
    (store / "step-00000000").rename(store / "step-00000004")
    before = _contents(store)
    for options, reason in (
        ([], "exists"),
        (["--overwrite"], "is no checkpoint (it has no config.json); it is not overwritten"),
        (["--to", "snapshot"], "holds snapshots already (step-00000004)"),
        (["--to", "snapshot", "--overwrite"], "holds snapshots already (step-00000004)"),
    ):
        assert main(["convert", str(checkpoint), str(store), *options]) == 2
        assert reason in capsys.readouterr().err
        assert _contents(store) == before


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--to", "snapshot", "--overwrite"]], ids=str)
def test_one_snapshot_of_a_run_is_never_the_target_either(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """It has a config.json, as what may be overwritten has; a run goes on from it, which a checkpoint cannot give."""
    store = tmp_path / "snapshots"
    assert main(["convert", str(checkpoint), str(store), "--to", "snapshot"]) == 0
    snapshot = (store / "step-00000000").rename(store / "step-00000004")
    before = _contents(store)
    assert main(["convert", str(checkpoint), str(snapshot), *options]) == 2
    assert f"{snapshot} is a run's snapshot (it has a manifest.json)" in capsys.readouterr().err
    assert _contents(store) == before


def test_a_store_without_a_whole_snapshot_is_no_source(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "snapshots"
    assert main(["convert", str(checkpoint), str(store), "--to", "snapshot"]) == 0
    (store / "step-00000000" / "config.json").write_text("{}")
    assert main(["convert", str(store), str(tmp_path / "out")]) == 2
    assert f"{store} holds snapshots, but none of them is whole" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_s_folder_is_no_source_and_the_message_says_what_it_lacks(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "run" / "01-sft" / "snapshots"), "--to", "snapshot"]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'run'} has no readable config.json" in capsys.readouterr().err


def test_gguf_is_one_file_in_the_dtype_asked_for_and_other_options_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader

    target = tmp_path / "model.gguf"
    assert main(["convert", str(checkpoint), str(target), "--to", "gguf", "--dtype", "bf16"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(target).tensors}
    assert (types["token_embd.weight"], types["output_norm.weight"]) == ("BF16", "F32")
    for options, reason in (
        ([], f"{target} exists"),
        (["--dtype", "bfloat16"], "unknown --dtype 'bfloat16' in --to gguf"),
        (["--shard-gb", "1"], "--shard-gb is for folders"),
    ):
        assert main(["convert", str(checkpoint), str(target), "--to", "gguf", *options]) == 2
        assert reason in capsys.readouterr().err
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--dtype", "q8_0"]) == 2
    assert "unknown --dtype 'q8_0' in --to huggingface" in capsys.readouterr().err
