"""What the tokenizer of a run's texts means for its model and for its guarantee.

A vocabulary reveals something of the texts that it was learnt from, and these texts are unknown. So
the guarantee is a claim, as for a run that starts from public weights (`saved.assumption`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpjax import data
from dpjax.accounting.text import paragraph
from dpjax.experiments.run import guarantee
from dpjax.validate import UserError


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


def add_note(
  promised: guarantee.Guarantee, tokenizer: Mapping[str, Any]
) -> guarantee.Guarantee:
  """Returns the guarantee of a run on texts, as a claim that names their tokenizer."""
  path = tokenizer["path"]
  note = (
    f"Tokens. The texts are read by the tokenizer {path} of {tokenizer['vocab_size']} "
    f"tokens (SHA-256 {tokenizer['sha256'][:16]}...). Nothing is promised to texts that it was "
    "learnt from; that none of this run's records are among them is assumed, not checked."
  )
  assumed = f"the tokenizer {path} was learnt from no record of this run"
  return guarantee.add_note(promised, paragraph(note), assumed)
