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

import os
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dpjax import names, validate
from dpjax.data import npz, prepared, registry, tables
from dpjax.data.dataset import Dataset
from dpjax.data.federation import Federation
from dpjax.validate import UserError

Pair = tuple[Federation, Federation]  # train, test


def by_client(
  dataset: Dataset,
  client_ids: Sequence[Any] | np.ndarray,
  *,
  sizes: Sequence[int] | np.ndarray | None = None,
  max_examples: int | None = None,
) -> Federation:
  """Groups rows into one client for each id. Clients are ordered by id as text: 10 before 2.

  Rows of a client keep their order.

  Args:
    client_ids: owners of the examples [n], as text, UTF-8 bytes or integers. b"7", "7" and 7
      are one client.
    sizes: lengths of consecutive stretches of rows, each of one client. If they are given,
      `client_ids` has one id for each stretch, and a stretch may have length 0.
    max_examples: public upper limit on the number of examples of a client. The client's first
      examples are kept. None: all are kept.

  Raises:
    UserError: one line: an id that is empty, or neither text nor an integer; a number of ids
      that does not fit the data.

  >>> from dpjax.data.dataset import from_arrays
  >>> d = from_arrays(np.arange(4.0)[:, None], [0, 1, 1, 0], num_classes=2)
  >>> fed = by_client(d, ["bob", b"ann", "bob", "bob"], max_examples=2)
  >>> fed.client_ids, fed.client("bob").x.ravel().tolist()
  (('ann', 'bob'), [0.0, 2.0])
  """
  if max_examples is not None:
    validate.integer_at_least(1, max_examples=max_examples)
  ids = texts(client_ids)
  counts = np.ones(len(ids), np.int64) if sizes is None else np.asarray(sizes, np.int64)
  if len(counts) != len(ids) or counts.sum() != len(dataset):
    raise UserError(
      "must be one for each example, or with `sizes` one for each client, whose sizes add up to "
      "the number of examples",
      field="client_ids",
    )
  if not ids:
    raise UserError("must name at least one client", field="client_ids")
  distinct = sorted(set(ids))
  places = {name: place for place, name in enumerate(distinct)}
  stretches = np.fromiter(map(places.__getitem__, ids), np.int64, len(ids))
  owners = np.repeat(stretches, counts)  # [n]
  if max_examples is not None:
    by_owner, first = _sorted(owners, 0)
    # Number of earlier rows of the same owner, for each row.
    before = np.arange(len(by_owner)) - first[owners[by_owner]]
    kept = np.sort(by_owner[before < max_examples])
    dataset = dataset.subset(kept)
    owners = owners[kept]
  order, starts = _sorted(owners, len(distinct))
  return Federation(dataset, np.split(order, starts[1:]), distinct)


def _sorted(owners: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (row numbers sorted by owner [n], start of each owner's rows in them [num_clients]).
  Rows of one owner keep their order."""
  ends = np.cumsum(np.bincount(owners, minlength=num_clients))
  return np.argsort(owners, kind="stable"), np.concatenate([[0], ends[:-1]])


def texts(client_ids: Iterable[Any]) -> list[str]:
  """Returns ids as text in one normal form, so that all types and encodings of one id become equal.

  Raises UserError for an id that is empty, or neither text nor an integer.

  >>> texts([b"ann", "ann", 7, np.int64(7)])
  ['ann', 'ann', '7', '7']
  """
  plain_ids: list[Any] = [
    client_id.item()
    if isinstance(client_id, np.generic | np.ndarray) and client_id.ndim == 0
    else client_id
    for client_id in client_ids
  ]
  kinds = set(map(type, plain_ids))
  if not kinds <= {str, bytes, int}:
    wrong = next(
      client_id for client_id in plain_ids if type(client_id) not in (str, bytes, int)
    )
    raise UserError(f"must be text or integers, got {wrong!r:.60}", field="client_ids")
  try:
    ids = list(map(_text, plain_ids))
    # `encode` fails for a lone surrogate, which UTF-8 cannot encode.
    "".join(ids).encode()
  except UnicodeError as error:
    raise UserError(
      f"must be UTF-8, got {error.object!r:.60}",  # type: ignore[attr-defined]
      field="client_ids",
    ) from None
  if "" in ids:
    raise UserError(
      f"the id at place {ids.index('')} is empty; records of nobody knows whom "
      "have no privacy per client: leave them out when the data are prepared",
      field="client_ids",
    )
  return ids


def _text(client_id: str | bytes | int) -> str:
  text = client_id.decode() if isinstance(client_id, bytes) else str(client_id)
  # One character, such as an accented letter, may have several encodings. NFC makes them equal.
  return unicodedata.normalize("NFC", text)


def paired(train: Federation, test: Federation, name: str) -> Pair:
  """Returns (train, test). Raises UserError if their examples differ in type or shape, or if train
  or test is empty."""
  kinds = [(fed.dataset.x.shape[1:], fed.dataset.x.dtype) for fed in (train, test)]
  if kinds[0] != kinds[1]:
    shapes = " and ".join(f"{dtype} {shape}" for shape, dtype in kinds)
    raise UserError(
      f"train and test differ in what one example is: {shapes}", field="name", value=name
    )
  if not (len(train) and len(test)):
    raise UserError(
      "train and test must hold at least one example each", field="name", value=name
    )
  return train, test


# --- data with a field that names the client


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
      A data set that tensorflow-datasets has prepared (sentiment140, with the field "user").
      The path of an `.npz`, whose arrays "NAME_train" and "NAME_test" hold ids (NAME: `client_id`).
      The path of a table (.csv, .tsv or .parquet) with a column `client_id`.
      `package.module:name`: a function of no arguments that returns two `Federation`s.
    data_dir, max_length: as in `data.load`.
    num_classes: number of classes, for an .npz or prepared data that do not declare it.
    client_id: name of the field; "" for a function.
    declaration: declaration of a table, as in `data.load`.
    max_examples: as in `by_client`, for each client in train and in test.

  Raises:
    UserError: one line: data that `data.load` or `by_client` refuses, a missing field, or a
      declaration for data that are no table.
  """
  if declaration is not None and not tables.is_table(name):
    raise UserError(
      f"would be ignored, name={name!r:.60} is no table",
      field="declaration",
      value=declaration,
    )
  if names.is_path(name):
    return _of_user(name, client_id, max_examples)
  if not client_id:
    raise UserError(
      "must name the field that says whose each record is", field="client_id", value=""
    )
  if tables.is_table(name):
    path = registry.user_path(name, data_dir)
    held = registry.declared_at(declaration, data_dir)
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
    return paired(make(parts[0]), make(parts[1]), name)


def _of_user(name: str, client_id: str, max_examples: int | None) -> Pair:
  for field, value in {"client_id": client_id, "max_examples": max_examples}.items():
    if value not in ("", None):
      raise UserError(
        f"would be ignored, name={name!r} returns clients as they are",
        field=field,
        value=value,
      )
  federations = names.call(name, "data.name")
  pair = isinstance(federations, tuple) and len(federations) == 2
  if not pair or not all(isinstance(part, Federation) for part in federations):
    raise UserError(
      f"must return (train, test), two dpjax.data.Federation, not {federations!r:.60}",
      field="data.name",
      value=name,
    )
  return paired(federations[0], federations[1], name)
