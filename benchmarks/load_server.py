"""The server under load: a checkpoint of random weights, a process of ``yunque serve``, its metrics and its memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import httpx
import torch

from yunque.engine.page_store import bytes_per_token
from yunque.model import Transformer, init_weights, preset
from yunque.text import CHAT_TEMPLATE_FILE, Tokenizer, chat_template, train_bpe
from yunque.weights import save_model

CONTEXT = 2048
PAGE_SIZE = 16
API_KEY, ADMIN_KEY = "load-key", "load-admin-key"
_SAMPLE = re.compile(r"^(yunque_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that ``yunque serve`` takes, the tokenizer in it, and what one page of its cache costs."""

    folder: Path
    tokenizer: Tokenizer
    page_bytes: int


def write_checkpoint(scratch: Path) -> Checkpoint:
    """The smallest preset with random weights and a draft layer, a byte-level vocabulary, GLM-5's chat format."""
    tokenizer = train_bpe([Path(__file__).read_text(encoding="utf-8") * 4], 512)
    config = replace(
        preset("nano"),
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.special.eos_ids,
    )
    model = Transformer(config)
    init_weights(model, torch.Generator().manual_seed(0))
    tokenizer.save(scratch / "text")
    files = {path.name: path.read_bytes() for path in (scratch / "text").iterdir()}
    files[CHAT_TEMPLATE_FILE] = chat_template("glm-5").encode()
    folder = save_model(scratch / "load-model", config, model.state_dict(), files=files)
    return Checkpoint(folder, tokenizer, bytes_per_token(config, torch.float32, with_mtp=True) * PAGE_SIZE)


@dataclass(frozen=True)
class Limits:
    """How the server is started. ``pages`` are few, so that the load evicts and preempts."""

    max_running: int = 64
    max_concurrent: int = 256
    max_queued: int = 256
    pages: int = 640
    drain_s: float = 5.0


class ServerProcess:
    """``yunque serve`` on a free port of this machine, with one thread of tensor work; ended when the block is left."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits, log: Path) -> None:
        command = [sys.executable, "-m", "yunque", "serve", str(checkpoint.folder), "--port", "0"]
        command += ["--api-key", API_KEY, "--admin-key", ADMIN_KEY, "--batch-invariant", "--device", "cpu"]
        command += ["--max-running", str(limits.max_running), "--max-concurrent", str(limits.max_concurrent)]
        command += ["--max-queued", str(limits.max_queued), "--drain", str(limits.drain_s)]
        command += ["--cache-memory", str(limits.pages * checkpoint.page_bytes)]
        self._log = log.open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.url = self._announced()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        self._log.close()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def rss_bytes(self) -> int:
        """What the process holds in memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def log_lines(self) -> list[str]:
        """What it wrote to standard error so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read().splitlines()

    def metrics(self) -> Metrics:
        """What ``/metrics`` says now."""
        headers = {"authorization": f"Bearer {API_KEY}"}
        return Metrics(httpx.get(f"{self.url}/metrics", headers=headers, timeout=30).raise_for_status().text)

    def quiet(self, timeout_s: float = 60.0) -> Metrics:
        """The metrics as soon as nothing runs, waits or is being answered. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout_s
        while (found := self.metrics()).in_progress:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{found.in_progress:g} requests are in progress {timeout_s:g} s after the load")
            time.sleep(0.1)
        return found

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def _announced(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "serving at " in line:
                return line.split()[2]
        raise RuntimeError("the server did not start:\n" + "\n".join(self.log_lines()))


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [(name, labels or "", float(value)) for name, labels, value in _SAMPLE.findall(text)]

    def total(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples whose labels match the expression ``label``."""
        return sum(value for found, labels, value in self._samples if found == name and re.search(label, labels))

    @property
    def pages_at_hand(self) -> float:
        """Pages that a new request could have: free ones, and those that only the prefix tree holds."""
        return self.total("yunque_engine_pages_free") + self.total("yunque_engine_pages_cached")

    @property
    def in_progress(self) -> float:
        """Requests that run or wait in the engine, and those that are being answered but this one."""
        engine = self.total("yunque_engine_running") + self.total("yunque_engine_waiting")
        return engine + self.total("yunque_http_in_flight") - 1

    @property
    def errors_5xx(self) -> float:
        """Answers with a 5xx status, and streams that ended with an error."""
        return self.total("yunque_http_requests_total", 'status="5') + self.total("yunque_turns_total", "error")

    @property
    def statuses(self) -> Counter[str]:
        """Answers by status."""
        counts: Counter[str] = Counter()
        for name, labels, value in self._samples:
            if name == "yunque_http_requests_total" and (status := re.search(r'status="(\d+)"', labels)):
                counts[status[1]] += int(value)
        return counts
