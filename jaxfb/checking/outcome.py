"""Describes the outcome of a case in plain values."""

from __future__ import annotations

from dataclasses import dataclass

SAME, REFUSED, DIFFERENT, FAILED, ABORTED, HUNG = "same", "refused", "different", "failed", "aborted", "hung"
FINDINGS = (DIFFERENT, FAILED, ABORTED, HUNG)


@dataclass(frozen=True)
class Outcome:
    """Describes the outcome of one case.

    status:  same; refused (a ValueError of jaxfb's own); different; failed (any other exception); aborted (the
      process died); or hung (it took too long).
    detail:  what was refused, raised or differs, or the last lines of a process that died.
    kind:    what a smaller case must show as well to count as the same finding: a quantity, or an exception's name.
    largest: the largest relative difference, as a share of what is allowed.
    seconds: that the case took.
    """

    status: str
    detail: str = ""
    kind: str = ""
    largest: float = 0.0
    seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        """Returns whether something is wrong with jaxfb."""
        return self.status in FINDINGS

    def like(self, other: Outcome) -> bool:
        """Returns whether both look like the same finding."""
        return (self.status, self.kind) == (other.status, other.kind)

    def __str__(self) -> str:
        numbers = f" {self.largest:.1e} of what rounding may do" if self.status == SAME else ""
        return f"{self.status}{numbers}{f': {self.detail}' if self.detail else ''}"
