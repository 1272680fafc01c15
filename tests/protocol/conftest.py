"""What the tests of clients share."""

from collections.abc import Iterator

import pytest

from .scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server on a free port that answers what a test tells it to; it has ended after the test."""
    with ScriptedServer() as scripted:
        yield scripted
