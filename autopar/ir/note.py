"""A note of a plan: a sentence for people, with the kind of thing that it says."""

from __future__ import annotations

from typing import Literal, Self, get_args

NoteKind = Literal["", "price", "stages", "runner-up", "tiers", "replicas", "owners", "versions"]
NOTE_KINDS: tuple[str, ...] = get_args(NoteKind)


class Note(str):
    """A sentence that knows its kind, so that a page can leave out what it says itself.

    >>> note = Note("predicted on h100: 41.2 ms", "price")
    >>> note, note.kind
    ('predicted on h100: 41.2 ms', 'price')

    Attributes:
        kind: "price" for time and memory as the search inside a stage adds them up, "stages" for cuts and
            time of a pipeline, "runner-up" for the next best plan, "tiers" for what lies outside the devices,
            "replicas" and "versions" for what is not the single device's result any more, "owners" for what single
            ranks store, and "" for everything else.
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
