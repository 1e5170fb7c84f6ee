"""The page of pitfalls is complete, true and fresh."""

import pytest

from tests import pitfalls


def test_every_number_that_is_cited_is_known_and_every_pitfall_has_a_test():
  assert set(pitfalls.by_number()) == set(pitfalls.PITFALLS)


def test_the_page_is_what_the_program_writes():
  assert pitfalls.PAGE.read_text() == pitfalls.page(), "run python -m tests.pitfalls"


def test_staleness_unknown_numbers_and_missing_tests_are_seen(monkeypatch, tmp_path):
  monkeypatch.setattr(pitfalls, "ROOT", tmp_path)
  monkeypatch.setattr(pitfalls, "PAGE", tmp_path / "PITFALLS.md")
  (tmp_path / "test_x.py").write_text("def test_p99_p1_unheard_of(): pass\n")
  assert pitfalls.by_number() == {
    1: ["test_x.py::test_p99_p1_unheard_of"],
    99: ["test_x.py::test_p99_p1_unheard_of"],
  }
  assert pitfalls.main([]) == 0 == pitfalls.main(["--check"])
  (tmp_path / "test_y.py").write_text("def test_p1_one_more(): pass\n")
  assert pitfalls.main(["--check"]) == 1
  assert pitfalls.main(["--what"]) == 2


@pytest.mark.parametrize("number", pitfalls.PITFALLS)
def test_texts_are_one_sentence_on_one_line(number):
  text = pitfalls.PITFALLS[number]
  assert text.endswith(".") and "\n" not in text and len(text) < 92


@pytest.mark.parametrize("number", pitfalls.PITFALLS)
def test_each_pitfall_has_a_severity_and_says_what_to_do(number):
  remedy = pitfalls.REMEDY[number]
  assert pitfalls.severity(number) in pitfalls.SEVERITY
  assert remedy.endswith(".") and "\n" not in remedy and len(remedy) < 92


def test_numbers_of_severities_and_remedies_are_known():
  assert set(pitfalls.REMEDY) == set(pitfalls.PITFALLS)
  lesser = [pitfalls._BESIDE, pitfalls._REPORT, pitfalls._TRAINING]
  assert set().union(*lesser) < set(pitfalls.PITFALLS)
  assert sum(map(len, lesser)) == len(set().union(*lesser))
