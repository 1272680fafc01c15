import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yunque.core.config import from_mapping, to_mapping
from yunque.core.errors import ConfigError, DataError
from yunque.core.seeds import Seeds
from yunque.data.documents import TokenDocument
from yunque.data.loader import DataConfig, HeldOut, Loader, assemble, build_held_out, build_loader
from yunque.data.mixture import MixtureConfig, Phase
from yunque.data.packing import PackingConfig
from yunque.data.readers import JsonlSource, TextSource
from yunque.data.tool_chats import ToolChatSource
from yunque.model.batch import PackedBatch
from yunque.text.render import Renderer
from yunque.text.tokenizer import Tokenizer

PACKING = PackingConfig(tokens_per_batch=512, sequence_length=256, buffer_documents=8)


def _num_tokens(folder: Path, tokenizer: Tokenizer) -> int:
    """Tokens of rows.jsonl, with the one that ends each document."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return sum(len(tokenizer.encode(json.loads(line)["text"])) + 1 for line in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some texts of very different lengths, and a cache."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = [{"text": f"row {i} " + "word " * int(rng.integers(1, 300))} for i in range(60)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "notes.txt").write_text("A note.\n" * 200)
    return root


def _config(folder: Path, **changes: object) -> DataConfig:
    settings: dict[str, object] = {
        "packing": PACKING,
        "sources": {
            "rows": JsonlSource(path=str(folder / "rows.jsonl")),
            "tools": ToolChatSource(num_train=40, num_held_out=10),
        },
        "mixture": MixtureConfig((Phase({"rows": 3, "tools": 1}, 8000), Phase({"rows": 1, "tools": 2}))),
    }
    return DataConfig(**(settings | changes))  # type: ignore[arg-type]


def _loader(config: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int = 0) -> Loader:
    renderer = Renderer(tokenizer, "glm-5")
    return build_loader(config, tokenizer, Seeds(seed), cache=folder / "cache", renderer=renderer)


def _held_out(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> HeldOut:
    return build_held_out(config, tokenizer, cache=folder / "cache", renderer=Renderer(tokenizer, "glm-5"))


def _are_equal(one: PackedBatch, other: PackedBatch) -> bool:
    names = ("tokens_T", "targets_T", "loss_mask_T", "document_start_T")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


DOCUMENTS = st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.booleans()), min_size=1)


@given(DOCUMENTS, st.integers(0, 3))
def test_assembling_equals_the_plain_construction(documents: list[tuple[list[int], bool]], padding: int) -> None:
    """Against PackedBatch.from_documents, with padding as documents of one token."""
    made = [
        TokenDocument(np.array(ids), (np.array(ids) % 2).astype(np.uint8) if masked else None, "")
        for ids, masked in documents
    ]
    masks = [[i % 2 for i in ids] if masked else [1] * len(ids) for ids, masked in documents]
    plain = PackedBatch.from_documents([ids for ids, _ in documents] + [[7]] * padding, masks + [[0]] * padding)
    batch = assemble(made, padding=padding, pad_id=7)
    assert _are_equal(batch, plain)
    assert batch.loss_mask_T.dtype == torch.float32
    assert torch.equal(batch.positions_T, plain.positions_T)


def test_batches_are_full_and_documents_do_not_see_each_other(tokenizer: Tokenizer, folder: Path) -> None:
    loader = _loader(_config(folder), tokenizer, folder)
    for _, batch in zip(range(30), loader, strict=False):
        assert batch.num_tokens == 512
        starts = torch.unique(batch.document_start_T)
        lengths = [piece.length for piece in loader.last_pieces]
        assert starts[: len(lengths)].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
        assert int(batch.positions_T.max()) < 256
        ends = torch.cat([starts[1:], torch.tensor([512])]) - 1
        assert (batch.targets_T[ends] == -1).all()
        assert (batch.loss_mask_T[ends] == 0).all()
        inside = batch.targets_T >= 0
        assert torch.equal(batch.targets_T[inside], batch.tokens_T.roll(-1)[inside])
    assert loader.report.batches == 30
    assert loader.report.waste < 0.2


@settings(max_examples=25)
@given(st.integers(0, 60), st.integers(0, 3))
def test_a_restored_loader_yields_the_same_batches_bit_for_bit(
    tokenizer: Tokenizer, folder: Path, number: int, seed: int
) -> None:
    config = _config(folder)
    loader = _loader(config, tokenizer, folder, seed)
    for _ in range(number):
        next(loader)
    state = json.loads(json.dumps(loader.state()))
    expected = [next(loader) for _ in range(25)]
    other = _loader(config, tokenizer, folder, seed)
    other.restore(state)
    assert all(_are_equal(next(other), batch) for batch in expected)
    assert other.state() == loader.state()
    assert other.report == loader.report


def test_a_state_is_small(tokenizer: Tokenizer, folder: Path) -> None:
    loader = _loader(_config(folder), tokenizer, folder)
    for _ in range(20):
        next(loader)
    assert len(json.dumps(loader.state())) < 2000


def test_seeds_change_the_order_and_nothing_else(tokenizer: Tokenizer, folder: Path) -> None:
    one_epoch = {"rows": JsonlSource(path=str(folder / "rows.jsonl"), split="train", max_epochs=1)}
    config = _config(folder, sources=one_epoch, mixture=MixtureConfig())
    runs = [list(_loader(config, tokenizer, folder, seed)) for seed in (0, 0, 1)]
    tokens = [torch.cat([batch.tokens_T for batch in run]) for run in runs]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[0].sort().values, tokens[2].sort().values)


def test_a_finite_loader_ends_with_a_shorter_batch_and_every_token_once(tokenizer: Tokenizer, folder: Path) -> None:
    sources = {"rows": JsonlSource(path=str(folder / "rows.jsonl"), split="train", max_epochs=2)}
    loader = _loader(_config(folder, sources=sources, mixture=MixtureConfig()), tokenizer, folder)
    batches = list(loader)
    assert {batch.num_tokens for batch in batches[:-1]} == {512}
    assert batches[-1].num_tokens <= 512
    text = _num_tokens(folder, tokenizer)
    assert sum(batch.num_tokens for batch in batches) == 2 * text == loader.report.tokens
    assert loader.epochs == {"rows": 2.0}


def test_held_out_batches_are_the_same_every_time_and_not_in_training(tokenizer: Tokenizer, folder: Path) -> None:
    config = _config(folder, held_out_share=0.2, held_out_batches=5)
    held_out = _held_out(config, tokenizer, folder)
    first, second = list(held_out), list(held_out)
    assert len(first) == 5
    assert all(map(_are_equal, first, second))
    assert all(map(_are_equal, first, _held_out(config, tokenizer, folder)))
    sources = {"rows": JsonlSource(path=str(folder / "rows.jsonl"), max_epochs=1)}
    alone = _config(folder, held_out_share=0.2, held_out_batches=99, sources=sources, mixture=MixtureConfig())
    rows = [list(side) for side in (_loader(alone, tokenizer, folder), _held_out(alone, tokenizer, folder))]
    assert sum(b.num_tokens for side in rows for b in side) == _num_tokens(folder, tokenizer)
    train, held = ([tokenizer.decode(b.tokens_T.tolist()) for b in side] for side in rows)
    numbers = [{n for text in side for n in re.findall(r"row (\d+) word", text)} for side in (train, held)]
    assert not numbers[0] & numbers[1]
    assert len(numbers[0] | numbers[1]) > 50


def test_a_source_of_its_own_can_be_the_held_out_set(tokenizer: Tokenizer, folder: Path) -> None:
    sources = {
        "rows": JsonlSource(path=str(folder / "rows.jsonl"), split="train"),
        "notes": TextSource(path=str(folder / "notes.txt"), split="held_out"),
    }
    config = _config(folder, sources=sources, mixture=MixtureConfig())
    (batch, *_) = _held_out(config, tokenizer, folder)
    assert "A note." in tokenizer.decode(batch.tokens_T.tolist())
    assert "A note." not in tokenizer.decode(next(_loader(config, tokenizer, folder)).tokens_T.tolist())
    weighted = _config(folder, sources=sources, mixture=MixtureConfig((Phase({"notes": 1}),)))
    with pytest.raises(ConfigError, match="none of these sources has a train split"):
        _loader(weighted, tokenizer, folder)


def test_without_held_out_documents_the_remedy_is_named(tokenizer: Tokenizer, folder: Path) -> None:
    sources = {"notes": TextSource(path=str(folder / "notes.txt"))}
    config = _config(folder, sources=sources, mixture=MixtureConfig(), held_out_share=0.0)
    with pytest.raises(DataError, match=r"raise held_out_share \(0\.0\) or give one with split = 'held_out'"):
        _held_out(config, tokenizer, folder)


def test_a_source_without_a_usable_document_is_named(tokenizer: Tokenizer, folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    sources = {"empty": JsonlSource(path=str(folder / "empty.jsonl"))}
    with pytest.raises(DataError, match=r"source 'empty' has nothing to train on: .*empty file: 1"):
        _loader(_config(folder, sources=sources, mixture=MixtureConfig()), tokenizer, folder)


def test_a_state_of_other_data_is_refused(tokenizer: Tokenizer, folder: Path) -> None:
    path = folder / "changing.txt"
    path.write_text("one\n")
    config = _config(folder, sources={"notes": TextSource(path=str(path), split="train")}, mixture=MixtureConfig())
    state = _loader(config, tokenizer, folder).state()
    path.write_text("another\n")
    with pytest.raises(DataError, match="source 'notes' does not hold the documents"):
        _loader(config, tokenizer, folder).restore(state)


def test_conversations_that_are_too_long_are_announced(
    tokenizer: Tokenizer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(folder, packing=PackingConfig(300, 300))
    loader = _loader(config, tokenizer, folder)
    announced = re.search(r"have more than sequence_length 300 tokens and lose their ends; of (\d+) ", caplog.text)
    assert announced is not None
    assert int(announced[1]) > 0
    for _ in range(40):
        next(loader)
    assert loader.report.truncated_documents > 0


def test_the_table_survives_toml_shaped_mappings(folder: Path) -> None:
    config = _config(folder)
    assert from_mapping(DataConfig, json.loads(json.dumps(to_mapping(config)))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {}}, "sources is empty"),
        ({"held_out_share": 1.0}, "held_out_share is 1.0"),
        ({"mixture": MixtureConfig((Phase({"rowz": 1}),))}, "unknown source 'rowz'.*did you mean 'rows'"),
    ],
)
def test_impossible_settings_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(folder, **changes)


def test_misspelt_kinds_and_keys_are_refused_with_the_nearest_name() -> None:
    def table(source: dict[str, object]) -> dict[str, object]:
        return {"packing": {"tokens_per_batch": 8, "sequence_length": 8}, "sources": {"a": source}}

    with pytest.raises(ConfigError, match="did you mean 'builtin'"):
        from_mapping(DataConfig, table({"kind": "bultin"}), where="data")
    with pytest.raises(ConfigError, match="did you mean 'field'"):
        from_mapping(DataConfig, table({"kind": "jsonl", "path": "x", "feild": "body"}), where="data")
    with pytest.raises(ConfigError, match=r"missing.*path.*in \[data.sources.a\]"):
        from_mapping(DataConfig, table({"kind": "jsonl"}), where="data")
