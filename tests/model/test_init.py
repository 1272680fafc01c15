"""Initial weights: the stated distribution, and the same seed gives the same model."""

import pytest
import torch
from builders import draw_config, random_batch, run

from yunque.model.init import init_weights
from yunque.model.names import Role, role_of
from yunque.model.presets import preset
from yunque.model.transformer import Transformer


def test_matrices_are_normal_norms_are_one_biases_are_zero():
    config = preset("nano")
    state = init_weights(Transformer(config), torch.Generator().manual_seed(0)).state_dict()
    for name, tensor in state.items():
        if tensor.dim() > 1:
            assert tensor.std().item() == pytest.approx(config.initializer_range, rel=0.2), name
            assert tensor.mean().abs() < 0.01, name
        elif role_of(name) is Role.ROUTER_BIAS or name.endswith(".bias"):
            assert not tensor.any(), name
        else:
            assert (tensor == 1).all(), name


def test_the_seed_decides_whatever_the_type():
    config = draw_config(0)
    one, again, other = (init_weights(Transformer(config), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    narrow = init_weights(Transformer(config).bfloat16(), torch.Generator().manual_seed(1))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor.to(narrow.state_dict()[name].dtype), narrow.state_dict()[name])
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_fresh_model_predicts_nearly_uniformly():
    config = preset("nano")
    model = init_weights(Transformer(config), torch.Generator().manual_seed(0))
    batch = random_batch(config, [50])
    log_probs = model.logits(run(model, batch).hidden_TD).log_softmax(-1)
    assert (log_probs + torch.tensor(config.vocab_size).log()).abs().max() < 1.0


def test_model_without_storage_is_refused():
    with torch.device("meta"):
        model = Transformer(draw_config(0))
    with pytest.raises(ValueError, match="no storage"):
        init_weights(model, torch.Generator())
