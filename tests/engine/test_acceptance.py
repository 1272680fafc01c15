import math

import pytest
import torch

from yunque.engine.acceptance import coupled, rejection
from yunque.engine.noise import NoiseSource, Purpose
from yunque.engine.sampler import RowSampling, Sampler
from yunque.protocol.generation import SamplingParams

# Shapes: P previous tokens, V vocabulary. A model of the tests is a table: the law of a token given the one before.
SOURCE = NoiseSource()


def table(seed: int, size: int, scale: float = 1.5) -> torch.Tensor:
    """Log-probabilities [P, V], with a few tokens that cannot come."""
    logits_PV = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * scale
    logits_PV[range(size), [(row * 3 + seed) % size for row in range(size)]] = -math.inf
    return torch.log_softmax(logits_PV, -1)


def draw(logprobs_V: torch.Tensor, seed: int, position: int, purpose: Purpose) -> int:
    noise_V = torch.from_numpy(SOURCE.gumbel(seed, position, logprobs_V.shape[0], purpose))
    return int((logprobs_V + noise_V).argmax())


def speculate(target_PV, draft_PV, *, seed: int, position: int, last: int, count: int):
    """One round of drafting and rejection after the token ``last``."""
    drafts = []
    for index in range(count):
        before = drafts[-1] if drafts else last
        drafts.append(draw(draft_PV[before], seed, position + index, Purpose.DRAFT))
    path = [last, *drafts]
    return rejection(drafts, draft_PV[path[:-1]], target_PV[path], seed=seed, position=position, noise=SOURCE)


@pytest.mark.parametrize("draft_seed", [1, 2])
def test_rejection_leaves_the_distribution_of_a_whole_reply_unchanged(draft_seed):
    """Chi-square of three-token replies against the product of the target's laws.

    The bound is exceeded once in 10,000 times (Wilson and Hilferty's approximation at 3.72 sigma).
    """
    size, count, length = 4, 6000, 3
    target_PV, draft_PV = table(0, size), table(draft_seed, size)
    observed = torch.zeros([size] * length, dtype=torch.float64)
    for seed in range(count):
        reply: list[int] = []
        while len(reply) < length:
            last = reply[-1] if reply else 0
            reply += speculate(target_PV, draft_PV, seed=seed, position=len(reply), last=last, count=2).tokens
        observed[tuple(reply[:length])] += 1
    law_PV = target_PV.double().exp()
    expected = law_PV[0][:, None, None] * law_PV[:, :, None] * law_PV[None] * count
    assert observed[expected == 0].sum() == 0
    small = expected < 5  # cells too rare for the statistic are one cell
    cells = [*zip(observed[~small].tolist(), expected[~small].tolist(), strict=True)]
    cells.append((float(observed[small].sum()), float(expected[small].sum())))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted)
    freedom = len(cells) - 1
    assert freedom > 10
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("draft_seed", [0, 1, 5])
def test_rejection_accepts_at_the_rate_one_minus_total_variation(draft_seed):
    size, count = 8, 3000
    target_PV, draft_PV = table(0, size), table(draft_seed, size)
    rate = 1 - 0.5 * float((target_PV[0].exp() - draft_PV[0].exp()).abs().sum())
    accepted = [speculate(target_PV, draft_PV, seed=s, position=9, last=0, count=1).num_drafts for s in range(count)]
    tolerance = 4 * math.sqrt(rate * (1 - rate) / count) + 1e-9
    assert abs(sum(accepted) / count - rate) < tolerance
    assert draft_seed or rate == pytest.approx(1)


def test_rejection_of_point_masses_is_greedy_decoding():
    """At temperature 0 a law is a point mass: a draft stands exactly when it is the best token."""
    greedy = SamplingParams(temperature=0.0)
    logits_PV = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    target_PV = Sampler().laws(logits_PV, [RowSampling(greedy, 0, row) for row in range(6)])
    best_P = logits_PV.argmax(-1).tolist()
    for seed in range(60):
        drafts = torch.randint(0, 6, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
        if seed % 2:  # start with what greedy decoding takes
            drafts[0] = best_P[2]
        path = [2, *drafts]
        draft_KV = torch.full((3, 6), -math.inf)
        draft_KV[range(3), drafts] = 0
        result = rejection(drafts, draft_KV, target_PV[path], seed=seed, position=0, noise=SOURCE)
        expected = [best_P[2]]
        while len(expected) <= 3 and drafts[len(expected) - 1] == expected[-1]:
            expected.append(best_P[expected[-1]])
        assert list(result.tokens) == expected
        assert result == coupled(drafts, [best_P[before] for before in path])


def test_coupled_drafts_give_exactly_the_reply_without_speculation():
    size, length = 12, 40
    target_PV = table(0, size)
    draft_PV = torch.log_softmax(target_PV.clamp(min=-30) + table(1, size).clamp(min=-2) * 0.4, -1)
    rounds = accepted = 0
    for seed in range(20):
        plain = [0]
        while len(plain) <= length:
            plain.append(draw(target_PV[plain[-1]], seed, len(plain), Purpose.TOKEN))
        reply = [0]
        while len(reply) <= length:
            drafts: list[int] = []
            for index in range(3):
                before = drafts[-1] if drafts else reply[-1]
                drafts.append(draw(draft_PV[before], seed, len(reply) + index, Purpose.TOKEN))
            path = [reply[-1], *drafts]
            drawn = [draw(target_PV[before], seed, len(reply) + i, Purpose.TOKEN) for i, before in enumerate(path)]
            result = coupled(drafts, drawn)
            reply += result.tokens
            rounds, accepted = rounds + 1, accepted + result.num_drafts
        assert reply[: length + 1] == plain
    assert accepted / rounds > 1.5  # shared noise makes similar laws agree


def test_the_last_token_is_the_targets_own_draw_when_every_draft_stands():
    target_PV = table(0, 8)
    for seed in range(30):
        result = speculate(target_PV, target_PV, seed=seed, position=4, last=1, count=2)
        assert result.num_drafts == 2
        assert result.tokens[2] == draw(target_PV[result.tokens[1]], seed, 6, Purpose.TOKEN)
