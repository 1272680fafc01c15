import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yunque.engine.distribution import distribution
from yunque.engine.noise import NoiseSource, Purpose, noise
from yunque.engine.penalties import Penalties
from yunque.engine.sampler import RowSampling, Sampler, score
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([{}, {1: 4.0}, {0: -1e9, 2: 0.5}]),
    num_top=st.sampled_from([0, 4]),
    record_kept=st.booleans(),
)


def drawn_logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def row_of(params: SamplingParams, index: int, prompt: list[int], reply: list[int], vocab_size: int) -> RowSampling:
    """A row as an engine keeps it: every second one has the end of its reply as unverified drafts."""
    row = RowSampling(params, seed=100 + index, position=len(prompt) + len(reply))
    if Penalties.are_needed(params):
        split = len(reply) // 2 if index % 2 else len(reply)
        row.penalties = Penalties(params, prompt, vocab_size)
        for token in reply[:split]:
            row.penalties.observe(token)
        row.drafts = tuple(reply[split:])
    return row


@given(
    params=st.lists(PARAMS, min_size=1, max_size=5), vocab_size=st.sampled_from([3, 17, 64]), seed=st.integers(0, 999)
)
def test_batched_sampling_equals_the_plain_distribution_row_by_row(params, vocab_size, seed):
    logits_BV = drawn_logits(seed, len(params), vocab_size)
    generator = np.random.default_rng(seed)
    cases = []
    for index, one in enumerate(params):
        prompt = generator.integers(0, vocab_size, 4).tolist()
        reply = generator.integers(0, vocab_size, index * 2).tolist()
        row = row_of(one, index, prompt, reply, vocab_size)
        if index % 3 == 2:
            row.allowed_V = generator.random(vocab_size) < 0.6
            row.allowed_V[seed % vocab_size] = True
        cases.append((one, prompt, reply, row))
    rows = [row for *_, row in cases]
    drawn = Sampler().draw(logits_BV, rows)
    laws_BV = Sampler().laws(logits_BV, rows)
    model_BV = torch.log_softmax(logits_BV, -1)
    for index, (one, prompt, reply, row) in enumerate(cases):
        law_V = distribution(logits_BV[index], one, prompt=prompt, reply=reply, allowed_V=row.allowed_V)
        assert torch.equal(law_V > -math.inf, laws_BV[index] > -math.inf)
        assert torch.allclose(law_V.exp(), laws_BV[index].exp(), atol=2e-5)
        noise_V = torch.from_numpy(noise(row.seed, row.position, vocab_size))
        token = int(drawn.tokens_B[index])
        assert token == int((law_V + noise_V).argmax())
        expected = model_BV[index, token] if one.temperature == 0 else law_V[token]
        assert float(drawn.logprobs_B[index]) == pytest.approx(float(expected), abs=3e-5, rel=1e-5)
        assert float(drawn.model_logprobs_B[index]) == float(model_BV[index, token])
        if drawn.kept:
            kept = tuple((law_V > -math.inf).nonzero()[:, 0].tolist())
            removes = row.truncates or (row.allowed_V is not None and one.temperature > 0)
            assert drawn.kept[index] == (kept if one.record_kept and removes else None)
        if one.num_top:
            order = sorted(range(vocab_size), key=lambda t, i=index: (-float(model_BV[i, t]), t))[: one.num_top]
            assert [top.token for top in drawn.top[index]] == order
            assert [top.logprob for top in drawn.top[index]] == model_BV[index, order].tolist()


def test_a_request_draws_the_same_tokens_whatever_is_beside_it():
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(top_k=20, min_p=0.02),
        SamplingParams(temperature=1.4, logit_bias={5: 2.0}, record_kept=True, top_p=0.5),
    ]
    rows = [row_of(params, index, [1, 2], [3], 513) for index, params in enumerate(settings * 4)]
    logits_BV = drawn_logits(0, len(rows), 513)
    together = Sampler().draw(logits_BV, rows)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    shuffled = Sampler().draw(logits_BV[order], [rows[index] for index in order])
    assert torch.equal(shuffled.tokens_B, together.tokens_B[order])
    assert torch.equal(shuffled.logprobs_B, together.logprobs_B[order])
    for index, row in enumerate(rows):
        alone = Sampler().draw(logits_BV[index : index + 1], [row])
        assert int(alone.tokens_B) == int(together.tokens_B[index])
        assert float(alone.logprobs_B) == float(together.logprobs_B[index])
        assert alone.model_logprobs_B.item() == together.model_logprobs_B[index].item()


def test_draws_are_distributed_as_the_law():
    """chi-square over 20,000 seeds: 5 degrees of freedom exceed 25.7 once in 10,000 times."""
    logits_V = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.4, -3.0])
    params = SamplingParams(temperature=1.3, min_p=0.04)
    law_V = distribution(logits_V, params)
    assert int((law_V > -math.inf).sum()) == 6
    count = 20_000
    rows = [RowSampling(params, seed=seed, position=7) for seed in range(count)]
    drawn = Sampler().draw(logits_V.expand(count, -1).contiguous(), rows)
    observed = torch.bincount(drawn.tokens_B, minlength=7).double()
    expected = law_V.double().exp() * count
    assert observed[6] == 0
    assert float(((observed - expected)[:6] ** 2 / expected[:6]).sum()) < 25.7


def test_positions_and_purposes_have_independent_noise():
    size = 4000
    streams = [noise(3, position, size, purpose) for position in (0, 1, 2**40) for purpose in Purpose]
    streams += [noise(seed, 0, size) for seed in (4, -1, 2**80 + 5)]
    correlations = np.corrcoef(np.stack(streams)) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / math.sqrt(size)
    assert noise(2**64 + 3, 0, 5).tolist() == noise(3, 0, 5).tolist()
    assert noise(3, 0, 5).tolist() == noise(3, 0, 9)[:5].tolist()


def test_noise_is_standard_gumbel():
    values = np.concatenate([noise(seed, 5, 50_000) for seed in range(4)]).astype(np.float64)
    sigma = math.pi / math.sqrt(6)
    assert abs(values.mean() - 0.5772157) < 4 * sigma / math.sqrt(values.size)
    assert abs(values.std() / sigma - 1) < 0.02
    assert abs((values < 0).mean() - math.exp(-1)) < 4 * 0.49 / math.sqrt(values.size)
    assert values.dtype == np.float64
    assert np.isfinite(values).all()


def test_noise_stays_what_it_was():
    """Philox's raw bits do not change between NumPy releases, so a seed keeps its tokens."""
    assert noise(7, 11, 4).tolist() == pytest.approx([1.4425763, -0.5606133, 0.2097549, 1.6976721], abs=1e-6)
    assert NoiseSource().uniform(7, 11, Purpose.ACCEPT) == pytest.approx(0.8525688567531534, abs=1e-15)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [1, 2]),
        (SamplingParams(top_k=3), [1, 2, 3]),
        (SamplingParams(top_p=0.2), [1]),
        (SamplingParams(top_p=0.3), [1, 2]),
        (SamplingParams(top_p=1e-12), [1]),
        (SamplingParams(min_p=1.0), [1, 2, 3]),
        (SamplingParams(top_k=4, min_p=0.999), [1, 2, 3]),
        (SamplingParams(top_k=4, top_p=0.99), [0, 1, 2, 3]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4]),
    ],
)
def test_ties_go_to_the_lowest_id_and_something_always_stays(params, kept):
    # Probabilities: three of 0.2689, two of 0.0966.
    logits_V = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]) + torch.log(torch.tensor(1.0))
    logits_V[[0, 4]] = 1 - math.log(0.2689 / 0.0966)
    row = RowSampling(params, seed=0, position=0)
    for law_V in (distribution(logits_V, params), Sampler().laws(logits_V[None], [row])[0]):
        assert (law_V > -math.inf).nonzero()[:, 0].tolist() == kept


def test_greedy_takes_the_lowest_id_of_a_tie_and_reports_the_models_own_logprob():
    logits_BV = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    plain = RowSampling(SamplingParams(temperature=0.0), 0, 0)
    biased_params = SamplingParams(temperature=0.0, logit_bias={3: 10.0})
    biased = RowSampling(biased_params, 0, 0, penalties=Penalties(biased_params, [], 4))
    drawn = Sampler().draw(logits_BV, [plain, biased])
    assert drawn.tokens_B.tolist() == [1, 3]
    assert drawn.logprobs_B.tolist() == torch.log_softmax(logits_BV, -1)[[0, 1], [1, 3]].tolist()


def test_recorded_kept_sets_make_behaviour_logprobs_exact():
    """huggingface/trl#6789: the sampler renormalises a nucleus, so a trainer needs that nucleus, not its own."""
    params = SamplingParams(temperature=0.8, top_p=0.7, record_kept=True)
    logits_BV = drawn_logits(2, 40, 200)
    drawn = Sampler().draw(logits_BV, [RowSampling(params, seed=1, position=i) for i in range(40)])
    tokens = drawn.tokens_B.tolist()
    assert torch.allclose(score(logits_BV, tokens, params), drawn.logprobs_B, atol=1e-6)
    assert torch.allclose(score(logits_BV, tokens, params, kept=drawn.kept), drawn.logprobs_B, atol=1e-6)
    # A trainer's logits differ a little: its own nuclei lose tokens that were drawn, recorded ones do not.
    others_BV = logits_BV + drawn_logits(3, 40, 200, scale=0.3)
    own = score(others_BV, tokens, params)
    imposed = score(others_BV, tokens, params, kept=drawn.kept)
    assert int(own.isinf().sum()) > 0
    assert float((imposed - drawn.logprobs_B).abs().max()) < 1.5
    sums = [torch.logsumexp(others_BV[i, list(kept)] / 0.8, 0) for i, kept in enumerate(drawn.kept)]
    by_hand = others_BV[range(40), tokens] / 0.8 - torch.stack(sums)
    assert torch.allclose(imposed, by_hand, atol=1e-5)


def test_scoring_a_reply_with_penalties_equals_what_was_reported_while_drawing_it():
    params = SamplingParams(
        temperature=1.2, presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.2, top_k=9
    )
    logits_TV = drawn_logits(4, 30, 12)
    row = RowSampling(params, seed=5, position=2, penalties=Penalties(params, [0, 3], 12))
    assert row.penalties is not None
    tokens, logprobs = [], []
    for logits_V in logits_TV:
        drawn = Sampler().draw(logits_V[None], [row])
        tokens.append(int(drawn.tokens_B))
        logprobs.append(float(drawn.logprobs_B))
        row.penalties.observe(tokens[-1])
        row.position += 1
    assert max(Counter(tokens).values()) > 2
    fresh = Penalties(params, [0, 3], 12)
    for _ in range(2):  # scoring leaves the state as it was
        scored = score(logits_TV, tokens, params, penalties=fresh)
        assert scored.tolist() == pytest.approx(logprobs, abs=1e-5)
    greedy = score(logits_TV, tokens, SamplingParams(temperature=0.0, top_k=2))
    assert greedy.tolist() == torch.log_softmax(logits_TV, -1)[range(30), tokens].tolist()


def test_observing_and_forgetting_leaves_penalties_bit_identical():
    params = SamplingParams(presence_penalty=0.1, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={2: 0.7})
    penalties = Penalties(params, [1], 6)
    logits_V = drawn_logits(6, 6)
    before_V, after_V = logits_V.clone(), logits_V.clone()
    penalties.observe(2)
    penalties.apply_(before_V)
    for token in (2, 3, 1, 2):
        penalties.observe(token)
    for token in (1, 2, 2, 3):
        penalties.forget(token)
    penalties.apply_(after_V)
    assert torch.equal(before_V, after_V)


def test_barred_stop_ids_come_only_where_a_constraint_leaves_nothing_else():
    params = SamplingParams(record_kept=True)
    logits_BV = torch.tensor([[0.0, 50.0, 0.0, 0.0]] * 3)
    only_stop_V = np.array([False, True])
    rows = [
        RowSampling(params, 0, 0, barred_ids=(1, 99)),
        RowSampling(params, 0, 0, barred_ids=(1,), allowed_V=np.array([True, True])),
        RowSampling(params, 0, 0, barred_ids=(1,), allowed_V=only_stop_V),
    ]
    drawn = Sampler().draw(logits_BV, rows)
    assert drawn.kept == ((0, 2, 3), (0,), (1,))
    assert drawn.tokens_B.tolist()[1:] == [0, 1]
    with pytest.raises(ValueError, match="no token at position 4"):
        Sampler().draw(logits_BV[:1], [RowSampling(params, 0, 4, allowed_V=np.zeros(4, np.bool_))])


def test_a_bias_outside_the_vocabulary_is_refused_by_name():
    with pytest.raises(RequestError, match="token id 7; valid: 0 to 6") as caught:
        Penalties(SamplingParams(logit_bias={7: 1.0}), [], 7)
    assert caught.value.param == "logit_bias"


def test_tiny_temperatures_are_finite_and_greedy():
    logits_BV = drawn_logits(8, 6, 300)
    rows = [
        RowSampling(SamplingParams(temperature=t), 0, i) for i, t in enumerate([1e-320, 1e-30, 1e-7, 1e-5, 1e-5, 1e-6])
    ]
    drawn = Sampler().draw(logits_BV, rows)
    assert drawn.tokens_B.tolist() == logits_BV.argmax(-1).tolist()
    assert drawn.logprobs_B.abs().max() < 1e-6
