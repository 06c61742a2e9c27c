"""The verdict on a plan: rounding told from error, tensor by tensor.

The truth is the single-device model in float64. In float64 arithmetic a plan must give it up to `TOLERANCE_FLOAT64`,
which leaves no room for a wrong reduction, scale, offset or shard. In the model's own arithmetic both the plan and the
single device are off by rounding, and the plan must not be off by more than the single device explains.

[Note: the bound of rounding] To first order the error of a floating-point result is a sum over all operations of the
addends that each rounds, times the unit roundoff u of the type (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., 2002, sections 3.1 and 4.2). It scales with what was summed and not with the result: the bias
before a batch norm has a true gradient of zero, and a computed one of the size of its addends' rounding. Where
roundings are independent and of mean zero, a sum of n addends x is off by a multiple of sqrt(n) u sum(|x|) (N. J.
Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, A2815).

The size of that error is sampled. The single device runs the step once as it is, and `PERTURBED_RUNS` times with the
last bit of every operator's results drawn at random (`RandomLastBits`). For each tensor, `own` is the largest error of
an entry over these runs. A right plan makes the same sums in another order, so its error is one more draw of the
same kind:

    bound = ROUNDING_FACTOR * own + u * (largest entry of the true tensor)

The second addend is the rounding of the result itself. The factor answers for the spread of few samples: for a
tensor of one entry, whose error is normal, the chance that a sixth draw exceeds k times the largest of five is about
6.4 (0.8 / k)^5, which is 2e-6 for k = 16. It also leaves room for the further rounding of each rank's partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.jupyter import JupyterMixin
from rich.text import Text

from autopar.ir import Mesh
from autopar.units import counted

TOLERANCE_FLOAT64 = 1e-9  # largest relative error of a right plan in float64 arithmetic
PERTURBED_RUNS = 4
ROUNDING_FACTOR = 16.0
_SHOWN = 8  # failures that a report names

Kind = Literal["loss", "gradient", "buffer", "parameter"]


@dataclass(frozen=True)
class Verdict:
    """One tensor of a plan, compared with the float64 reference.

    Attributes:
        kind: what the tensor is.
        name: name of the parameter or buffer, "" for the loss.
        step: number of the step, from 1.
        arithmetic: element type in which the plan ran: `float64`, or the lowest of the model's own.
        error: largest absolute error of an entry, on the worst rank.
        own: the same for the single device in that arithmetic; 0.0 in float64, where it is the reference.
        bound: largest error of a right plan.
        scale: size to which errors are relative, greater than zero.
    """

    kind: Kind
    name: str
    step: int
    arithmetic: str
    error: float
    own: float
    bound: float
    scale: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; a nan is not."""
        return self.error <= self.bound

    @property
    def relative_error(self) -> float:
        return self.error / self.scale

    @property
    def share(self) -> float:
        """The error as a share of its bound; infinite for a nan."""
        if self.error == 0:
            return 0.0
        return nan_last(self.error / self.bound) if self.bound else float("inf")

    def __str__(self) -> str:
        what = f"{self.kind} of {self.name}" if self.name else self.kind
        return (
            f"{what}, step {self.step}, in {self.arithmetic}: error {self.error:.1e}, "
            f"the single device's own {self.own:.1e}, bound {self.bound:.1e}"
        )


@dataclass(frozen=True)
class VerifyReport(JupyterMixin):
    """The distance of a plan's results from those of the single-device model.

    The relative errors are those in float64 arithmetic.

    Attributes:
        mesh: the simulated mesh.
        recipe: how the plan was made.
        verdicts: one for every tensor, step and arithmetic that was compared.
        schedule: how micro-batches went through pipeline stages, or when replicas met; "" for neither.
        all_rounding: whether every gradient is too small to tell from the rounding of the loss.
        idle: axes of the mesh along which the plan splits nothing, so that nothing is proved of them.
        not_numbers: what has NaN on one device, in words. Where the plan has it in the same entries, it is equal.
    """

    mesh: Mesh
    recipe: str
    verdicts: tuple[Verdict, ...]
    schedule: str = ""
    all_rounding: bool = False
    idle: tuple[str, ...] = ()
    not_numbers: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its bound."""
        return not self.failures

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """The verdicts that did not pass."""
        return tuple(verdict for verdict in self.verdicts if not verdict.passed)

    @property
    def arithmetic(self) -> str:
        """The lowest precision that was compared: `float64`, or the model's own."""
        return next((v.arithmetic for v in self.verdicts if v.arithmetic != "float64"), "float64")

    @property
    def steps(self) -> int:
        """Number of steps that were run."""
        return max(verdict.step for verdict in self.verdicts)

    @property
    def loss_error(self) -> float:
        """Relative error of the loss."""
        return _relative(self._worst("loss"))

    @property
    def worst_gradient_error(self) -> float:
        """Largest relative error of a gradient; 0.0 without gradients."""
        return _relative(self._worst("gradient"))

    @property
    def worst_parameter(self) -> str:
        """Name of the parameter with the worst gradient, "none" without gradients."""
        return self._worst_name("gradient") or "none"

    @property
    def parameters(self) -> int:
        """Number of compared gradients."""
        return self._count("gradient")

    @property
    def buffer_error(self) -> float:
        """Largest relative error of an updated buffer; 0.0 if there are none."""
        return _relative(self._worst("buffer"))

    @property
    def worst_buffer(self) -> str:
        """Name of the buffer with the largest error, "" if none is updated."""
        return self._worst_name("buffer")

    @property
    def buffers(self) -> int:
        """Number of updated buffers."""
        return self._count("buffer")

    @property
    def met(self) -> Verdict | None:
        """The parameter with the largest relative error after a meeting or a step that updates; None for neither."""
        return self._worst("parameter")

    @property
    def worst_rounding(self) -> Verdict | None:
        """The verdict nearest to its bound in the model's own arithmetic; None for a float64 model."""
        return _worst((v for v in self.verdicts if v.arithmetic != "float64"), lambda v: v.share)

    def _worst(self, kind: Kind) -> Verdict | None:
        exact = (v for v in self.verdicts if v.kind == kind and v.arithmetic == "float64")
        return _worst(exact, lambda v: nan_last(v.relative_error))

    def _worst_name(self, kind: Kind) -> str:
        worst = self._worst(kind)
        return worst.name if worst is not None else ""

    def _count(self, kind: Kind) -> int:
        return len({v.name for v in self.verdicts if v.kind == kind})

    def __str__(self) -> str:
        head = (
            f"{'PASSED' if self.passed else 'FAILED'}: {self.mesh}, recipe {self.recipe}, "
            f"{self.mesh.ranks} ranks simulated{', ' + self.schedule if self.schedule else ''}"
        )
        lines = (*self._float64_lines(), *self._own_lines(), *self._failure_lines())
        return "\n".join((head, *self._idle_lines(), *self._nan_lines(), *lines))

    def _nan_lines(self) -> list[str]:
        if not self.not_numbers:
            return []
        more = f" and {len(self.not_numbers) - 1} more" if len(self.not_numbers) > 1 else ""
        return [
            f"  one device gives NaN for {self.not_numbers[0]}{more}; of entries that are NaN on both sides nothing "
            "is proved"
        ]

    def _idle_lines(self) -> list[str]:
        return [
            f"  the plan splits nothing along {axis}, whose ranks all do the same; name a recipe to have it split"
            for axis in self.idle
        ]

    def _float64_lines(self) -> list[str]:
        lines = [
            f"  in float64 arithmetic, {counted(self.steps, 'step')}; tolerance {TOLERANCE_FLOAT64:.0e}",
            f"    loss              {self.loss_error:.1e} (relative, worst rank)",
            f"    worst gradient    {self.worst_gradient_error:.1e} of {self.parameters}, at {self.worst_parameter}",
        ]
        if self.buffers:
            lines.append(
                f"    buffers           {self.buffer_error:.1e} of {self.buffers} updated, at {self.worst_buffer}"
            )
        if self.met is not None:
            lines.append(
                f"    updated           {_relative(self.met):.1e} of {self._count('parameter')} parameters, "
                f"at {self.met.name}"
            )
        return lines

    def _own_lines(self) -> list[str]:
        worst = self.worst_rounding
        if worst is None:
            return []
        return [f"  in {worst.arithmetic}, against float64; nearest to its bound:", f"    {worst}"]

    def _failure_lines(self) -> list[str]:
        if self.passed:
            return []
        failures = sorted(self.failures, key=lambda v: -v.share)
        lines = [f"  beyond the bound: {len(failures)} of {len(self.verdicts)} comparisons"]
        lines += [f"    {verdict}" for verdict in failures[:_SHOWN]]
        if len(failures) > _SHOWN:
            lines.append(f"    and {len(failures) - _SHOWN} more")
        if all(verdict.step > 1 for verdict in failures):
            lines.append(
                "  The first step is correct and a later one is not: the plan keeps a value that the model changes "
                "between steps."
            )
        if self.all_rounding:
            lines.append(
                "  No gradient is larger than the rounding of the loss: a loss that does not depend on the "
                "parameters\n  (such as one of normalized values) has gradients of zero except for rounding, and "
                "proves nothing."
            )
        return lines

    def __rich__(self) -> Text:
        head, _, rest = str(self).partition(":")
        return Text.assemble((head, "bold green" if self.passed else "bold red"), ":" + rest)


def rounding_bound(own: float, unit_roundoff: float, largest: float) -> float:
    """The largest error of a right plan in the model's own arithmetic; [Note: the bound of rounding].

    Args:
        own: error of the single device, the largest of its runs.
        unit_roundoff: largest relative error of one rounding in the tensor's type.
        largest: largest entry of the true tensor.
    """
    return ROUNDING_FACTOR * own + unit_roundoff * largest


def nan_last(error: float) -> float:
    """Infinity for a nan, and any other error itself."""
    return float("inf") if error != error else error


def _relative(verdict: Verdict | None) -> float:
    return verdict.relative_error if verdict is not None else 0.0


def _worst(verdicts: Iterable[Verdict], key: Callable[[Verdict], float]) -> Verdict | None:
    found: Sequence[Verdict] = tuple(verdicts)
    return max(found, key=key) if found else None
