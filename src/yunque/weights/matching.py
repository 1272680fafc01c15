"""Which stored tensor fills which part of a model: all agrees, or one error names what does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from yunque.core.errors import CheckpointError
from yunque.weights.checkpoint import Checkpoint
from yunque.weights.fp8 import E4M3, SCALE_SUFFIX, Fp8Format
from yunque.weights.layout import checkpoint_views, is_router_bias, keeps_fp32
from yunque.weights.safetensors_file import DTYPE_NAMES, Entry

_NAMES_SHOWN = 5
#: What other quantisers call a scale; some mean its reciprocal, so none is taken for ours.
_OTHER_SCALES = ("weight_scale", "scale", "scale_inv", "weight_scale_2", "input_scale")
_EMBEDDING = "model.embed_tokens.weight"
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Fill:
    """One stored tensor and the view of a module's tensor ``parameter`` that it fills."""

    entry: Entry
    parameter: str
    out: Tensor
    scale: Entry | None = None


@dataclass(frozen=True)
class Matching:
    """All fills, and ``copies``: pairs of a stored repetition and the tensor that it must equal."""

    fills: tuple[Fill, ...]
    copies: tuple[tuple[Fill, Fill], ...]
    fp8: Fp8Format
    notes: tuple[str, ...]


@dataclass
class _Problems:
    """Findings by kind, so that a checkpoint with a thousand missing tensors gives one readable error."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, what: str) -> None:
        self.found.setdefault(kind, []).append(what)

    def lines(self) -> list[str]:
        return [f"{kind}: {shorten(names)}" for kind, names in self.found.items()]


def shorten(names: Sequence[str]) -> str:
    """The count and the first few of ``names``."""
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_NAMES_SHOWN])}{more})"


def match(checkpoint: Checkpoint, target: Mapping[str, Tensor], ignore: Sequence[str], *, exact: bool) -> Matching:
    """Pair every tensor of ``target`` (module names) with the stored one of its Hugging Face name.

    ``ignore`` are patterns (``*.indexer.*``) for stored tensors that the model has no place for; it never
    excuses a missing one. ``exact`` refuses every conversion of dtype. Raises one ``CheckpointError`` with
    all findings.
    """
    entries, problems, notes = checkpoint.entries, _Problems(), []
    views = {name: (parameter, view) for name, parameter, view in checkpoint_views(target)}
    scales = _scales(entries, views, problems)
    fp8 = Fp8Format.from_hf(checkpoint.raw_config) if not problems.found else None
    fp8 = fp8 or Fp8Format()

    fills = []
    for name, (parameter, view) in views.items():
        entry = entries.get(name)
        if entry is None:
            problems.add("missing", name)
            continue
        fill = Fill(entry, parameter, view, scales.get(name))
        _check(fill, fp8, problems, exact=exact)
        fills.append(fill)

    copies = _copies(checkpoint, {fill.entry.name: fill for fill in fills})
    used = {fill.scale.name for fill in fills if fill.scale} | {copy.entry.name for copy, _ in copies}
    ignored = []
    for name in entries:
        if name not in views and name not in used:
            if any(fnmatchcase(name, pattern) for pattern in ignore):
                ignored.append(name)
            else:
                problems.add("unexpected", name)
    if problems.found:
        lines = problems.lines() + _advice(checkpoint, problems)
        raise CheckpointError("\n  ".join([f"{checkpoint.folder} does not fit the model:", *lines]))
    if ignored:
        notes.append(f"ignored as asked: {shorten(ignored)}")
    notes += _precision_notes(fills, fp8)
    return Matching(tuple(fills), tuple(copies), fp8, tuple(notes))


def _scales(entries: Mapping[str, Entry], wanted: Iterable[str], problems: _Problems) -> dict[str, Entry]:
    """The scale of every FP8 tensor; one under another name is reported with that name, never guessed at."""
    scales = {}
    for name in wanted:
        if name not in entries or entries[name].dtype != E4M3:
            continue
        if (scale := entries.get(name + SCALE_SUFFIX)) is not None:
            scales[name] = scale
            continue
        base = name.removesuffix(".weight")
        others = [n for n in (f"{base}.{other}" for other in _OTHER_SCALES) if n in entries]
        kept = f"; the file has {others[0]!r}, whose meaning differs between quantisers" if others else ""
        problems.add("FP8 without a scale", f"{name}: expected {name + SCALE_SUFFIX!r}{kept}")
    return scales


def _check(fill: Fill, fp8: Fp8Format, problems: _Problems, *, exact: bool) -> None:
    entry, view = fill.entry, fill.out
    if entry.shape != tuple(view.shape):
        problems.add(
            "shape",
            f"{entry.name} is {list(entry.shape)} in {entry.file.name}, {list(view.shape)} in the model",
        )
    if keeps_fp32(entry.name) and view.dtype.itemsize < 4:
        problems.add("model must hold in float32", f"{entry.name}, which is {DTYPE_NAMES[view.dtype]} there")
    if exact and entry.dtype != view.dtype:
        problems.add("dtype", f"{entry.name} is {entry.dtype_name}, the model's is {DTYPE_NAMES[view.dtype]}")
    if entry.dtype == E4M3 and len(entry.shape) != 2:
        problems.add("FP8 that is no matrix", f"{entry.name} is {list(entry.shape)}")
    elif entry.dtype == E4M3:
        if fill.scale is not None and fill.scale.shape != (wanted := fp8.scale_shape(entry.shape)):
            problems.add("scale shape", f"{fill.scale.name} is {list(fill.scale.shape)}, expected {list(wanted)}")
        if fill.scale is not None and fill.scale.dtype != torch.float32:
            problems.add("scale dtype", f"{fill.scale.name} is {fill.scale.dtype_name}, expected F32")
    elif entry.dtype not in _FLOATS:
        problems.add("dtype that is no weight's", f"{entry.name} is {entry.dtype_name}")


def _copies(checkpoint: Checkpoint, fills: Mapping[str, Fill]) -> list[tuple[Fill, Fill]]:
    """Repetitions of head and embedding that some exports put under the MTP layer."""
    prefix = _mtp_prefix(checkpoint)
    if not any(name.startswith(prefix) for name in fills):
        return []
    pairs = {"shared_head.head.weight": "lm_head.weight", "embed_tokens.weight": _EMBEDDING}
    copies = []
    for name, repeated in pairs.items():
        entry, main = checkpoint.entries.get(prefix + name), fills.get(repeated)
        if entry and main and (entry.dtype, entry.shape) == (main.entry.dtype, main.entry.shape):
            copies.append((Fill(entry, main.parameter, main.out), main))
    return copies


def _mtp_prefix(checkpoint: Checkpoint) -> str:
    return f"model.layers.{checkpoint.raw_config.get('num_hidden_layers')}."


def _advice(checkpoint: Checkpoint, problems: _Problems) -> list[str]:
    prefix = _mtp_prefix(checkpoint)
    missing, unexpected = problems.found.get("missing", []), problems.found.get("unexpected", [])
    advice = []
    if any(n.startswith(prefix) for n in missing) and not any(n.startswith(prefix) for n in checkpoint.entries):
        advice.append("the checkpoint has no MTP layer, but its config asks for one: set num_nextn_predict_layers = 0")
    if any(n == f"{prefix}eh_proj.weight" for n in unexpected):
        advice.append(
            "the checkpoint has an MTP layer, but its config asks for none: set num_nextn_predict_layers = 1 "
            f"or ignore {prefix + '*'!r}"
        )
    if any(".indexer." in n and not n.startswith(prefix) for n in unexpected):
        advice.append("layers that share an indexer (indexer_types) own none; to leave these out, ignore '*.indexer.*'")
    return advice


def _precision_notes(fills: Sequence[Fill], fp8: Fp8Format) -> list[str]:
    notes = []
    coarse = [f.entry.name for f in fills if f.entry.dtype == E4M3 and not fp8.quantises(f.entry.name)]
    if coarse:
        notes.append(f"stored in FP8, from which their role or modules_to_not_convert keeps them: {shorten(coarse)}")
    rounded = [f.entry.name for f in fills if is_router_bias(f.entry.name) and f.entry.dtype.itemsize < 4]
    if rounded:
        notes.append(f"router biases stored below float32, which their spread needs; read as is: {shorten(rounded)}")
    usual = min((f.entry.dtype.itemsize for f in fills if f.parameter == _EMBEDDING), default=0)
    narrowed = [f.entry.name for f in fills if f.entry.dtype.itemsize > max(usual, f.out.dtype.itemsize)]
    if narrowed:
        notes.append(f"stored wider than the rest, rounded to the model's dtype: {shorten(narrowed)}")
    return notes
