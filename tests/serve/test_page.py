"""The web page's files: their types, their policy, and when they are sent again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import yunque.serve.page
from yunque.serve.page import MEDIA_TYPES, page_files
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import events, serve

WEB = Path(yunque.serve.page.__file__).parent / "web"


def directives(policy: str) -> dict[str, str]:
    return dict(part.strip().split(" ", 1) for part in policy.split(";"))


def test_every_file_is_served_with_its_type_and_policy(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    names = sorted(path.name for path in WEB.iterdir())
    assert len(names) > 10
    for name, path in [("index.html", "/"), *((name, f"/web/{name}") for name in names)]:
        response = served.call("GET", path)
        assert response.status_code == 200
        assert response.content == (WEB / name).read_bytes()
        assert response.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        policy = directives(response.headers["content-security-policy"])
        assert policy["default-src"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert set(policy.values()) == {"'none'", "'self'", "'script'"}


def test_a_file_that_the_browser_has_is_not_sent_again(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    etag = served.call("GET", "/web/app.js").headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
    for given, status in ((etag, 304), (f'"other", W/{etag}', 304), ("*", 304), ('"other"', 200), (etag[1:-1], 200)):
        response = served.call("GET", "/web/app.js", headers={"if-none-match": given})
        assert (response.status_code, bool(response.content)) == (status, status == 200)
        assert response.headers["etag"] == etag
        assert "content-security-policy" in response.headers
    etags = [file.etag for file in page_files().values()]
    assert len(set(etags)) == len(etags)


def test_head_answers_without_a_body(renderer: Renderer) -> None:
    response = serve(renderer, "x").call("HEAD", "/")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path", ["/web/nothing.js", "/web/", "/web/..%2fpage.py", "/web/%2e%2e/page.py", "/web/a/b.js"]
)
def test_nothing_else_is_served(renderer: Renderer, path: str) -> None:
    response = serve(renderer, "x").call("GET", path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_the_page_opens_without_a_key(renderer: Renderer) -> None:
    served = serve(renderer, "x", settings=ServeSettings(api_keys=("one",)))
    statuses = {path: served.call("GET", path).status_code for path in ("/", "/web/app.js", "/web/style.css")}
    assert set(statuses.values()) == {200}


def test_no_file_names_another_address() -> None:
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name
    page = (WEB / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", page)
    named = re.findall(r'(?:src|href)="web/([^"]+)"', page)
    imported = [name for path in WEB.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text("utf-8"))]
    assert {*named, *imported} | {"index.html"} == {path.name for path in WEB.iterdir()}


def test_the_page_needs_no_torch() -> None:
    code = "import sys, yunque.serve.page as page; page.page_routes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (40, 30)])
def test_usage_tells_the_drafts_that_the_page_shows(renderer: Renderer, drafted: int, accepted: int) -> None:
    served = serve(renderer, "a</think>b<|user|>", drafted=drafted, accepted=accepted)
    request = {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    streamed = events(served.post("/v1/chat/completions", request))[-1]["usage"]
    whole = served.post("/v1/chat/completions", {**request, "stream": False, "stream_options": None}).json()["usage"]
    assert streamed == whole
    details = whole["completion_tokens_details"]
    drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    assert {key: value for key, value in details.items() if "prediction" in key} == (drafts if drafted else {})
