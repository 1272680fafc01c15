"""What ``yunque info`` counts, and how it refuses."""

import json
from pathlib import Path

import pytest

from yunque.cli.main import main


@pytest.mark.parametrize(
    ("name", "tensors", "main_b", "with_mtp_b"), [("glm-5", 59_870, 743.9, 753.9), ("glm-5.2", 59_585, 743.4, 753.3)]
)
def test_released_models_count_as_published(
    name: str, tensors: int, main_b: float, with_mtp_b: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"] == tensors
    assert round(report["parameters_main"]["total"] / 1e9, 1) == main_b
    assert round(report["parameters_with_mtp"]["total"] / 1e9, 1) == with_mtp_b


def test_cache_bytes_are_latents_on_all_layers_and_index_keys_on_full_ones(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "glm-5", "--json"])
    assert json.loads(capsys.readouterr().out)["cache_bytes_per_token"]["bfloat16"] == 2 * 78 * (576 + 128)
    main(["info", "glm-5.2", "--json"])
    assert json.loads(capsys.readouterr().out)["cache_bytes_per_token"]["bfloat16"] == 2 * (78 * 576 + 21 * 128)


def test_active_parameters_count_the_chosen_experts_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "glm-5", "--json"])
    experts = json.loads(capsys.readouterr().out)["parameters"]["routed experts"]
    assert experts["active"] * 32 == experts["total"]


def test_flops_grow_with_context_by_the_indexer_only_beyond_topk(capsys: pytest.CaptureFixture[str]) -> None:
    flops = []
    for context in (4096, 8192):
        main(["info", "glm-5", "--json", "--context", str(context)])
        flops.append(json.loads(capsys.readouterr().out)["flops_per_token"])
    assert flops[1] - flops[0] == 2 * 78 * 4096 * 32 * 129


def test_a_checkpoint_folder_and_its_config_file_give_the_same_report(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["info", str(checkpoint), "--json"])
    from_folder = capsys.readouterr().out
    main(["info", str(checkpoint / "config.json"), "--json"])
    assert capsys.readouterr().out == from_folder


def test_tables_name_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "tiny"]) == 0
    out = capsys.readouterr().out
    for part in ("embedding", "attention", "indexer", "routed experts", "MTP layer", "weights, int4"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["glm5"], "did you mean 'glm-5'"), (["tiny", "--context", "0"], "--context is 0")],
)
def test_mistakes_exit_with_2_and_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1
