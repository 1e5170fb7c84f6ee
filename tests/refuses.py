"""What a test asks of a refusal: the error's class, the field and its value, and not its words."""

import contextlib
import re

import pytest

from dpjax.validate import NO_VALUE, UserError


@contextlib.contextmanager
def refuses(*fields, value=NO_VALUE, error=UserError):
  """Context in which an error about one of `fields` must be raised; gives pytest's `ExceptionInfo`.

  Args:
    *fields: names as the user typed them, such as "privacy.delta". Without any, all will do.
    value: the value that the error must show. Without it, every value will do.
    error: the class of the error.

  >>> with refuses("delta", value=2.0):
  ...   raise UserError("must be in (0, 1)", field="delta", value=2.0)
  """
  with pytest.raises(error) as caught:
    yield caught
  # Some errors have their field in the text alone, which then begins with it.
  named = re.match(r"[\w.\[\]']+(?=[=:]|$)", caught.value.field or str(caught.value))
  field = named[0] if named else ""
  assert not fields or field in fields, str(caught.value)
  if value is not NO_VALUE:
    assert caught.value.is_about(caught.value.field, value), str(caught.value)
