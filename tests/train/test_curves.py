"""Loss curves are drawn from the metrics of all stages."""

from __future__ import annotations

from pathlib import Path

from yunque.core.metrics import JsonlSink
from yunque.train.curves import StageCurve, draw_curves


def test_a_png_is_drawn_from_stages_with_and_without_metrics(tmp_path: Path) -> None:
    curves = []
    for number, title in enumerate(("pretrain", "dsa_warmup", "sft")):
        path = tmp_path / f"{title}.jsonl"
        curves.append(StageCurve(title, path, 100 * number))
        if title == "sft":
            continue
        sink = JsonlSink(path)
        sink.write(0, {"heldout_dense": 4.0, "heldout_sparse": 4.5})
        for step in range(1, 6):
            name = "index_kl" if title == "dsa_warmup" else "loss"
            sink.write(step, {"tokens": 20.0 * step, name: 4.0 / step})
        sink.close()
    picture = draw_curves(curves, tmp_path / "curves.png")
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 5000
