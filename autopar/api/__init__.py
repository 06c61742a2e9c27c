"""The front door: `compile` and `explain`."""

from autopar.api.front_door import compile, explain

__all__ = ["compile", "explain"]
