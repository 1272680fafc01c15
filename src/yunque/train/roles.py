"""Which optimiser and weight decay each parameter gets, decided by its role in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from yunque.core.checks import above_zero, at_least, share_below_one
from yunque.model.config import ModelConfig
from yunque.model.names import Role, TensorSpec

Method = Literal["muon", "adamw", "frozen"]
MatrixMethod = Literal["muon", "adamw"]

#: The lightning indexer: learns from its own loss only, and is frozen where there is none.
INDEXER_ROLES = frozenset({Role.INDEXER, Role.INDEXER_HEADS, Role.INDEXER_NORM})
#: Everything that learns from the language-model loss. The router's bias is a buffer that a sign rule moves.
BACKBONE_ROLES = frozenset(Role) - INDEXER_ROLES - {Role.ROUTER_BIAS}
ALL_ROLES = BACKBONE_ROLES | INDEXER_ROLES

#: Vectors: no matrix to orthogonalise, and no weight decay.
_VECTOR_ROLES = frozenset({Role.NORM, Role.INDEXER_NORM})


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon with AdamW for the rest, or AdamW for everything.

    Published (GLM-4.5 report, carried over by GLM-5's appendix A): Muon on all parameters except word
    embedding, biases and RMSNorm weights; 5 Newton-Schulz steps, momentum 0.95, update RMS 0.2, weight decay
    0.1. Not published: the AdamW constants, Nesterov or not, whether the head counts as a word embedding,
    whether norms decay, and whether anything but the up-projections is cut into heads.
    """

    kind: Literal["muon", "adamw"] = "muon"
    #: Orthogonalise the query, key and value up-projections head by head (GLM-5) instead of whole (GLM-4.5).
    muon_split: bool = True
    #: Newton-Schulz costs 20-30 m FLOPs per expert weight (m = short side) whatever the batch; on a CPU with
    #: few tokens per step that is more than the step itself, and "adamw" is the way out.
    experts: MatrixMethod = "muon"
    head: MatrixMethod = "adamw"
    router: MatrixMethod = "adamw"
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    update_rms: float = 0.2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    #: Largest global gradient norm; larger gradients are scaled down to it.
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        share_below_one(momentum=self.momentum, weight_decay=self.weight_decay)
        at_least(1, newton_schulz_steps=self.newton_schulz_steps)
        above_zero(update_rms=self.update_rms, eps=self.eps, clip_norm=self.clip_norm)
        share_below_one(**{f"betas[{index}]": beta for index, beta in enumerate(self.betas)})


@dataclass(frozen=True)
class MatrixLayout:
    """How Muon sees a parameter: ``stacks`` equal stacks of rows, each cut into matrices of ``rows[i]``
    rows."""

    stacks: int
    rows: tuple[int, ...]
    columns: int

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(matrices, rows, columns) of each kind of matrix."""
        return tuple((self.stacks, rows, self.columns) for rows in self.rows)

    def __str__(self) -> str:
        return " + ".join(f"{count} x [{rows}, {columns}]" for count, rows, columns in self.shapes)


@dataclass(frozen=True)
class Assignment:
    """What happens to one parameter at each step."""

    name: str
    role: Role
    shape: tuple[int, ...]
    method: Method
    weight_decay: float
    layout: MatrixLayout | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def assign(
    specs: Mapping[str, TensorSpec],
    optimizer: OptimizerConfig,
    model: ModelConfig,
    trainable: frozenset[Role] = ALL_ROLES,
) -> tuple[Assignment, ...]:
    """The table: one row per parameter of ``specs`` (names as the module has them), in the order given."""
    rows = []
    for name, spec in specs.items():
        if spec.role is Role.ROUTER_BIAS:
            continue
        method = _method(spec.role, optimizer) if spec.role in trainable else "frozen"
        decays = method != "frozen" and spec.role not in _VECTOR_ROLES
        layout = matrix_layout(spec, model, split=optimizer.muon_split) if method == "muon" else None
        rows.append(Assignment(name, spec.role, spec.shape, method, optimizer.weight_decay if decays else 0.0, layout))
    return tuple(rows)


def _method(role: Role, optimizer: OptimizerConfig) -> Method:
    if optimizer.kind == "adamw" or role in _VECTOR_ROLES or role is Role.EMBEDDING:
        return "adamw"
    chosen: dict[Role, Method] = {
        Role.EXPERT: optimizer.experts,
        Role.HEAD: optimizer.head,
        Role.ROUTER: optimizer.router,
    }
    return chosen.get(role, "muon")


def matrix_layout(spec: TensorSpec, model: ModelConfig, *, split: bool) -> MatrixLayout:
    """The matrices inside one parameter: a tensor of a checkpoint is one, except where Muon Split cuts it.

    With ``split``, ``q_b_proj`` is one [qk_head_dim, Q] block per head (rotary rows included: the report does
    not say that they are cut off) and ``kv_b_proj`` one key block [nope, C] and one value block [v, C] per
    head. Experts are stacked in the module but stay matrices of their own, gate and up apart.
    """
    heads = model.num_attention_heads
    if spec.role is Role.EXPERT:
        stacks, rows, columns = spec.shape
        if rows == 2 * model.moe_intermediate_size and columns == model.hidden_size:
            return MatrixLayout(2 * stacks, (rows // 2,), columns)
        return MatrixLayout(stacks, (rows,), columns)
    rows, columns = spec.shape
    if split and spec.role is Role.Q_UP:
        return MatrixLayout(heads, (model.qk_head_dim,), columns)
    if split and spec.role is Role.KV_UP:
        return MatrixLayout(heads, (model.qk_nope_head_dim, model.v_head_dim), columns)
    return MatrixLayout(1, (rows,), columns)


@dataclass(frozen=True)
class RoleRow:
    """One line of the printed table: a role, what optimises it, and how much of the model it is."""

    role: Role
    method: Method
    weight_decay: float
    tensors: int
    parameters: int
    matrices: str


def by_role(assignments: Sequence[Assignment]) -> tuple[RoleRow, ...]:
    """The table summed by role, in order of first appearance; ``matrices`` lists the distinct layouts."""
    rows = []
    for role in dict.fromkeys(a.role for a in assignments):
        mine = [a for a in assignments if a.role is role]
        layouts = dict.fromkeys(str(a.layout) for a in mine if a.layout is not None)
        numel = sum(a.numel for a in mine)
        rows.append(RoleRow(role, mine[0].method, mine[0].weight_decay, len(mine), numel, "; ".join(layouts)))
    return tuple(rows)
