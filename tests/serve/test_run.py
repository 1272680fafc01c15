"""A server process: its URL, its port, its end."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from yunque.core.errors import ConfigError
from yunque.serve.run import Server
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import listening, serve

PROGRAM = """
    import asyncio, importlib.util, sys
    spec = importlib.util.spec_from_file_location("scripted_engine", sys.argv[1])
    scripted_engine = importlib.util.module_from_spec(spec)
    sys.modules["scripted_engine"] = scripted_engine
    spec.loader.exec_module(scripted_engine)
    from yunque.serve.app import create_app
    from yunque.serve.run import answer_forever
    from yunque.serve.settings import ServeSettings
    from yunque.text import Renderer, train_bpe

    tokenizer = train_bpe(["abc " * 20], 400)
    script = scripted_engine.ScriptSettings(delay_s=0.01, max_model_len=10**6)
    engine = scripted_engine.ScriptedEngine(lambda _: [65] * int(sys.argv[2]), script)
    settings = ServeSettings(port=0, drain_timeout_s=float(sys.argv[3]))
    app = create_app(engine, Renderer(tokenizer, "glm-5"), settings)
    asyncio.run(answer_forever(app, engine, settings, announce=lambda url: print(url, flush=True)))
    print("ended", engine.pages_used, "torch" in sys.modules, flush=True)
"""


@contextmanager
def process(num_tokens: int, drain_timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    engine = str(Path(__file__).with_name("scripted_engine.py"))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), engine, str(num_tokens), str(drain_timeout_s)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running, running.stdout.readline().strip()
    finally:
        running.kill()
        running.wait(timeout=10)


@pytest.mark.parametrize(
    ("num_tokens", "drain_timeout_s", "reason"),
    [(60, 20.0, "stop"), (100_000, 0.3, "length")],
    ids=["replies end within the time", "replies are handed back after it"],
)
def test_sigterm_drains_within_the_stated_time(num_tokens: int, drain_timeout_s: float, reason: str) -> None:
    with process(num_tokens, drain_timeout_s) as (running, url):
        assert url.startswith("http://127.0.0.1:")
        assert int(url.rpartition(":")[2]) > 0
        text: list[str] = []
        begun = threading.Event()

        def read() -> None:
            body = {"prompt": "a", "max_tokens": None, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
                for part in response.iter_text():
                    text.append(part)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(timeout=20)
        begin_s = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=drain_timeout_s + 5) == 0
        assert time.monotonic() - begin_s < drain_timeout_s + 3
        reader.join(timeout=10)
        assert "".join(text).endswith("data: [DONE]\n\n")
        assert f'"finish_reason":"{reason}"' in "".join(text)
        assert running.stdout is not None
        assert running.stdout.read().split() == ["ended", "0", "False"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_an_idle_server_ends_at_once() -> None:
    with process(1, 30.0) as (running, url):
        with httpx.Client() as client:
            assert client.get(f"{url}/health").status_code == 200
            begin_s = time.monotonic()
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=10) == 0
        assert time.monotonic() - begin_s < 3


def test_small_answers_are_not_held_back_by_nagle_s_delay(renderer: Renderer) -> None:
    with listening(serve(renderer, "x<|user|>")) as url, httpx.Client(base_url=url) as client:
        seconds = []
        for _ in range(21):
            begin_s = time.perf_counter()
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
            seconds.append(time.perf_counter() - begin_s)
    assert sorted(seconds)[10] < 0.035, "every other request of a connection would wait 40 ms"


def test_a_port_that_is_taken_is_named(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    first = Server(served.app, served.engine, ServeSettings(port=0))
    url = first.bind()
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
        Server(served.app, served.engine, ServeSettings(port=port)).bind()
    first.close()


def test_the_address_of_ipv6_is_a_url(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    server = Server(served.app, served.engine, ServeSettings(host="::1", port=0))
    try:
        assert server.bind().startswith("http://[::1]:")
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    finally:
        server.close()
