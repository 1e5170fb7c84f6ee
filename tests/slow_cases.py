"""Which cases are slow: measured, not guessed. The list is `slow_cases.txt` beside this file.

The quickest case of each test is what `pytest` runs, where it takes less than 1.5 seconds of
processor time, and every other that takes less than .3. Quickest cases of 1.5 to 3 seconds are
`slow`: `.ci/run` runs them as well. The rest is `long`, by hand, but for the quickest cases of
`KEPT`: promises that many changes could break, whatever they take. Measure, with an empty
compilation cache (`DPJAX_TEST_CACHE`), and write the list again:

    python -m pytest -q -n 2 -m '' -p tests.slow_cases --times=DIR
    python -m tests.slow_cases DIR

    python -m pytest -q -n 2 -p tests.slow_cases --times=QUICK
    python -m tests.slow_cases QUICK quick

The second pair is of README's own command, in which a quick case may pay for what a slow one
had compiled or prepared for it: what takes more than .8 seconds there is slow. A test that is
added later is quick until then, or carries `pytest.mark.slow` itself. Cases that were not
measured keep their mark.
"""

import collections
import math
import os
import pathlib
import resource
import sys

import pytest

LIST = pathlib.Path(__file__).with_suffix(".txt")
# Seconds of processor time: of a quick case, of a test's quickest, and of a slow one.
_QUICK, _QUICKEST, _SLOW = 0.3, 1.5, 3.0
_ALONE = 0.8  # where no slow case runs beside it
# Fixtures that start programs of eight devices or of several processes, for a whole file: the
# first test that is left would pay for all.
PROGRAMS = frozenset({"on_devices", "outcomes", "whole_runs", "counted_bytes"})

# Tests whose quickest case `.ci/run` runs, whatever it takes.
KEPT = frozenset(
  f"tests/{path}"
  for path in (
    "accounting/test_calibration.py::test_p25_calibration_lands_on_the_private_side",
    "accounting/test_lower_bounds.py::test_no_epsilon_is_below_what_an_attack_can_see",
    "adversary/test_dtypes.py::test_no_sum_is_rounded_in_microbatches",
    "adversary/test_dtypes.py::test_no_sum_of_clipped_gradients_of_any_layer_is_rounded",
    "adversary/test_games.py::test_a_broken_twin_is_refuted",
    "adversary/test_games.py::test_draws_at_once_are_those_of_rounds_as_users_run_them",
    "adversary/test_games.py::test_the_claim_stands",
    "auditing/test_lower_bounds.py::"
    "test_p39_no_bound_exceeds_the_truth_in_more_than_5_of_100_runs",
    "checks/test_check.py::test_a_sound_run_passes_every_check",
    "federated/test_execution.py::test_clients_own_noise_is_the_same_in_every_execution",
    "federated/test_remote.py::test_nothing_that_the_server_holds_gives_a_clients_noise",
    "gradients/test_automatic.py::test_p4_one_example_never_exceeds_the_bound",
    "gradients/test_ghost.py::test_examples_are_clipped_before_devices_are_added_up",
    "gradients/test_ghost_numerics.py::test_p1_a_non_finite_example_contributes_nothing",
    "gradients/test_per_example.py::test_clipped_sum_equals_jax_privacy",
    "gradients/test_per_example.py::"
    "test_p29_batch_norm_is_refused_for_it_would_mix_the_batch",
    "launch/test_stoppable.py::"
    "test_between_two_trainings_sigterm_is_one_line_and_the_same_command_goes_on",
    "mechanisms/test_finite.py::test_a_hopeless_candidate_is_chosen_as_often_as_it_should",
    "mechanisms/test_finite.py::test_integers_and_float64_are_not_rounded_before_the_noise",
    "mechanisms/test_response.py::test_edge_cases",
    "noise/test_source.py::"
    "test_p17_steps_leaves_and_keys_share_no_noise_and_a_state_repeats",
    "relevance/test_streams.py::test_p17_two_methods_share_no_noise",
    "runs/test_audit.py::test_a_run_that_neither_clips_nor_adds_its_noise_is_refuted",
    "runs/test_audit.py::"
    "test_p39_a_non_private_run_claims_nothing_and_its_canaries_are_found",
    "runs/test_audit.py::test_white_box_audit_of_dp_sgd_and_of_dp_sgd_without_its_noise",
    "runs/test_clipping_runs.py::test_p16_p27_stopped_and_resumed_equals_uninterrupted",
    "runs/test_federate_private.py::"
    "test_p16_resumed_equals_uninterrupted_and_pays_what_its_plan_says",
    "runs/test_federate_release.py::"
    "test_p16_a_resumed_release_of_correlated_noise_equals_the_uninterrupted_one",
    "runs/test_federate_release.py::test_p32_a_release_logs_nothing_private",
    "runs/test_ftrl.py::test_p16_an_interrupted_run_ends_as_the_uninterrupted_one",
    "runs/test_loop.py::test_p16_a_resumed_run_goes_on_with_the_keys_it_drew",
    "runs/test_loop.py::test_p16_another_seed_is_another_run",
    "runs/test_loop.py::test_p16_cut_off_between_checkpoints_repeats_steps_exactly",
    "runs/test_loop.py::test_p16_killed_and_resumed_equals_uninterrupted",
    "runs/test_loop.py::test_two_that_start_at_once_do_not_draw_two_sets_of_keys",
    "runs/test_normalization.py::test_a_resumed_run_has_the_same_statistics",
    "runs/test_normalization.py::test_a_run_pays_for_them_says_so_and_releases_them",
    "runs/test_secure.py::"
    "test_p42_weights_that_are_asked_in_secret_know_what_they_began_from",
    "runs/test_streams.py::test_nothing_but_noisy_parameters_tells_two_data_sets_apart",
    "sweeps/test_side_by_side.py::test_each_task_is_done_once_by_one_of_the_processes",
    "test_docs.py::test_every_command_names_a_launcher_its_flags_and_a_config",
    "test_front_door.py::test_no_import_starts_a_backend",
    "test_plan.py::test_p25_calibrated_plans_stay_within_the_target",
    "training/test_hosts.py::"
    "test_p19_two_hosts_have_the_sums_the_very_noise_and_the_ledger_of_one",
    "training/test_mesh.py::test_p19_eight_devices_have_the_sums_and_the_very_noise_of_one",
  )
)


def marks() -> dict[str, str]:
  """Node id -> slow or long."""
  pairs = (line.split(" ", maxsplit=1) for line in LIST.read_text().splitlines())
  return {name: mark for mark, name in pairs}


def pytest_addoption(parser):
  parser.addoption("--times", help="folder for the seconds of each test")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
  before = _seconds()
  yield
  worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
  folder = pathlib.Path(item.config.getoption("--times"))
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / f"{worker}.tsv", "a") as file:
    file.write(f"{_seconds() - before:.3f}\t{item.nodeid}\n")


def _seconds() -> float:
  """Of this process and of the commands that it has waited for."""
  whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  used = [resource.getrusage(who) for who in whose]
  return sum(one.ru_utime + one.ru_stime for one in used)


def marked(times: dict[str, float]) -> dict[str, str]:
  """Of node ids and their seconds those that are not quick.

  >>> marked({"a::t[1]": 0.1, "a::t[2]": 0.2, "a::u[1]": 1.6, "a::u[2]": 1.9, "a::v": 9.0})
  {'a::u[1]': 'slow', 'a::u[2]': 'long', 'a::v': 'long'}
  """
  by_test = collections.defaultdict(dict)
  for name, seconds in times.items():
    by_test[name.partition("[")[0]][name] = seconds
  found = {}
  for test, cases in by_test.items():
    quickest = min(cases, key=cases.__getitem__)
    for name, seconds in cases.items():
      if seconds > (_QUICKEST if name == quickest else _QUICK):
        most = math.inf if test in KEPT else _SLOW
        found[name] = "slow" if name == quickest and seconds <= most else "long"
  return found


def _times(folder: pathlib.Path) -> dict[str, float]:
  lines = [line for path in folder.glob("*.tsv") for line in path.read_text().splitlines()]
  pairs = (line.split("\t", maxsplit=1) for line in lines)
  return {name: float(seconds) for seconds, name in pairs}


if __name__ == "__main__":
  times = _times(pathlib.Path(sys.argv[1]))
  kept = {name: mark for name, mark in marks().items() if name not in times}
  alone = {name: "slow" for name, seconds in times.items() if seconds > _ALONE}
  new = alone if sys.argv[2:] == ["quick"] else marked(times)
  found = sorted((name, mark) for name, mark in (kept | new).items())
  LIST.write_text("".join(f"{mark} {name}\n" for name, mark in found))
