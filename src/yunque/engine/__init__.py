"""The inference engine: continuous batching over latent pages, prefix tree, sampling, speculation."""

from yunque.engine.core import EngineCore
from yunque.engine.engine import Engine
from yunque.engine.policy_client import LocalPolicyClient
from yunque.engine.settings import EngineSettings
from yunque.protocol.generation import Completion, Finish, GenerationRequest, SamplingParams, TokenDelta

__all__ = [
    "Completion",
    "Engine",
    "EngineCore",
    "EngineSettings",
    "Finish",
    "GenerationRequest",
    "LocalPolicyClient",
    "SamplingParams",
    "TokenDelta",
]
