"""Losses and all their gradients against the second model in float64, and what each part may touch."""

from dataclasses import replace

import pytest
import torch
from builders import build, draw_config, gradients, largest_difference, random_batch, random_documents
from reference_model import Pass, ReferenceModel
from torch import Tensor

from yunque.model.batch import PackedBatch
from yunque.model.config import ModelConfig
from yunque.model.names import Role, role_of
from yunque.model.objectives import IndexerWarmupLoss, LanguageModelLoss, LossConfig, evaluate

LENGTHS = [5, 14, 1, 26, 26, 2]
INDEXER = (Role.INDEXER, Role.INDEXER_HEADS, Role.INDEXER_NORM)


def cross_entropy(hidden: Tensor, head: Tensor, batch: PackedBatch, ahead: int) -> Tensor:
    """Weighted loss of predicting the token ``ahead`` rows after the next one, a row at a time."""
    total = hidden.new_zeros(())
    starts = batch.document_start_T
    for t in range(batch.num_tokens - ahead):
        target, weight = int(batch.targets_T[t + ahead]), float(batch.loss_mask_T[t + ahead])
        if starts[t] == starts[t + ahead] and target >= 0:
            total = total - weight * (hidden[t] @ head.T).log_softmax(-1)[target]
    return total


def reference_loss(reference: ReferenceModel, batch: PackedBatch, loss: LossConfig) -> Tensor:
    """The whole training loss by its formula."""
    side = Pass(batch, batch.loss_mask_T * (batch.targets_T >= 0), dense=loss.attention == "dense")
    head, hidden = reference.p["lm_head.weight"], reference.forward(side)
    total = cross_entropy(hidden, head, batch, 0)
    for ahead, state in enumerate(reference.mtp(hidden, side, loss.mtp_steps), 1):
        total = total + loss.mtp_weight / loss.mtp_steps * cross_entropy(state, head, batch, ahead)
    total = total + loss.balance_weight * sum(side.balance) / len(side.balance)
    return total + loss.index_kl_weight * sum(side.index_kl) / max(len(side.index_kl), 1)


def compare_gradients(
    model, reference: ReferenceModel, expected: Tensor, *, only: tuple[Role, ...] | None = None
) -> None:
    """Every parameter's gradient equals the reference's; outside ``only`` there is none."""
    found = gradients(model)
    names = [name for name, _ in model.named_parameters()]
    wanted = torch.autograd.grad(expected, [reference.p[name] for name in names], allow_unused=True)
    for name, gradient in zip(names, wanted, strict=True):
        if only is not None and role_of(name) not in only:
            assert name not in found, name
        elif gradient is None or not gradient.any():
            assert name not in found or not found[name].any(), name
        else:
            assert largest_difference(found[name], gradient) < 1e-10, name


def differentiable(config: ModelConfig, model) -> ReferenceModel:
    reference = ReferenceModel(config, model.state_dict())
    for tensor in reference.p.values():
        tensor.requires_grad_()
    return reference


@pytest.mark.parametrize(
    ("attention", "seed"), [*(("sparse", seed) for seed in range(8)), *(("dense", seed) for seed in range(3))]
)
def test_loss_and_every_gradient_equal_the_reference(attention, seed):
    """xtuner#2072: one prediction step was trained instead of all; shared parameters sum their gradients."""
    config = draw_config(seed, index_share_for_mtp_iteration=seed % 2 == 0)
    steps = 1 + seed % 3
    loss = LossConfig(
        attention=attention,
        mtp_weight=0.25 * steps,  # each step's share is exact in fp32, in which the loss mask is kept
        mtp_steps=steps,
        balance_weight=0.3,
        index_kl_weight=0.6 if attention == "sparse" else 0.0,
        chunk_tokens=7,
    )
    model, batch = build(config, seed).double(), random_batch(config, LENGTHS, seed)
    got = LanguageModelLoss(loss)(model, batch)
    got.sum.backward()
    reference = differentiable(config, model)
    expected = reference_loss(reference, batch, loss)
    assert got.sum.item() == pytest.approx(expected.item(), rel=1e-11)
    compare_gradients(model, reference, expected)


@pytest.mark.parametrize("seed", range(4))
def test_warmup_teaches_the_indexers_alone_and_by_the_reference_gradient(seed):
    config = draw_config(seed)
    model, batch = build(config, seed).double(), random_batch(config, LENGTHS, seed)
    got = IndexerWarmupLoss()(model, batch)
    got.sum.backward()
    has_next_T = batch.targets_T >= 0
    reference, side = differentiable(config, model), Pass(batch, has_next_T.float(), dense=True)
    reference.mtp(reference.forward(side), side, 1)
    expected = sum(side.index_kl) / len(side.index_kl)
    assert got.sum.item() == pytest.approx(expected.item(), rel=1e-11)
    assert got.count == has_next_T.sum()
    compare_gradients(model, reference, expected, only=INDEXER)


def test_the_indexer_loss_never_reaches_the_backbone():
    config = draw_config(1)
    model, batch = build(config, 1), random_batch(config, LENGTHS)
    parts = []
    for weight in (0.0, 2.0):
        LanguageModelLoss(LossConfig(index_kl_weight=weight))(model, batch).sum.backward()
        parts.append(gradients(model))
    without, with_loss = parts
    backbone = {name for name in with_loss if role_of(name) not in INDEXER}
    assert backbone == set(without)
    assert all(torch.equal(without[name], with_loss[name]) for name in backbone)
    learning = {name for name, gradient in with_loss.items() if role_of(name) in INDEXER and gradient.any()}
    assert learning == {name for name, _ in model.named_parameters() if role_of(name) in INDEXER}


def test_attention_alone_sends_no_gradient_to_the_indexer():
    config = draw_config(5)
    model = build(config, 5)
    LanguageModelLoss(LossConfig())(model, random_batch(config, LENGTHS)).sum.backward()
    assert not [name for name in gradients(model) if role_of(name) in INDEXER]


def test_masked_tokens_do_not_count_and_are_still_seen():
    config = draw_config(2)
    model, document = build(config, 2), random_documents(config, [20])[0]
    loss = LanguageModelLoss(LossConfig(mtp_weight=0.0, balance_weight=0.0))

    def total(tokens: list[int], mask: list[float]) -> tuple[float, float]:
        out = loss(model, PackedBatch.from_documents([tokens], [mask]))
        return out.sum.item(), out.count.item()

    halves = [total(document, [0.0] * 10 + [1.0] * 10), total(document, [1.0] * 10 + [0.0] * 10)]
    whole = total(document, [1.0] * 20)
    assert [count for _, count in halves] == [10, 9]
    assert sum(value for value, _ in halves) == pytest.approx(whole[0], rel=1e-6)
    changed = [(document[0] + 1) % config.vocab_size, *document[1:]]
    assert total(changed, [0.0] * 10 + [1.0] * 10)[0] != halves[0][0]
    assert total(document, [0.0] * 20) == (0.0, 0.0)


def test_packed_loss_equals_the_sum_of_separate_losses():
    config = draw_config(6, index_topk=4)
    model = build(config, 6).double()
    documents, loss = random_documents(config, LENGTHS), LanguageModelLoss(LossConfig(index_kl_weight=0.5))
    packed = loss(model, PackedBatch.from_documents(documents))
    packed.sum.backward()
    got = gradients(model)
    separate = [loss(model, PackedBatch.from_documents([document])) for document in documents]
    total = sum(part.sum for part in separate)
    total.backward()
    assert packed.sum.item() == pytest.approx(total.item(), rel=1e-12)
    assert packed.count == sum(part.count for part in separate)
    for name, gradient in gradients(model).items():
        assert largest_difference(got[name], gradient) < 1e-10, name
    for name, ratio in packed.metrics.items():
        assert ratio.sum.item() == pytest.approx(sum(p.metrics[name].sum.item() for p in separate), rel=1e-6, abs=1e-9)
        assert ratio.count.item() == pytest.approx(sum(p.metrics[name].count.item() for p in separate))
    load = sum(part.expert_load_LE for part in separate)
    assert torch.equal(packed.expert_load_LE, load)


def test_checkpointed_layers_give_the_same_loss_and_gradients():
    config = draw_config(5, num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"), index_topk=4)
    model, batch = build(config, 5), random_batch(config, LENGTHS)
    results = []
    for checkpoint in (False, True):
        out = LanguageModelLoss(LossConfig(index_kl_weight=0.5, checkpoint=checkpoint))(model, batch)
        out.sum.backward()
        results.append((out.sum, gradients(model), out.expert_load_LE))
    (one, grads, load), (other, again, load_again) = results
    assert torch.equal(one, other)
    assert torch.equal(load, load_again)
    assert grads.keys() == again.keys()
    assert all(torch.equal(grads[name], again[name]) for name in grads)


def test_chunk_of_the_head_does_not_change_the_loss():
    config = draw_config(3)
    model, batch = build(config, 3).double(), random_batch(config, LENGTHS)
    sums = [LanguageModelLoss(LossConfig(chunk_tokens=size))(model, batch).sum.item() for size in (1, 8, 4096)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-13) == pytest.approx(sums[2], rel=1e-13)


def test_metrics_hold_sums_and_counts_of_each_part():
    config = draw_config(8, num_nextn_predict_layers=1)
    model, batch = build(config, 8), random_batch(config, LENGTHS)
    out = LanguageModelLoss(LossConfig(index_kl_weight=0.5, mtp_steps=2, mtp_weight=0.4))(model, batch)
    assert set(out.metrics) == {
        *("loss", "accuracy", "mtp1_loss", "mtp1_accuracy", "mtp2_loss", "mtp2_accuracy"),
        *("balance", "index_kl"),
    }
    parts = {name: ratio.sum.item() for name, ratio in out.metrics.items()}
    expected = parts["loss"] + 0.2 * (parts["mtp1_loss"] + parts["mtp2_loss"])
    expected += 1e-4 * parts["balance"] + 0.5 * parts["index_kl"]
    assert out.sum.item() == pytest.approx(expected, rel=1e-6)
    assert out.count == out.metrics["loss"].count == (batch.loss_mask_T * (batch.targets_T >= 0)).sum()


def test_mtp_is_off_without_weight_or_layer():
    config = draw_config(8)
    batch = random_batch(config, LENGTHS)
    without = replace(config, num_nextn_predict_layers=0)
    for model, loss in ((build(config), LossConfig(mtp_weight=0.0)), (build(without), LossConfig())):
        assert not any(name.startswith("mtp") for name in LanguageModelLoss(loss)(model, batch).metrics)


def test_evaluation_is_the_token_mean_over_batches():
    config = draw_config(9)
    model, loss = build(config, 9), LossConfig(mtp_steps=3)
    batches = [random_batch(config, [5, 9], 0), random_batch(config, [31], 1)]
    result = evaluate(model, batches, loss)
    outs = [LanguageModelLoss(loss)(model, batch).metrics for batch in batches]

    def mean(name: str) -> float:
        return sum(o[name].sum.item() for o in outs) / sum(o[name].count.item() for o in outs)

    assert result.loss == pytest.approx(mean("loss"), rel=1e-6)
    assert result.accuracy == pytest.approx(mean("accuracy"), rel=1e-6)
    assert result.mtp_losses == pytest.approx([mean(f"mtp{k}_loss") for k in (1, 2, 3)], rel=1e-6)
    assert result.tokens == int(sum(o["loss"].count.item() for o in outs))
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_with_a_fraction_of_one_token_is_still_a_mean():
    config = draw_config(9)
    model, document = build(config, 9), random_documents(config, [3])[0]
    whole, part = (
        evaluate(model, [PackedBatch.from_documents([document], [[0, weight, 0]])], LossConfig(mtp_weight=0.0))
        for weight in (1.0, 0.25)
    )
    assert part.loss == pytest.approx(whole.loss, rel=1e-6)


def test_evaluation_orders_more_than_nine_mtp_steps_by_number():
    config = draw_config(9)
    model, batch = build(config, 9), random_batch(config, [31], 1)
    loss = LossConfig(mtp_steps=11)
    with torch.no_grad():
        metrics = LanguageModelLoss(loss)(model, batch).metrics
    expected = [(metrics[f"mtp{k}_loss"].sum / metrics[f"mtp{k}_loss"].count).item() for k in range(1, 12)]
    assert evaluate(model, [batch], loss).mtp_losses == pytest.approx(expected, rel=1e-6)


def test_evaluation_without_any_loss_token_is_refused():
    config = draw_config(0)
    batch = PackedBatch.from_documents([[1, 2]], [[0.0, 0.0]])
    with pytest.raises(ValueError, match="no token"):
        evaluate(build(config), [batch], LossConfig())


@pytest.mark.parametrize(
    ("values", "message"),
    [({"attention": "dense", "index_kl_weight": 0.1}, "index_kl_weight"), ({"mtp_steps": 0}, "mtp_steps is 0")],
)
def test_contradictory_losses_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**values)
