"""Configuration: what is written is read back equal, and what cannot be used is refused by name."""

import enum
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from yunque.core.config import from_mapping, to_mapping, to_toml, with_overrides
from yunque.core.errors import ConfigError


class Mode(enum.StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True)
class AdamW:
    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Muon:
    kind: Literal["muon"] = "muon"
    lr: float = 0.02
    split: bool = True


@dataclass(frozen=True)
class Source:
    path: Path
    weight: float = 1.0
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Train:
    steps: int
    lr_peak: float = 1e-3
    optimizer: AdamW | Muon = AdamW()
    decay: Muon | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps {self.steps} is not positive")


@dataclass(frozen=True)
class Run:
    name: str
    train: Train
    mode: Mode = Mode.DENSE
    device: Literal["auto", "cpu", "cuda"] = "auto"
    limit: int | None = None
    window: Literal["all"] | int = "all"
    sources: tuple[Source, ...] = ()
    phases: dict[str, Source] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


SMALL = Run("r", Train(3))
text = st.text(max_size=8)
finite = st.floats(allow_nan=False)
int64 = st.integers(-(2**63), 2**63 - 1)
sources = st.builds(
    Source,
    path=st.text("abc/.é ", min_size=1, max_size=9).map(Path),
    weight=finite,
    columns=st.lists(text, max_size=3).map(tuple),
)
optimizers = st.builds(AdamW, lr=st.floats(1e-9, 1e9), betas=st.tuples(finite, finite)) | st.builds(Muon, lr=finite)
trains = st.builds(
    Train,
    steps=st.integers(1, 2**63 - 1),
    lr_peak=finite | st.integers(-(2**53), 2**53).map(float),
    optimizer=optimizers,
    decay=st.none() | st.builds(Muon),
)
runs = st.builds(
    Run,
    name=text,
    train=trains,
    mode=st.sampled_from(Mode),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    limit=st.none() | int64,
    window=st.just("all") | int64,
    sources=st.lists(sources, max_size=2).map(tuple),
    phases=st.dictionaries(text, sources, max_size=2),
    tags=st.dictionaries(text, text, max_size=2),
    free=st.dictionaries(text, st.booleans() | int64 | text | st.lists(int64, max_size=2), max_size=2),
)


@given(runs)
@settings(max_examples=150, deadline=None)
def test_to_toml_is_read_back_to_an_equal_object(run):
    again = from_mapping(Run, tomllib.loads(to_toml(run)))
    assert again == run
    assert type(again.train.optimizer) is type(run.train.optimizer)
    assert isinstance(again.train.lr_peak, float)


def test_values_get_their_field_types():
    run = from_mapping(
        Run,
        {
            "name": "r",
            "train": {"steps": 2, "lr_peak": 1, "optimizer": {"kind": "muon", "split": False}},
            "mode": "sparse",
            "sources": [{"path": "a/b", "columns": ["x"]}],
            "phases": {"warm": {"path": "c"}},
        },
    )
    assert run.train == Train(2, 1.0, Muon(split=False))
    assert isinstance(run.train.lr_peak, float)
    assert run.mode is Mode.SPARSE
    assert run.sources == (Source(Path("a/b"), columns=("x",)),)
    assert run.phases == {"warm": Source(Path("c"))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train": {"steps": 1, "lr_peek": 1.0}},
            r"^unknown key 'lr_peek' in \[train\]; did you mean 'lr_peak'\? valid: decay, lr_peak, opti",
        ),
        ({"nmae": "x"}, r"^unknown key 'nmae'; did you mean 'name'\?"),
        ({"train": {}}, r"^missing key 'steps' in \[train\]$"),
        ({"train": 3}, r"^train = 3: expected a table$"),
        ({"train": {"steps": 0}}, r"^\[train\]: steps 0 is not positive$"),
        ({"train": {"steps": "3"}}, r"^train\.steps = '3': input should be a valid integer"),
        ({"train": {"steps": 1.5}}, r"^train\.steps = 1\.5: input should be a valid integer"),
        ({"train": {"steps": True}}, r"^train\.steps = True: input should be a valid integer"),
        (
            {"train": {"steps": 1, "lr_peak": "high"}},
            r"^train\.lr_peak = 'high': input should be a valid num",
        ),
        ({"train": {"steps": 1, "lr_peak": True}}, r"^train\.lr_peak = True: input should be a valid number"),
        (
            {"device": "cdua"},
            r"^unknown value 'cdua' in device; did you mean 'cuda'\? valid: auto, cpu",
        ),
        (
            {"mode": "spares"},
            r"^unknown value 'spares' in mode; did you mean 'sparse'\? valid: dense",
        ),
        ({"window": "al"}, r"^window = 'al': "),
        (
            {"train": {"steps": 1, "optimizer": {"kind": "moun"}}},
            r"^unknown kind 'moun' in \[train\.optimizer\]; did you mean 'muon'\? valid: adamw, muon$",
        ),
        (
            {"train": {"steps": 1, "optimizer": {"lr": 1.0}}},
            r"^missing key 'kind' in \[train\.optimizer\]; valid: adamw, muon$",
        ),
        (
            {"train": {"steps": 1, "optimizer": {"kind": "muon", "betas": [0, 0]}}},
            r"^unknown key 'betas' in \[train\.optimizer\]; valid: kind, lr, split$",
        ),
        (
            {"train": {"steps": 1, "optimizer": {"kind": "adamw", "lr": 0.0}}},
            r"^train\.optimizer\.lr = 0\.0: input should be greater than 0$",
        ),
        (
            {"train": {"steps": 1, "optimizer": {"kind": "adamw", "betas": [0.9, "x"]}}},
            r"^train\.optimizer\.betas\[1\] = 'x': input should be a valid number",
        ),
        (
            {"train": {"steps": 1, "optimizer": {"kind": "adamw", "betas": [0.9]}}},
            r"^train\.optimizer\.betas = \[0\.9\]: ",
        ),
        (
            {"sources": [{"path": "a"}, {"pth": "b"}]},
            r"^unknown key 'pth' in \[sources\[1\]\]; did you mean",
        ),
        ({"sources": {"path": "a"}}, r"^sources = \{'path': 'a'\}: expected a list$"),
        ({"phases": {"warm": {"path": 3}}}, r"^phases\.warm\.path = 3: "),
        ({"tags": {"a": 1}}, r"^tags\.a = 1: input should be a valid string"),
    ],
)
def test_refusal_names_key_value_and_choices(change, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Run, {"name": "r", "train": {"steps": 1}} | change)


def test_all_unknown_keys_of_a_table_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        from_mapping(Run, {"name": "r", "train": {"steps": 1}, "modes": 1, "devise": 2})
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "unknown key 'modes'",
        "unknown key 'devise'",
    ]


def test_overrides_are_toml_values_and_bare_words_are_strings():
    data = {"train": {"steps": 1}, "keep": 5}
    changed = with_overrides(
        data,
        [
            "train.lr_peak=3e-4",
            "train.steps=7",
            "device=cpu",
            'name="a b"',
            "sources=[{path='x'}]",
            "new.deep.flag=true",
            "path=/a/b=c",
            "empty=",
        ],
    )
    assert changed == {
        "train": {"steps": 7, "lr_peak": 3e-4},
        "keep": 5,
        "device": "cpu",
        "name": "a b",
        "sources": [{"path": "x"}],
        "new": {"deep": {"flag": True}},
        "path": "/a/b=c",
        "empty": "",
    }
    assert data == {"train": {"steps": 1}, "keep": 5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "not of the form key.path=value"),
        (".steps=1", "not of the form"),
        ("keep.x=1", "'keep' is a value, not a table"),
        ("train.betas=[1,", "value is not TOML"),
    ],
)
def test_a_malformed_override_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        with_overrides({"keep": 5}, [override])


def test_none_is_left_out_and_refused_where_it_would_read_back_differently():
    assert "limit" not in to_mapping(SMALL)
    assert from_mapping(Run, to_mapping(SMALL) | {"limit": None}) == SMALL

    with pytest.raises(ConfigError, match=r"seed is None, which TOML cannot say"):
        to_mapping(DefaultNotNone(seed=None))
    with pytest.raises(ConfigError, match=r"free\.a\[1\] is None"):
        to_mapping(replace(SMALL, free={"a": [1, None]}))


@dataclass(frozen=True)
class DefaultNotNone:
    seed: int | None = 3


def test_non_finite_numbers_survive():
    run = replace(SMALL, train=Train(1, lr_peak=float("inf")))
    assert from_mapping(Run, tomllib.loads(to_toml(run))) == run
