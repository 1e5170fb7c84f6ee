"""Loads data for all kinds of run whose config has a section about data, `config.data`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from dpjax import data
from dpjax.experiments.kinds.central.config import DataConfig
from dpjax.validate import UserError


def load(config: DataConfig, **more: Any) -> tuple[Any, Any]:
  """Loads (train, test); errors name fields of the section `data`.

  Args:
    config: section `data` of a config.
    more: other arguments of `dpjax.data.load`.
  """
  with errors_of_data():
    return data.load(
      config.name,
      data_dir=config.data_dir,
      num_classes=config.num_classes,
      num_examples=config.num_examples,
      declaration=config.declaration,
      **more,
    )


@contextlib.contextmanager
def errors_of_data() -> Iterator[None]:
  """Makes errors about arguments of `dpjax.data` name the fields of a config's section `data`.

  >>> with errors_of_data():
  ...   raise UserError("there is no such file", field="name", value="a.npz")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: data.name='a.npz': there is no such file
  """
  try:
    yield
  except UserError as error:
    if error.field in (field.name for field in dataclasses.fields(DataConfig)):
      raise error.within("data") from error
    raise
