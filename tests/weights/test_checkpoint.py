"""Nothing outside a checkpoint's folder is read, no pickle is, and index and shards must agree."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sample_checkpoints import NANO, random_state, stored_tensors, write_checkpoint

from yunque.core.errors import CheckpointError
from yunque.weights.checkpoint import open_checkpoint, read_config, text_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint of two tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO.to_hf()))
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    _index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_folder_lists_every_tensor_with_its_file(folder):
    checkpoint = open_checkpoint(folder)
    assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert checkpoint.num_bytes == 20


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", "", "a\\b", "x\0y"]
)
def test_index_that_leads_outside_the_folder_is_refused(folder, name):
    save_file({"a": torch.ones(2)}, folder.parent / "one.safetensors")
    _index(folder, {"a": name, "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"leads outside|not a \.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["one.safetensors", "config.json", "model.safetensors.index.json"])
def test_link_out_of_the_folder_is_refused_and_one_inside_is_followed(folder, name):
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*outside the folder"):
        open_checkpoint(folder)
    (folder / name).unlink()
    outside.rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")
    assert set(open_checkpoint(folder).entries) == {"a", "b"}


def test_links_of_a_hugging_face_cache_are_followed_to_its_blobs_only(folder):
    repository = folder.parent / "models--x--y"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    folder.rename(snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(Path("../../blobs") / f"blob-{path.name}")
    assert set(open_checkpoint(snapshot).entries) == {"a", "b"}
    (blobs / "blob-config.json").rename(repository / "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../config.json")
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_checkpoint(snapshot)


def test_link_loop_and_fifo_are_refused(folder):
    (folder / "one.safetensors").unlink()
    (folder / "one.safetensors").symlink_to("one.safetensors")
    with pytest.raises(CheckpointError, match=r"no readable one\.safetensors"):
        open_checkpoint(folder)
    (folder / "one.safetensors").unlink()
    os.mkfifo(folder / "one.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle_is_never_read(tmp_path, name):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "config.json").write_text(json.dumps(NANO.to_hf()))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=rf"no readable model\.safetensors \(found {name}: pickle"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, r"one\.safetensors: tensor 'b' is missing"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "tensor 'c' is missing"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, r"two\.safetensors: tensor 'a' is missing"),
        ({"b": "two.safetensors", "c": "one.safetensors"}, r"one\.safetensors: tensor 'a' is not where"),
        ({"a": "three.safetensors"}, r"no readable three\.safetensors"),
        ({"a": 3}, "must map tensor names to file names"),
        (None, "must map tensor names to file names"),
        ({"a": "pytorch_model.bin"}, r"'pytorch_model\.bin' is not a \.safetensors file"),
    ],
)
def test_index_and_shards_that_disagree_are_refused(folder, weight_map, message):
    _index(folder, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_tensor_in_two_shards_is_refused(folder):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor 'a' is also in one\.safetensors"):
        open_checkpoint(folder)


def test_damaged_or_oversized_config_is_refused(folder):
    for content, message in [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        (" " * (16 * 2**20) + "{}", "limit"),
    ]:
        (folder / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(folder / "absent")


def test_config_and_text_files_are_read_without_weights(tmp_path):
    folder = write_checkpoint(tmp_path / "m", NANO, stored_tensors(random_state(NANO)))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    assert read_config(folder).to_hf() == NANO.to_hf()
    assert text_files(folder) == {"chat_template.jinja": b"{{ x }}"}
