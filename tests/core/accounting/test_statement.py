"""The statement says everything that an epsilon depends on."""

import re

import dp_accounting as dpa

from dpjax import accounting
from dpjax.accounting.statement import delta_warning
from tests.refuses import refuses

_RUN = accounting.compose(
  accounting.poisson_sampled_event(accounting.gaussian_event(1.25), sampling_prob=0.01),
  4000,
)


def _words(text):
  return " ".join(text.split())


def _table(text):
  return dict(re.findall(r"^(pld|rdp|paper) +(.+)$", text, flags=re.MULTILINE))


def test_all_assumptions_are_named():
  text = _words(accounting.privacy_statement(_RUN, delta=1e-5, num_examples=60_000))
  for words in (
    "Unit: one example",
    "add_or_remove_one",
    "delta 1e-05",
    "60000 examples",
    "public",
    "4000 x Gaussian noise of 1.25 times the clip norm",
    "Poisson sample",
    "with probability 0.01",
    "every iterate, hence also the last one",
    "choice of hyper-parameters",
    "kind: proved",
  ):
    assert words in text, words
  assert "WARNING" not in text


def test_the_table_is_the_accountants_answer_rounded_up():
  table = _table(accounting.privacy_statement(_RUN, delta=1e-5))
  for accountant, value in table.items():
    exact = accounting.epsilon(_RUN, delta=1e-5, accountant=accountant)
    assert exact <= float(value) <= exact + 1e-4
  assert set(table) == {"pld", "rdp"}


def test_a_share_of_delta_can_be_set_aside():
  table = _table(accounting.privacy_statement(_RUN, delta=1e-5, delta_set_aside=5e-6))
  exact = accounting.epsilon(_RUN, delta=5e-6)
  assert exact <= float(table["pld"]) <= exact + 1e-4


def test_fixed_size_batches_say_what_is_assumed():
  event = accounting.fixed_size_event(
    accounting.gaussian_event(4.0), num_examples=100, batch_size=7
  )
  text = accounting.privacy_statement(
    event, delta=1e-5, neighboring_relation="replace_one", unit="user"
  )
  assert 0 < float(_table(text)["pld"]) < float(_table(text)["rdp"])
  assert "7 distinct users of 100" in _words(text)
  assert "one user exchanged for any other" in _words(text)


def test_epsilons_from_elsewhere_are_called_what_they_are():
  text = accounting.privacy_statement(
    _RUN, delta=1e-5, epsilon_kind="claimed", epsilons={"paper": 2.0}
  )
  assert _table(text) == {"paper": "2.0000"}
  assert "kind: claimed" in _words(text) and "NOT proved" in _words(text)
  with refuses("epsilon_kind"):
    accounting.privacy_statement(_RUN, delta=1e-5, epsilon_kind="certain")


def test_a_run_without_noise_is_infinite():
  text = accounting.privacy_statement(dpa.NonPrivateDpEvent(), delta=1e-5)
  assert _table(text) == {"pld": "inf", "rdp": "inf"}
  assert "a release without noise" in text


def test_a_delta_of_one_record_or_more_deserves_a_warning():
  assert delta_warning(1e-5, 60_000) is None
  for delta in (1e-3, 1e-2):
    warning = delta_warning(delta, 1000)
    assert warning is not None and "one record" in _words(warning)
  with refuses("num_examples", value=0):
    accounting.privacy_statement(_RUN, delta=1e-3, num_examples=0)
  text = accounting.privacy_statement(_RUN, delta=1e-3, num_examples=1000)
  assert "WARNING: delta=0.001 is not below 1/num_examples=0.001" in _words(text)
