"""A note of a plan: a sentence for people, with a word for its subject."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self, get_args

NoteKind = Literal[
    "",
    "axes",
    "price",
    "stages",
    "unasked",
    "runner-up",
    "tiers",
    "replicas",
    "owners",
    "versions",
    "decomposed",
    "overlap",
    "buckets",
    "micro-batches",
    "undivided",
    "repeated",
    "uneven",
    "guess",
]
NOTE_KINDS: tuple[str, ...] = get_args(NoteKind)


class Note(str):
    """A string with a kind, so that a report can leave out the kinds of notes that it shows in another way.

    >>> note = Note("predicted on h100: 41.2 ms", "price")
    >>> note, note.kind
    ('predicted on h100: 41.2 ms', 'price')

    Attributes:
        kind: subject of the note. "axes": why axes were taken as two, or nest in another order than the user named.
            "price": time and memory that the search predicts for one stage. "stages": cuts and time of a pipeline.
            "unasked": the reason for a pipeline under a recipe without one. "runner-up": the next best plan. "tiers":
            what is stored outside the devices. "replicas" and "versions": differences from training on a single
            device. "owners": parameters that single ranks store. "decomposed": axes along which collectives run piece
            by piece. "overlap": micro-batches that take turns. "buckets": the bytes that a collective carries.
            "micro-batches": the reason for a number of them that nobody asked for. "undivided": dims that an axis does
            not divide. "repeated": axes whose ranks all compute the same. "uneven": a dim, or a batch, in parts of
            different sizes. "guess": the machine was guessed from the device. "": anything else.
    """

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Self:
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str]]:
        return Note, (str(self), self.kind)


def kind_of(note: str) -> str:
    """The kind of a note; "" for a plain string."""
    return note.kind if isinstance(note, Note) else ""


def without_prices(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes but those on the price of a plan, which has changed."""
    return tuple(note for note in notes if kind_of(note) != "price")
