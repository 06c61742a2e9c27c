"""The front door: `compile` and `explain`."""

from autopar.api.front_door import compile, explain
