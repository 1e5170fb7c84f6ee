"""Finds the tokenizer of a run's texts, and adds its assumption to the guarantee.

A vocabulary reveals something of the texts that it was learnt from, and these texts are unknown. So
the guarantee is a claim, as for a run that starts from public weights (`saved.assumed`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpjax import data
from dpjax.accounting.text import paragraph
from dpjax.data import tables, tokenizer_files
from dpjax.experiments.kinds.central.config import DataConfig
from dpjax.experiments.run import guarantee
from dpjax.validate import UserError
from dpjax.zoo.datasets import registry


def of(config: DataConfig) -> tokenizer_files.Tokenizer | None:
  """Returns the tokenizer that the declaration of a table or a text file names.

  Returns None if no tokenizer is named, or if the data are no such file.
  """
  path = registry.user_path(config.name, config.data_dir)
  is_text = registry.takes_declaration(config.name) and not config.name.endswith("/")
  # Data that a program passes directly have a name, but no file.
  if not is_text or not path.exists():
    return None
  declared = registry.declared_at(config.declaration, config.data_dir)
  tokenizer = tables.declared_content(path, declared).get("tokenizer")
  return None if tokenizer is None else tokenizer_files.read(path.parent / tokenizer)


def facts(config: DataConfig) -> dict[str, Any] | None:
  """Returns path, digest and size of the tokenizer for result.json; None without a tokenizer."""
  tokenizer = of(config)
  if tokenizer is None:
    return None
  named = {"path": tokenizer.path, "sha256": tokenizer.sha256}
  return {**named, "vocab_size": tokenizer.vocab_size}


def check_vocabulary(model: Any, dataset: data.Dataset, name: str) -> None:
  """Raises UserError for data with more tokens than the model has embeddings.

  JAX would silently read the embedding of another token.

  Args:
    name: name of the model.
  """
  known = getattr(model, "vocab_size", None)
  tokens = dataset.vocab_size if dataset.x.dtype == np.int32 else None
  if isinstance(known, int) and tokens is not None and tokens > known:
    raise UserError(
      f"must be at least {tokens}, the tokens of the data, for model.name={name!r}",
      field="model.options.vocab_size",
      value=known,
    )


def noted(promised: guarantee.Guarantee, config: DataConfig) -> guarantee.Guarantee:
  """Returns the guarantee; if the texts have a tokenizer, as a claim that names it."""
  tokenizer = of(config)
  if tokenizer is None:
    return promised
  note = (
    f"Tokens. The texts are read by the tokenizer {tokenizer.path} of {tokenizer.vocab_size} "
    f"tokens (SHA-256 {tokenizer.sha256[:16]}...). Nothing is promised to texts that it was learnt "
    "from; that none of this run's records are among them is assumed, not checked."
  )
  assumed = f"the tokenizer {tokenizer.path} was learnt from no record of this run"
  wrapped = paragraph(note)
  return guarantee.noted(promised, wrapped, assumed)
