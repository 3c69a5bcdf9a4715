"""Every error that miniserve raises on purpose.

    MiniserveError
    ├── ConfigError            a setting, or a field of config.json, has no meaning
    ├── ModelError
    │   ├── UnsupportedModel   a family, or a feature of one, that is not implemented
    │   └── CheckpointMismatch tensors missing, left over or of another shape
    ├── RequestError           one request cannot be served as asked; names the field
    │   └── QueueFull          the waiting queue is full: try again later
    └── EngineError            a step failed, or the engine has stopped

A message says what is wrong (with the numbers), why, and what to do about it.
"""

from __future__ import annotations


class MiniserveError(Exception):
    """Root of the tree: `except MiniserveError` catches all that is raised on purpose."""


class ConfigError(MiniserveError, ValueError):
    """A setting of `EngineConfig` or a field of a model's config.json has no meaning."""


class ModelError(MiniserveError):
    """The model folder cannot be served."""


class UnsupportedModel(ModelError):
    """The model is of a family, or uses a feature, that miniserve does not implement."""


class CheckpointMismatch(ModelError):
    """The tensors of the checkpoint are not those that config.json promises."""


class RequestError(MiniserveError, ValueError):
    """One request cannot be served as asked. Nothing else is disturbed.

    `param` is the name of the field at fault and `code` a word for programs, both as in OpenAI's error object.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RequestError):
    """The waiting queue is at `max_waiting`; the request was not accepted."""


class EngineError(MiniserveError, RuntimeError):
    """The step that ran this request failed, or the engine has stopped."""
