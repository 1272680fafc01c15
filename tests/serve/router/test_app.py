"""The router's own routes: keys, engines in and out, broadcasts and what they do to who is used, numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_engines import CLIENT, PROMPT, Engine, until

from yunque.core.errors import ConfigError
from yunque.serve.router.app import create_router
from yunque.serve.router.run import run_router
from yunque.serve.router.settings import RouterSettings

ADMIN = {"authorization": "Bearer admin"}


def generate(url: str, session: str, **headers: str) -> httpx.Response:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    return CLIENT.post(f"{url}/generate", json=body, headers={"x-session-id": session, **headers})


def status(url: str) -> dict[str, dict]:
    return {record["url"]: record for record in CLIENT.get(f"{url}/router/status").json()["engines"]}


def test_engines_come_and_go_while_it_runs(engines, router):
    made = engines(2)
    served = router(made[0])
    answer = CLIENT.post(f"{served.url}/router/backends", json={"url": made[1].url + "/"}, headers=ADMIN)
    assert [record["state"] for record in answer.json()["engines"]] == ["usable", "usable"]
    for number in range(20):
        generate(served.url, f"s{number}")
    assert min(len(engine.sessions) for engine in made) > 0
    gone = CLIENT.request("DELETE", f"{served.url}/router/backends", json={"url": made[0].url}, headers=ADMIN)
    assert [record["url"] for record in gone.json()["engines"]] == [made[1].url]
    count = len(made[0].sessions)
    for number in range(20):
        assert generate(served.url, f"s{number}").status_code == 200
    assert len(made[0].sessions) == count


def test_a_drained_engine_is_taken_back_by_adding_it(engines, router):
    (engine,) = engines(1)
    served = router(engine)
    body = {"url": engine.url, "grace_s": 0}
    answer = CLIENT.post(f"{served.url}/router/backends/drain", json=body, headers=ADMIN)
    assert answer.json()["engines"][0]["drained"] is True
    assert generate(served.url, "s").status_code == 503
    CLIENT.post(f"{served.url}/router/backends", json=body, headers=ADMIN)
    assert generate(served.url, "s").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/router/backends", {}, 400),
        ("POST", "/router/backends", [1], 400),
        ("POST", "/router/backends", {"url": "ftp://x"}, 400),
        ("POST", "/router/backends", {"url": "http://user:pass@x"}, 400),
        ("DELETE", "/router/backends", {"url": "http://127.0.0.1:9"}, 404),
        ("POST", "/router/backends/drain", {"url": "http://127.0.0.1:9"}, 404),
        ("POST", "/router/backends/drain", {"url": "http://127.0.0.1:9", "grace_s": -1}, 400),
        ("POST", "/router/backends/drain", {"url": "http://127.0.0.1:9", "grace_s": "soon"}, 400),
    ],
)
def test_mistakes_of_the_operator_are_named(router, method, path, body, expected):
    served = router("http://127.0.0.1:1")
    answer = CLIENT.request(method, f"{served.url}{path}", json=body, headers=ADMIN)
    assert answer.status_code == expected
    assert answer.json()["error"]["message"]


def test_keys_open_what_they_are_for_and_nothing_else(engines, router):
    (engine,) = engines(1)
    served = router(engine, api_keys=frozenset({"client"}), engine_key="inner", engine_admin_key="inner-admin")
    assert generate(served.url, "s").status_code == 401
    assert generate(served.url, "s", authorization="Bearer admin").status_code == 401
    assert generate(served.url, "s", authorization="Bearer client").status_code == 200
    assert generate(served.url, "s", **{"x-api-key": "client"}).status_code == 200
    assert {headers["authorization"] for headers in engine.headers} == {"Bearer inner"}
    assert CLIENT.get(f"{served.url}/router/status").status_code == 401
    for key in ("client", "wrong", "\u00e9"):
        headers = {"authorization": f"Bearer {key}".encode()}
        assert CLIENT.post(f"{served.url}/admin/pause", headers=headers).status_code == 401
        assert (
            CLIENT.post(f"{served.url}/router/backends", json={"url": "http://a"}, headers=headers).status_code == 401
        )
    assert CLIENT.post(f"{served.url}/admin/pause", headers=ADMIN).status_code == 200
    assert engine.headers[-1]["authorization"] == "Bearer inner-admin"
    closed = router(engine, admin_key=None)
    assert CLIENT.post(f"{closed.url}/admin/pause", headers=ADMIN).status_code == 403


def test_a_broadcast_reaches_every_engine_and_tells_what_each_said(engines, router):
    made = engines(3)
    served = router(*made)
    for method, path in (("POST", "/admin/pause"), ("POST", "/pause_generation"), ("GET", "/admin/weight_hashes")):
        answer = CLIENT.request(method, f"{served.url}{path}?mode=keep", headers=ADMIN)
        assert answer.status_code == 200
        assert answer.json()["ok"] is True
        engines_said = answer.json()["engines"]
        assert {url: said["body"] for url, said in engines_said.items()} == {e.url: {"version": "v1"} for e in made}
        assert all(engine.calls[-1] == (method, path) for engine in made)
    assert answer.json()["agree"] is True
    made[1].version = "v2"
    assert CLIENT.get(f"{served.url}/admin/weight_hashes", headers=ADMIN).json()["agree"] is False


def test_an_engine_that_missed_new_weights_is_not_used_until_it_takes_some(engines, router):
    made = engines(2)
    served = router(*made)
    made[1].refuses = 500
    answer = CLIENT.post(f"{served.url}/admin/load_weights", json={"version": 2}, headers=ADMIN)
    assert answer.status_code == 502
    assert [answer.json()["engines"][engine.url]["ok"] for engine in made] == [True, False]
    assert [status(served.url)[engine.url]["stale"] for engine in made] == [False, True]
    made[1].refuses = None
    for number in range(12):
        generate(served.url, f"s{number}")
    assert made[1].sessions == []
    assert CLIENT.post(f"{served.url}/admin/load_weights", json={"version": 3}, headers=ADMIN).status_code == 200
    for number in range(12):
        generate(served.url, f"t{number}")
    assert made[1].sessions != []


def test_an_unreachable_engine_is_told_in_a_broadcast(engines, router):
    (engine,) = engines(1)
    served = router(engine, "http://127.0.0.1:1")
    answer = CLIENT.post(f"{served.url}/admin/resume", headers=ADMIN)
    assert answer.status_code == 502
    assert "ConnectError" in answer.json()["engines"]["http://127.0.0.1:1"]["error"]


def test_numbers_for_prometheus_count_what_happened(engines, router):
    made = engines(2)
    served = router(*made)
    for number in range(6):
        generate(served.url, f"s{number % 3}")

    def samples() -> dict[tuple, float]:
        families = text_string_to_metric_families(CLIENT.get(f"{served.url}/metrics").text)
        return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}

    key = ("yunque_router_requests_total", ("outcome", "ok"), ("path", "/generate"))
    until(lambda: samples().get(key) == 6)
    found = samples()
    why = {labels[0][1]: n for (name, *labels), n in found.items() if name == "yunque_router_placements_total"}
    assert sum(why.values()) == 6
    assert why["sticky"] == 3
    assert sum(n for (name, *_), n in found.items() if name == "yunque_router_live_sessions") == 3
    assert sum(n for (name, *_), n in found.items() if name == "yunque_router_running_requests") == 0
    assert sum(n for (name, *_), n in found.items() if name == "yunque_router_usable") == 2


def test_addresses_that_are_none_are_refused_at_once():
    for url in ("ftp://a", "http://", "http://a:x", "http://a?b=1"):
        with pytest.raises(ConfigError, match="an engine is an address"):
            create_router([url])


def test_beyond_loopback_only_with_a_key():
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match=f"{host} can be reached from other machines"):
            run_router(["http://127.0.0.1:1"], RouterSettings(), host=host)
    with pytest.raises(ConfigError, match="at least one engine"):
        run_router([], RouterSettings())


@pytest.mark.parametrize(("option", "value"), [("max_attempts", 0), ("max_body_bytes", 0), ("read_timeout_s", 0)])
def test_settings_name_the_value_that_cannot_be(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        RouterSettings(**{option: value})


COMMAND = """
import argparse, sys
from yunque.cli import route
parser = argparse.ArgumentParser()
route.add_commands(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
code = args.run(args)
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_the_command_prints_its_address_answers_without_delay_and_ends_on_sigterm(engines):
    (engine,) = engines(1)
    command = [sys.executable, "-c", COMMAND, "route", engine.url, "--port", "0", "--admin-key", "admin"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with httpx.Client() as client:
            until(lambda: _answers(client, url))
            waits = []
            for _ in range(20):
                began = time.perf_counter()
                client.get(f"{url}/router/status")
                waits.append(time.perf_counter() - began)
            assert min(waits) < 0.03  # a socket with Nagle's delay takes 40 ms
            assert generate(url, "s").status_code == 200
        process.terminate()
        process.wait(10)
    finally:
        process.kill()
        process.wait()
    assert engine.sessions == ["s"]


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _environment() -> dict[str, str]:
    import yunque

    source = os.path.dirname(os.path.dirname(yunque.__file__))
    return os.environ | {"PYTHONPATH": source}


def test_an_engine_has_a_record_from_the_start(engines, router):
    (engine,) = engines(1)
    served = router(engine)
    assert status(served.url)[engine.url] == {
        "url": engine.url,
        "state": "usable",
        "sign": "ok",
        "reason": "",
        "running": 0,
        "sessions": 0,
        "draining": False,
        "drained": False,
        "stale": False,
    }
    assert isinstance(engine, Engine)
