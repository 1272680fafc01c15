"""The web page in a real browser, over a scripted engine behind a real server."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import Served, listening, serve, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="the page is not tested: Playwright is not installed")
expect = playwright.expect
pytestmark = pytest.mark.xdist_group("browser")  # one browser serves them all

TIMEOUT_MS = 8000
TOOL = '{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
CALL = (
    "need it</think>Looking."
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><|observation|>"
)
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@dataclass
class Opened:
    """A page on a server; ``complaints`` are errors in its console and requests to other places."""

    page: Any
    served: Served
    url: str
    complaints: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.keyboard.press("Enter")

    def set(self, **values: str) -> None:
        """Fill fields of the side panel by name."""
        if not self.page.locator("#panel").is_visible():
            self.page.get_by_role("button", name="Settings").click()
        for name, value in values.items():
            self.page.locator(f"#settings [name={name}]").fill(value)

    def reply(self) -> Any:
        return self.page.locator("article.reply").last

    def is_done(self) -> None:
        expect(self.page.locator("#send")).to_be_visible()

    def prompt(self) -> str:
        """The last prompt that the engine got."""
        return self.served.renderer.tokenizer.decode(self.served.engine.requests[-1].tokens)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if path is None:
        pytest.skip("the page is not tested: there is no chromium on the path (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as play:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, served: Served, **context: Any) -> Iterator[Opened]:
    """A fresh visitor on the page; at the end it must have had no complaints."""
    with listening(served) as url:
        visitor = browser.new_context(**context)
        visitor.set_default_timeout(TIMEOUT_MS)
        expect.set_options(timeout=TIMEOUT_MS)
        page = visitor.new_page()
        found = Opened(page, served, url)
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("console", lambda line: found.complaints.append(line.text) if line.type == "error" else None)
        page.on("request", lambda asked: None if asked.url.startswith(url) else found.complaints.append(asked.url))
        page.goto(url)
        try:
            yield found
            assert found.complaints == []
        finally:
            visitor.close()


def slow(served: Served, delay_s: float) -> Served:
    served.engine.settings = replace(served.engine.settings, delay_s=delay_s)
    return served


def test_a_reply_streams_and_its_thought_folds(browser: Any, renderer: Renderer) -> None:
    long = " ".join(f"word{i}" for i in range(30))
    served = slow(serve(renderer, f"{long}</think>{long} **end**<|user|>", drafted=40, accepted=30), 0.006)
    with opened(browser, served) as at:
        expect(at.page.locator("#model")).to_have_text("scripted")
        expect(at.page.locator("#health")).to_have_text("ready")
        at.say("Hello")
        thought = at.reply().locator("details.thought")
        expect(thought.locator("summary")).to_contain_text("Thinking…")
        expect(thought).to_have_attribute("open", "")
        expect(at.reply().locator(".prose")).to_contain_text("word3")
        assert len(served.engine.live) == 1, "text is shown before the reply is complete"
        expect(thought).not_to_have_attribute("open", "")
        expect(at.page.locator("#stop")).to_be_visible()
        at.is_done()
        expect(at.reply().locator(".prose strong")).to_have_text("end")
        expect(thought.locator("summary")).to_contain_text("Thought for")
        thought.locator("summary").click()
        expect(thought.locator(".thought-text")).to_have_text(long)
        figures = at.reply().locator(".figures")
        made = len(served.ids(f"{long}</think>{long} **end**<|user|>"))
        expect(figures).to_contain_text(f"tokens{made:,}")
        expect(figures).to_contain_text("tok/s")
        expect(figures).to_contain_text("first token")
        expect(figures).to_contain_text("cache hit50 %")
        expect(figures).to_contain_text("drafts accepted75 %")


def test_a_call_is_a_card_and_its_result_goes_on(browser: Any, renderer: Renderer) -> None:
    served = serve(renderer, CALL, "so</think>It is 21 degrees.<|user|>", chunk=3)
    with opened(browser, served) as at:
        at.set(tools=TOOL, system="Be brief.")
        expect(at.page.locator("#tools-state")).to_contain_text("get_weather")
        at.say("Paris?")
        card = at.reply().locator(".tool-card")
        expect(card.locator(".tool-name")).to_have_text("get_weather")
        expect(card.locator(".tool-arguments")).to_have_text('{\n  "city": "Paris"\n}')
        expect(card.locator(".tool-state")).to_have_text("waits for a result")
        card.get_by_label("Result of get_weather").fill('{"degrees": 21}')
        at.reply().get_by_role("button", name="Send result").click()
        expect(at.page.locator("article.reply")).to_have_count(2)
        expect(at.reply().locator(".prose")).to_have_text("It is 21 degrees.")
        first = at.page.locator("article.reply").first
        expect(first.locator(".tool-result")).to_have_text('{"degrees": 21}')
        expect(first.locator(".tool-state")).to_have_text("answered")
        prompt = at.prompt()
        for part in ("Be brief.", "get_weather", "Paris?", '{"degrees": 21}'):
            assert part in prompt
        at.set(tools="[{")
        at.say("More?")
        expect(at.page.locator("#tools-state")).to_contain_text("This is not JSON")
        assert len(served.engine.requests) == 2


def test_tokens_show_their_log_probabilities_and_alternatives(browser: Any, renderer: Renderer) -> None:
    served = serve(renderer, "hm</think>Paris 東<|user|>", chunk=2)
    with opened(browser, served) as at:
        at.set()
        at.page.get_by_label("Log-probabilities").check()
        at.say("Where?")
        at.is_done()
        answer = at.reply().locator(".prose .token")
        expect(at.reply().locator(".prose .token-flow")).to_contain_text("Paris")
        thought = len(served.ids("hm</think>"))
        expect(answer).to_have_count(len(served.ids("Paris 東<|user|>")))
        shares = [math.exp(-(place + 1) / 4) for place in range(thought, len(served.engine._replies[0]))]
        levels = [sum(share < least for least in (0.9, 0.7, 0.4, 0.2, 0.05)) for share in shares]
        assert levels == [int(x) for x in answer.evaluate_all("all => all.map(token => token.dataset.surprise)")]
        answer.first.hover()
        card = at.page.locator("#token-card")
        expect(card).to_contain_text(f"log-probability −{(thought + 1) / 4:.3f}")
        expect(card.locator(".alternatives li")).to_have_count(5)
        at.page.locator(".prose .token-flow").focus()
        at.page.keyboard.press("End")
        expect(card.locator(".chosen")).to_have_text("<|user|>")
        at.page.keyboard.press("Escape")
        expect(card).to_be_hidden()
        assert served.engine.requests[0].sampling.num_top == 5
        at.reply().get_by_role("button", name="Tokens").click()
        expect(at.reply().locator(".prose p")).to_have_text("Paris 東")


def test_stop_frees_the_engine_and_keeps_what_came(browser: Any, renderer: Renderer) -> None:
    served = slow(serve(renderer, "</think>" + "on and on " * 300, "</think>Better.<|user|>"), 0.01)
    with opened(browser, served) as at:
        for key in (None, "Escape"):
            at.say("Go")
            expect(at.reply().locator(".prose")).to_contain_text("on and")
            assert len(served.engine.live) == 1
            at.page.get_by_role("button", name="Stop").click() if key is None else at.page.keyboard.press(key)
            wait_until(lambda: not served.engine.live)
            at.is_done()
            expect(at.reply().locator(".end")).to_have_text("Stopped.")
            served.engine._replies = [served.ids("</think>" + "on and on " * 300)]
        assert (len(served.engine.aborted), served.engine.pages_used) == (2, 0)
        expect(at.reply().locator(".prose")).to_contain_text("on and")
        served.engine._replies = [served.ids("</think>Better.<|user|>")]
        at.reply().get_by_role("button", name="Retry").click()
        expect(at.reply().locator(".prose")).to_have_text("Better.")
        expect(at.page.locator("article")).to_have_count(4)


@pytest.mark.parametrize("logprobs", [False, True])
def test_markup_in_a_reply_is_text(browser: Any, renderer: Renderer, logprobs: bool) -> None:
    hostile = f"{HOSTILE}</think>{HOSTILE}\n\n**{HOSTILE}**\n\n- `{HOSTILE}`\n\n```html\n{HOSTILE}\n```\n"
    call = f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{HOSTILE}</arg_value></tool_call><|observation|>"
    with opened(browser, serve(renderer, hostile + call, chunk=7)) as at:
        at.set(tools=TOOL)
        at.page.get_by_label("Log-probabilities").set_checked(logprobs)
        at.say(HOSTILE)
        at.is_done()
        assert at.page.locator("#thread").locator("img, script, iframe, a").count() == 0
        text = at.page.locator("#thread").text_content()
        assert text.count("<img src=x onerror=") == (8 if logprobs else 7)
        expect(at.page).to_have_title("scripted · Yunque")
        at.page.reload()
        expect(at.page.locator("article.question")).to_contain_text(HOSTILE)
        assert at.page.locator("#thread").locator("img, script, iframe, a").count() == 0
        expect(at.page).to_have_title("scripted · Yunque")


def test_a_wrong_key_is_asked_for_and_kept_for_the_tab_alone(browser: Any, renderer: Renderer) -> None:
    served = serve(renderer, "</think>Welcome.<|user|>", settings=ServeSettings(api_keys=("open-sesame",)))
    with opened(browser, served) as at:
        expect(at.page.locator("#key-reason")).to_contain_text("only with an API key")
        at.page.get_by_label("Key", exact=True).fill("guess")
        at.page.keyboard.press("Enter")
        expect(at.page.locator("#key-reason")).to_contain_text("not valid")
        at.page.get_by_role("button", name="Cancel").click()
        at.say("Hello")
        expect(at.page.locator(".problem")).to_contain_text("This server asks for an API key")
        at.page.get_by_label("Key", exact=True).fill("open-sesame")
        at.page.get_by_role("button", name="Use this key").click()
        expect(at.reply().locator(".prose")).to_have_text("Welcome.")
        assert "open-sesame" not in at.page.evaluate("JSON.stringify({ ...localStorage })")
        assert at.page.evaluate("Object.values(sessionStorage)") == ["open-sesame"]
        assert "open-sesame" not in at.page.content()
        refused = [line for line in at.complaints if "401" in line]
        assert len(refused) == len(at.complaints) > 0
        at.complaints.clear()


@pytest.mark.parametrize(
    ("script", "title", "detail"),
    [
        ({"max_live": 0, "retry_after_s": 3}, "The server is busy: try again in 3 s", "the queue is full"),
        ({"max_model_len": 30}, "This conversation no longer fits", "30"),
    ],
)
def test_a_refusal_is_readable_and_can_be_tried_again(
    browser: Any, renderer: Renderer, script: dict[str, Any], title: str, detail: str
) -> None:
    served = serve(renderer, "</think>Now.<|user|>", **script)
    with opened(browser, served) as at:
        at.say("Hello, " + "again and " * 8)
        problem = at.page.get_by_role("alert")
        expect(problem).to_contain_text(title)
        expect(problem).to_contain_text(detail)
        served.engine.settings = replace(served.engine.settings, max_live=10, max_model_len=8192)
        problem.get_by_role("button", name="Try again").click()
        expect(at.reply().locator(".prose")).to_have_text("Now.")
        expect(problem).to_be_hidden()
        at.complaints.clear()  # the browser's own line about the status


def test_an_engine_that_breaks_is_told_below_what_came(browser: Any, renderer: Renderer) -> None:
    served = serve(renderer, "</think>abc def<|user|>")
    served.engine.fails_after = 4
    with opened(browser, served) as at:
        at.say("Hello")
        expect(at.reply().locator(".end")).to_contain_text("the script says so")
        expect(at.reply().locator(".prose")).to_contain_text("a")


def test_a_reload_keeps_conversation_and_settings(browser: Any, renderer: Renderer) -> None:
    served = serve(renderer, "hm</think>One.<|user|>", "hm</think>Two.<|user|>", "</think>Three.<|user|>")
    with opened(browser, served) as at:
        at.set(temperature="0.5", topP="0.9", maxTokens="40", seed="7", system="Be kind.")
        at.page.get_by_label("Thinking").select_option("off")
        at.say("First")
        expect(at.reply().locator(".prose")).to_contain_text("One.")
        sampling = served.engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed) == (0.5, 0.9, 40, 7)
        assert at.prompt().endswith("</think>"), "thinking is switched off in the prompt"
        at.page.reload()
        expect(at.page.locator("article")).to_have_count(2)
        expect(at.page.locator("article.question")).to_contain_text("First")
        expect(at.reply().locator(".figures")).to_contain_text("tokens")
        at.say("Second")
        expect(at.page.locator("article")).to_have_count(4)
        expect(at.reply().locator(".prose")).to_contain_text("Two.")
        assert "Be kind." in at.prompt()
        assert "First" in at.prompt()
        at.page.locator("article.question").last.hover()
        at.page.locator("article.question").last.get_by_role("button", name="Edit").click()
        expect(at.page.get_by_label("Message")).to_have_value("Second")
        at.say("Second, edited")
        expect(at.page.locator("article")).to_have_count(4)
        expect(at.reply().locator(".prose")).to_contain_text("Three.")
        assert "Second, edited" in at.prompt()
        at.page.get_by_role("button", name="New chat").click()
        expect(at.page.locator(".welcome")).to_be_visible()
        for kept in ("{", '{"messages": [{}]}', "[]"):
            at.page.evaluate("kept => localStorage.setItem('yunque.conversation', kept)", kept)
            at.page.reload()
            expect(at.page.locator(".welcome")).to_be_visible()


def test_keys_write_lines_and_a_code_block_is_copied(browser: Any, renderer: Renderer) -> None:
    reply = "</think>1. one\n   - inner\n2. two `x`\n\n## Code\n\n```py\ndef f():\n    return 1\n```\nend<|user|>"
    with opened(browser, serve(renderer, reply, chunk=5), permissions=["clipboard-read", "clipboard-write"]) as at:
        field = at.page.get_by_label("Message")
        field.focus()
        at.page.keyboard.type("a")
        at.page.keyboard.press("Shift+Enter")
        at.page.keyboard.type("b")
        at.page.keyboard.press("Enter")
        at.is_done()
        assert at.page.locator(".question-text").text_content() == "a\nb"
        prose = at.reply().locator(".prose")
        expect(prose.locator("> ol > li")).to_have_count(2)
        expect(prose.locator("> ol > li ul > li")).to_have_text("inner")
        expect(prose.locator("h3")).to_have_text("Code")
        expect(prose.locator("li code")).to_have_text("x")
        prose.get_by_role("button", name="Copy").click()
        expect(prose.get_by_role("button", name="Copied")).to_be_visible()
        assert at.page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1"
        field.focus()
        at.page.keyboard.press("ArrowUp")
        expect(field).to_have_value("a\nb")
        at.page.keyboard.press("Escape")
        expect(field).to_have_value("")


def test_events_are_the_same_wherever_the_stream_is_cut(browser: Any, renderer: Renderer) -> None:
    stream = (
        ': ping\n\ndata: {"a":"é😀"}\r\n\r\ndata: one\rdata: two\r\revent: x\ndata:three\n\ndata: [DONE]\n\ndata: cut'
    )
    with opened(browser, serve(renderer, "x")) as at:
        found = at.page.evaluate(
            """async (text) => {
              const { EventDecoder } = await import("/web/sse.js");
              const bytes = new TextEncoder().encode(text);
              const seen = new Set();
              const read = (...pieces) => {
                const decoder = new EventDecoder();
                const events = pieces.flatMap((piece) => decoder.feed(piece));
                seen.add(JSON.stringify([...events, ...decoder.finish()]));
              };
              for (let i = 0; i <= bytes.length; i += 1) {
                for (let j = i; j <= bytes.length; j += 7) {
                  read(bytes.subarray(0, i), bytes.subarray(i, j), bytes.subarray(j));
                }
              }
              read(...Array.from(bytes, (byte) => new Uint8Array([byte])));
              return [...seen].map(JSON.parse);
            }""",
            stream,
        )
        assert found == [
            [
                {"event": "message", "data": '{"a":"é😀"}'},
                {"event": "message", "data": "one\ntwo"},
                {"event": "x", "data": "three"},
                {"event": "message", "data": "[DONE]"},
            ]
        ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_no_sideways_scrolling_and_text_has_contrast(
    browser: Any, renderer: Renderer, scheme: str
) -> None:
    reply = "hm</think>" + "longword" * 40 + "\n\n```\n" + "wide " * 60 + "\n```\n<|user|>"
    size = {"width": 360, "height": 640}
    with opened(browser, serve(renderer, reply, chunk=50), viewport=size, color_scheme=scheme) as at:
        at.say("x" * 200)
        at.is_done()
        assert at.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert at.page.evaluate("document.querySelector('#scroller').scrollWidth") <= 360
        at.page.get_by_role("button", name="Settings").click()
        assert at.page.evaluate("document.documentElement.scrollWidth") <= 360
        at.page.keyboard.press("Escape")
        expect(at.page.locator("#panel")).to_be_hidden()
        nameless = at.page.locator("button, input, select, textarea").evaluate_all(
            "all => all.filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.outerHTML)"
        )
        assert nameless == []
        pairs = at.page.evaluate(
            """() => {
              const style = getComputedStyle(document.documentElement);
              const hex = (name) => style.getPropertyValue(name).trim();
              const rgb = (name) => [1, 3, 5].map((i) => parseInt(hex(name).slice(i, i + 2), 16));
              const light = (name) => rgb(name).map((c) => c / 255)
                .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
              const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
              return ["--paper", "--raised", "--sunk"].flatMap((back) =>
                ["--ink", "--quiet", "--accent"].map((front) => [front, back, ratio(front, back)])
              ).concat([["--on-accent", "--accent", ratio("--on-accent", "--accent")]]);
            }"""
        )
        assert [pair for pair in pairs if pair[2] < 4.5] == []
