"""`python -m launch.account`: every unknown, the curve, and mistakes in one line."""

import csv
import math
import re

import pytest
from absl import flags

from dpjax import accounting, solve
from dpjax.accounting import trade_off_files
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.validate import UserError
from launch import account
from tests import commands
from tests.checks import finished_runs
from tests.refuses import refuses


def _run(*args):
  return commands.run("launch.account", *args)


def _flags(*args):
  values = flags.FlagValues()
  account.define_flags(values)
  values(["account", *args])
  return values


def _ask(*args):
  return account.questions(_flags(*args))


def _answer(*args):
  (question,) = _ask(*args)
  return solve.solve(question)


def _epsilons(text):
  """accountant -> epsilon, of the table's rows."""
  rows = re.findall(r"^ +(pld|rdp) .* ([\d.]+|inf)$", text, flags=re.MULTILINE)
  return {by: float(value) for by, value in rows}


def _dp_sgd(z, q, steps):
  noise = accounting.gaussian_event(z)
  return accounting.compose(accounting.poisson_sampled_event(noise, sampling_prob=q), steps)


@pytest.mark.slow
def test_the_command_gives_epsilon_and_the_statement():
  done = _run(
    "--noise_multiplier=1.5",
    "--num_examples=1000",
    "--batch_size=20",
    "--epochs=2.5",
    "--delta=1e-4",
    "--statement",
  )
  assert (done.returncode, done.stderr) == (0, "")
  event = _dp_sgd(1.5, 0.02, 125)
  for by, value in _epsilons(done.stdout).items():
    exact = accounting.epsilon(event, delta=1e-4, accountant=by)
    assert exact <= value <= exact + 1e-4
  assert set(_epsilons(done.stdout)) == {"pld", "rdp"}
  assert "Privacy statement" in done.stdout and "1000 examples" in done.stdout


@pytest.mark.slow
def test_the_command_writes_a_curve_of_several_noise_levels(tmp_path):
  folder = tmp_path / "new" / "curve"
  done = _run(
    "--noise_multiplier=1,2", "--sampling_prob=0.02", "--num_steps=50", f"--curve={folder}"
  )
  assert (done.returncode, done.stderr) == (0, "")
  with (folder / "epsilon_curve.csv").open() as file:
    rows = list(csv.DictReader(file))
  seen = {(row["accountant"], float(row["noise_multiplier"])) for row in rows}
  assert seen == {(by, z) for by in ("pld", "rdp") for z in (1.0, 2.0)}
  for row in rows:
    if row["num_steps"] in ("1", "50"):
      event = _dp_sgd(float(row["noise_multiplier"]), 0.02, int(row["num_steps"]))
      exact = accounting.epsilon(event, delta=1e-5, accountant=row["accountant"])
      assert float(row["epsilon"]) == pytest.approx(exact)
  assert (folder / "epsilon_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.cases(slow=[0, 2, 3, 4, 5])
@pytest.mark.parametrize(
  "args, words",
  [
    (["--noise_multiplier=1", "--num_steps=3"], "--epsilon: must be given"),
    (["--epsilon=abc"], "--epsilon=abc: must be"),
    (["--num_steps=1.5"], "--num_steps=1.5: must be"),
    (
      ["--noise_multiplier=1", "--batch_size=9", "--num_examples=3", "--num_steps=1"],
      "--batch_size=9: must be",
    ),
    (["--q=.1"], "--sampling_prob"),
    (
      [
        "--noise_multiplier=1",
        "--num_steps=3",
        "--sampling_prob=.1",
        "--neighboring_relation=replace_one",
      ],
      "neighboring_relation='replace_one': must be add_or_remove_one",
    ),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, words):
  done = _run(*args)
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.count("\n") == 1 and words in done.stderr


def test_a_curve_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
  (tmp_path / "file").write_text("")
  done = _run(
    "--noise_multiplier=9",
    "--sampling_prob=.1",
    "--num_steps=2",
    f"--curve={tmp_path}/file",
  )
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.count("\n") == 1 and "curve=" in done.stderr


def test_a_curve_does_not_replace_the_trade_off_of_a_run(tmp_path):
  (tmp_path / "result.json").write_text("{}")
  with refuses("curve", value=str(tmp_path)):
    account._check_companions(_flags(f"--curve={tmp_path}"))


def test_help_shows_examples_and_flags():
  done = _run("--help")
  assert "python -m launch.account --noise_multiplier=1.1" in done.stdout
  for name in ("epsilon", "sampling_prob", "curve", "[no]statement", "accountant"):
    assert f"--{name}:" in done.stdout


@pytest.mark.slow
def test_each_unknown_is_solved_on_the_private_side():
  known = ["--epsilon=1.5", "--accountant=rdp", "--delta=1e-6"]
  z, q, steps = "--noise_multiplier=1.2", "--sampling_prob=0.01", "--num_steps=300"
  for args in ([q, steps], [z, steps], [z, q]):
    answer = _answer(*known, *args)
    event = _dp_sgd(answer.noise_multiplier, answer.sampling_prob, answer.num_steps)
    found = accounting.epsilon(event, delta=1e-6, accountant="rdp")
    assert 1.5 * (1 - 5e-3) <= found <= 1.5
    for value in (answer.noise_multiplier, answer.sampling_prob):
      assert float(f"{value:.6g}") == pytest.approx(value, rel=1e-12)  # shown as it is


def test_what_is_shown_is_rounded_to_the_private_side():
  target = {"epsilon": 1.5, "delta": 1e-5, "accountant": "rdp"}
  known = ["--epsilon=1.5", "--accountant=rdp", "--num_steps=30"]
  z = accounting.calibrate_noise_multiplier(lambda z: _dp_sgd(z, 0.01, 30), **target)
  assert z < _answer(*known, "--sampling_prob=0.01").noise_multiplier < z * (1 + 1e-5)
  q = accounting.calibrate_sampling_prob(lambda q: _dp_sgd(1.2, q, 30), **target)
  assert q * (1 - 1e-5) < _answer(*known, "--noise_multiplier=1.2").sampling_prob < q


@pytest.mark.slow
def test_pld_solves_when_both_are_shown():
  (question,) = _ask("--epsilon=1", "--sampling_prob=0.01", "--num_steps=100")
  assert question.accountants == ("pld", "rdp")
  answer = solve.solve(question)
  assert solve.epsilon_of(answer, "pld") <= 1 < solve.epsilon_of(answer, "rdp")


@pytest.mark.long
def test_fixed_size_batches_are_whole_and_under_replace_one():
  (question,) = _ask(
    "--sampler=fixed_size",
    "--epsilon=1",
    "--noise_multiplier=6",
    "--num_steps=50",
    "--num_examples=777",
  )
  assert question.neighboring_relation == "replace_one"
  assert question.accountants == ("pld", "rdp")
  answer = solve.solve(question)
  batch = answer.sampling_prob * 777
  assert batch == pytest.approx(round(batch)) and solve.epsilon_of(answer, "pld") <= 1
  larger = answer._replace(sampling_prob=(round(batch) + 1) / 777)
  assert solve.epsilon_of(larger, "pld") > 1


def test_without_a_sampler_every_step_sees_all_data():
  answer = _answer("--sampler=none", "--noise_multiplier=4", "--num_steps=4")
  one = accounting.epsilon(accounting.gaussian_event(2.0), delta=1e-5)
  assert solve.epsilon_of(answer, "pld") == pytest.approx(one)


@pytest.mark.parametrize(
  "epochs, prob, steps",
  [(40, 0.01, 4000), (7, 0.07, 100), (1, 0.3, 4), (0.1, 0.5, 1), (60, 1 / 3, 180)],
)
def test_p27_epochs_are_rounded_up_to_whole_steps(epochs, prob, steps):
  (question,) = _ask(
    f"--epochs={epochs}", f"--sampling_prob={prob!r}", "--noise_multiplier=1"
  )
  assert question.num_steps == steps


@pytest.mark.parametrize(
  "args",
  [
    ["--epsilon=1", "--noise_multiplier=1", "--num_steps=1", "--sampling_prob=.1"],
    ["--epochs=1", "--num_steps=1", "--sampling_prob=.1"],
    ["--epochs=1", "--epsilon=1", "--noise_multiplier=1"],
    ["--epochs=1e300", "--noise_multiplier=1", "--sampling_prob=.1"],
    ["--batch_size=3", "--num_steps=1", "--noise_multiplier=1"],
    ["--batch_size=3", "--num_examples=2", "--num_steps=1", "--noise_multiplier=1"],
    ["--batch_size=3", "--num_examples=9", "--sampling_prob=.1", "--num_steps=1"],
    ["--sampling_prob=1.5", "--num_steps=1", "--noise_multiplier=1"],
    ["--sampling_prob=.5", "--num_steps=0", "--noise_multiplier=1"],
    ["--sampling_prob=.5", "--num_steps=1", "--noise_multiplier=1,x"],
    ["--sampling_prob=.5", "--num_steps=1", "--noise_multiplier=-1"],
    ["--sampler=none", "--sampling_prob=.5", "--num_steps=1", "--noise_multiplier=1"],
    ["--sampler=fixed_size", "--sampling_prob=.5", "--num_steps=1", "--noise_multiplier=1"],
  ],
)
def test_unclear_questions_are_user_errors(args):
  with pytest.raises(UserError) as error:
    _ask(*args)
  assert "\n" not in str(error.value)


def test_no_noise_costs_everything():
  answer = _answer("--noise_multiplier=0", "--sampling_prob=.5", "--num_steps=1")
  assert solve.epsilon_of(answer, "pld") == math.inf
  assert "inf" in account.table([answer])


def test_a_truncated_sample_is_replace_special_by_pld_and_costs_more():
  given = ("--noise_multiplier=1.5", "--num_examples=1000", "--batch_size=20")
  (cut,) = _ask("--sampler=truncated_poisson", "--capacity=24", "--num_steps=50", *given)
  assert cut.neighboring_relation == "replace_special"
  assert cut.accountants == ("pld",)
  (plain,) = _ask("--num_steps=50", *given)
  assert solve.epsilon_of(cut, "pld") > solve.epsilon_of(plain, "pld")
  assert "gdp" not in account.table([cut])
  with refuses("capacity"):
    _ask("--sampler=truncated_poisson", "--num_steps=50", *given)
  with refuses("capacity", value=24):
    _ask("--capacity=24", "--num_steps=50", *given)
  with refuses("num_examples", value=None):
    _ask("--sampler=truncated_poisson", "--capacity=9", "--num_steps=5", "--epsilon=1")


def test_the_approximation_is_shown_on_request_and_labelled():
  given = ("--noise_multiplier=1.1", "--num_steps=100")
  (asked,) = _ask("--sampling_prob=0.01", *given)
  row = account.table([asked], gdp=True).splitlines()[-1]
  assert "gdp (APPROXIMATION, not a bound)" in row
  assert float(row.split()[-1]) < solve.epsilon_of(asked, "pld")  # too small, in truth
  (unasked,) = _ask("--sampling_prob=0.01", *given)
  assert "gdp" not in account.table([unasked])
  (unsampled,) = _ask("--sampler=none", *given)
  assert "gdp (exact)" in account.table([unsampled], gdp=True)


def test_random_allocation_is_one_pass_or_several_with_poisson_beside_it():
  (one,) = _ask("--sampler=random_allocation", "--noise_multiplier=2", "--num_steps=4")
  assert one.steps_per_pass == 4 and one.accountants == ("pld", "rdp")
  once = random_allocation_event(accounting.gaussian_event(2.0), num_steps=4)
  assert solve.run_event(one) == accounting.compose(once, 1)
  # 9 steps of 4 a pass: the third pass is charged whole
  (more,) = _ask(
    "--sampler=random_allocation", "--noise_multiplier=2", "--num_steps=9",
    "--sampling_prob=0.25",
  )  # fmt: skip
  assert solve.run_event(more) == accounting.compose(once, 3)
  lines = account.table([one]).splitlines()
  names = [line.split()[0] for line in lines]
  assert names == ["accountant", "pld", "rdp", "launch.train", "poisson"]


@pytest.mark.slow
def test_random_allocation_solves_for_whole_passes():
  answer = _answer(
    "--sampler=random_allocation", "--noise_multiplier=8", "--sampling_prob=0.5",
    "--epsilon=1",
  )  # fmt: skip
  assert answer.num_steps % 2 == 0
  assert solve.epsilon_of(answer, "pld") <= 1
  more = answer._replace(num_steps=answer.num_steps + 1)
  assert solve.epsilon_of(more, "pld") > 1


@pytest.mark.parametrize(
  "args, field",
  [
    (("--epsilon=1", "--noise_multiplier=2"), "sampling_prob"),
    (("--sampling_prob=2", "--num_steps=4", "--noise_multiplier=2"), "sampling_prob"),
    (
      ("--sampling_prob=1e-320", "--num_steps=4", "--noise_multiplier=2"),
      "sampling_prob",
    ),
    (  # as launch.train does, whose passes are whole
      ("--sampling_prob=0.3", "--num_steps=4", "--noise_multiplier=2"),
      "sampling_prob",
    ),
    (
      (
        "--batch_size=4096",
        "--num_examples=60000",
        "--num_steps=4",
        "--noise_multiplier=2",
      ),
      "batch_size",
    ),
  ],
)
def test_what_random_allocation_cannot_do_is_one_line(args, field):
  with refuses(field):
    answer = _answer("--sampler=random_allocation", *args)
    solve.epsilon_of(answer, answer.accountants[0])


def test_a_pass_of_random_allocation_has_the_batch_asked_for():
  asked = ("--sampler=random_allocation", "--noise_multiplier=2", "--num_steps=7")
  for batch in (7142, 7143):  # 50000 / 7 is 7142.9
    (one,) = _ask(*asked, f"--batch_size={batch}", "--num_examples=50000")
    assert one.steps_per_pass == 7


@pytest.mark.long
def test_the_fewest_steps_of_a_pass_are_solved_for_in_the_library():
  (one,) = _ask("--sampler=random_allocation", "--noise_multiplier=2", "--num_steps=40")
  found = solve.solve(one._replace(epsilon=0.6, sampling_prob=None))
  assert solve.epsilon_of(found, "pld") <= 0.6
  fewer = found._replace(sampling_prob=1 / (found.steps_per_pass - 1))
  assert solve.epsilon_of(fewer, "pld") > 0.6


_SELECTED = ("--sampler=k_out_of_t", "--accountant=rdp", "--noise_multiplier=2")


def test_k_out_of_t_is_one_pass_or_several_and_needs_its_k():
  (one,) = _ask(*_SELECTED, "--num_selected=3", "--num_steps=10")
  noise = accounting.gaussian_event(2.0)
  once = accounting.k_out_of_t_event(noise, num_steps=10, num_selected=3)
  assert solve.event(one) == once and one.sampling_prob == 0.3
  # A pass that has begun is accounted whole.
  more = ("--num_selected=3", "--num_steps=11", "--num_examples=1000", "--batch_size=300")
  assert solve.run_event(*_ask(*_SELECTED, *more)) == accounting.compose(once, 2)
  names = [line.split()[0] for line in account.table([one]).splitlines()]
  assert names == ["accountant", "rdp", "launch.train", "poisson"]


@pytest.mark.cases(slow=["noise_multiplier"])
@pytest.mark.parametrize("unknown", solve.UNKNOWNS)
def test_one_of_t_has_the_answers_of_random_allocation(unknown):
  asked = {"epsilon": 2.0, "noise_multiplier": 2.0, "num_steps": 40, "sampling_prob": 0.125}
  question = solve.Question(
    **{**asked, unknown: None}, delta=1e-5, sampler="random_allocation", accountants=("rdp",),
    neighboring_relation="add_or_remove_one",
  )  # fmt: skip
  answer = solve.solve(question)
  one = question._replace(sampler="k_out_of_t", num_selected=1)
  of_one = solve.solve(one)
  assert of_one == answer._replace(sampler="k_out_of_t", num_selected=1)
  assert solve.epsilon_of(of_one, "rdp") == solve.epsilon_of(answer, "rdp")


@pytest.mark.parametrize("unknown", ["num_steps", "sampling_prob"])
def test_three_of_t_are_solved_for_in_whole_passes_on_the_private_side(unknown):
  asked = {"epsilon": 2.0, "noise_multiplier": 2.0, "num_steps": 40, "sampling_prob": 0.15}
  answer = solve.solve(
    solve.Question(
      **{**asked, unknown: None}, delta=1e-5, sampler="k_out_of_t", accountants=("rdp",),
      neighboring_relation="add_or_remove_one", num_selected=3,
    )
  )  # fmt: skip
  assert answer.steps_per_pass == round(3 / answer.sampling_prob)
  assert solve.epsilon_of(answer, "rdp") <= 2
  shorter = {"sampling_prob": 3 / (answer.steps_per_pass - 1)}
  more = shorter if unknown == "sampling_prob" else {"num_steps": answer.num_steps + 1}
  assert solve.epsilon_of(answer._replace(**more), "rdp") > 2


@pytest.mark.parametrize(
  "args, field",
  [
    (("--num_steps=4",), "num_selected"),
    (("--num_selected=0", "--num_steps=4"), "num_selected"),
    (("--num_selected=5", "--num_steps=4"), "num_steps"),
    (
      ("--num_selected=3", "--num_steps=9", "--sampling_prob=0.4"),
      "sampling_prob",
    ),
    (
      ("--num_selected=3", "--num_steps=9", "--num_examples=1000", "--batch_size=601"),
      "batch_size",
    ),
    (
      ("--num_selected=3", "--num_steps=9", "--sampling_prob=1e-300"),
      "sampling_prob",
    ),
    (("--num_selected=99999999999999999", "--num_steps=4"), "num_selected"),
    (("--sampler=poisson", "--num_selected=2"), "num_selected"),
    (("--sampler=none", "--num_selected=2"), "num_selected"),
  ],
)
def test_what_k_out_of_t_cannot_do_is_one_line(args, field):
  with refuses(field):
    _ask(*_SELECTED, *args)


def test_batches_with_replacement_are_answered_by_pld_under_both_relations():
  asked = ("--sampler=with_replacement", "--num_examples=90", "--batch_size=9")
  more = ("--noise_multiplier=4", "--num_steps=5")
  noise = accounting.gaussian_event(4.0)
  step = accounting.with_replacement_event(noise, num_examples=90, batch_size=9)
  for relation in ("replace_one", "add_or_remove_one"):
    (one,) = _ask(*asked, *more, f"--neighboring_relation={relation}")
    assert solve.run_event(one) == accounting.compose(step, 5)
    assert one.accountants == ("pld",) and one.neighboring_relation == relation
  (default,) = _ask(*asked, *more)
  assert default.neighboring_relation == "replace_one"
  # A share is that of a whole batch, as training draws it.
  (share,) = _ask(asked[0], asked[1], "--sampling_prob=0.097", *more)
  assert share.sampling_prob == 0.1
  with refuses("num_examples", value=None):
    _ask(asked[0], "--sampling_prob=0.1", *more)
  with refuses("event"):
    solve.epsilon_of(default, "rdp")


def test_tradeoff_tells_what_an_attack_may_reach():
  asked = _answer("--noise_multiplier=1", "--sampler=none", "--num_steps=1", "--tradeoff")
  line = account.attackers(asked)
  assert "at most 0.0183" in line  # at .001, Phi(1 - 3.0902) = .018299
  assert "1.001-Gaussian DP up to 1e-05 (by pld)" in line


_ONCE = ("--sampler=none", "--num_steps=1")


def test_noise_is_solved_for_what_an_attacker_may_do():
  asked = _answer("--tpr=0.1", "--fpr=0.01", *_ONCE)
  # 1 / (Phi^-1(.1) - Phi^-1(.01)) is .957124.
  assert 0.957124 <= asked.noise_multiplier <= 0.958
  line = account.attackers(asked, fpr=0.2, prior=0.5)
  assert " 0.1 at false positive rate 0.1" not in line
  assert "at false positive rate 0.2, and" in line and "prior 0.5 errs" in line
  assert account.headline(asked).startswith(
    "noise_multiplier with which no test of membership has a true positive rate above 0.1"
  )


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (("--tpr=0.1", "--fpr=0.01", "--epsilon=2"), "epsilon=2.0: not with TruePositiveRate"),
    (("--mu=1", "--noise_multiplier=2"), "mu=1.0: is what the noise would be solved for"),
    (("--mu=1", "--advantage=0.2"), "are numbers of several guarantees"),
    (("--tpr=0.01", "--fpr=0.1"), "must be above fpr=0.1"),
    (("--tpr=nan", "--fpr=0.1"), "tpr=nan: must be in"),
    (("--fpr=0", "--noise_multiplier=1"), "fpr=0.0: must be in"),
  ],
)
def test_two_guarantees_or_an_impossible_one_are_one_line(args, message):
  with pytest.raises(UserError, match=message):
    _ask(*args, *_ONCE)


def test_a_rate_is_printed_where_epsilon_decides_the_noise():
  asked = _answer("--epsilon=2", "--fpr=0.2", "--prior=0.5", *_ONCE)
  assert asked.attack is None and asked == _answer("--epsilon=2", *_ONCE)


@pytest.mark.parametrize("sampler", ["with_replacement", "truncated_poisson"])
def test_an_accountant_that_has_no_analysis_of_a_sampler_is_one_flag(sampler):
  sized = ["--num_examples=60", "--batch_size=6", "--num_steps=1", "--noise_multiplier=1"]
  sized += ["--capacity=9"] if sampler == "truncated_poisson" else []
  with refuses("accountant", value="rdp"):
    _ask(f"--sampler={sampler}", "--accountant=rdp", *sized)


def test_the_curve_and_the_losses_of_the_run_are_files(tmp_path):
  asked = [_answer(f"--noise_multiplier={level}", *_ONCE) for level in (1, 2)]
  paths = account._write_trade_offs(asked[:1], tmp_path)
  assert [path.name for path in paths] == ["trade_off.csv", "privacy_loss.npz"]
  several = account._write_trade_offs(asked, tmp_path)
  assert [path.name for path in several][::2] == ["1_trade_off.csv", "2_trade_off.csv"]
  alphas, betas = trade_off_files.read_curve(several[2])
  assert alphas[0] == 0 and betas[0] <= 1


@pytest.mark.cases(long=["balls_in_bins"])
@pytest.mark.parametrize("sampler", ["min_sep", "balls_in_bins"])
def test_bounded_participation_says_what_each_number_is_worth(sampler):
  more = ["--sampling_prob=0.05"] if sampler == "min_sep" else []
  values = _flags(
    f"--sampler={sampler}", "--steps_apart=4", "--bands=2", "--noise_multiplier=2",
    "--num_steps=8", "--delta=1e-2", "--num_samples=2000", *more,
  )  # fmt: skip
  (run,) = account.bounded_runs(values, [2.0])
  rows = dict(solve.bounded_rows(run))
  estimate = rows["Monte Carlo estimate, NOT a bound"]
  upper = rows["Monte Carlo, 99 % confidence, NOT a proof"]
  assert estimate < upper and estimate < rows["proved, unamplified (pld)"]
  assert ("proved, charged by no run (rdp)" in rows) == (sampler == "balls_in_bins")
  lines = account.bounded_table([run]).splitlines()
  assert len(lines) == 1 + len(rows) and lines[1].endswith("NOT a bound")


@pytest.mark.parametrize("least", [5, 10, 20, 40])
def test_batches_that_come_as_often_as_they_may_are_simulated(least):
  """1 / steps_apart is no number of floats: p / (1 - (m - 1) p) may be just above 1."""
  given = (1.0, 8, 1 / least, least, 1e-2)
  rows = dict(solve.bounded_rows(solve.Bounded("min_sep", *given, num_samples=2000)))
  assert (
    rows["Monte Carlo estimate, NOT a bound"] <= rows["proved, unamplified (pld)"] + 0.5
  )


@pytest.mark.parametrize(("sampler", "prob"), [("balls_in_bins", 0.9), ("min_sep", 0.3)])
def test_a_probability_that_would_be_ignored_is_refused_in_the_library(sampler, prob):
  with refuses("sampling_prob"):
    solve.bounded_rows(solve.Bounded(sampler, 1.0, 8, prob, 4, 1e-3))


def test_a_row_beside_others_refuses_none_of_them():
  """A delta that the grid of PLD is too coarse for, and RDP is not."""
  (asked,) = _ask(
    "--sampler=random_allocation", "--accountant=rdp", "--noise_multiplier=1",
    "--num_steps=20", "--delta=1e-15",
  )  # fmt: skip
  names = [line.split("  ")[0].strip() for line in account.table([asked]).splitlines()]
  assert "poisson (rdp)" in account.table([asked]) and len(names) == 4


@pytest.mark.parametrize(
  "args, field",
  [
    (("--steps_apart=4",), "sampling_prob"),
    (("--steps_apart=4", "--sampling_prob=0.3"), "sampling_prob"),
    (("--steps_apart=4", "--sampling_prob=0.1", "--bands=5"), "bands"),
    (("--steps_apart=4", "--sampling_prob=0.1", "--gdp"), "gdp"),
    (("--steps_apart=4", "--sampling_prob=0.1", "--zcdp"), "zcdp"),
    (("--sampling_prob=0.1",), "steps_apart"),
  ],
)
def test_what_a_simulation_cannot_answer_is_one_line(args, field):
  values = _flags("--sampler=min_sep", "--num_steps=8", *args)
  with refuses(field):
    account.bounded_runs(values, [1.0])


def test_a_simulation_refuses_what_it_would_ignore():
  read = {*account._BESIDE_BOUNDED, *account._OF_BOUNDED}
  sound = ["--sampler=min_sep", "--num_steps=8", "--steps_apart=4", "--sampling_prob=0.1"]
  account.bounded_runs(_flags(*sound), [1.0])
  defined = flags.FlagValues()
  account.define_flags(defined)
  for name in {*defined} - read:
    usual = _flags(*sound)[name].value
    text = "pld" if name == "accountant" else "replace_one" if "relation" in name else "1"
    given = f"--{name}" if isinstance(usual, bool) else f"--{name}={text}"
    with refuses(name):
      account.bounded_runs(_flags(*sound, given), [1.0])


def test_a_simulation_that_is_refused_prints_nothing(capsys):
  (asked,) = account.bounded_runs(
    _flags(
      "--sampler=min_sep", "--num_steps=8", "--steps_apart=4", "--sampling_prob=0.1",
      "--delta=1e-9", "--num_samples=10",
    ),
    [1.0],
  )  # fmt: skip
  with refuses("num_samples"):
    account.show_bounded([asked])
  assert capsys.readouterr().out == ""


def test_replacing_under_random_allocation_has_no_poisson_beside_it():
  (asked,) = _ask(
    "--sampler=random_allocation", "--noise_multiplier=4", "--num_steps=4",
    "--neighboring_relation=replace_one", "--accountant=rdp",
  )  # fmt: skip
  names = [line.split()[0] for line in account.table([asked]).splitlines()]
  assert names == ["accountant", "rdp", "launch.train"]
  assert "(by rdp)" in account.attackers(asked)


# --- finished runs


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--runs=/nowhere/run"], ["runs", "/nowhere/run", "there is none"]),
    (["--runs="], ["runs=''", "there is none"]),
    (["--runs=/a,/b", "--epsilon=2"], ["epsilon", "does not go with --runs"]),
  ],
)
def test_wrong_folders_of_runs_are_one_line(arguments, words):
  done = _run(*arguments)
  assert done.returncode == 2 and done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert all(word in line for word in words), line


def test_the_command_prints_what_finished_runs_cost_together(tmp_path):
  for seed in range(2):
    finished_runs.write(tmp_path / str(seed), seed)
  done = _run(f"--runs={tmp_path / '0'},{tmp_path / '1'}")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  total, together = (float(lines[row].split()[-2]) for row in (2, 3))
  assert lines[2].startswith("sum") and lines[3].startswith("together (pld)")
  assert total / 2 < together < total
  assert "quote the sum" in lines[-1]
  smaller = _run(f"--runs={tmp_path / '0'},{tmp_path / '1'}", "--delta=1e-4")
  assert float(smaller.stdout.splitlines()[3].split()[-2]) < together
