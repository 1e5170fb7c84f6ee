"""The error for a field that is set although nothing reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dpjax.validate import NO_VALUE, UserError


class WouldBeIgnored(UserError):
  """Error about fields that are set although nothing reads them, in one line for all fields.

  Attributes:
    faults: errors that were joined, one for each field; () if none were, since this error then
      names its only field.
  """

  faults: tuple[UserError, ...] = ()

  @classmethod
  def joined(cls, faults: Sequence[UserError]) -> Self:
    """Returns one error that joins the errors of several fields.

    >>> faults = [UserError("would be ignored", field=name) for name in ("mu", "tau")]
    >>> print(WouldBeIgnored.joined(faults).within("algorithm"))
    algorithm.mu: would be ignored; algorithm.tau: would be ignored
    """
    return cls._of("; ".join(map(str, faults)), "", tuple(faults))

  @classmethod
  def _of(cls, must: str, field: str, faults: tuple[UserError, ...]) -> Self:
    error = cls(must, field=field)
    error.faults = faults
    return error

  def fields(self) -> list[str]:
    """Returns the dotted names of all fields that would be ignored."""
    return [fault.field for fault in self.faults or (self,)]

  def within(self, section: str) -> Self:
    if not self.faults:
      return super().within(section)
    return self.joined([fault.within(section) for fault in self.faults])

  def of(self, *, field: str, value: Any = NO_VALUE) -> Self:
    if not self.faults:
      return super().of(field=field, value=value)
    return self  # each fault names its own field

  def at(self, place: str) -> Self:
    return self._of(str(self), place, self.faults or (self,))

  def __reduce__(self) -> tuple[Any, ...]:
    if not self.faults:
      return super().__reduce__()
    return self._of, (self.must, self.field, self.faults)
