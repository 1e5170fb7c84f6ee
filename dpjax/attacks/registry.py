"""Registry of attacks: each one's aim, access, possible adversaries and defences.

Each entry of `ATTACKS` gives a row of the page of threats (`python -m launch.attack --threats >
THREATS.md`), and a line of `experiments.catalogue`. Tests fail for an attack of this package
without an entry, and for an entry whose code does not exist.

An attack without code is only described: dpjax does not carry it out, so nothing here measures it.
A defence is listed if a proof ("proved") or experience supports it. A defence that held against
the attacks of this package is not thereby proved.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

from dpjax import markdown, validate
from dpjax.validate import UserError

# Kinds of access that an attack may need, roughly from the least to the most.
ACCESS = {
  "answers": "black box: the released model's answers to records of its choice",
  "model": "white box: the parameters of the released model",
  "two models": "the released model, and what training started from or added to its data",
  "gradient": "the gradient of one step",
  "update": "what one client sends in one round, and the model that it got",
  "messages": "what every client sends in every round",
  "part": "a seat in the training: its own data, or messages of its own making",
  "surroundings": "what is around the computation: times, sizes, files, memory",
}


@dataclasses.dataclass(frozen=True)
class Attack:
  """An attack as one value: its target, its access, and the defences.

  Args:
    name: common name.
    target: what the attack tries to learn or change.
    access: key of `ACCESS`.
    adversary: parties that have this access.
    defends: defences that stop it, or make it more expensive.
    code: dotted path of its implementation, such as `dpjax.attacks.lira`; "": described only.
    source: paper, or other origin.

  Raises UserError for an unknown access, text that would break a table, or an empty field other
  than `code`.

  >>> Attack("guessing", "a coin", "answers", "anybody", "nothing", "", "folklore").simulated
  False
  """

  name: str
  target: str
  access: str
  adversary: str
  defends: str
  code: str
  source: str

  def __post_init__(self):
    validate.one_of(ACCESS, access=self.access)
    for field in dataclasses.fields(self):
      text = getattr(self, field.name)
      if "|" in text or "\n" in text or not (text or field.name == "code"):
        raise UserError(
          "must be words on one line, without '|'", field=field.name, value=text
        )

  @property
  def simulated(self) -> bool:
    """Whether dpjax implements the attack."""
    return bool(self.code)

  def find(self) -> Any:
    """Returns the object that the attack's code names. Raises UserError if there is none."""
    module, _, name = self.code.rpartition(".")
    try:
      return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
      raise UserError(
        f"of {self.name!r} does not exist", field="code", value=self.code
      ) from error


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
  # --- described only: dpjax has no code that does this
  Attack(
    "interception", "messages between client and server", "messages",
    "whoever is between the two",
    "a secure sum (launch.federate): masked vectors tell nothing; else encrypted connections, "
    "which are the deployment's, and client noise", "",
    "what is read is attacked by the inversions above",
  ),
  Attack(
    "collusion of server and clients", "the message of the client that is left", "messages",
    "a server with accomplices, who subtract theirs from a sum",
    "client noise, or noise inside the secure sum, of which each accomplice takes its share "
    "away; a masked sum alone does not help where all others collude", "",
    "Bonawitz et al. 2017, section 6",
  ),
  Attack(
    "membership over rounds", "whether a client took part", "messages",
    "a server, or a client who keeps every model that it got",
    "user-level privacy (launch.federate, privacy=central), proved for all rounds", "",
    "Nasr et al. 2019",
  ),
  Attack(
    "times and sizes", "sizes of batches and cohorts", "surroundings",
    "whoever sees clocks, traffic or files",
    "fixed shapes; a release (release=true) writes no time, but files and terminals have one",
    "", "not covered by any epsilon",
  ),
  Attack(
    "holes of floating point", "the value under the noise", "model",
    "whoever sees noisy numbers bit by bit",
    "release=true: noise on a public grid; mechanisms round to one", "", "Mironov 2012",
  ),
  # --- on secure computation, and on a run's files: described only, too
  Attack(
    "two stories about who is left", "the vector of one client of a secure sum", "messages",
    "a server that asks one group for a client's mask and another for its key",
    "signed lists of survivors (secagg, signed); clients answer each letter once", "",
    "Bonawitz et al. 2017, section 6",
  ),
  Attack(
    "messages of one silo", "whether one record is in a silo, such as a hospital", "messages",
    "the server, or other silos, who keep what a silo sent in all rounds",
    "record-level privacy inside the silo (privacy=records, proved): nobody but one's own silo is "
    "trusted", "dpjax.auditing.games.silos.games", "Lowy and Razaviyayn 2021",
  ),
  Attack(
    "a sum over too few", "the vector of one client of a secure sum", "messages",
    "a server that leaves out whom it likes",
    "min_survivors, below which clients reveal nothing", "", "Bonawitz et al. 2017, section 6",
  ),
  Attack(
    "differences of sums", "the update of a client that was in one round only", "messages",
    "a server that compares the sums of two rounds",
    "differential privacy of the sums (secure.distributed_noise), proved for all rounds", "",
    "So et al. 2023",
  ),
  Attack(
    "collusion in a computation on shares", "all inputs", "messages",
    "a party with the dealer, or with another party: as many as the protocol cannot bear",
    "parties of different interests; no dealer: garbled circuits, CHEETAH", "",
    "by definition of the sharing",
  ),
  Attack(
    "a party that deviates", "a wrong result, or a bit of an input for each failure", "part",
    "a party of a computation on shares, or a client of a secure sum",
    "nothing here beyond lengths, replays and seals: protocols are honest-but-curious", "",
    "Lindell 2017, How to simulate it",
  ),
  Attack(
    "noise of decrypted CKKS", "the secret key", "answers",
    "whoever gets a raw decryption of something that it knows",
    "decryptions stay with the key's holder or are rounded; BFV, which is exact", "",
    "Li and Micciancio 2021",
  ),
  Attack(
    "one key for all clients", "every vector of a homomorphic sum", "messages",
    "a server with one client as accomplice",
    "secure sums by masks, which have no such key", "", "by definition of the scheme",
  ),
  Attack(
    "side channels of an enclave", "what trusted execution (SGX) computes on", "surroundings",
    "whoever owns the machine, whom an enclave is to keep out",
    "patches; programs whose memory and time do not depend on data; there is none here: dpjax "
    "neither runs in an enclave nor simulates one", "",
    "Van Bulck et al. 2018 (Foreshadow); van Schaik et al. 2020 (SGAxe)",
  ),
  Attack(
    "stolen checkpoints", "the noise key, and with it the data", "surroundings",
    "whoever reads a run's folder",
    "checkpoints/ is as secret as the data; publish params.npz of a release alone", "",
    "no epsilon holds for it",
  ),
)  # fmt: skip

# How each way to compute on hidden data changes a threat. dpjax has no code for the last way.
_WAYS = (
  "threat", "secure sum (`secure.sums`)", "shares (`secure.mpc`)",
  "ciphertexts (`secure.homomorphic`)", "trusted execution (not in dpjax)",
)  # fmt: skip
_CHANGES = (
  (
    "interception",
    "masked vectors and sealed shares tell nothing on an open wire; additive shares need "
    "private channels",
    "the engine's sockets are TLS, as are SPU's, which keeps to one machine without it",
    "ciphertexts tell nothing",
    "a channel that ends inside the enclave",
  ),
  (
    "rogue server",
    "sees the sum alone; one that lies about survivors needs `signed`, and fewer than 2t - n "
    "clients that sign for it; a model made to leak "
    "leaks into the sum",
    "there is none: two parties, neither sees a number; one that deviates is not caught",
    "may return anything; under one key of all clients it can have one vector decrypted as the "
    "sum",
    "only the program whose signature was checked gets the keys",
  ),
  (
    "colluding clients",
    "up to t - 1 with the server learn the sum of the others, no more",
    "two that the protocol holds apart (a party and the dealer) open everything",
    "one with the server opens everything, where clients share the key",
    "learn what the program tells them",
  ),
  (
    "what is revealed",
    "the sum still tells of its parts: noise inside it (`secure.distributed_noise`)",
    "weights and classes tell what they tell anybody: no differential privacy",
    "the same; and raw CKKS decryptions tell about the key",
    "the same as without",
  ),
  (
    "side channels",
    "who fell silent, and when; lengths are public",
    "shapes, rounds and times, none of which follow from secrets; in one process everything",
    "sizes, times, levels",
    "caches, page faults, power: enclaves were read by each",
  ),
)

PAGE = "THREATS.md"
COMMAND = f"python -m launch.attack --threats > {PAGE}"


def table(attacks: Iterable[Attack] = ATTACKS) -> str:
  """Returns a Markdown table of attack, target, access and defences.

  >>> print(table([Attack("a", "b", "answers", "c", "d", "", "e")]))
  | attack | target | access | what defends |
  | --- | --- | --- | --- |
  | a (described only) | b | answers | d |
  <BLANKLINE>
  """
  head = ["attack", "target", "access", "what defends"]
  label = lambda a: a.name if a.simulated else f"{a.name} (described only)"
  rows = [[label(a), a.target, a.access, a.defends] for a in attacks]
  return markdown.table(head, rows)


def page() -> str:
  """Returns the text of the page of threats: attacks, defences, access and adversaries."""
  access = markdown.table(["access", "means"], ACCESS.items())
  adversaries = []
  for attack in ATTACKS:
    code = f"`{attack.code}`" if attack.simulated else "described only"
    adversaries.append([attack.name, attack.adversary, code, attack.source])
  return (
    "# Threats: who could learn what, and what stops them\n\n"
    f"Written by `{COMMAND}` from\n"
    "`dpjax/attacks/registry.py`; a test fails where this page is stale. An attack that is\n"
    "described only has no code here, so no number of dpjax speaks of it. That an attack\n"
    "finds nothing proves nothing; what is proved stands in a run's privacy statement.\n\n"
    f"## Attacks and defences\n\n{table()}\n"
    "## What secure computation changes\n\n"
    "It hides what is computed on, and says nothing of what the result tells. Against parties\n"
    "that follow the protocol, unless a section says more. Trusted execution needs hardware\n"
    "(SGX), whose maker signs which program runs: it is described here, and not simulated.\n\n"
    f"{markdown.table(_WAYS, _CHANGES)}\n"
    f"## Access\n\n{access}\n"
    f"## Adversaries\n\n"
    f"{markdown.table(['attack', 'who', 'carried out by', 'source'], adversaries)}"
  )
