"""The plan's numbers by hand, and what people see of it."""

from __future__ import annotations

import io
from math import prod

import torch
from rich.console import Console
from training_runs import nano_run

from yunque.model.names import Role, module_specs
from yunque.model.transformer import Transformer
from yunque.train.optimizer import Optimizer
from yunque.train.plan import plan
from yunque.train.plan_view import count, show_plan, size
from yunque.train.roles import OptimizerConfig, assign
from yunque.train.settings import run_from_mapping


def test_weights_gradients_and_optimizer_state_are_exact() -> None:
    """Against the real module and optimiser, in fp32 and in bf16 with masters."""
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        run = run_from_mapping(nano_run(dtype=dtype))
        stage_plan = plan(run).stages[0]
        model = Transformer(run.model).to(torch_dtype)
        config = run.optimizer
        optimizer = Optimizer(model, assign(module_specs(run.model), config, run.model, run.stage[0].trainable), config)
        tensors = [*model.parameters(), *model.buffers()]
        assert stage_plan.memory.weights == sum(t.numel() * t.element_size() for t in tensors)
        state = [t for name, t in optimizer.state().items() if not name.endswith(".step")]
        assert stage_plan.memory.optimizer == sum(t.numel() * t.element_size() for t in state)
        moving = sum(p.numel() for p in optimizer.parameters.values())
        assert stage_plan.memory.gradients == moving * (4 if dtype == "float32" else 6)
        assert stage_plan.trainable == moving


def test_activation_checkpointing_and_small_chunks_need_less() -> None:
    base = nano_run()
    base["stage"] = base["stage"][:1]
    plain = plan(run_from_mapping(base)).stages[0].memory
    base["stage"][0] |= {"checkpoint_activations": True, "loss_chunk": 32}
    small = plan(run_from_mapping(base)).stages[0].memory
    assert small.activations < plain.activations / 3
    vocab, hidden = 512, 32
    assert (plain.logits, small.logits) == tuple(4 * (3 * c * vocab + vocab * hidden) for c in (128, 32))


def test_warm_up_keeps_gradients_of_the_indexer_only() -> None:
    run = run_from_mapping(nano_run())
    warmup = plan(run).stages[2]
    indexer = sum(prod(s.shape) for s in module_specs(run.model).values() if s.role.startswith("indexer"))
    assert warmup.trainable == indexer
    assert warmup.memory.gradients == 4 * indexer
    methods = {row.role: row.method for row in warmup.table}
    assert methods[Role.INDEXER] == "muon"
    assert methods[Role.EXPERT] == "frozen"


def test_the_plan_shows_stages_optimisers_and_memory() -> None:
    out = io.StringIO()
    show_plan(plan(run_from_mapping(nano_run())), Console(file=out, width=180))
    text = out.getvalue()
    for words in ("cosine 0.01 → 0, warm-up 128", "2 x [8, 16] + 2 x [12, 16]", "adamw 0.1", "frozen", "midtrain"):
        assert words in text


def test_counts_and_sizes_read_well() -> None:
    assert [count(n) for n in (512, 2048, 743.9e9, 28.55e12)] == ["512", "2.048 k", "743.9 B", "28.55 T"]
    assert [size(n) for n in (12, 1.5e6, 3.02e12)] == ["12 B", "1.5 MB", "3.02 TB"]


def test_muon_needs_half_the_state_of_adamw() -> None:
    """One momentum against two moments, for the matrices that Muon takes."""
    memory = {}
    for kind in ("muon", "adamw"):
        run = run_from_mapping(nano_run(optimizer={"kind": kind, "head": "muon", "router": "muon"}))
        memory[kind] = plan(run).stages[0].memory.optimizer
    rows = assign(
        module_specs(run.model), OptimizerConfig(head="muon", router="muon"), run.model, run.stage[0].trainable
    )
    under_muon = sum(a.numel for a in rows if a.method == "muon")
    assert memory["adamw"] - memory["muon"] == 4 * under_muon
