"""What the tests of clients share."""

from collections.abc import Iterator

import pytest

from .scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def running_server() -> Iterator[ScriptedServer]:
    """A server on a free port; it has ended after the module's tests."""
    with ScriptedServer() as scripted:
        yield scripted


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    """The server, that answers what the test tells it to."""
    running_server.play()
    running_server.left = 0
    return running_server
