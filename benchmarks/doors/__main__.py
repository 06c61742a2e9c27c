"""Compares what the doors make of 200 calls with what they made of them when that was recorded.

python -m benchmarks.doors             one line for each call that differs; status 1 if any does
python -m benchmarks.doors --record    writes the outcomes of today
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from benchmarks.doors.calls import CALLS, Outcome, outcome_of

RECORDED = Path(__file__).parent / "recorded.json.gz"


def recorded() -> dict[str, Outcome]:
    """The outcome of every call when it was recorded."""
    found: dict[str, Outcome] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


def difference(call: str, before: Outcome) -> str:
    """What a call makes now, and made before; "" if that is the same."""
    now = json.loads(json.dumps(outcome_of(call)))
    return "" if now == before else f"{call}\n  before {json.dumps(before)}\n  now    {json.dumps(now)}"


def main() -> None:
    if "--record" in sys.argv:
        outcomes = {call: outcome_of(call) for call in CALLS}
        text = json.dumps(outcomes, indent=0)
        RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{len(CALLS)} calls recorded, {sum('error' in each for each in outcomes.values())} of them errors")
        return
    known = recorded()
    found = [line for call in CALLS if (line := difference(call, known[call]))]
    print("\n".join(found))
    print(f"{len(found)} of {len(CALLS)} calls differ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
