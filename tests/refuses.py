"""What a test asks of a refusal: the error's class, the field and its value, and not its words."""

import contextlib

import pytest

from dpjax.validate import NO_VALUE, UserError


@contextlib.contextmanager
def refuses(field, *, value=NO_VALUE, error=UserError):
  """Context in which an error about `field` must be raised; gives pytest's `ExceptionInfo`.

  Args:
    field: its name as the user typed it, such as "privacy.delta".
    value: the value that the error must show. Without it, every value will do.
    error: the class of the error.

  >>> with refuses("delta", value=2.0):
  ...   raise UserError("must be in (0, 1)", field="delta", value=2.0)
  """
  with pytest.raises(error) as caught:
    yield caught
  assert caught.value.field == field, str(caught.value)
  if value is not NO_VALUE:
    assert caught.value.is_about(field, value), str(caught.value)
