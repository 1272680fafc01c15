"""Loading a checkpoint against reading its files: time, and memory beyond the model's own.

    python benchmarks/loading.py

Writes a checkpoint of about 1 GB (bfloat16, per-expert names, four shards) to a temporary folder. Every
measurement is a process of its own, after all files were read once: one loads the model, one reads all
shards into fresh buffers, in turns. ``load_time_ratio`` is the median over the pairs of loading time by
reading time; ``load_memory_ratio`` the median peak of memory while loading, beyond that before it and
without mapped files, by the checkpoint's size.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

THREADS = 2


def main() -> None:
    parser = common.options("Load a checkpoint, and read its files.", seeds=range(7))
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help="one measurement, by itself")
    arguments = parser.parse_args()
    if arguments.child:
        what, folder = arguments.child[0], Path(arguments.child[1])
        print(json.dumps({"make": make, "make_quick": make_quick, "load": load, "read": read}[what](folder)))
        return
    with tempfile.TemporaryDirectory(prefix="yunque-loading-") as scratch:
        folder = Path(scratch) / "checkpoint"
        size = _child("make_quick" if arguments.quick else "make", folder)["bytes"]
        pairs = [_pair(folder, swapped=bool(seed % 2)) for seed in arguments.seeds[: 2 if arguments.quick else None]]
    time_ratio = statistics.median(pair["load"]["seconds"] / pair["read"]["seconds"] for pair in pairs)
    memory_ratio = statistics.median(pair["load"]["peak_bytes"] / size for pair in pairs)
    rows = [
        {
            "what": name,
            "MB": size / 1e6,
            "seconds (median)": statistics.median(pair[what]["seconds"] for pair in pairs),
            "CPU seconds": statistics.median(pair[what]["cpu_seconds"] for pair in pairs),
            "peak MB": statistics.median(pair[what]["peak_bytes"] for pair in pairs) / 1e6,
        }
        for what, name in (("load", "load_model"), ("read", f"read into fresh buffers, {THREADS} threads"))
    ]
    figures = {"load_time_ratio": time_ratio, "load_memory_ratio": memory_ratio}
    common.report("loading", rows, figures, to=arguments.json)


def make(folder: Path, *, layers: int = 4, experts: int = 64, vocabulary: int = 32_000) -> dict[str, Any]:
    """Write the checkpoint; returns the bytes of its tensors."""
    import torch

    from yunque.model.names import module_specs
    from yunque.model.presets import preset
    from yunque.weights import open_checkpoint, save_model

    config = replace(
        preset("nano"),
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=4096,
        moe_intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        q_lora_rank=512,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=96,
        index_head_dim=64,
        n_routed_experts=experts,
    )
    state = {
        name: torch.randn(spec.shape).to(torch.float32 if spec.keeps_fp32 else torch.bfloat16)
        for name, spec in module_specs(config).items()
    }
    total = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    save_model(folder, config, state, shard_bytes=total // 4 + 8 * 2**20)
    return {"bytes": open_checkpoint(folder).num_bytes}


def make_quick(folder: Path) -> dict[str, Any]:
    return make(folder, layers=2, experts=4, vocabulary=512)


def load(folder: Path) -> dict[str, Any]:
    from yunque.weights import load_model

    return _measured(lambda: load_model(folder))


def read(folder: Path) -> dict[str, Any]:
    """All shards into buffers of their size, each thread taking the next shard."""
    import torch

    def read_file(path: Path) -> torch.Tensor:
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
        memory, done = buffer.numpy().data, 0
        with open(path, "rb", buffering=0) as file:
            while done < len(memory):
                done += file.readinto(memory[done:])
        return buffer

    def read_all() -> list[torch.Tensor]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(read_file, sorted(folder.glob("*.safetensors"))))

    return _measured(read_all)


def _measured(work: Any) -> dict[str, Any]:
    with contextlib.suppress(OSError):  # where it may not be reset, an earlier peak makes ours look larger
        Path("/proc/self/clear_refs").write_text("5")
    before = _memory()
    started, started_cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    after = _memory()
    del result
    mapped_files = after["RssFile"] - before["RssFile"]
    peak_bytes = after["VmHWM"] - before["VmRSS"] - mapped_files
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes}


def _memory() -> dict[str, int]:
    """VmRSS, VmHWM (its peak) and RssFile (pages of mapped files) of this process in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile")}


def _pair(folder: Path, *, swapped: bool) -> dict[str, dict[str, Any]]:
    for path in folder.iterdir():
        path.read_bytes()  # both find all files in the page cache
    order = ("read", "load") if swapped else ("load", "read")
    return {what: _child(what, folder) for what in order}


def _child(what: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
