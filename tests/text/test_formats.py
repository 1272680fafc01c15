import pytest

from yunque.core.errors import TemplateError
from yunque.text import ChatFormat, TemplateOptions, effort_shown


@pytest.mark.parametrize(
    ("name", "effort", "thinking", "shown"),
    [
        ("glm-5", "high", True, None),
        ("glm-5.1", None, True, None),
        ("glm-5.2", None, True, "max"),
        ("glm-5.2", "high", True, "high"),
        ("glm-5.2", "low", True, "max"),
        ("glm-5.2", "high", False, None),
        ("glm-5.3", "low", True, "low"),
        ("glm-5.3", "high", False, "high"),
        ("glm-5.3", "medium", True, "max"),
        ("glm-5.3", "High", True, "max"),
    ],
)
def test_effort_in_force(name: str, effort: str | None, thinking: bool, shown: str | None) -> None:
    """sgl-project/sglang#28454: effort "low" silently is "max" on 5.2: the level in force can be asked."""
    options = TemplateOptions(enable_thinking=thinking, reasoning_effort=effort)
    assert effort_shown(ChatFormat.named(name), options) == shown


def test_unknown_options_are_refused_with_the_valid_names() -> None:
    """sgl-project/sglang#28454: the key is enable_thinking; ``thinking`` was ignored without a word."""
    with pytest.raises(TemplateError) as caught:
        TemplateOptions.from_kwargs({"thinking": False})
    message = str(caught.value)
    assert "'thinking'" in message
    assert "did you mean" in message
    assert "valid: clear_thinking, enable_thinking, reasoning_effort" in message


@pytest.mark.parametrize(
    "options",
    [{"enable_thinking": "false"}, {"enable_thinking": None}, {"clear_thinking": 0}, {"reasoning_effort": 1}],
)
def test_options_of_the_wrong_type_are_refused(options: dict) -> None:
    with pytest.raises(TemplateError, match=f"{next(iter(options))} must be"):
        TemplateOptions.from_kwargs(options)


def test_an_unknown_format_is_refused_with_the_valid_names() -> None:
    with pytest.raises(TemplateError, match=r"'glm-5\.4'.*valid: glm-5, glm-5\.1, glm-5\.2, glm-5\.3"):
        ChatFormat.named("glm-5.4")
