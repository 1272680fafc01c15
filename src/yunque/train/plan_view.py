"""The plan of a run as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from yunque.train.inputs import missing_inputs
from yunque.train.plan import MemoryEstimate, RunPlan
from yunque.train.schedule import Decay


def show_plan(plan: RunPlan, console: Console) -> None:
    """Print the resolved run: model, stages, the optimiser's table, memory, and what it reads that is not there."""
    run = plan.run
    console.print(
        f"run [bold]{run.name}[/bold] in {run.folder}: seed {run.seed}, {run.dtype} on {run.device}, "
        f"{'start from ' + run.start_from if run.start_from else 'new weights'}",
        highlight=False,
    )
    console.print(_parts_table(plan))
    console.print(_stage_table(plan))
    console.print(_role_table(plan))
    console.print(_memory_table(plan))
    for line in missing_inputs(run):
        console.print(f"[yellow]not here yet[/yellow]  {escape(line)}", highlight=False)


def count(number: float) -> str:
    """A number with three digits and a unit: 743.9 B, 12.4 M, 512."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:.4g}"


def size(num_bytes: float) -> str:
    """Bytes with a unit: 1.49 TB, 12.4 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def _parts_table(plan: RunPlan) -> Table:
    table = Table("part", "parameters", "active per token", title="model")
    for name, part in plan.report.parts.items():
        table.add_row(name, count(part.total), count(part.active))
    table.add_section()
    table.add_row("all", count(plan.report.with_mtp.total), count(plan.report.with_mtp.active))
    return _right(table)


def _stage_table(plan: RunPlan) -> Table:
    table = Table(
        "stage",
        "kind",
        "tokens",
        "steps",
        "per step",
        "sequence",
        "attention",
        "learning rate",
        title="stages",
    )
    for item in plan.stages:
        stage, schedule = item.stage, item.stage.schedule
        rate = f"{schedule.kind} {schedule.lr_peak:g}"
        if isinstance(schedule, Decay):
            rate += f" → {schedule.lr_end:g}"
        if schedule.warmup_tokens:
            rate += f", warm-up {count(schedule.warmup_tokens)}"
        per_step = count(stage.tokens_per_step)
        if stage.batch_ramp is not None:
            per_step = f"{count(stage.batch_ramp.start_tokens)} → {per_step}"
        table.add_row(
            item.title, stage.kind_name, count(stage.tokens), f"{item.steps:,}", per_step,
            f"{stage.sequence_length:,}", stage.attends, rate,
        )  # fmt: skip
    return table


def _role_table(plan: RunPlan) -> Table:
    """Roles down, stages across: what optimises each role when, and with which weight decay."""
    table = Table("role", "tensors", "parameters", *(stage.title for stage in plan.stages), "matrices that Muon sees")
    table.title = "optimisers (and weight decay)"
    for rows in zip(*(stage.table for stage in plan.stages), strict=True):
        methods = [row.method + (f" {row.weight_decay:g}" if row.weight_decay else "") for row in rows]
        matrices = dict.fromkeys(row.matrices for row in rows if row.matrices)
        table.add_row(rows[0].role, str(rows[0].tensors), count(rows[0].parameters), *methods, " or ".join(matrices))
    return table


def _memory_table(plan: RunPlan) -> Table:
    table = Table(
        "stage",
        "trainable",
        "weights",
        "gradients",
        "optimiser",
        "activations",
        "logits",
        "total",
        title="memory",
    )
    for stage in plan.stages:
        table.add_row(stage.title, count(stage.trainable), *_sizes(stage.memory))
    return _right(table)


def _sizes(memory: MemoryEstimate) -> tuple[str, ...]:
    parts = (
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.logits,
        memory.total,
    )
    return tuple(size(part) for part in parts)


def _right(table: Table) -> Table:
    for column in table.columns[1:]:
        column.justify = "right"
    return table
