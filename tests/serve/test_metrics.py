"""What Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import Served, serve

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = served.call("GET", "/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_of_requests_turns_and_the_engine(renderer: Renderer) -> None:
    served = serve(renderer, "</think>abc<|user|>")
    for _ in range(3):
        served.post("/v1/chat/completions", CHAT)
    served.post("/v1/chat/completions", {"messages": []})
    served.call("GET", "/nowhere/at/all")
    found = samples(served)
    route = ("route", "/v1/chat/completions")
    key = (("method", "POST"), route)
    assert found["yunque_http_requests_total", (*key, ("status", "200"))] == 3
    assert found["yunque_http_requests_total", (*key, ("status", "400"))] == 1
    missing = (("method", "GET"), ("route", "(no route)"), ("status", "404"))
    assert found["yunque_http_requests_total", missing] == 1
    assert found["yunque_http_request_seconds_count", (route,)] == 4
    assert found["yunque_turns_total", (("finish", "stop"),)] == 3
    assert found["yunque_time_to_first_token_seconds_count", ()] == 3
    assert found["yunque_turn_seconds_count", ()] == 3
    assert found["yunque_http_in_flight", ()] == 1, "the scrape itself"
    made = len(served.ids("</think>abc<|user|>"))
    assert found["yunque_engine_generated_tokens_total", ()] == 3 * made
    assert found["yunque_engine_pages_free", ()] == found["yunque_engine_pages_total", ()] == 100_000
    assert found["yunque_engine_healthy", ()] == 1


def test_two_servers_in_one_process_do_not_mix_and_refusals_count(renderer: Renderer) -> None:
    first = serve(renderer, "</think>x<|user|>", settings=ServeSettings(api_keys=("k",)))
    second = serve(renderer, "</think>x<|user|>")
    first.post("/v1/chat/completions", CHAT)
    text = first.call("GET", "/metrics", headers={"authorization": "Bearer k"}).text
    assert 'yunque_http_requests_total{method="POST",route="/v1/chat/completions",status="401"} 1.0' in text
    assert not any(name == "yunque_turns_total" for name, _ in samples(second))
