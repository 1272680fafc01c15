"""Writes the pictures of the web page that the documentation shows: ``python scripts/screenshot.py [FOLDER]``.

The page is the real one, in a real browser; the engine behind it plays a written exchange. Needs Playwright and a
``chromium`` on the path.
"""

import math
import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from serve.scripted_engine import ScriptedEngine, ScriptSettings, _Reply  # noqa: E402
from serve.servers import Served, listening  # noqa: E402
from yunque.protocol.generation import GenerationRequest, TokenDelta, TopToken  # noqa: E402
from yunque.serve.app import create_app  # noqa: E402
from yunque.serve.settings import ServeSettings  # noqa: E402
from yunque.text import Renderer, train_bpe  # noqa: E402

TOOLS = """[
  {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
      "required": ["city"]
    }
  }
]"""
QUESTION = "Is Saturday a good day for a walk along the Seine? If it is, which way round?"
RESULT = '{"saturday": {"sky": "clear", "high_c": 21, "wind_kmh": 9}}'
FIRST = (
    "The user asks about Saturday in Paris. I know nothing of the forecast, so I should look it up before I say "
    "anything: three days cover the weekend.</think>Let me look at the forecast."
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
)
SECOND = (
    "Clear, 21 degrees, little wind: good. A loop from Pont Neuf keeps the sun behind them if they take the left bank "
    "eastward in the morning.</think>Yes: **Saturday is clear, 21 °C, with hardly any wind.** From Pont Neuf I would "
    "go:\n\n"
    "1. along the left bank to the Jardin des Plantes, with the morning sun ahead,\n"
    "2. over the Pont de Sully,\n"
    "3. and back along the right bank, in the shade of the plane trees.\n\n"
    "That is about 5 km, an hour and a quarter without stops.<|user|>"
)
MORE = "In one line?"
THIRD = "A line will do.</think>Yes: clear and mild, left bank out, right bank back.<|user|>"


class Plausible(ScriptedEngine):
    """Log-probabilities like a model's: most tokens are nearly certain, a few are not. ``words``: other tokens."""

    words: Sequence[int] = ()

    def submit(self, request: GenerationRequest) -> _Reply:
        reply = super().submit(request)
        step = reply._step
        reply._step = lambda: _plausible(step(), random.Random(len(reply._made)), self.words)
        return reply


def _plausible(delta: TokenDelta, draw: random.Random, words: Sequence[int]) -> TokenDelta:
    logprobs, top = [], []
    for token in delta.tokens:
        share = draw.choice((0.995, 0.98, 0.97, 0.93, 0.85, 0.62, 0.31, 0.12))
        shares = [(token, share)]
        for place, other in enumerate(draw.sample(words, 4)):
            shares.append((other, (1 - share) * 0.6 * 0.4**place))
        logprobs.append(math.log(share))
        top.append(tuple(TopToken(other, math.log(p)) for other, p in sorted(shares, key=lambda pair: -pair[1])))
    return replace(delta, model_logprobs=tuple(logprobs), top=tuple(top) if delta.top else ())


def main(folder: Path) -> None:
    """Play the exchange, and write ``chat.png`` and ``tokens.png``."""
    texts = (FIRST, SECOND, THIRD)
    renderer = Renderer(train_bpe([QUESTION, RESULT, *texts] * 4, 700), "glm-5")
    replies: Sequence[Sequence[int]] = [renderer.tokenizer.encode_with_special(text) for text in texts]
    script = ScriptSettings(
        chunk=2,
        delay_s=0.03,
        vocab_size=renderer.tokenizer.vocab_size,
        model_name="glm-5-small",
        drafted=96,
        accepted=71,
    )
    engine = Plausible(replies, script, decode=renderer.tokenizer.decode)
    texts_by_id = {i: renderer.tokenizer.decode([i]) for i in range(renderer.tokenizer.vocab_size)}
    engine.words = [
        i for i, text in texts_by_id.items() if text.startswith(" ") and text[1:].isalpha() and len(text) > 3
    ]
    served = Served(renderer, engine, create_app(engine, renderer, ServeSettings()))
    browser_path = shutil.which("chromium")
    assert browser_path, "there is no chromium on the path"
    folder.mkdir(parents=True, exist_ok=True)
    with listening(served) as url, sync_playwright() as play:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=browser_path, args=arguments)
        page = browser.new_context(viewport={"width": 1180, "height": 900}, color_scheme="light").new_page()
        page.goto(url)
        _play(page, folder)
        browser.close()


def _play(page: Page, folder: Path) -> None:
    page.get_by_role("button", name="Settings").click()
    page.locator("#settings [name=system]").fill("Be brief. Look things up before you answer.")
    page.locator("#settings [name=temperature]").fill("0.7")
    page.locator("#settings [name=tools]").fill(TOOLS)
    _say(page, QUESTION)
    card = page.locator(".tool-card")
    card.get_by_label("Result of get_weather").fill(RESULT)
    page.get_by_role("button", name="Send result").click()
    expect(page.locator("article.reply")).to_have_count(2)
    _wait(page)
    page.screenshot(path=folder / "chat.png")
    page.get_by_label("Log-probabilities").check()
    _say(page, MORE)
    page.locator(".prose .token").nth(4).click()
    page.screenshot(path=folder / "tokens.png")


def _say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    _wait(page)


def _wait(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible(timeout=30_000)
    page.wait_for_timeout(100)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
