"""The router: what chooses, what weighs, and what stays fp32."""

import pytest
import torch
from builders import build, draw_config, largest_difference, random_batch, run

from yunque.model.moe import MoE, Router
from yunque.model.presets import preset
from yunque.ops.reference.experts import routed_experts


def router(**fixed) -> Router:
    """A router over 256 experts whose bias is 7 + 0.001 e, as far from zero as released ones are."""
    shape = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "hidden_size": 32}
    gate = Router(draw_config(0, **shape | fixed), invariant=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.copy_(0.02 * torch.randn(gate.weight.shape, generator=generator))
        gate.e_score_correction_bias.copy_(7 + 0.001 * torch.arange(256.0))
    return gate


def inputs(num_tokens: int = 64) -> torch.Tensor:
    return torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_choice_in_narrow_models_equals_the_fp32_choice(cast):
    """sglang#31213, sglang#37133, sglang#34857: the correction bias was stored in bf16, which has one value for all of
    7 + 0.001 e within 0.03."""
    x = inputs().bfloat16().float()
    expected = router()(x, 64)
    gate = cast(router())
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        got = gate(x.to(dtype), 64)
        assert got.scores_TE.dtype == got.weight_Tk.dtype == torch.float32
    assert torch.equal(gate(x.bfloat16(), 64).expert_Tk, expected.expert_Tk)
    collapsed = router()
    collapsed.e_score_correction_bias.copy_(collapsed.e_score_correction_bias.bfloat16())
    assert not torch.equal(collapsed(x, 64).expert_Tk, expected.expert_Tk)


def test_whole_model_keeps_its_routers_in_fp32_through_every_cast():
    model = build(preset("nano"))
    before = {k: v.clone() for k, v in model.state_dict().items() if ".mlp.gate." in k and "gate_proj" not in k}
    for cast in (model.bfloat16, model.half, model.float, model.double, model.bfloat16, model.float):
        cast()
        for name, tensor in model.state_dict().items():
            if name in before:
                assert tensor.dtype == (torch.float64 if cast == model.double else torch.float32), name
                assert torch.equal(tensor.float(), before[name]), name
    run(model, random_batch(model.config, [9]))


def test_biased_scores_choose_but_do_not_weigh():
    """mlx-swift-lm#463: the bias leaked into the weights."""
    gate = router(norm_topk_prob=False, routed_scaling_factor=1.0)
    x = inputs()
    gate.e_score_correction_bias.zero_()
    gate.e_score_correction_bias[200] = 1e4
    routing = gate(x, 64)
    assert (routing.expert_Tk[:, 0] == 200).all()
    expected = (x @ gate.weight.T).sigmoid()
    torch.testing.assert_close(routing.weight_Tk, expected.gather(1, routing.expert_Tk), rtol=1e-6, atol=0)
    assert routing.weight_Tk.max() < 1


def test_weights_are_normalised_then_scaled():
    routing = router(routed_scaling_factor=2.5)(inputs(), 64)
    torch.testing.assert_close(routing.weight_Tk.sum(1), torch.full((64,), 2.5))
    chosen = routing.scores_TE.gather(1, routing.expert_Tk)
    torch.testing.assert_close(routing.weight_Tk, 2.5 * chosen / chosen.sum(1, keepdim=True))


def test_imposed_experts_keep_the_models_own_weights():
    gate, x = router(), inputs(5)
    imposed = torch.arange(40).view(5, 8)
    routing = gate(x, 5, imposed)
    assert torch.equal(routing.expert_Tk, imposed)
    chosen = routing.scores_TE.gather(1, imposed)
    torch.testing.assert_close(routing.weight_Tk, 2.5 * chosen / chosen.sum(1, keepdim=True))


def test_router_bias_has_no_gradient_and_the_weight_has():
    gate = router()
    gate(inputs(), 64).weight_Tk[:, 0].sum().backward()
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().max() > 0
    assert [name for name, _ in gate.named_parameters()] == ["weight"]


def test_layer_is_routed_experts_plus_the_unscaled_shared_expert():
    config = draw_config(7, first_k_dense_replace=0)
    layer = build(config, 7).model.layers[0].mlp
    assert isinstance(layer, MoE)
    x = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(3))
    out, routing = layer(x, 20)
    experts = layer.experts
    routed = routed_experts(x, routing.expert_Tk, routing.weight_Tk, experts.gate_up_proj, experts.down_proj)
    assert largest_difference(out, routed + layer.shared_experts(x)) < 1e-6
