"""Poisoned rounds on MNIST: three attacks against seven aggregators, run unchanged.

`python -m tests.published.test_poisoning` writes results/attacks/poisoning.{json,md,png}, in
12 minutes on 2 busy CPU cores; `python -m pytest -m long tests/published/test_poisoning.py` makes
the same runs; `--draw` draws poisoning.json again. Needs the prepared MNIST (TFDS_DATA_DIR).

100 clients of 60 records each, all in every round; 20 rounds of a linear model; attackers are
10 or 30 of them. Krum was told of 20, the trimmed mean cuts 20 % at either end.

Seen: the mean lets a scaled backdoor of 10 through at .998 without losing accuracy. Within its
breakdown point the geometric median lets one of 30 through at .88 (of 10: .06), and the median,
trimmed mean (of 10) and multi-Krum at most .02. User-level privacy bounds the factor, not the
number of attackers: .06 of 10, .69 of 30. Krum costs 11 points of accuracy where clients are
alike, 36 where they are not (Dirichlet .5), the median 1 and 12.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import dpjax
from dpjax import attacks, data, federated, pictures
from dpjax.attacks.poisoning import poisoned_training
from dpjax.validate import UserError
from tests import plans
from tests.published import poisoning_grid as robustness

_CLIENTS, _EACH, _FRACTIONS = 100, 60, (0.1, 0.3)
_OUT = pathlib.Path(__file__).parents[2] / "results" / "attacks"
_NAMES = {  # words of the picture
  "iid": "IID",
  "dirichlet_0.5": "label skew",
  "user_level_dp_epsilon_26": "user-level DP, epsilon 26",
}
_PARTITIONS = {
  "iid": lambda labels: data.partition.iid(labels, num_clients=_CLIENTS, seed=0),
  "dirichlet_0.5": lambda labels: data.partition.dirichlet(
    labels, num_clients=_CLIENTS, alpha=0.5, seed=0
  ),
}


def _plan(noise_multiplier):
  return plans.of(
    _CLIENTS + 12,
    prob=1.0,
    noise_multiplier=noise_multiplier,
    l2_clip_norm=0.3,
    normalize_by=_CLIENTS,
    num_steps=20,
    delta=1e-4,
    unit="user",
  )


def _against():
  rows = robustness.defences(_plan(0.0), num_byzantine=20, trim=0.2, num_selected=50)
  private = _plan(1.0)
  noisy = federated.central(private, jax.random.key(99))
  name = f"user_level_dp_epsilon_{private.epsilon():.0f}"
  return {**rows, name: robustness.Defence(noisy, None)}


_ATTACKS = {
  "label_flip": attacks.label_flip(1, 7),
  "sabotage": attacks.scaled_update(-5.0),
  "backdoor": attacks.backdoor(0),
  "backdoor_scaled": attacks.backdoor(0, factor=_CLIENTS / 10),
}


def run(partition, tell=print):
  """The outcomes for clients that are made by one of `_PARTITIONS`."""
  train, test = data.load("mnist")
  train = train.subset(slice(0, _CLIENTS * _EACH))
  federation = data.Federation(train, _PARTITIONS[partition](train.y))
  model = dpjax.zoo.networks.build("linear", num_classes=10)
  loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)

  def trained(aggregator, attack, attackers):
    return poisoned_training(
      lambda **lies: federated.fed_avg(
        loss_fn, optax.sgd(0.1), aggregator=aggregator, key=jax.random.key(0), **lies
      ),
      attack,
      attackers,
      federation=federation,
      work=federated.LocalWork(batch_size=20, epochs=2),
      params=model.init(jax.random.key(1), jnp.zeros((1, 28, 28, 1))),
      rng=0,
    )

  return robustness.poisoning_grid(
    _ATTACKS,
    _against(),
    _FRACTIONS,
    train=trained,
    apply=model.apply,
    test=test,
    num_clients=_CLIENTS,
    seed=0,
    tell=tell,
  )


def _picture(found, path):
  """Success of the backdoors and accuracy under sabotage, by aggregator.

  Args:
    found: partition -> rows as poisoning.json has them: [count, total, low, high] of each rate.
    path: of the picture.
  """
  look = pictures.Look()
  figure = pictures.new_figure(look, height=3.0 * len(found) + 0.6)
  panels = figure.subplots(len(found), 2, squeeze=False, sharex=True, sharey="row")
  whats = (
    ("backdoor_scaled", "success", "success of the scaled backdoor"),
    ("sabotage", "accuracy", "accuracy, sabotage"),
  )
  for axes_of_row, (partition, rows) in zip(panels, found.items()):
    names = list(dict.fromkeys(row["defence"] for row in rows))
    labels = [_NAMES.get(name) or pictures.proper_name(name) for name in names]
    for axes, (attack, rate, what) in zip(axes_of_row, whats):
      for index, many in enumerate((10, 30)):
        mine = [
          row for row in rows if (row["attack"], row["num_attackers"]) == (attack, many)
        ]
        places = [names.index(row["defence"]) + 0.3 * index - 0.15 for row in mine]
        how = {"color": look.color(index), "marker": pictures.marker(index)}
        for place, row in zip(places, mine):
          axes.plot(row[rate][2:], [place, place], color=how["color"], linewidth=1.4)
        shares = [row[rate][0] / row[rate][1] for row in mine]
        label = f"{many} of {_CLIENTS} clients attack"
        axes.plot(shares, places, linestyle="none", markersize=3.5, label=label, **how)
      axes.set_yticks(range(len(names)), labels)
      axes.set(xlim=(-0.03, 1.03), ylim=(len(names) - 0.4, -0.6))
      pictures.dress(
        axes, look, title=f"{what} ({_NAMES[partition]})", xlabel="share (bars: 95 %)"
      )
  for axes in panels[:-1].flat:
    axes.set_xlabel("")
  handles, _ = panels[0, 0].get_legend_handles_labels()
  pictures.key(figure, look, handles)
  pictures.save(figure, path)


def _row(one):
  interval = lambda c: None if c is None else [c.count, c.total, *c.interval]
  rates = ("accuracy", "success", "clean_accuracy", "clean_success")
  facts = {name: interval(getattr(one.outcome, name)) for name in rates}
  facts |= {"attack": one.attack, "defence": one.defence, "num_clients": one.num_clients}
  facts |= {name: getattr(one.outcome, name) for name in ("num_attackers", "tolerates")}
  return facts | {"beyond": one.outcome.beyond, "fails": bool(one.outcome.fails)}


def main():
  """Writes the three files of results/attacks; with --draw the picture alone, of what ran."""
  if "--draw" in sys.argv:
    return _picture(
      json.loads((_OUT / "poisoning.json").read_text()), _OUT / "poisoning.png"
    )
  found = {partition: run(partition) for partition in _PARTITIONS}
  _OUT.mkdir(parents=True, exist_ok=True)
  rows = {name: [_row(one) for one in outcomes] for name, outcomes in found.items()}
  lines = {name: ",\n".join(map(json.dumps, part)) for name, part in rows.items()}
  parts = [f"{json.dumps(name)}: [\n{line}\n]" for name, line in lines.items()]
  (_OUT / "poisoning.json").write_text("{" + ",\n".join(parts) + "}\n")
  text = "# Poisoned rounds on MNIST\n\n`python -m tests.published.test_poisoning`\n\n"
  text += (
    "Accuracy / success of the attack (its rate without attackers). FAILS: the exact 95 %\n"
  )
  text += "interval does not meet that without attackers; `*`: more attackers than the\n"
  text += (
    "aggregator is made for. Each aggregator as the run has it, nothing else changed.\n"
  )
  for name, outcomes in found.items():
    text += f"\n## Clients: {name}\n\n{robustness.poisoning_table(outcomes)}"
  (_OUT / "poisoning.md").write_text(text)
  _picture(rows, _OUT / "poisoning.png")


@pytest.mark.long
def test_a_backdoor_goes_through_the_mean_and_not_through_the_median():
  try:
    outcomes = run("iid", tell=lambda line: None)
  except UserError as error:
    pytest.skip(str(error))
  by = {
    (one.attack, one.defence, one.outcome.num_attackers): one.outcome for one in outcomes
  }
  assert by["backdoor_scaled", "mean", 10].fails
  assert by["backdoor_scaled", "mean", 10].success.rate > 0.8
  assert not by["backdoor_scaled", "median", 10].fails
  assert by["sabotage", "mean", 30].accuracy.rate < 0.5


if __name__ == "__main__":
  sys.exit(main())
