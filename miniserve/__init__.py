"""miniserve: a small inference engine for language models whose layers share KV cache.

    from miniserve import Engine, SamplingParams

    engine = Engine("path/to/model")
    outputs = engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))

`import miniserve` is cheap: torch and the rest are imported when `Engine` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniserve.config import EngineConfig
from miniserve.errors import MiniserveError
from miniserve.output import RequestOutput
from miniserve.request import SamplingParams

if TYPE_CHECKING:
    from miniserve.async_engine import AsyncEngine
    from miniserve.engine import Engine

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "MiniserveError", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from miniserve.engine import Engine

        return Engine
    if name == "AsyncEngine":
        from miniserve.async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module 'miniserve' has no attribute {name!r}")
