"""Requests through a real router: tried again, continued after deaths, refused, given up, cut short by clients."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
from router_engines import CLIENT, PROMPT, Engine, logprob, model_tokens, until, word

from yunque.serve.router.health import HeartbeatSettings

#: Heartbeats that leave the tests of single requests alone.
SLOW = HeartbeatSettings(interval_s=60, timeout_s=5, eject_after=50, backoff_max_s=60)
SAMPLING = {"max_new_tokens": 12}


def generate(url: str, *, session: str = "s", **more) -> httpx.Response:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, **more}
    return CLIENT.post(f"{url}/generate", json=body, headers={"x-session-id": session}, timeout=20)


def chat_body(**more) -> dict:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "stream": True, **more}


def events(response: httpx.Response) -> list[dict]:
    found = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(data) for data in found if data != "[DONE]"]


def chat_text(chunks: list[dict]) -> str:
    deltas = [choice["delta"] for event in chunks for choice in event["choices"]]
    return "".join(delta.get("reasoning_content", "") + delta.get("content", "") for delta in deltas)


def spread(engines: list[Engine], session: str = "s") -> tuple[Engine, Engine]:
    """The engine that had the session's only request, and another."""
    (first,) = [engine for engine in engines if session in engine.sessions]
    return first, next(engine for engine in engines if engine is not first)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_sessions_keep_their_engine_over_turns_and_are_spread(engines, router):
    made = engines(4)
    served = router(*made)
    for turn in range(4):
        for number in range(24):
            body = {"input_ids": PROMPT * (turn + 1), "sampling_params": {"max_new_tokens": 1}}
            headers = {"x-session-id": f"s{number}"}
            assert CLIENT.post(f"{served.url}/generate", json=body, headers=headers).status_code == 200
    placed = [{session for session in engine.sessions} for engine in made]
    assert sum(len(sessions) for sessions in placed) == 24  # none is in two places
    assert all(len(engine.sessions) == 4 * len(sessions) for engine, sessions in zip(made, placed, strict=True))
    assert min(len(sessions) for sessions in placed) >= 1
    assert all(len(engine.ports) < len(engine.sessions) / 2 for engine in made)  # connections are used again


def test_an_undisturbed_reply_is_passed_on_as_the_engine_gave_it(engines, router):
    (engine,) = engines(1)
    served = router(engine)
    through = generate(served.url).json()
    assert through["output_ids"] == model_tokens(PROMPT, 12)
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
    alone = CLIENT.post(f"{engine.url}/generate", json=body).json()
    assert through["meta_info"] | {"cached_tokens": 0} == alone["meta_info"] | {"cached_tokens": 0}
    streamed = CLIENT.post(f"{served.url}/v1/chat/completions", json=chat_body(return_token_ids=True)).text
    assert streamed == CLIENT.post(f"{engine.url}/v1/chat/completions", json=chat_body(return_token_ids=True)).text
    assert streamed.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fault", ["refused", "503", "before the first byte"])
def test_a_request_that_produced_nothing_is_answered_by_another_engine(engines, router, fault):
    good, bad = engines(2)
    served = router(good, bad, heartbeat=SLOW)
    for number in range(40):  # until the bad one has a session
        generate(served.url, session=f"s{number}")
        if bad.sessions:
            break
    session = bad.sessions[-1]
    if fault == "refused":
        bad.stop()
    elif fault == "503":
        bad.refuses = 503
    else:
        bad.deaths = 1
    answer = generate(served.url, session=session)
    assert answer.status_code == 200
    assert answer.json()["output_ids"] == model_tokens(PROMPT, 12)
    assert good.sessions[-1] == session


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("is_incremental", [True, False])
@pytest.mark.parametrize("at", [1, 11])
def test_a_generate_request_survives_the_death_of_its_engine_token_for_token(
    engines, router, streams, is_incremental, at
):
    made = engines(2, is_incremental=is_incremental, die_after=at)
    served = router(*made, heartbeat=SLOW)
    for engine in made:
        engine.version = engine.name
    generate(served.url)
    first, other = spread(made)
    first.deaths = 1
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "stream": streams}
    with CLIENT.stream("POST", f"{served.url}/generate", json=body, headers={"x-session-id": "s"}) as response:
        if streams:
            found = events(response)
            last = found[-1]
            ids = [token for event in found for token in event["output_ids"]] if is_incremental else last["output_ids"]
        else:
            response.read()
            last = response.json()
            ids = last["output_ids"]
    assert ids == model_tokens(PROMPT, 12)
    meta = last["meta_info"]
    assert meta["finish_reason"] == {"type": "length"}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 12)
    parts = [{"tokens": at, "weight_version": first.version}, {"tokens": 12 - at, "weight_version": other.version}]
    assert meta["parts"] == parts
    assert other.bodies[-1]["input_ids"] == PROMPT + model_tokens(PROMPT, at)
    assert other.bodies[-1]["sampling_params"]["max_new_tokens"] == 12 - at
    if not (streams and is_incremental):
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[logprob(t), t] for t in ids]
        assert meta["output_token_versions"] == [first.version] * at + [other.version] * (12 - at)
        assert last["text"] == "".join(map(word, ids))


@pytest.mark.parametrize("streams", [True, False])
def test_the_vllm_endpoint_survives_as_well(engines, router, streams):
    made = engines(2, die_after=5)
    served = router(*made, heartbeat=SLOW)
    made[0].deaths = made[1].deaths = 1
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12}, "stream": streams}
    with CLIENT.stream("POST", f"{served.url}/inference/v1/generate", json=body) as response:
        found = events(response) if streams else [json.loads(response.read())]
    choices = [choice for event in found for choice in event["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == model_tokens(PROMPT, 12)
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert entries == [{"token": f"token_id:{token}", "logprob": logprob(token)} for token in ids]
    assert len({event["request_id"] for event in found}) == 1
    assert found[-1]["usage"]["completion_tokens"] == 12
    assert found[-1]["usage"]["prompt_tokens"] == len(PROMPT)
    assert sum(len(engine.bodies) for engine in made) == 3


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("at", [1, 8])
def test_a_streamed_chat_survives_with_the_words_an_undisturbed_engine_would_have_said(
    engines, router, asks, tools, at
):
    made = engines(2, die_after=at)
    served = router(*made, heartbeat=SLOW)
    more: dict = {"logprobs": True, "user": "s"}
    more |= {"return_token_ids": True} if asks else {}
    more |= {"tools": [{"type": "function", "function": {"name": "look"}}]} if tools else {}

    def ask(url: str) -> list[dict]:
        with CLIENT.stream("POST", f"{url}/v1/chat/completions", json=chat_body(**more)) as response:
            return events(response)

    alone = ask(served.url)
    first = next(engine for engine in made if engine.bodies)
    first.deaths = 1
    found = ask(served.url)
    assert len({event["id"] for event in found}) == 1

    def read(chunks: list[dict]) -> tuple:
        choices = [choice for event in chunks for choice in event["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids", [])]
        entries = [e["logprob"] for c in choices if c.get("logprobs") for e in c["logprobs"]["content"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        names = [call["function"]["name"] for call in calls if "name" in call["function"]]
        roles = sum("role" in choice["delta"] for choice in choices)
        return (
            chat_text(chunks),
            ids,
            entries,
            arguments,
            names,
            roles,
            choices[-1]["finish_reason"],
            chunks[-1]["usage"],
        )

    assert read(found) == read(alone)
    assert len(read(found)[2]) == 12
    assert len(read(found)[1]) == (12 if asks else 0)


def test_an_engine_that_cannot_resume_ends_the_stream_with_an_error_and_no_wrong_word(engines, router):
    made = engines(2, die_after=5, resumes=False)
    served = router(*made, heartbeat=SLOW)
    prompt = list(json.dumps(chat_body()["messages"]).encode())
    made[0].deaths = made[1].deaths = 1
    for engine in made:
        engine.gives_ids = False
    with CLIENT.stream("POST", f"{served.url}/v1/chat/completions", json=chat_body()) as response:
        found = events(response)
    assert found[-1]["error"] | {"message": ""} == {
        "message": "",
        "type": "server_error",
        "param": None,
        "code": "engine_lost",
    }
    assert "no token ids" in found[-1]["error"]["message"]
    said = chat_text([event for event in found if "choices" in event])
    assert said == "".join(map(word, model_tokens(prompt, 4)))


def test_a_stream_of_another_endpoint_ends_with_the_error_of_its_api(engines, router):
    (engine,) = engines(1, die_after=3, deaths=1)
    served = router(engine)
    body = {"max_tokens": 9, "stream": True}
    with CLIENT.stream("POST", f"{served.url}/v1/messages", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2] == "event: error"
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert len(lines) == 8  # three deltas before


def test_penalties_are_not_continued_but_begun_anew_where_the_client_has_heard_nothing(engines, router):
    made = engines(2, die_after=5)
    served = router(*made, heartbeat=SLOW)
    sampling = {"max_new_tokens": 12, "presence_penalty": 0.5}
    generate(served.url, sampling_params=sampling)
    first, other = spread(made)
    first.deaths = 1
    answer = generate(served.url, sampling_params=sampling).json()
    assert answer["output_ids"] == model_tokens(PROMPT, 12)
    assert "parts" not in answer["meta_info"]
    assert other.bodies[-1]["input_ids"] == PROMPT


def test_a_reply_whose_last_token_was_made_is_finished_without_another_engine(engines, router):
    made = engines(2)
    served = router(*made, heartbeat=SLOW)
    generate(served.url)
    first, other = spread(made)
    first.die_after, first.deaths = 5, 1
    stop = model_tokens(PROMPT, 5)[-1]
    answer = generate(served.url, sampling_params={"max_new_tokens": 12, "stop_token_ids": [stop]}).json()
    assert answer["output_ids"] == model_tokens(PROMPT, 5)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert other.bodies == []


def test_engines_that_refuse_or_repeat_streams_are_asked_for_whole_replies(engines, router):
    (refusing,) = engines(1, streams=False)
    served = router(refusing)
    for _ in range(3):
        assert generate(served.url).json()["output_ids"] == model_tokens(PROMPT, 12)
    assert [body.get("stream", False) for body in refusing.bodies] == [True, False, False, False]
    refusing.refuses, refusing.streams = 400, True  # a bad request says nothing about streams
    served = router(refusing)
    assert generate(served.url).status_code == 400
    refusing.refuses = None
    generate(served.url)
    assert refusing.bodies[-1]["stream"] is True
    (repeating,) = engines(1, is_incremental=False)
    served = router(repeating)
    for _ in range(3):
        answer = generate(served.url, sampling_params={"max_new_tokens": 80}).json()
        assert answer["output_ids"] == model_tokens(PROMPT, 80)
    assert [body.get("stream", False) for body in repeating.bodies] == [True, False, False]


def test_an_error_event_of_the_engine_is_tried_elsewhere_and_one_of_the_request_passed_on(engines, router):
    made = engines(2)
    served = router(*made, heartbeat=SLOW)
    generate(served.url)
    first, other = spread(made)
    first.error_event = {"error": {"message": "out of memory", "type": "server_error", "code": None}}
    assert generate(served.url).json()["output_ids"] == model_tokens(PROMPT, 12)
    assert len(other.bodies) == 1
    wrong = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}
    first.error_event = other.error_event = wrong
    answer = generate(served.url, session="s2")
    assert (answer.status_code, answer.json()) == (400, wrong)


def test_a_busy_engine_is_replaced_once_and_then_the_shorter_wait_is_passed_on(engines, router):
    made = engines(4)
    served = router(*made, heartbeat=SLOW)
    generate(served.url)
    first, _ = spread(made)
    first.refuses = 429
    assert generate(served.url).status_code == 200
    for engine, wait in zip(made, "3456", strict=True):
        engine.refuses, engine.retry_after = 429, wait
    counts = [len(engine.bodies) for engine in made]
    answer = generate(served.url, session="another")
    asked = [engine for engine, count in zip(made, counts, strict=True) if len(engine.bodies) > count]
    assert answer.status_code == 429
    assert len(asked) == 2  # overload is not multiplied by the number of engines
    assert answer.headers["retry-after"] == min(engine.retry_after for engine in asked)
    assert answer.json()["error"]["code"] == "busy"


def test_without_a_usable_engine_the_answer_is_503_with_a_wait(router):
    served = router(f"http://127.0.0.1:{free_port()}")
    answer = generate(served.url)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no_engine"
    assert CLIENT.get(f"{served.url}/health").status_code == 503


def test_a_silent_engine_is_ejected_its_replies_go_on_elsewhere_and_it_returns(engines, router):
    made = engines(2, delay_s=0.05)
    served = router(*made)
    generate(served.url, sampling_params={"max_new_tokens": 1})
    first, other = spread(made)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(generate(served.url, sampling_params={"max_new_tokens": 40}))
    )
    asking.start()
    until(lambda: first.live == 1)
    time.sleep(0.3)
    port = int(first.url.rsplit(":", 1)[1])
    first.stop()  # the port is closed; the reply is cut or its heartbeats stop

    def states() -> dict[str, str]:
        records = CLIENT.get(f"{served.url}/router/status").json()["engines"]
        return {record["url"]: record["state"] for record in records}

    url = f"http://127.0.0.1:{port}"
    until(lambda: states()[url] == "ejected")
    asking.join(20)
    assert answers[0].json()["output_ids"] == model_tokens(PROMPT, 40)
    assert len(answers[0].json()["meta_info"]["parts"]) == 2
    assert generate(served.url, sampling_params={"max_new_tokens": 1}).status_code == 200
    first.start(port)
    until(lambda: states()[url] == "usable")
    assert other.live == 0


def test_an_engine_that_says_it_is_unwell_gets_nothing_and_a_paused_one_is_waited_for(engines, router):
    made = engines(2)
    served = router(*made)

    def state(engine: Engine) -> tuple[str, str]:
        records = CLIENT.get(f"{served.url}/router/status").json()["engines"]
        return next((record["state"], record["sign"]) for record in records if record["url"] == engine.url)

    made[0].health = (503, "broken")
    until(lambda: state(made[0])[0] == "ejected")
    for number in range(12):
        generate(served.url, session=f"s{number}")
    assert made[0].bodies == []
    made[0].health = (503, "paused")
    until(lambda: state(made[0])[0] == "usable")
    time.sleep(0.3)
    assert state(made[0]) == ("usable", "paused")


def test_a_client_that_goes_away_ends_the_request_at_the_engine(engines, router):
    (engine,) = engines(1, delay_s=0.02)
    served = router(engine)
    for body, path in (
        (chat_body(max_tokens=5000), "/v1/chat/completions"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5000}, "stream": True}, "/generate"),
    ):
        closed = engine.closed
        with CLIENT.stream("POST", f"{served.url}{path}", json=body) as response:
            next(response.iter_bytes())
            assert engine.live == 1
        until(lambda: engine.live == 0)
        assert engine.closed == closed + 1
    closed = engine.closed
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5000}}
    with pytest.raises(httpx.ReadTimeout):  # one that waits for a whole reply, and hangs up
        CLIENT.post(f"{served.url}/generate", json=body, timeout=0.3)
    until(lambda: engine.live == 0)
    assert engine.closed == closed + 1


def test_a_slow_reader_holds_the_engine_back_instead_of_filling_memory(engines, router):
    (engine,) = engines(1, flood_bytes=400 * 2**20)
    served = router(engine)
    with CLIENT.stream("GET", f"{served.url}/flood") as response:
        time.sleep(1.0)
        first = engine.sent_bytes
        time.sleep(0.5)
        assert engine.sent_bytes == first < 40 * 2**20  # what sockets hold, and no more
        taken = 0
        for chunk in response.iter_raw():
            taken += len(chunk)
            if taken > 80 * 2**20:
                break
        assert engine.sent_bytes > 60 * 2**20


def test_drain_moves_new_sessions_away_and_lets_live_ones_finish(engines, router):
    made = engines(2, delay_s=0.02)
    served = router(*made)
    headers = {"authorization": "Bearer admin"}
    generate(served.url)
    first, other = spread(made)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(generate(served.url, sampling_params={"max_new_tokens": 40}))
    )
    asking.start()
    until(lambda: first.live == 1)
    body = {"url": first.url, "grace_s": 2}
    assert CLIENT.post(f"{served.url}/router/backends/drain", json=body, headers=headers).status_code == 200
    for number in range(12):
        generate(served.url, session=f"new{number}", sampling_params={"max_new_tokens": 1})
    assert not [session for session in first.sessions if session.startswith("new")]
    generate(served.url, sampling_params={"max_new_tokens": 1})  # a live session's next turn
    assert first.sessions[-1] == "s"
    asking.join(20)
    assert answers[0].json()["output_ids"] == model_tokens(PROMPT, 40)
    assert "parts" not in answers[0].json()["meta_info"]

    def record() -> dict:
        records = CLIENT.get(f"{served.url}/router/status").json()["engines"]
        return next(record for record in records if record["url"] == first.url)

    until(lambda: record()["drained"])
    count = len(first.sessions)
    assert generate(served.url, sampling_params={"max_new_tokens": 1}).status_code == 200
    assert len(first.sessions) == count
    assert other.sessions[-1] == "s"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_what_an_engine_hands_back_as_it_ends_goes_on_elsewhere_and_else_is_passed_on(engines, router, path):
    made = engines(2)
    served = router(*made, heartbeat=SLOW)
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "user": "s", **chat_body()}

    def ask() -> list[dict]:
        return events(CLIENT.post(f"{served.url}{path}", json=body))

    whole = ask()
    first = next(engine for engine in made if engine.bodies)
    first.hands_back = True
    first.health = (503, "paused")
    cut = ask()
    if path == "/generate":
        assert cut[-1]["meta_info"]["finish_reason"] == {"type": "abort"}
    else:
        assert cut[-1]["choices"][0]["finish_reason"] == "abort"
    first.health = (503, "draining")
    found = ask()
    if path == "/generate":
        assert [token for event in found for token in event["output_ids"]] == model_tokens(PROMPT, 12)
    else:
        assert chat_text(found) == chat_text(whole)
        assert found[-1]["usage"] == whole[-1]["usage"]


@pytest.mark.parametrize("streams", [True, False])
def test_what_a_draining_engine_hands_back_goes_on_elsewhere(engines, router, streams):
    made = engines(2, delay_s=0.02)
    served = router(*made)
    headers = {"authorization": "Bearer admin"}
    generate(served.url)
    first, _ = spread(made)
    first.hands_back = True
    body = {"url": first.url, "grace_s": 30}
    CLIENT.post(f"{served.url}/router/backends/drain", json=body, headers=headers)
    answer = generate(served.url, stream=streams)
    ids = answer.json()["output_ids"] if not streams else [t for e in events(answer) for t in e["output_ids"]]
    assert ids == model_tokens(PROMPT, 12)


def test_a_call_that_is_no_generation_is_not_done_twice(engines, router):
    made = engines(2, refuses=500)
    served = router(*made)
    assert CLIENT.post(f"{served.url}/v1/files", json={"a": 1}).status_code == 500
    assert sum(len(engine.calls) for engine in made) == 1


def test_bodies_that_are_no_json_go_to_an_engine_and_large_ones_nowhere(engines, router):
    (engine,) = engines(1)
    served = router(engine, max_body_bytes=1000)
    answer = CLIENT.post(f"{served.url}/generate", content=b"x" * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    answer = CLIENT.post(f"{served.url}/generate", content=iter([b"x" * 600] * 2))
    assert answer.status_code == 413
    assert engine.bodies == []


def test_headers_and_query_pass_both_ways(engines, router):
    (engine,) = engines(1)
    served = router(engine)
    answer = CLIENT.get(f"{served.url}/v1/models?a=%20b", headers={"x-mine": "1", "authorization": "Bearer k"})
    assert answer.headers["x-engine"] == engine.name
    assert answer.json() == {"version": "v1"}
    assert engine.headers[-1]["x-mine"] == "1"
    assert engine.headers[-1]["authorization"] == "Bearer k"
    assert engine.headers[-1]["host"] == engine.url.removeprefix("http://")
