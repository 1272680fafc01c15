"""Logging: quiet until set up, one handler however often it is."""

import logging

import pytest

from yunque.core.errors import ConfigError
from yunque.core.logging import get_logger, setup


@pytest.fixture(autouse=True)
def _restore_root():
    root = logging.getLogger("yunque")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers, root.level, root.propagate = before


def test_messages_reach_standard_error_once_from_the_chosen_level(capsys):
    setup("debug")
    setup("info")
    get_logger("yunque.train").info("step done")
    get_logger("yunque.train").debug("hidden")
    captured = capsys.readouterr()
    assert captured.err.count("step done") == 1
    assert "hidden" not in captured.err
    assert captured.out == ""


def test_every_logger_is_below_yunque():
    assert get_logger("yunque.core").name == "yunque.core"
    assert get_logger("mine").name == "yunque.mine"
    assert get_logger("yunquest").name == "yunque.yunquest"


def test_unknown_level_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown log level 'inf'; did you mean 'info'"):
        setup("inf")
