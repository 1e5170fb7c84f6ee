"""Natural federations: a field of the data names the owner of each record.

All records with one id are one client, wherever they lie in the files and whether the id is text,
bytes or a number. User-level privacy protects an id: a person with two ids is two clients. Clients
are sorted by id, and rows keep the order of the data. So the records that a client holds and keeps
do not depend on the records of other clients.

`natural_federation` reads prepared data, .npz files and tables with a field that names the client.
`leaf_federation`, `tff_federation` and `pfl_federation` read file formats that name the client of
each record.
Vocabulary and classes are declared, never taken from the data. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import os

from dpjax import names, validate
from dpjax.data import npz, tables
from dpjax.data.federation import Federation, Pair, by_client, check_pair
from dpjax.validate import UserError
from dpjax.zoo.datasets import prepared, registry
from dpjax.zoo.datasets.published import PUBLISHED, has_owners


def natural_federation(
  name: str,
  data_dir: str | os.PathLike[str] | None = None,
  *,
  client_id: str = "",
  max_length: int = 256,
  num_classes: int | None = None,
  max_examples: int | None = None,
  declaration: tables.Declared = None,
) -> Pair:
  """Loads (train, test), with one client for each value of the field `client_id`.

  Test clients need not be training clients.

  Args:
    name: one of the following.
      A published data set whose records have owners (smartwatch), with client_id="".
      A data set that tensorflow-datasets has prepared (sentiment140, with the field "user").
      The path of an `.npz`, whose arrays "NAME_train" and "NAME_test" hold ids (NAME: `client_id`).
      The path of a table (.csv, .tsv or .parquet) with a column `client_id`.
      `package.module:name`: a function of no arguments that returns two `Federation`s.
    data_dir, max_length: as in `data.load`.
    num_classes: number of classes, for an .npz or prepared data that do not declare it.
    client_id: name of the field; "" for a function, and for a published data set with owners.
    declaration: declaration of a table, as in `data.load`.
    max_examples: as in `by_client`, for each client in train and in test.

  Raises:
    UserError: one line: data that `data.load` or `by_client` refuses, a missing field, or a
      declaration for data that are no table.
  """
  if declaration is not None and not registry.is_table(name):
    raise UserError(
      f"would be ignored, name={name!r:.60} is no table",
      field="declaration",
      value=declaration,
    )
  if names.is_path(name):
    return _of_user(name, client_id, max_examples)
  if has_owners(name):
    return _of_owners(name, data_dir, client_id, num_classes, max_examples)
  if not client_id:
    raise UserError(
      "must name the field that says whose each record is", field="client_id", value=""
    )
  if registry.is_table(name):
    path = registry.user_path(name, data_dir)
    held = registry.declaration_at(declaration, data_dir)
    parts = list(zip(*tables.table_fields(path, client_id, held)))
  elif name.endswith(".npz"):
    parts = npz.load_npz_fields(registry.user_path(name, data_dir), client_id, num_classes)
  else:
    root = registry.prepared_root(name, data_dir)
    parts = prepared.load_prepared_fields(
      name, root, client_id, max_length=max_length, num_classes=num_classes
    )
  make = lambda part: by_client(*part, max_examples=max_examples)
  with validate.about("client_id", client_id):
    return check_pair(make(parts[0]), make(parts[1]), name)


def _of_owners(
  name: str,
  data_dir: str | os.PathLike[str] | None,
  client_id: str,
  num_classes: int | None,
  max_examples: int | None,
) -> Pair:
  for field, value in {"client_id": client_id, "num_classes": num_classes}.items():
    if value not in ("", None):
      raise UserError(
        f"would be ignored, name={name!r} declares it itself", field=field, value=value
      )
  row = PUBLISHED[name]
  train, test = (
    by_client(*part, max_examples=max_examples) for part in row.load_owners()(data_dir)
  )
  return check_pair(dataclasses.replace(train, nominal_users=row.num_users), test, name)


def _of_user(name: str, client_id: str, max_examples: int | None) -> Pair:
  for field, value in {"client_id": client_id, "max_examples": max_examples}.items():
    if value not in ("", None):
      raise UserError(
        f"would be ignored, name={name!r} returns clients as they are",
        field=field,
        value=value,
      )
  federations = names.call(name, "data.name")
  are_two = isinstance(federations, tuple) and len(federations) == 2
  if not are_two or not all(isinstance(part, Federation) for part in federations):
    raise UserError(
      f"must return (train, test), two dpjax.data.Federation, not {federations!r:.60}",
      field="data.name",
      value=name,
    )
  return check_pair(federations[0], federations[1], name)
