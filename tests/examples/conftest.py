"""The ranks of frameworks, for their examples."""

from tests.integrations.conftest import framework_ranks

__all__ = ["framework_ranks"]
