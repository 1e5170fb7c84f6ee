"""Registry of attacks: each one's aim, access, possible adversaries and defences.

Each entry of `ATTACKS` gives a row of the page of threats (`python -m launch.attack --threats >
THREATS.md`), and a line of `experiments.catalogue`. Tests fail for an attack of this package
without an entry, and for an entry whose code does not exist. What dpjax does not carry out is
described in `docs/threat_model.md`.

A defence is listed if a proof ("proved") or experience supports it. A defence that held against
the attacks of this package is not thereby proved.
"""

from __future__ import annotations

from typing import NamedTuple

from dpjax import markdown

# Kinds of access that an attack may need, roughly from the least to the most.
ACCESS = {
  "answers": "black box: the released model's answers to records of its choice",
  "model": "white box: the parameters of the released model",
  "two models": "the released model, and what training started from or added to its data",
  "gradient": "the gradient of one step",
  "update": "what one client sends in one round, and the model that it got",
  "messages": "what every client sends in every round",
  "part": "a seat in the training: its own data, or messages of its own making",
}


class Attack(NamedTuple):
  """An attack as one value: its target, its access, and the defences."""

  name: str
  target: str  # what the attack tries to learn or change
  access: str  # key of `ACCESS`
  adversary: str  # parties that have this access
  defends: str  # defences that stop it, or make it more expensive
  code: str  # dotted path of its implementation, such as `dpjax.attacks.lira`
  source: str  # paper, or other origin


_MEMBER = "whether a record was in the training data"
_INPUT = "the examples behind a gradient or a message"
_OWNER = "whoever may ask the model"
_WIRE = "whoever reads the wire, or the server itself"
_DP = "differential privacy of the training (proved: the line of its epsilon)"
_NOISE = (
  "noise of the client itself (privacy=local, proved); a secure sum, of which the server "
  "sees a cohort's mean alone (secure_sum); larger batches help little"
)

_AGREED = "clients of the federation who agree, and know what honest ones send"
_CLIPPED = (
  "a clip norm for each client (user-level privacy bounds what one can do, proved); more honest "
  "clients in each round"
)

# A new attack needs an entry here: tests check it, and the page of threats shows it.
ATTACKS: tuple[Attack, ...] = (
  # --- membership
  Attack(
    "confidence rule", _MEMBER, "answers", _OWNER,
    f"{_DP}; less overfitting", "dpjax.attacks.membership.confidence_rule",
    "folklore: surer than .8",
  ),
  Attack(
    "loss threshold", _MEMBER, "answers", _OWNER,
    f"{_DP}; less overfitting", "dpjax.attacks.loss_threshold", "Yeom et al. 2018",
  ),
  Attack(
    "LiRA, online", _MEMBER, "answers", f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.lira", "Carlini et al. 2022",
  ),
  Attack(
    "LiRA, offline or of fixed variance", _MEMBER, "answers",
    f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.lira", "Carlini et al. 2022",
  ),
  Attack(
    "LiRA against a federation", "whether a record, or a client, was in the training", "answers",
    f"{_OWNER} and has data like the clients'",
    "differential privacy of the training (proved: of a record for silos, of a client else)",
    "dpjax.attacks.lira", "Carlini et al. 2022, by shadow federations",
  ),
  Attack(
    "RMIA", _MEMBER, "answers", f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.rmia", "Zarifzadeh et al. 2024",
  ),
  Attack(
    "RMIA, tuned on shadows", _MEMBER, "answers",
    f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.membership.rmia_tuned", "Zarifzadeh et al. 2024",
  ),
  Attack(
    "InfoRMIA", _MEMBER, "answers", f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.membership.informia", "Tao and Shokri 2025",
  ),
  Attack(
    "BaVarIA", _MEMBER, "answers", f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.membership.bavaria", "Brännvall 2026",
  ),
  Attack(
    "augmented queries", _MEMBER, "answers",
    f"{_OWNER}, flips and shifts records, and has data like the training's", _DP,
    "dpjax.attacks.queries.mean_score", "Carlini et al. 2022, section 6.C",
  ),
  Attack(
    "quantile regression", _MEMBER, "answers",
    f"{_OWNER} and has records that are certainly no members", _DP,
    "dpjax.attacks.difficulty.quantile_regression", "Bertran et al. 2023",
  ),
  Attack(
    "attack network of each class", _MEMBER, "answers",
    f"{_OWNER} and has data like the training's", _DP,
    "dpjax.attacks.attack_network.attack_network", "Shokri et al. 2017",
  ),
  Attack(
    "loss tail", "how many members LiRA would find, without shadow models", "answers",
    f"{_OWNER} and knows members and non-members: an estimate for owners, no attack", _DP,
    "dpjax.attacks.roc.loss_tail", "Dodd et al. 2025",
  ),
  Attack(
    "canary audit of one run", "a lower bound on epsilon", "two models",
    "the auditor, who puts canaries into the data",
    "nothing should: above a proved epsilon it refutes the proof",
    "dpjax.auditing.audit", "Steinke et al. 2023",
  ),
  Attack(
    "canary exposure", "a secret in the training text, such as a number in a line", "answers",
    f"{_OWNER} for the loss of a line, and knows the format of the secret",
    f"{_DP}, less with each copy of the secret: those are a group; few copies; clipping alone "
    "does not help", "dpjax.attacks.exposure_by_rank", "Carlini et al. 2019",
  ),
  Attack(
    "extraction of training text", "lines of the training text, such as names with numbers",
    "answers", f"{_OWNER} for the next token, and knows no format",
    f"{_DP}, less with each copy of the line: those are a group; few copies",
    "dpjax.attacks.text_extraction.extracted", "Carlini et al. 2021",
  ),
  # --- inputs from gradients and messages
  Attack(
    "DLG", _INPUT, "gradient", _WIRE, _NOISE, "dpjax.attacks.Dlg", "Zhu et al. 2019",
  ),
  Attack(
    "iDLG", "the label behind a gradient", "gradient", _WIRE, _NOISE,
    "dpjax.attacks.infer_labels", "Zhao et al. 2020; LLG, Wainakh et al. 2022",
  ),
  Attack(
    "cosine and total variation", _INPUT, "gradient", _WIRE, _NOISE,
    "dpjax.attacks.CosineAdam", "Geiping et al. 2020",
  ),
  Attack(
    "dense layer first", "the one example behind a gradient", "gradient", _WIRE,
    f"{_NOISE}; a batch mixes examples; clipping does not help: it is a ratio",
    "dpjax.attacks.first_dense", "Phong et al. 2018",
  ),
  Attack(
    "rogue server", "the examples of a batch, or of all clients in a sum", "messages",
    "a server that sends a model made to leak",
    "client noise (its proof holds for any model); clients that check what they get; a secure "
    "sum alone does not help: gradients add up, and so do the bins",
    "dpjax.attacks.imprint", "Fowl et al. 2022; Boenisch et al. 2023; Pasquini et al. 2022",
  ),
  Attack(
    "fishing for a class", "the examples of one class in a batch, or in the batches of a sum",
    "messages", "a server that sends a model made to leak",
    "client noise (its proof holds for any model); clients that check what they get; larger "
    "batches and secure sums do not help", "dpjax.attacks.fish", "Wen et al. 2022",
  ),
  Attack(
    "text from a gradient", "the lines of text behind a gradient, of all parameters or LoRA's",
    "gradient", _WIRE,
    "noise of the client itself (privacy=local, proved); more tokens together than the "
    "layer is wide, or adapters of a rank below them, leave this attack no span, which is no "
    "proof; clipping does not help: it is a factor",
    "dpjax.attacks.SpanAttack", "Petrov et al. 2024 (DAGER)",
  ),
  Attack(
    "inversion of FedAvg's messages", _INPUT, "update", _WIRE, _NOISE,
    "dpjax.attacks.client_view", "Geiping et al. 2020, section 5",
  ),
  Attack(
    "gradient leakage score", "how much of its input a gradient shows", "gradient", _WIRE,
    _NOISE, "dpjax.attacks.leakage.dense_leakage", "three readings, each beside its shuffled null",
  ),
  # --- knowledge in a model
  Attack(
    "class inversion", "what the records of a class look like", "model",
    "whoever holds the model",
    "little: a class is not a record; noise blurs it as it blurs the model",
    "dpjax.attacks.ClassInversion", "Fredrikson et al. 2015",
  ),
  Attack(
    "inversion of answers", "the input behind an answer", "answers",
    f"{_OWNER}, sees others' answers and has data like theirs",
    "answers by label alone; privacy of the training says nothing of what is asked later",
    "dpjax.attacks.AnswerInversion", "Yang et al. 2019",
  ),
  Attack(
    "model extraction", "the model itself", "answers", _OWNER,
    "answers by label alone cost it more queries; limits on queries; no privacy of training",
    "dpjax.attacks.Extraction", "Tramer et al. 2016; Orekondy et al. 2019",
  ),
  Attack(
    "extraction of a linear model", "its weights, exactly", "answers", _OWNER,
    "answers by label alone", "dpjax.attacks.extraction.solve_softmax", "Tramer et al. 2016",
  ),
  Attack(
    "property inference", "a fact about all training records together", "model",
    "whoever holds the model and has data like the training's",
    "not differential privacy of records, which hides one; fewer, coarser parameters",
    "dpjax.attacks.property_inference.infer_property", "Ateniese et al. 2015; Ganju et al. 2018",
  ),
  Attack(
    "attribute inference", "a missing field of a known record", "answers",
    f"{_OWNER} and knows the rest of the record",
    f"{_DP}, against what is more than a guess from others' records",
    "dpjax.attacks.attribute_inference.attribute_advantage",
    "Fredrikson et al. 2014; Yeom et al. 2018",
  ),
  # --- poisoned rounds
  Attack(
    "label flip", "errors of the model on one class", "part", "clients of the federation",
    "aggregator=median, trimmed_mean, krum, below their breakdown points",
    "dpjax.attacks.label_flip", "Tolpegin et al. 2020",
  ),
  Attack(
    "scaled update", "a model that is useless, or the attacker's", "part",
    "clients of the federation",
    "a clip norm for each client (user-level privacy bounds what one can do, proved); "
    "robust aggregators", "dpjax.attacks.scaled_update", "Bagdasaryan et al. 2020",
  ),
  Attack(
    "a little is enough", "a model that is useless", "part",
    _AGREED, _CLIPPED, "dpjax.attacks.collusion.alie", "Baruch et al. 2019",
  ),
  Attack(
    "min-max", "a model that is useless", "part",
    _AGREED, _CLIPPED, "dpjax.attacks.collusion.min_max",
    "Shejwalkar and Houmansadr 2021",
  ),
  Attack(
    "min-sum", "a model that is useless", "part",
    _AGREED, _CLIPPED, "dpjax.attacks.collusion.min_sum",
    "Shejwalkar and Houmansadr 2021",
  ),
  Attack(
    "backdoor", "a chosen answer to inputs with a trigger", "part",
    "clients of the federation",
    "aggregator=median or krum while attackers are few; clipping slows it",
    "dpjax.attacks.backdoor", "Gu et al. 2017; Bagdasaryan et al. 2020",
  ),
  Attack(
    "canary audit of a federated run", "a lower bound on user-level epsilon", "messages",
    "the auditor, whose canary clients take part",
    "nothing should: above a proved epsilon it refutes the proof",
    "dpjax.auditing.insert_canary_clients", "Steinke et al. 2023; Andrew et al. 2024",
  ),
  Attack(
    "audit of the final model", "a lower bound on epsilon", "model",
    "the auditor, who chose the first parameters and the data",
    "nothing should: above a proved epsilon it refutes the proof",
    "dpjax.auditing.final_model_scores", "Annamalai, De Cristofaro 2024",
  ),
  Attack(
    "messages of one silo", "whether one record is in a silo, such as a hospital", "messages",
    "the server, or other silos, who keep what a silo sent in all rounds",
    "record-level privacy inside the silo (privacy=records, proved): nobody but one's own silo is "
    "trusted", "dpjax.auditing.games.silos.games", "Lowy and Razaviyayn 2021",
  ),
)  # fmt: skip

PAGE = "THREATS.md"
COMMAND = f"python -m launch.attack --threats > {PAGE}"


def page() -> str:
  """Returns the text of the page of threats: attacks, defences, access and adversaries."""
  attacks = [[a.name, a.target, a.access, a.defends] for a in ATTACKS]
  who = [[a.name, a.adversary, f"`{a.code}`", a.source] for a in ATTACKS]
  return (
    "# Threats: who could learn what, and what stops them\n\n"
    f"Written by `{COMMAND}` from\n"
    "`dpjax/attacks/registry.py`; a test fails where this page is stale. That an attack finds\n"
    "nothing proves nothing; what is proved stands in a run's privacy statement.\n"
    "[The threat model](docs/threat_model.md) describes attacks that dpjax does not carry out.\n\n"
    "## Attacks and defences\n\n"
    f"{markdown.table(['attack', 'target', 'access', 'what defends'], attacks)}\n"
    f"## Access\n\n{markdown.table(['access', 'means'], ACCESS.items())}\n"
    f"## Adversaries\n\n"
    f"{markdown.table(['attack', 'who', 'carried out by', 'source'], who)}"
  )
