"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass

from yunque.core.errors import ConfigError, unknown
from yunque.engine.speculation import Acceptance


@dataclass(frozen=True)
class EngineSettings:
    """Bounds and choices of one engine.

    ``page_size`` positions share a page. ``max_running`` requests are computed at once, ``max_waiting`` wait;
    a step computes at most ``max_step_tokens`` tokens, of prompts at most ``chunk_tokens`` beside decodes.
    ``watermark_pages`` stay free of admissions. ``num_drafts`` tokens are drafted by the MTP layer after each token
    and stand or fall by ``acceptance``. ``max_model_len`` bounds prompt and reply (None: what the model has).
    A level of priority is worth ``aging_steps`` steps of waiting. ``seed`` is for requests without one.
    """

    page_size: int = 16
    max_running: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 2048
    chunk_tokens: int = 512
    watermark_pages: int = 8
    num_drafts: int = 0
    acceptance: Acceptance = "coupled"
    max_model_len: int | None = None
    aging_steps: int = 256
    seed: int = 0

    @property
    def max_live(self) -> int:
        """Requests that may be in progress, computed and waiting."""
        return self.max_running + self.max_waiting

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running", "max_waiting", "max_step_tokens", "chunk_tokens", "aging_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if not 0 <= self.num_drafts <= 16:
            raise ConfigError(f"num_drafts is {self.num_drafts}; it must be between 0 and 16")
        if self.acceptance not in ("coupled", "rejection"):
            raise ConfigError(unknown("acceptance", self.acceptance, ("coupled", "rejection")))
