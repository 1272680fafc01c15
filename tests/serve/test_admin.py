"""The policy's life over HTTP."""

import asyncio

import pytest

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import Served, eventually, serve

KEY = {"authorization": "Bearer adm"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def administered(renderer: Renderer, **script: object) -> Served:
    return serve(renderer, rule=lambda _: [65] * 1000, settings=ServeSettings(admin_key="adm"), **script)


def test_pause_resume_load_and_hashes_reach_the_engine(renderer: Renderer) -> None:
    served = administered(renderer)
    assert served.post("/admin/pause", {"mode": "abort"}, headers=KEY).json() == {"paused": True}
    assert served.call("GET", "/health").status_code == 503
    assert served.call("GET", "/health").json()["reason"] == "paused"
    body = {"version": 7, "source": "folder", "keep_cache": True}
    assert served.post("/admin/load_weights", body, headers=KEY).json() == {"version": 7}
    assert served.post("/admin/resume", headers=KEY).json() == {"paused": False}
    health = {"status": "ok", "model": "scripted", "version": 7, "resumes": True}
    assert served.call("GET", "/health").json() == health
    hashes = served.call("GET", "/admin/weight_hashes", headers=KEY).json()
    assert (hashes["version"], {len(value) for value in hashes["sha256"].values()}) == (7, {64})
    assert served.engine.calls == [("pause", "abort"), ("load_weights", 7, "folder", True), ("resume",)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pause", {"mode": "sleep"}),
        ("pause", {"mod": "keep"}),
        ("load_weights", {"version": -1, "source": "x"}),
        ("load_weights", {"version": 1, "source": ""}),
        ("abort", {}),
        ("abort", {"request_id": "x", "all": True}),
        ("drain", {"timeout_s": -1}),
    ],
)
def test_admin_bodies_are_strict(renderer: Renderer, path: str, body: dict[str, object]) -> None:
    served = administered(renderer)
    assert served.post(f"/admin/{path}", body, headers=KEY).status_code == 400
    assert served.engine.calls == []


def test_weights_that_cannot_be_read_are_a_400_with_the_reason(renderer: Renderer) -> None:
    served = administered(renderer)

    async def refuse(version: int, source: str, *, keep_cache: bool = False) -> None:
        raise FileNotFoundError(f"no folder {source} for {version} {keep_cache}")

    served.engine.load_weights = refuse  # type: ignore[method-assign]
    response = served.post("/admin/load_weights", {"version": 2, "source": "gone"}, headers=KEY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "source")
    assert "gone: no folder gone for 2 False" in response.json()["error"]["message"]


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("body", [{"request_id": "mine"}, {"all": True}])
def test_an_aborted_reply_comes_back_as_it_is(renderer: Renderer, body: dict[str, object], paused: bool) -> None:
    served = administered(renderer, delay_s=0.002)

    async def run() -> tuple[dict[str, object], list[dict[str, object]]]:
        async with served.client() as client:
            if paused:
                await served.engine.pause()
            fields = {"max_new_tokens": None}
            request = {"input_ids": [1], "rid": "mine", "sampling_params": fields}
            reply = asyncio.ensure_future(client.post("/generate", json=request))
            other = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20}))
            await eventually(lambda: len(served.engine.live) == 2)
            aborted = (await client.post("/admin/abort", json=body, headers=KEY)).json()
            found = (await reply).json()
            await served.engine.resume()
            return aborted, [found, (await other).json()]

    aborted, (found, other) = asyncio.run(run())
    assert aborted == {"aborted": 2 if body.get("all") else 1}
    assert found["meta_info"]["finish_reason"]["type"] == "abort"  # type: ignore[index]
    assert other["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    assert served.engine.pages_used == 0


def test_aborting_what_is_not_there_changes_nothing(renderer: Renderer) -> None:
    assert administered(renderer).post("/admin/abort", {"request_id": "x"}, headers=KEY).json() == {"aborted": 0}


def test_drain_hands_back_what_did_not_end_and_refuses_what_comes(renderer: Renderer) -> None:
    served = administered(renderer, delay_s=0.005)

    async def run() -> tuple[int, int, str | None]:
        async with served.client() as client:
            reply = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True}))
            await eventually(lambda: served.engine.live)
            assert (await client.post("/admin/drain", json={"timeout_s": 0.05}, headers=KEY)).status_code == 200
            late = await client.post("/v1/chat/completions", json=CHAT)
            (choice,) = (await reply).json()["choices"]
            assert choice["finish_reason"] == "length"
            return len(choice["token_ids"]), late.status_code, late.headers.get("retry-after")

    num_tokens, status, retry_after = asyncio.run(run())
    assert 0 < num_tokens < 1000
    assert (status, retry_after) == (503, "5")
