"""GGUF files: llama.cpp computes and writes what we do, every tensor is where it belongs, nothing is half-written."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from sample_checkpoints import quantised, quantization_config, random_state, stored_tensors, write_checkpoint
from torch import Tensor

import yunque
from yunque.core.errors import CheckpointError, ConfigError
from yunque.core.records import Message
from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView
from yunque.model.config import ModelConfig
from yunque.model.forward import ForwardMode
from yunque.model.generate import Sampling, generate
from yunque.model.names import tensor_specs
from yunque.model.presets import preset
from yunque.model.transformer import MTPState, Transformer
from yunque.text import Renderer, Tokenizer, chat_template, train_bpe
from yunque.text.tokenizer import SPLIT_PATTERN
from yunque.weights import Fp8Format, SnapshotParts, SnapshotStore, load_model, save_model, write_gguf
from yunque.weights.gguf import GGUF_DTYPES, encode
from yunque.weights.gguf_metadata import Vocabulary, pre_tokenizer_of
from yunque.weights.gguf_names import gguf_tensors

for folder in (Path(__file__).parents[2] / "benchmarks", Path(__file__).parents[1] / "model"):
    sys.path.insert(0, str(folder))
from builders import build, draw_config  # noqa: E402
from llamacpp import LlamaCpp  # noqa: E402

CORPUS = ["import os\ndef main(argv=None):\n    return 0\n", "What is 3 plus 4? The answer is 7.\n"]
VOCABULARY = 330
NANO = replace(preset("nano"), vocab_size=VOCABULARY)
PROMPT, NEW = 40, 64
TOPK = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """320 tokens; the models have ten ids more, as released ones do."""
    return train_bpe(CORPUS * 4, 320)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("text")
    tokenizer.save(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"chat_template.jinja": chat_template("glm-5.1").encode()}


def drawn(seed: int, **fixed: object) -> ModelConfig:
    """An architecture of random shapes; 16 index heads leave no two keys with a score of exactly 0."""
    width = random.Random(seed).choice([8, 16, 64])
    values = {"vocab_size": VOCABULARY, "index_n_heads": 16, "index_head_dim": width, "index_topk": TOPK}
    values["latent_norm_eps"] = random.Random(seed).choice([None, 1e-6, 1e-3])
    return draw_config(seed, **values | fixed)


def saved(folder: Path, config: ModelConfig, texts: dict[str, bytes], seed: int = 0) -> tuple[Transformer, Path]:
    """A random model and the folder that holds it."""
    model = build(config, seed)
    return model, save_model(folder / "model", config, model.state_dict(), files=texts)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


@torch.inference_mode()
def our_log_probs(model: Transformer, tokens: list[int]) -> Tensor:
    """Log-probabilities [T, V]; fails unless the last row kept fewer keys than it sees."""
    batch = PackedBatch.from_documents([tokens])
    out = model(batch.tokens_T, PackedView(batch), ForwardMode(trace=True))
    assert out.trace is not None
    assert all(
        s is not None and (s.positions_TK[-1] >= 0).sum() == TOPK < len(tokens) for s in out.trace.selections.values()
    )
    return model.logits(out.hidden_TD).log_softmax(-1)


def our_text(model: Transformer, prompt: list[int]) -> list[int]:
    stops = frozenset(model.config.eos_token_id)
    return list(generate(model, prompt, Sampling(max_new_tokens=NEW, stop_ids=stops)))


def opened(file: Path, tokenizer: Tokenizer, **options: int) -> LlamaCpp:
    return LlamaCpp(file, vocab_size=VOCABULARY, plain_token=tokenizer.encode("0")[0], **options)


def stored(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file as float32, slowest axis first."""
    return {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape][::-1]).copy()
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


def types_of(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("seed", range(8))
def test_llamacpp_agrees_past_index_topk_and_writes_the_same_text(tmp_path, tokenizer, texts, seed):
    """Random shapes, shared indexers, groups, latent epsilons: 61 rows to 5e-4 (40 tokens in one prefill, the rest
    decoded), and 64 greedy tokens, up to a near-tie of our two best logits."""
    config = drawn(seed, num_nextn_predict_layers=seed % 2, eos_token_id=tokenizer.special.eos_ids)
    model, folder = saved(tmp_path, config, texts, seed)
    engine = opened(write_gguf(folder, tmp_path / "model.gguf", dtype="f32"), tokenizer)
    tokens = random_tokens(100, seed)
    gaps = (engine.log_probs(tokens, PROMPT) - our_log_probs(model, tokens)[PROMPT - 1 :]).abs().amax(-1)
    assert len(gaps) == 61
    assert gaps.max() < 5e-4
    prompt = tokens[:PROMPT]
    ours, theirs = our_text(model, prompt), list(engine.greedy(prompt, NEW).tokens)
    if ours != theirs:
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        best = our_log_probs(model, prompt + ours[:first])[-1].topk(2).values
        assert best[0] - best[1] < 1e-3, f"token {first}"


@pytest.mark.parametrize(("dtype", "most"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.3)])
def test_rounded_files_load_and_stay_near(tmp_path, tokenizer, texts, dtype, most):
    """While all keys are kept, rounded weights (llama.cpp rounds their inputs too) move half the rows by less."""
    config = drawn(2, index_topk=128, q_lora_rank=32, kv_lora_rank=32, hidden_size=32, intermediate_size=64)
    model, folder = saved(tmp_path, config, texts)
    engine = opened(write_gguf(folder, tmp_path / "model.gguf", dtype=dtype), tokenizer)
    tokens = random_tokens(60)
    batch = PackedBatch.from_documents([tokens])
    with torch.inference_mode():
        ours = model.logits(model(batch.tokens_T, PackedView(batch)).hidden_TD).log_softmax(-1)
    gaps = (engine.log_probs(tokens, PROMPT) - ours[PROMPT - 1 :]).abs().amax(-1)
    assert 5e-4 < gaps.median() < most


@torch.no_grad()
def test_the_prediction_layer_drafts_what_ours_drafts(tmp_path, tokenizer, texts):
    """A prediction layer that is often right, read from the file: as many drafts are accepted as ours had right."""
    config = replace(drawn(1), num_nextn_predict_layers=1, index_topk=256)
    model = build(config, 3)
    for name, parameter in model.named_parameters():
        if "down_proj" in name or "o_proj" in name:
            parameter.mul_(0.1)  # the last token's embedding nearly decides what comes next
    mtp = model.model.layers[-1]
    mtp.eh_proj.weight.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
    mtp.eh_proj.weight[:, config.hidden_size :].normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    mtp.enorm.weight.fill_(1.0)
    mtp.shared_head["norm"].weight.copy_(model.model.norm.weight)
    folder = save_model(tmp_path / "model", config, model.state_dict(), files=texts)
    engine = opened(write_gguf(folder, tmp_path / "model.gguf", dtype="f32"), tokenizer, drafts=1)
    accepted = drafted = 0
    for seed in range(4):
        prompt = random_tokens(PROMPT, seed)
        answer = engine.greedy(prompt, NEW)
        assert list(answer.tokens) == our_text(model, prompt)
        accepted, drafted = accepted + answer.num_accepted, drafted + answer.num_drafted
        assert answer.num_accepted == pytest.approx(_accepted(model, prompt, list(answer.tokens)), abs=1)
    assert 0.2 < accepted / drafted < 1


def _accepted(model: Transformer, prompt: list[int], text: list[int]) -> int:
    """How many drafts are right when one token is drafted after every step that wrote a token."""
    batch = PackedBatch.from_documents([prompt + text])
    tokens, view = batch.tokens_T, PackedView(batch)
    state, _ = model.predict_next(MTPState(model(tokens, view).hidden_TD, None, 0), tokens.roll(-1), view)
    drafts = model.logits(state.hidden_TD).argmax(-1).tolist()
    known, right = 1, 0  # the prefill gives the first token
    while known < len(text) - 1:
        hit = drafts[len(prompt) + known - 2] == text[known]
        right += hit
        known += 1 + hit
    return right


def test_text_is_cut_and_rendered_by_the_file_as_by_us(tmp_path, tokenizer, texts):
    """Digits one by one, letters of all scripts, blanks, newlines, control tokens: the same ids; the same prompts."""
    _, folder = saved(tmp_path, drawn(0), texts)
    engine = opened(write_gguf(folder, tmp_path / "model.gguf", dtype="f32"), tokenizer)
    for text in (
        "def main(argv=None):\n    return 12345\n\n\n",
        "  It's 3 plus  44?\tWE'LL SEE...\r\n",
        "naïve café 東京 😀 ١٢٣ ½",
        "<|user|>hi<think>x</think>",
        "[gMASK]<sop><|assistant|>",
    ):
        assert engine.tokenize(text, special=True) == tokenizer.encode_with_special(text), text
    assert engine.tokenize("<|user|>hi", special=False) == tokenizer.encode("<|user|>hi")
    for messages in ([("user", "hi")], [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]):
        rows = [{"role": role, "content": content} for role, content in messages]
        rendered = Renderer(tokenizer, "glm-5.1").render(
            [Message.from_openai(row) for row in rows], add_generation_prompt=True
        )
        assert engine.tokenize(engine.render(rows), special=True) == list(rendered.tokens)


def test_every_tensor_is_used_once_under_a_name_the_architecture_has():
    """GLM-5.2 at full size: 59,585 checkpoint tensors, each in one place, kv_b in two."""
    config = preset("glm-5.2")
    tensors = list(gguf_tensors(config))
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM_DSA]}
    for tensor in tensors:
        layer = tensor.name.split(".")[1]
        base = tensor.name.rpartition(".")[0]
        assert base in known or base.replace(f"blk.{layer}.", "blk.{bid}.", 1) in known, tensor.name
    used = [source.name for tensor in tensors for source in tensor.sources]
    assert set(used) == set(tensor_specs(config))
    assert len(set(used)) == 59_585
    assert len(used) == 59_585 + config.num_layers_with_mtp
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    assert shapes["blk.0.attn_k_b.weight"] == (64, 512, 192)
    assert shapes["blk.0.attn_v_b.weight"] == (64, 256, 512)
    assert shapes["blk.78.ffn_gate_exps.weight"] == (256, 2048, 6144)
    assert "blk.3.indexer.attn_k.weight" not in shapes
    assert shapes["blk.78.indexer.attn_k.weight"] == (128, 6144)


@pytest.mark.parametrize("dtype", GGUF_DTYPES)
def test_values_are_rounded_once_and_those_that_decide_choices_not_at_all(tmp_path, texts, dtype):
    config = drawn(4, q_lora_rank=32, latent_norm_eps=None, num_hidden_layers=3, first_k_dense_replace=1)
    model, folder = saved(tmp_path, config, texts)
    file = write_gguf(folder, tmp_path / "model.gguf", dtype=dtype)
    found, kinds, state = stored(file), types_of(file), stored_tensors(model.state_dict())
    exact = ("_norm.weight", "k_norm.bias", "ffn_gate_inp.weight", "exp_probs_b.bias", "indexer.proj.weight")
    for name, kind in kinds.items():
        wanted = "f32" if name.endswith((*exact, "enorm.weight", "hnorm.weight")) else dtype
        assert kind == wanted or (wanted == "q8_0" and kind == "f16" and found[name].shape[-1] % 32)
    gate = state["model.layers.1.mlp.gate.weight"]
    assert torch.equal(found["blk.1.ffn_gate_inp.weight"], gate)
    up = torch.stack([state[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(config.n_routed_experts)])
    kv_b = state["model.layers.2.self_attn.kv_b_proj.weight"].view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys = kv_b[:, : config.qk_nope_head_dim].transpose(1, 2)
    q_b = state["model.layers.0.self_attn.q_b_proj.weight"]
    for name, plain in (("blk.1.ffn_up_exps", up), ("blk.2.attn_k_b", keys), ("blk.0.attn_q_b", q_b)):
        kind = kinds[f"{name}.weight"]
        if kind == "q8_0":
            step = plain.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
            error = (found[f"{name}.weight"] - plain).unflatten(-1, (-1, 32)).abs()
            assert (error <= 0.5 * step + 1e-3 * step * 127).all()
        else:
            precision = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
            assert torch.equal(found[f"{name}.weight"], plain.to(precision).float())


def test_the_file_says_what_the_config_says(tmp_path, texts, tokenizer):
    special = tokenizer.special
    config = drawn(
        5,
        num_hidden_layers=4,
        indexer_types=("full", "shared", "shared", "full"),
        n_group=2,
        topk_group=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_head_dim=16,
        eos_token_id=special.eos_ids,
        pad_token_id=special.pad_id,
    )
    _, folder = saved(tmp_path, config, texts)
    fields = gguf.GGUFReader(write_gguf(folder, tmp_path / "model.gguf", dtype="bf16")).fields
    values = {name.removeprefix("glm-dsa."): field.contents() for name, field in fields.items()}
    assert values["general.architecture"] == "glm-dsa"
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert values["block_count"] == 5
    assert values["nextn_predict_layers"] == 1
    assert values["attention.indexer.types"] == [True, False, False, True]
    assert values["attention.indexer.key_length"] == 64  # widened: the smallest that llama.cpp turns
    assert values["attention.key_length"] == config.kv_lora_rank + config.qk_rope_head_dim
    assert values["attention.value_length_mla"] == config.v_head_dim
    assert (values["expert_group_count"], values["expert_group_used_count"]) == (2, 1)
    assert values["attention.layer_norm_epsilon"] == pytest.approx(1e-6)
    ends = [values[f"tokenizer.ggml.{end}_token_id"] for end in ("eos", "eot", "eom")]
    assert ends == list(special.eos_ids)
    assert values["tokenizer.ggml.bos_token_id"] == tokenizer.find("[gMASK]")
    assert values["tokenizer.ggml.pre"] == "qwen2"
    assert values["tokenizer.ggml.tokens"][320:] == [f"[PAD{index}]" for index in range(320, VOCABULARY)]
    kinds = values["tokenizer.ggml.token_type"]
    assert (kinds[special["<|user|>"]], kinds[special["<think>"]], kinds[0], kinds[-1]) == (3, 4, 1, 5)
    assert values["tokenizer.chat_template"] == chat_template("glm-5.1")


def test_groups_that_all_stay_are_none(tmp_path, texts):
    """llama.cpp dies of n_group_used = n_group; keeping every group is the same as having none."""
    config = drawn(5, n_group=2, topk_group=2, n_routed_experts=8, num_experts_per_tok=2)
    _, folder = saved(tmp_path, config, texts)
    fields = gguf.GGUFReader(write_gguf(folder, tmp_path / "model.gguf")).fields
    assert not [name for name in fields if "group" in name]


def test_snapshots_and_fp8_checkpoints_are_sources_and_the_stored_dtype_is_the_default(tmp_path, texts):
    state = random_state(NANO, dtype=torch.bfloat16)
    store = tmp_path / "store"
    SnapshotStore(store).save(3, SnapshotParts(NANO, state, files=texts))
    from_snapshot = write_gguf(store, tmp_path / "snapshot.gguf")
    assert types_of(from_snapshot)["token_embd.weight"] == "bf16"
    assert torch.equal(stored(from_snapshot)["token_embd.weight"], state["model.embed_tokens.weight"].float())
    fmt = Fp8Format((16, 16))
    tensors = quantised(stored_tensors(random_state(NANO, dtype=torch.bfloat16)), fmt)
    fp8 = write_checkpoint(tmp_path / "fp8", NANO, tensors, quantization_config=quantization_config(fmt))
    (fp8 / "tokenizer.json").write_bytes(texts["tokenizer.json"])
    file = write_gguf(fp8, tmp_path / "fp8.gguf")
    assert types_of(file)["blk.0.attn_output.weight"] == "bf16"
    ours = load_model(fp8, dtype=torch.float32).state_dict()["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(stored(file)["blk.0.attn_output.weight"], ours.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'"),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is false"),
        ({"index_head_dim": 24}, "index_head_dim 24 is no power of two"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 leaves one expert a group"),
    ],
)
def test_what_llamacpp_would_compute_otherwise_is_refused_by_name(tmp_path, texts, change, reason):
    config = replace(NANO, **change)
    folder = save_model(tmp_path / "model", config, random_state(config), files=texts)
    with pytest.raises(CheckpointError, match=reason):
        write_gguf(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e6, "f16"), (1e8, "q8_0"), (float("nan"), "bf16"), (float("inf"), "f32")]
)
def test_a_value_out_of_range_is_refused_by_name_and_nothing_is_half_written(tmp_path, texts, value, dtype):
    """The last tensor written holds it; the file that was there before stays, and no temporary one does."""
    state = random_state(NANO)
    state["model.layers.3.mlp.experts.down_proj"][-1, -1, -1] = value
    folder = save_model(tmp_path / "model", NANO, state, files=texts)
    target = tmp_path / "model.gguf"
    target.write_bytes(b"before")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.mlp\.experts\.7\.down_proj\.weight"):
        write_gguf(folder, target, dtype=dtype, overwrite=True)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_existing_files_folders_and_unknown_dtypes_are_refused(tmp_path, texts, monkeypatch):
    folder = save_model(tmp_path / "model", NANO, random_state(NANO), files=texts)
    target = write_gguf(folder, tmp_path / "deep" / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf exists"):
        write_gguf(folder, target)
    with pytest.raises(CheckpointError, match="is a folder; GGUF is one file"):
        write_gguf(folder, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match=r"unknown GGUF dtype 'q4_0'.* valid: bf16, f16, f32, q8_0"):
        write_gguf(folder, tmp_path / "other.gguf", dtype="q4_0")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'yunque\[gguf\]'"):
        write_gguf(folder, tmp_path / "other.gguf")


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    folder = save_model(tmp_path / "model", NANO, random_state(NANO))
    with pytest.raises(CheckpointError, match=r"the checkpoint has no tokenizer\.json"):
        write_gguf(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(texts):
    content = json.loads(texts["tokenizer.json"])
    with pytest.raises(CheckpointError, match=r"'</arg_value>' has id 319, the model's vocab_size is 300"):
        Vocabulary.read(content, 300)


@pytest.mark.parametrize(
    ("pattern", "name", "is_known"),
    [
        (SPLIT_PATTERN, "qwen2", True),
        (SPLIT_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1), "glm4", True),
        (r"\p{N}{1,3}|\p{L}+", "glm4", False),
        (r"\w+", "qwen2", False),
    ],
)
def test_the_cutting_expression_has_a_name_or_the_nearest_is_stated(pattern, name, is_known, caplog):
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    with caplog.at_level(logging.WARNING, logger="yunque"):
        assert pre_tokenizer_of({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]}}) == name
    assert (f"{name} is the nearest" in caplog.text) is not is_known


def test_encoded_bytes_are_those_of_the_gguf_package():
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 3
    for dtype in GGUF_DTYPES:
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        expected = gguf.quants.quantize(values.numpy().astype(np.float32), kind)
        assert encode(values, dtype, name="x").tobytes() == expected.tobytes()


MEASURE = """
import sys
from pathlib import Path
import gguf
from yunque.weights import write_gguf

def kilobytes(key):
    status = Path("/proc/self/status").read_text()
    return int(status.split(key + ":")[1].split()[0])

Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = kilobytes("VmRSS")
write_gguf(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux: a peak that can be reset")
@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_writing_needs_a_few_matrices_of_memory_not_the_model(tmp_path, texts, dtype):
    """An 80 MB model, its largest matrix 1 MB: the process grows by less than a third of the model."""
    config = replace(NANO, hidden_size=512, moe_intermediate_size=512, n_routed_experts=16)
    folder = save_model(tmp_path / "model", config, random_state(config, dtype=torch.bfloat16), files=texts)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 75e6
    command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "model.gguf"), dtype]
    environment = {"PYTHONPATH": str(Path(yunque.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < size / 3
