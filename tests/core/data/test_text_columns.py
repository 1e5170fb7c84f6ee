"""Texts in a table, and public tokenizers: what is declared is read, all else is one line."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import data
from dpjax.data import table_declaration, tables, tokenizer_files
from dpjax.experiments.kinds.central import build, facts
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.run import model_inputs
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks.gpt2 import save_gpt2
from tests.refuses import refuses

_REVIEWS = 'review,stars\n"a b, a",good\nb,bad\na a,good\nb b,bad\na,good\nb a,bad\n'


def declared(**changes):
  keys = {
    "columns": {"review": {"length": 5}},
    "target": {"column": "stars", "values": ["bad", "good"]},
    "split": {"test_share": 0.5, "salt": 1},
    "num_examples": 4,
  }
  return keys | changes


@pytest.fixture
def reviews(tmp_path):
  (tmp_path / "reviews.csv").write_text(_REVIEWS)
  (tmp_path / "reviews.json").write_text(json.dumps(declared()))
  return tmp_path / "reviews.csv"


def refused(source, declaration):
  with pytest.raises(UserError) as caught:
    tables.table(source, declaration)
  (line,) = str(caught.value).splitlines()
  return line


def test_a_column_of_texts_is_bytes_cut_and_padded(reviews):
  train, test = data.load(str(reviews))
  assert (train.vocab_size, train.num_classes, train.nominal_size) == (256, 2, 4)
  assert train.x.dtype == np.int32 and train.x.shape[1] == 5
  rows = {
    (bytes(row[row > 0].tolist()), int(label))
    for part in (train, test)
    for row, label in zip(part.x, part.y)
  }
  texts = [("a b, a", 1), ("b", 0), ("a a", 1), ("b b", 0), ("a", 1), ("b a", 0)]
  assert rows == {(line.encode()[:5], label) for line, label in texts}


def test_rows_of_a_server_are_read_by_the_same_code():
  got = tables.inputs(
    {"review": ["a b", "z\N{LATIN SMALL LETTER E WITH ACUTE}"]}, declared()
  )
  assert got.tolist() == [[97, 32, 98, 0, 0], [122, 195, 169, 0, 0]]
  assert tables.inputs({"review": []}, declared()).shape == (0, 5)
  # A file of the same name in the server's folder could give other tokens.
  with refuses("columns"):
    tables.inputs({"review": ["a"]}, declared(tokenizer="tokenizer.json"))


@pytest.mark.parametrize(
  "cell, says",
  [
    ("", "row 2, column 'review': holds no text"),
    (None, "row 2, column 'review': holds no text"),
    ("sec\0secret", "holds a zero byte, or half a character"),
    ("secret\ud800", "holds a zero byte, or half a character"),
  ],
)
def test_a_cell_that_is_no_text_is_one_line_without_the_cell(cell, says):
  columns = {"review": ["a", cell, "b"], "stars": ["good", "bad", "bad"]}
  line = refused(columns, declared())
  assert says in line and "secret" not in line


@pytest.mark.parametrize(
  "change, field",
  [
    ({"columns": {"review": {"length": 0}}}, "columns.review.length"),
    ({"columns": {"review": {"length": True}}}, "columns.review.length"),
    ({"columns": {"review": {"length": 5, "missing": ""}}}, "columns.review.length"),
    (
      {"columns": {"age": {"lower": 0, "upper": 9}, "review": {"length": 5}}},
      "columns.review",
    ),
    ({"target": {"column": "stars", "length": 3}}, "target"),
    ({"tokenizer": 3}, "tokenizer"),
    (
      {"columns": {"age": {"lower": 0, "upper": 9}}, "tokenizer": "tokenizer.json"},
      "tokenizer",
    ),
  ],
)
def test_a_wrong_declaration_names_its_key(change, field):
  with refuses(field):
    table_declaration.parse(declared(**change))


# --- tokenizers


def _saved(folder, words, **special):
  tokenizers = pytest.importorskip("tokenizers")
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(list(special))
  made.enable_padding(length=9)
  made.enable_truncation(1)
  made.save(str(folder / "tokenizer.json"))
  return folder / "tokenizer.json"


_WORDS = {"[PAD]": 0, "a": 1, "b": 2, "?": 3, "gap": 7}


def test_ids_are_the_files_own_where_zero_is_its_padding(tmp_path):
  read = tokenizer_files.read(_saved(tmp_path, _WORDS, **{"[PAD]": 0}))
  # The file's own padding and cut are left out; the largest id decides the size.
  assert read.ids("a b c") == [1, 2, 3] and (read.vocab_size, read.first_id) == (8, 0)
  assert read.rows(["a b", "a b a b"], 3).tolist() == [[1, 2, 0], [1, 2, 1]]
  # A word at 0 would be taken for padding.
  shifted = tokenizer_files.read(_saved(tmp_path, {"a": 0, "b": 1, "?": 2}))
  assert shifted.ids("a b c") == [1, 2, 3]
  assert (shifted.vocab_size, shifted.first_id) == (4, 1)
  # "[PAD]" as a plain word is no padding.
  assert tokenizer_files.read(_saved(tmp_path, _WORDS)).ids("a") == [2]


def test_a_run_names_the_tokenizer_and_is_claimed(tmp_path, reviews):
  path = _saved(tmp_path, _WORDS, **{"[PAD]": 0})
  (tmp_path / "reviews.json").write_text(json.dumps(declared(tokenizer="tokenizer.json")))
  config = TrainConfig(
    data=DataConfig(name=str(reviews)),
    model=ModelConfig("bert", {"vocab_size": 8, "num_layers": 1, "features": 8}),
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=1,
  )
  loaded = build.load_data(config)
  digest = tokenizer_files.read(path).sha256
  # The data know what has read them: no file is needed again.
  for gone in (path, tmp_path / "reviews.json", reviews):
    gone.unlink()
  run = build.assemble(config, loaded)
  run.save(tmp_path, run.algorithm.init(run.params))
  inputs = model_inputs.read(tmp_path)
  assert inputs.labels == ("bad", "good")
  assert inputs.declaration == declared(tokenizer="tokenizer.json")
  named = facts.planned_facts(config, run)["tokenizer"]
  assert named["vocab_size"] == 8 and named["sha256"] == digest
  assert run.guarantee.kind == "claimed"
  assert run.guarantee.failed_assumptions == (
    f"the tokenizer {path} was learnt from no record of this run",
  )
  assert named["sha256"][:16] in run.guarantee.statement(1)
  config.model.options["vocab_size"] = 7
  with refuses("model.options.vocab_size", value=7):
    build.assemble(config, loaded)


@pytest.mark.slow
def test_weights_of_gpt2_are_read_by_the_ids_of_their_tokenizer(tmp_path):
  _saved(tmp_path, {"a": 0, "b": 1, "?": 2})
  (tmp_path / "posts.txt").write_text("a b\nb c\na a\nb a\n")
  split = {"test_share": 0.5, "salt": 0}
  keys = {"example": "line", "length": 3, "tokenizer": "tokenizer.json", "split": split}
  (tmp_path / "posts.json").write_text(json.dumps({**keys, "num_examples": 3}))
  options = {"num_layers": 1, "num_heads": 1, "features": 4, "max_length": 3}
  options["norm_epsilon"] = 1e-5
  own = networks.Transformer(vocab_size=3, **options)
  begun = own.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
  save_gpt2(tmp_path / "gpt2.safetensors", own, begun)
  config = TrainConfig(
    data=DataConfig(
      name=str(tmp_path / "posts.txt"), declaration=str(tmp_path / "posts.json")
    ),
    model=ModelConfig("transformer", options),
    pretrained=str(tmp_path / "gpt2.safetensors"),
    safetensors=True,
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=1,
  )
  run = build.assemble(config)
  embedding = run.params["params"]["embed"]["embedding"]
  np.testing.assert_array_equal(embedding[1:], begun["params"]["embed"]["embedding"])
  assert run.guarantee.kind == "claimed" and len(run.guarantee.failed_assumptions) == 2
  run.save(tmp_path, run.algorithm.init(run.params))
  again = networks.load_gpt2(tmp_path / "model.safetensors", own)
  jax.tree.map(np.testing.assert_array_equal, again, begun)


def test_a_wrong_tokenizer_is_one_line(tmp_path, reviews):
  path = tmp_path / "tokenizer.json"
  keys = declared(tokenizer="tokenizer.json")
  assert "cannot be read (No such file" in refused(reviews, keys)
  path.mkdir()
  assert "must be a file, not a folder" in refused(reviews, keys)
  path.rmdir()
  with path.open("wb") as file:
    file.truncate(2**29)
  assert "is larger than" in refused(reviews, keys)
  pytest.importorskip("tokenizers")
  for content in ("{}", "", "[" * 10_000, '{"model": 3}', "\0"):
    path.write_text(content)
    assert "is no tokenizer.json (" in refused(reviews, keys)


def test_a_hostile_tokenizer_gives_no_other_tokens_and_no_panic(tmp_path):
  saved = _saved(tmp_path, _WORDS, **{"[PAD]": 0})
  plain = json.loads(saved.read_text())

  def refusal(**changes):
    saved.write_text(json.dumps({**plain, **changes}))
    with pytest.raises(UserError) as caught:
      tokenizer_files.read(saved).ids("a secret")
    assert "secret" not in str(caught.value)
    return str(caught.value)

  # Its number of tokens is 8: embeddings of a model have no row 999.
  around = {"type": "RobertaProcessing", "sep": ["s", 999], "cls": ["c", 1]}
  around |= {"trim_offsets": True, "add_prefix_space": False}
  assert "are none of its 8" in refusal(post_processor=around)
  huge = {**plain["model"], "vocab": {**_WORDS, "huge": 2**31}}
  assert "has a token above 2147483647" in refusal(model=huge)
  # Each reading would have other tokens, and so other data.
  random = {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0, "b": 1}, "merges": []}
  assert "draws tokens at random (dropout)" in refusal(model=random)
  # Panics of Rust derive from BaseException: of a text, and of the file.
  around = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
  around["single"] = [{"SpecialToken": {"id": "[X]", "type_id": 0}}]
  assert "cannot read a text of these (Panic" in refusal(post_processor=around)
  broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
  assert "is no tokenizer.json (Precompiled" in refusal(normalizer=broken)
