"""The results of a part as data: figures with their limits, pictures, and sentences."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["running", "done", "raised", "late", "died"]


@dataclass(frozen=True)
class Figure:
    """One number that a part measured.

    Attributes:
        name: words that tell the figure from the others of its part.
        value: the number in SI units; None where it was not measured.
        unit: "seconds", "bytes", "FLOP/s", "bytes/s", "ratio", "error" or "count".
        limit: the largest value that passes; None where any value does.
        asked: whether this device is held to the limit.
        note: the reason why a value is missing or a limit is not asked, or how the value was found.

    >>> Figure("step time ratio", 1.25, "ratio", limit=1.0).verdict
    'FAIL'
    >>> Figure("step time ratio", 1.25, "ratio", limit=1.0, asked=False).verdict
    'not asked'
    >>> Figure("bandwidth of pinned copies", None, "bytes/s").verdict
    'not measured'
    """

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    asked: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """`pass`, `FAIL`, `not asked`, `not measured`, or "" for a figure without a limit."""
        if self.value is None:
            return "not measured"
        if self.limit is None:
            return ""
        if not self.asked:
            return "not asked"
        return "pass" if self.value <= self.limit else "FAIL"  # NaN fails


@dataclass(frozen=True)
class Picture:
    """Values to be drawn.

    Attributes:
        title: the words above the picture.
        kind: "bars" for labelled values; "curves" for values over sizes, both axes being logarithmic.
        unit: unit of the values.
        series: name of a series -> its (label, value) or (size, value) pairs.
        across: the words below the horizontal axis of curves.
    """

    title: str
    kind: Literal["bars", "curves"]
    unit: str
    series: dict[str, list[tuple[Any, float]]]
    across: str = ""


@dataclass(frozen=True)
class Sentence:
    """Something that a part has to say in words, such as what it cannot prove."""

    text: str


@dataclass
class Result:
    """All that one part left, whether it came to its end or not.

    Attributes:
        name: name of the part.
        run: what the result depends on: version of the code, device, and number of subjects.
        state: "done" where the part came to its end; else how it ended.
        why: the reason why it did not come to its end, "" if it did.
        figures, pictures, sentences: the results in the order in which they came.
        seconds: duration by the clock.
        processor_seconds: processor time of the part and its ranks.
    """

    name: str
    run: dict[str, str]
    state: State = "running"
    why: str = ""
    figures: list[Figure] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float = 0.0

    def add(self, found: Figure | Picture | Sentence) -> None:
        """Adds what a part found."""
        if isinstance(found, Figure):
            self.figures.append(found)
        elif isinstance(found, Picture):
            self.pictures.append(found)
        else:
            self.sentences.append(found.text)

    @property
    def passed(self) -> bool:
        """Whether the part came to its end and no figure failed."""
        return self.state == "done" and not any(f.verdict == "FAIL" for f in self.figures)

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        """The result that `to_json` gave."""
        figures = [Figure(**each) for each in values["figures"]]
        pictures = [Picture(**each) for each in values["pictures"]]
        return cls(**(values | {"figures": figures, "pictures": pictures}))
