"""Every recipe loads, plans, and says what was published."""

from __future__ import annotations

from pathlib import Path

import pytest

import yunque.recipes
from yunque.train.plan import plan
from yunque.train.schedule import learning_rate
from yunque.train.settings import RunConfig, load_run

FOLDER = Path(yunque.recipes.__file__).parent
NAMES = tuple(sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.rglob("*.toml")))
GLM5 = tuple(name for name in NAMES if name.startswith("glm-5/"))


def _run(name: str) -> RunConfig:
    return load_run(FOLDER / f"{name}.toml")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_plans_from_shapes_alone(name: str) -> None:
    resolved = plan(_run(name))
    assert all(stage.steps >= 1 and stage.memory.total > 0 for stage in resolved.stages)


@pytest.mark.parametrize("name", GLM5)
def test_glm5_recipes_have_the_released_size_and_the_published_optimiser(name: str) -> None:
    resolved = plan(_run(name))
    assert resolved.report.with_mtp.total == pytest.approx(753.9e9, rel=1e-4)
    assert resolved.report.main.total == pytest.approx(743.9e9, rel=1e-4)
    optimizer = resolved.run.optimizer
    assert (optimizer.kind, optimizer.muon_split, optimizer.momentum) == ("muon", True, 0.95)
    assert (optimizer.newton_schulz_steps, optimizer.update_rms, optimizer.weight_decay) == (5, 0.2, 0.1)


def test_the_published_budget_adds_up() -> None:
    """27 T + 1 T + 500 B + 50 B, then 1,000 warm-up steps of 14 sequences, then 20 B."""
    tokens = {name.removeprefix("glm-5/"): _run(name).stage[0].tokens for name in GLM5}
    trained = ("pretrain", "midtrain-32k", "midtrain-128k", "midtrain-200k")
    assert sum(tokens[name] for name in trained) == 28_550_000_000_000
    assert tokens["dsa-warmup"] == 1000 * 14 * 202_752
    assert _run("glm-5/dsa-warmup").stage[0].steps == 1000
    assert tokens["dsa-sparse"] == 20_000_000_000


def test_published_rates_stand_at_the_ends_of_each_stage() -> None:
    def ends(name: str) -> tuple[float, float]:
        stage = _run(f"glm-5/{name}").stage[0]
        first = learning_rate(stage.schedule, stage.schedule.warmup_tokens, stage.tokens)
        return first, learning_rate(stage.schedule, stage.tokens, stage.tokens)

    assert ends("pretrain") == (2e-4, 4e-5)
    assert ends("midtrain-32k")[0] == 4e-5
    assert ends("midtrain-200k")[1] == 1e-5
    assert ends("dsa-warmup") == (5e-3, 2e-4)
    assert ends("dsa-sparse") == (1e-5, 1e-5)


def test_mid_training_is_one_straight_line_over_its_three_files() -> None:
    """4e-5 to 1e-5 over 1.55 T tokens: 2.065e-5 after 1 T, 1.097e-5 after 1.5 T."""
    for name, done, tokens in (("32k", 0.0, 1.0), ("128k", 1.0, 0.5), ("200k", 1.5, 0.05)):
        schedule = _run(f"glm-5/midtrain-{name}").stage[0].schedule
        assert schedule.lr_peak == pytest.approx(4e-5 - 3e-5 * done / 1.55, rel=1e-3)
        assert learning_rate(schedule, 1, 1) == pytest.approx(4e-5 - 3e-5 * (done + tokens) / 1.55, rel=1e-3)


def test_the_batch_of_pre_training_grows_from_16_to_64_million_tokens() -> None:
    pace = _run("glm-5/pretrain").stage[0].pace
    assert [pace.step_tokens(t) / 2**20 for t in (0, 250 * 10**9, 500 * 10**9)] == [16, 40, 64]


def test_pre_training_starts_with_base_10_000_and_goes_on_with_a_million_from_32k() -> None:
    assert _run("glm-5/pretrain").model_at(0).rope_theta == 10_000.0
    bases = {name: _run(name).model_at(0).rope_theta for name in GLM5 if name != "glm-5/pretrain"}
    assert set(bases.values()) == {1_000_000.0}


def test_every_unpublished_value_is_marked() -> None:
    for name in GLM5:
        text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
        settings = text[text.index("[optimizer]") :]
        bare = [
            line
            for line in settings.splitlines()
            if "=" in line
            and "#" not in line
            and not line.startswith(("snapshot_every_s", 'kind = "', "sources", "  {"))
        ]
        allowed = ("checkpoint_activations", "lr_", "tokens_per_step", "microbatches", "mixture.phases")
        assert [line for line in bare if not line.startswith(allowed)] == []
