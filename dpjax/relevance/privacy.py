"""The guarantee of a run. A claimed epsilon always comes with its failed assumptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dpjax import validate
from dpjax.relevance.rigorous import StageCharge


@dataclasses.dataclass(frozen=True)
class Privacy:
  """An epsilon, its kind, and its neighbouring relation.

  A claim comes with the list of its failed assumptions. `proved_epsilon` is None unless `kind`
  is "proved".
  """

  kind: str  # "proved" | "claimed" | "none"
  epsilon: float | None
  delta: float | None
  neighboring_relation: str | None
  unit: str = "example"
  claimed_epsilon: float | None = None
  claimed_epsilon_thm7: float | None = None
  failed_assumptions: tuple[str, ...] = ()
  ledger: tuple[StageCharge, ...] = ()
  notes: tuple[str, ...] = ()
  details: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    validate.one_of(("proved", "claimed", "none"), kind=self.kind)
    if self.kind == "claimed" and not self.failed_assumptions:
      raise ValueError("a claimed epsilon must name the assumptions that fail")
    if self.kind == "proved" and not (self.epsilon and math.isfinite(self.epsilon)):
      raise ValueError(f"epsilon={self.epsilon!r}: a proved one is finite and > 0")

  @property
  def proved_epsilon(self) -> float | None:
    """Proved epsilon; None if the epsilon is only claimed, or the training has no privacy."""
    return self.epsilon if self.kind == "proved" else None

  def to_json(self) -> dict[str, Any]:
    """Returns the privacy part of result.json."""
    return {
      "epsilon": self.epsilon,
      "delta": self.delta,
      "neighboring_relation": self.neighboring_relation,
      "unit": None if self.kind == "none" else self.unit,
      "epsilon_kind": self.kind,
      "claimed_epsilon": self.claimed_epsilon,
      "claimed_epsilon_thm7": self.claimed_epsilon_thm7,
      "proved_epsilon": self.proved_epsilon,
      "failed_assumptions": list(self.failed_assumptions),
      "ledger": [dataclasses.asdict(charge) for charge in self.ledger],
      "notes": list(self.notes),
      **self.details,
    }


NOT_PRIVATE = Privacy("none", None, None, None)


def proof_record(
  epsilon: float,
  delta: float,
  neighboring_relation: str,
  *,
  unit: str = "example",
  ledger: Sequence[StageCharge] = (),
  notes: Sequence[str] = (),
  rests_on: Sequence[str] = (),
  **details: Any,
) -> Privacy:
  """Returns the record of a proved epsilon; `claimed_epsilon` is the same number.

  Args:
    rests_on: assumptions that cannot be checked. If there are any, the kind is "claimed".

  >>> proof_record(1.0, 1e-5, "replace_one").claimed_epsilon
  1.0
  """
  return Privacy(
    kind="claimed" if rests_on else "proved",
    epsilon=epsilon,
    delta=delta,
    neighboring_relation=neighboring_relation,
    unit=unit,
    claimed_epsilon=epsilon,
    failed_assumptions=tuple(rests_on),
    ledger=tuple(ledger),
    notes=tuple(notes),
    details=details,
  )
