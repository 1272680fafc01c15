"""Two real engine processes behind a real router: one is killed in the middle of its replies."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from router_engines import CLIENT

from yunque.serve.router.health import HeartbeatSettings
from yunque.text import Renderer, chat_template
from yunque.weights import save_model

from ...model.builders import build, draw_config

SLOW = HeartbeatSettings(interval_s=60, timeout_s=5, eject_after=50, backoff_max_s=60)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def checkpoint(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    renderer.tokenizer.save(folder / "text")
    files = {path.name: path.read_bytes() for path in (folder / "text").iterdir()}
    files["chat_template.jinja"] = chat_template("glm-5.1").encode()
    config = draw_config(5, vocab_size=renderer.tokenizer.vocab_size, max_position_embeddings=4096)
    return save_model(folder / "model", config, build(config, 5).state_dict(), files=files)


Engine = tuple["subprocess.Popen[str]", str]


@contextlib.contextmanager
def engine_processes(checkpoint: Path, count: int) -> Iterator[list[Engine]]:
    command = [sys.executable, "-m", "yunque", "serve", str(checkpoint), "--port", "0", "--batch-invariant"]
    command += ["--cache-memory", "64M"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [(process, _url(process)) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait(timeout=10)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("serving at ")).split()[2]


def bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Replies of 200 tokens that end by their length: the model's end tokens are barred."""
    talk = {"messages": [{"role": "user", "content": "naïve?"}], "max_tokens": 200, "min_tokens": 200, "stream": True}
    sampling = {"max_new_tokens": 200, "temperature": 0.9, "top_p": 0.9, "sampling_seed": 3, "ignore_eos": True}
    shaped = {**sampling, "presence_penalty": 0.4, "stop": ["\u0001\u0002"]}
    tokens = {"input_ids": list(range(40, 70)), "sampling_params": shaped, "return_logprob": True, "stream": True}
    return {
        "greedy chat": (CHAT, {**talk, "temperature": 0, "return_token_ids": True}),
        "seeded tokens": ("/generate", {**tokens, "incremental_streaming_output": True}),
    }


def read(url: str, path: str, body: dict[str, Any], on_event: Any = lambda _: None) -> dict[str, Any]:
    """The joined events of a stream."""
    seen: dict[str, Any] = {"ids": [], "text": "", "logprobs": [], "parts": None}
    with CLIENT.stream("POST", f"{url}{path}", json=body, headers={"x-session-id": "s"}, timeout=60) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            if path == CHAT:
                for choice in event["choices"]:
                    seen["ids"] += choice.get("token_ids", [])
                    delta = choice["delta"]
                    seen["text"] += delta.get("reasoning_content", "") + (delta.get("content") or "")
                    seen["finish"] = choice["finish_reason"]
            else:
                meta = event["meta_info"]
                seen["ids"] += event["output_ids"]
                seen["text"] += event["text"]
                seen["logprobs"] += [entry[0] for entry in meta["output_token_logprobs"]]
                seen |= {"finish": meta["finish_reason"], "parts": meta.get("parts")}
            on_event(len(seen["ids"]))
    return seen


def test_replies_of_a_killed_engine_go_on_elsewhere_as_if_nothing_had_been(checkpoint, router):
    with engine_processes(checkpoint, 2) as (one, two):
        url = router(one[1], two[1], heartbeat=SLOW).url
        alone = {name: read(one[1], *asked) for name, asked in bodies().items()}
        assert [len(reply["ids"]) for reply in alone.values()] == [200, 200]
        counts = dict.fromkeys(alone, 0)
        killing, killed = threading.Lock(), []

        def on_event(name: str, count: int) -> None:
            with killing:
                counts[name] = count
                if not killed and min(counts.values()) > 20:
                    killed.append(busy(one, two))
                    killed[0].kill()

        with ThreadPoolExecutor(2) as pool:
            asked = {
                name: pool.submit(read, url, *body, on_event=lambda count, name=name: on_event(name, count))
                for name, body in bodies().items()
            }
            found = {name: reply.result() for name, reply in asked.items()}
        assert len(killed) == 1
        parts = found["seeded tokens"].pop("parts")
        alone["seeded tokens"].pop("parts")
        assert parts[0]["tokens"] >= 20
        assert sum(part["tokens"] for part in parts) == 200
        numbers = [replies["seeded tokens"].pop("logprobs") for replies in (found, alone)]
        assert found == alone
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def busy(*engines: Engine) -> subprocess.Popen[str]:
    """The engine that makes replies; the session keeps them on one."""
    gauge = "yunque_engine_running "
    for running, url in engines:
        lines = CLIENT.get(f"{url}/metrics").text.splitlines()
        if any(line.startswith(gauge) and float(line.removeprefix(gauge)) == 2 for line in lines):
            return running
    raise AssertionError("no engine runs both replies")
