r"""Clients as separate programs: dpjax's client update and aggregator under Flower (flwr).

Flower only carries the messages. dpjax does the clients' work, the sums, the noise and the
accounting. Flower's own wrappers for privacy are not used: they draw noise from NumPy's global
generator and account without sampling. Install the `flower` extra. Set
FLWR_TELEMETRY_ENABLED=0 unless usage is to be reported to Flower's makers.

`client_app` is the client; `rounds` makes a `flwr.serverapp.strategy.Strategy`. If clients draw
nothing at random, the result is that of the algorithm in one process, to rounding. If they draw
(local noise, rounding), it is another draw from the same distribution. In one program:

    client = federated.local_training(loss_fn, optax.sgd(0.1))
    strategy = flower.rounds(algorithm, params, plan=plan, num_clients=20, noise_key=key)
    run_simulation(flower.server_app(strategy, num_rounds=100),
                   flower.client_app(client, local_data, params, num_rounds=100,
                                     folder="/data/clients"), num_supernodes=20)

For separate programs, put `app = flower.server_app(...)` and `app = flower.client_app(...)`
into the modules that [tool.flwr.app.components] of a Flower app's pyproject.toml names, then:

    flower-superlink --insecure --host 0.0.0.0 --port 8000     # on the server
    flower-supernode --insecure --superlink HOST:8000 \
      --port 8001 --node-config "partition-id=0"               # on client 0, and so on
    flwr run . NAME                                            # submits the app

Outside of a test, use certificates in place of --insecure. NAME is a section [superlink.NAME]
with `address = "HOST:8000"` in Flower's config.toml. Flower starts a fresh
process for each message, so a client compiles anew in every round. `partition-id` says which
client a program is; `local_data(client, round)` gives its batches: no data leave the program.

| who           | gets                                                              |
| ------------- | ----------------------------------------------------------------- |
| a client      | the parameters and the number of the round                        |
| the server    | a client's message and weight, its number, and when it answers    |
| the server    | NOT: losses, norms before local noise, the text of an error, any  |
|               | key, example counts (except in the weights of `by_examples` and   |
|               | `capped_weight`)                                                  |

A client of your own, in any library, is a `ClientApp` that replies to two kinds of messages:

| message | it holds                                 | the reply, a RecordDict                    |
| ------- | ---------------------------------------- | ------------------------------------------ |
| query   | nothing that is read                     | "config": ConfigRecord({"client": number}) |
| train   | "arrays": ArrayRecord of the parameters; | "answer": ArrayRecord([*change, weight])   |
|         | "config": {"round": number of the round} |                                            |

`number` of a client is its place, from 0, and the same in every round. The parameters are arrays in
the order of `jax.tree.leaves` (dicts by sorted keys). `change` is the client's parameters minus
these, in this order, in their shapes and in float32. `weight` is an array of shape [] in float32, 1
if clients count alike. Other replies, such as Flower's usual "arrays" and "metrics", count as no
client: the server says how many there were. With `central` the server clips and adds noise whatever
a client of your own sends, so the guarantee of a user holds. Noise against the server, and that a
round is answered once, are the work of such a client itself.

The sampler's seed stays on the server: anyone who knows it knows who takes part, and epsilon
relies on that being secret. With a guarantee it is drawn afresh, and so is the noise, also under a
key of before: a server that starts again asks for rounds that clients have answered, gets nothing,
and would release its first run's noise alone.

Everything random on a client is drawn from a key that the client's own operating system makes for
each answer. The key is neither sent nor kept. So a server cannot subtract the noise of
`client_noise`. A run cannot be repeated bit for bit if clients draw.

A client answers a round at most once, and at most `num_rounds` times in all, whatever the server
asks. It notes the round in its own folder before it looks at its data. So with
`client_noise(client, l2_clip_norm=C, noise_multiplier=z)` its answers to the server together
are (`local_epsilon(z, delta, num_rounds)`, delta)-private for the whole client under
"replace_one". Neither how long an answer takes nor whether a client fails is hidden: data on which
it would fail must be kept from it. A client that fails, or answers in other shapes, is left out.
The round is accounted all the same. The server says on stderr how many clients
it left out, and why, and fails after rounds in which no reply could be used. These lines are for
its owner, who sees every message anyway: they are NOT private, and never show the text of a reply.
"""

from __future__ import annotations

import collections
import importlib
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.accounting.proved import ZERO
from dpjax.federated.aggregation import Aggregator, central, weighted_mean
from dpjax.federated.client import ClientAlgorithm, ClientInfo, Received
from dpjax.federated.cohort import Cohort, Drawn, LocalBatches, bucket, pad
from dpjax.federated.execution.client_loop import loop_clients
from dpjax.federated.execution.context import Context, MapClients, Mapped, Run
from dpjax.federated.round import FederatedAlgorithm, RoundInfo, check_apart
from dpjax.federated.transport import remote
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.sampling import batches
from dpjax.types import Params
from dpjax.validate import UserError, Verbatim

_ANSWER = "answer"
# flwr's code for an error in the client's program.
_RAISED = 2


def _flwr(module: str) -> Any:
  """Imports a module of flwr. Raises UserError if it is not installed."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise UserError(
      f"is not installed ({error}); pip install -e '.[flower]' in dpjax's clone for clients "
      "that are separate programs",
      field="flwr",
    ) from error


def _arrays(tree: Any) -> Any:
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  return _flwr("flwr.app").ArrayRecord(leaves)


def _tree(record: Any, like: Any) -> Any:
  """Returns the arrays of a record in the structure of `like`. Raises ValueError for other shapes
  or dtypes."""
  leaves, treedef = jax.tree.flatten(like)
  arrays = record.to_numpy_ndarrays()
  facts = lambda leaf: (tuple(leaf.shape), np.dtype(leaf.dtype))
  # Other dtypes would compile again; other shapes could broadcast into every coordinate.
  if [facts(leaf) for leaf in arrays] != [facts(leaf) for leaf in leaves]:
    raise ValueError("arrays of other shapes or types")
  return jax.tree.unflatten(treedef, arrays)


# --- client program


def client_app(
  client: ClientAlgorithm,
  local_data: Callable[[int, int], tuple[LocalBatches, int]],
  like: Params,
  *,
  num_rounds: int,
  folder: pathlib.Path | str,
) -> Any:
  """Makes a `flwr.clientapp.ClientApp` that does the local work of one client.

  Args:
    client: client that the server's algorithm was made from; see `local_training`, and
      `client_noise` for privacy against the server.
    local_data: `(client, round) -> (batches, number of examples)`, called in the program of the
      client with the client's `partition-id`. Of the client's arrays [n, ...], one pass makes
      `federated.from_batches([examples], batch_size=10).batches[0], n`.
    like: parameters whose structure, shapes and dtypes are the server's.
    num_rounds: largest number of answers that this client ever gives; rounds are 0 to
      num_rounds - 1.
    folder: absolute path of the folder where the client notes the rounds that it has answered. The
      folder must outlive programs and runs: emptying it allows `num_rounds` more answers.

  Guarantee: see the top of this module. A round whose work was interrupted counts as answered.

  Raises:
    UserError: flwr is not installed; num_rounds < 1; the path of the folder is relative.
  """
  app = _flwr("flwr.clientapp").ClientApp()
  flwr = _flwr("flwr.app")
  remote_client = remote.Client(
    client, local_data, like, num_rounds=num_rounds, folder=folder
  )

  @app.train()
  def train(message: Any, context: Any) -> Any:
    try:
      who = int(context.node_config["partition-id"])
      asked = message.content["config"]
      sent = remote_client.answer(
        who, asked["round"], _tree(message.content["arrays"], remote_client.like)
      )
    # Every error is caught, since Flower would send its text, which may contain data.
    except Exception as error:
      # The client's owner reads the error here: one line of a UserError, otherwise the traceback.
      if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
      else:
        traceback.print_exception(error)
      return flwr.Message(flwr.Error(_RAISED, "left out"), reply_to=message)
    return flwr.Message(flwr.RecordDict({_ANSWER: _arrays(sent)}), reply_to=message)

  @app.query()
  def who(message: Any, context: Any) -> Any:
    """Replies with the number of the client that this program runs."""
    config = flwr.ConfigRecord({"client": int(context.node_config["partition-id"])})
    return flwr.Message(flwr.RecordDict({"config": config}), reply_to=message)

  return app


# --- server program


class _Answers:
  """A `MapClients` for clients that have already answered: it returns their answers."""

  def __init__(self):
    self.answers: dict[int, Any] = {}
    self._client: Any = None

  def __call__(self, client: ClientAlgorithm, partial: Any) -> Run:
    self._client = client
    self._partial = None if partial is None else jax.jit(partial)
    return self._run

  def like(self, received: Received, key: jax.Array) -> Any:
    """Returns the `Sent` of one client, with shapes in place of arrays."""

    def client_message(received: Received, key: jax.Array) -> Any:
      local = self._client.init(received, None, jnp.int32(0), key)
      return self._client.finish(received, local)[0]

    return jax.eval_shape(client_message, received, key)

  def _run(self, context: Context, cohort: Cohort) -> Mapped:
    if context.received.extra is not None:
      raise UserError(
        "clients that get more than the parameters are not run over Flower", field="make"
      )
    if not cohort.size:
      empty = loop_clients()(self._client, self._partial)
      return empty(context, cohort)
    answers = [self.answers[int(who)] for who in cohort.ids]
    sent = jax.tree.map(lambda *leaves: np.stack(leaves), *answers)
    # Clients send a message and a weight, but neither losses nor numbers of examples.
    message = jax.tree.map(jnp.asarray, sent.message)
    norms: Any = np.asarray(trees.per_example_norms(message))
    unknown: Any = np.zeros(len(norms), np.int32)
    bits = 32.0 * sum(leaf[0].size for leaf in jax.tree.leaves(sent.message))
    each: Any = lambda number: np.full(len(norms), number, np.float32)
    info = ClientInfo(each(np.nan), unknown, unknown, norms, each(bits), sent.weight)
    if self._partial is None:
      return Mapped(None, sent, (), info)
    size = bucket(cohort.size)
    message, weight = pad(tuple(sent), size)
    sums = self._partial(context.state, message, weight, np.arange(size) < cohort.size)
    return Mapped(sums, None, (), info)


class _Server:
  """State of the server for `rounds`, independent of Flower."""

  def __init__(
    self,
    make: Callable[[Aggregator, MapClients], FederatedAlgorithm],
    params: Params,
    *,
    plan: Plan,
    num_clients: int,
    rng: int | None = None,
    noise_key: Any = None,
  ):
    validate.integer_at_least(1, num_clients=num_clients)
    if plan.is_private and rng is not None:
      raise UserError(
        "must be None with a private plan: a server that starts again would draw the same noise, "
        "for other sums, since clients answer a round once",
        field="rng",
        value=rng,
      )
    self._draws = batches.draws_of(rng, 0, plan.sampler, num_clients)
    if plan.is_private != (noise_key is not None):
      # The key is secret, so the message does not show it.
      shown = "None" if noise_key is None else "(given)"
      raise UserError(
        "must be given with a private plan, and only with one",
        field="noise_key",
        value=Verbatim(shown),
      )
    check_apart(
      plan, "programs see when they are asked, and so in whose place another one was not"
    )
    if plan.is_private and plan.neighboring_relation == ZERO:
      raise UserError(
        "must be 'add_or_remove_one' or 'replace_one': what the program of an emptied client "
        "sends is not known here, and noise of its own is up to two clip norms from its message",
        field="neighboring_relation",
        value=plan.neighboring_relation,
      )
    plan.check_capacity(num_clients)
    self.plan = plan
    self.num_clients = num_clients
    self._answers = _Answers()
    aggregator = weighted_mean() if noise_key is None else central(plan, noise_key)
    self._algorithm = make(aggregator, self._answers)
    self.state = self._algorithm.init(params, num_clients)
    if getattr(self.state, "memories", ()) is not None:
      raise UserError(
        "clients that keep something between rounds, or that work twice in one, "
        "are not run over Flower",
        field="make",
      )
    key = source.from_words(self.state.key)
    self._like = self._answers.like(Received(self.state.params), key)
    self.infos: list[RoundInfo] = []

  def draw(self) -> list[int]:
    """Draws the clients of the next round. Raises UserError after the plan's last round."""
    step = int(self.state.round)
    if step >= self.plan.num_steps:
      raise UserError(
        f"must be <= {self.plan.num_steps}, what the plan charges for",
        field="num_rounds",
        value=step + 1,
      )
    drawn = batches.draw_rows(
      self.plan.sampler, self.num_clients, seed=self._draws.seed, step=step
    )
    return [int(client) for client in drawn]

  def settings(self) -> dict[str, Any]:
    """Returns the settings that are sent with the parameters. A client's noise depends on none of
    these settings."""
    return {"round": int(self.state.round)}

  def answer(self, record: Any) -> Any:
    """Decodes the answer of one client. Raises ValueError for other shapes or types."""
    return _tree(record, self._like)

  def close(self, answers: dict[int, Any], num_silent: int = 0) -> RoundInfo:
    """Aggregates the answers, even if there are none. Returns the diagnostics of the round, with
    `num_silent` more clients left out."""
    ids = np.array(sorted(answers), np.int64)
    self._answers.answers = answers
    drawn = Drawn(self.plan, int(self.state.round), self._draws.run)
    cohort = Cohort(ids, np.zeros(len(ids), np.int64), (), drawn=drawn)
    self.state, info = self._algorithm.round(self.state, cohort)
    # A client without a usable reply is not in the cohort.
    info = info._replace(left_out=info.left_out + np.int32(num_silent))
    self.infos.append(info)
    return info


class _Strategy:
  """Methods of the strategies that `rounds` makes. Only `rounds` adds flwr's base class, so that
  other code does not need flwr."""

  timeout = 3600.0  # seconds for the answers of a round
  start: Callable[..., Any]  # method of flwr's base class

  def __init__(self, server: _Server):
    self.server = server
    self._nodes: dict[int, int] = {}  # client -> node
    self._known: set[int] = set()  # nodes that have said who they are
    self._asked: dict[int, int] = {}  # node -> client, in this round
    self._num_asked = 0
    self._strange: set[int] = (
      set()
    )  # nodes whose owner was told that they are not understood

  def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list:
    # Flower's copy of the parameters is ignored: only the server's own state counts.
    del server_round, arrays, config
    self._find(grid)
    content = {
      "arrays": _arrays(self.server.state.params),
      "config": _flwr("flwr.app").ConfigRecord(self.server.settings()),
    }
    present = set(grid.get_node_ids())
    drawn = [c for c in self.server.draw() if self._nodes.get(c) in present]
    self._asked = {self._nodes[client]: client for client in drawn}
    self._num_asked = len(self._asked)
    return [_message("train", node, content) for node in self._asked]

  def _find(self, grid: Any) -> None:
    """Asks new nodes which clients they are."""
    present = set(grid.get_node_ids())
    asked = [_message("query", node, {}) for node in present - self._known]
    for reply in grid.send_and_receive(asked, timeout=self.timeout) if asked else ():
      try:
        node = reply.metadata.src_node_id
        client = int(reply.content["config"]["client"])
      # A node with an unusable answer stays unknown, and is asked again in the next round.
      except Exception:
        continue
      self._known.add(node)
      # The first node that names a client keeps it, so nobody can take over a connected client.
      if self._nodes.get(client) not in present:
        self._nodes[client] = node
    strange = present - self._known - self._strange
    if strange:
      self._strange |= strange
      _warn(
        f"{len(strange)} connected programs did not say which client they are, and are not "
        "asked; dpjax.federated.transport.flower.client_app says it"
      )

  def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
    answers = {}
    why = collections.Counter()
    for reply in replies:
      # Only a first answer counts. A node that was not asked, or has answered, is ignored.
      client = self._asked.pop(reply.metadata.src_node_id, None)
      if client is None:
        continue
      # The round continues without a client that sent an error or no valid answer. What the errors
      # say may contain data, so it is not shown.
      try:
        record = reply.content[_ANSWER]
      except Exception:
        why["with an error" if reply.has_error() else f"without a record {_ANSWER!r}"] += 1
        continue
      try:
        answers[client] = self.server.answer(record)
      except Exception:
        why["with arrays of other shapes or types"] += 1
    why["without a reply in time"] = len(self._asked)
    info = self.server.close(answers, self._num_asked - len(answers))
    why["with NaN, infinity or no example"] = len(answers) - int(info.num_clients)
    if info.left_out:
      reasons = ", ".join(f"{count} {reason}" for reason, count in why.items() if count)
      _warn(
        f"round {server_round}: {int(info.left_out)} of {self._num_asked} clients are left out: "
        f"{reasons}; the replies of dpjax.federated.transport.flower.client_app are understood"
      )
    return _arrays(self.server.state.params), None

  def configure_evaluate(
    self, server_round: int, arrays: Any, config: Any, grid: Any
  ) -> list:
    return []

  def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> None:
    return None

  def summary(self) -> None:
    """Does nothing: results do not belong in Flower's log."""


def _warn(message: str) -> None:
  """Tells the server's owner, on stderr, of clients that are left out."""
  print(f"warning: {message}", file=sys.stderr, flush=True)


def _message(kind: str, node: int, content: dict[str, Any]) -> Any:
  flwr = _flwr("flwr.app")
  return flwr.Message(flwr.RecordDict(content), dst_node_id=node, message_type=kind)


def rounds(make: Callable[..., Any], params: Params, **options: Any) -> Any:
  """Makes a `flwr.serverapp.strategy.Strategy` with cohorts, sums, noise and accounting of this
  library.

  Args:
    make: `(aggregator, map_clients) -> FederatedAlgorithm`, such as
      `lambda a, m: fed_avg(loss_fn, optax.sgd(0.1), None, a, m, key=key)`. Clients of the algorithm
      must get only the parameters and keep nothing, as in fed_avg, fed_prox, fed_nova and fed_sgd.
    params: initial parameters.
    plan: plan that draws the cohorts of clients and adds the noise. The unit is one client. A
      private plan draws each client apart from all others (`Sampler.proved_with_memory`).
    num_clients: number of clients, with `partition-id` 0 to num_clients - 1; they need
      not all be connected.
    rng: integer seed of the sampler, for a plan without privacy only. None takes 128 fresh bits of
      the operating system, and the noise of this run alone (`cohort.cohorts`).
    noise_key: key of the noise, for a private plan only.

  Guarantee: the same as that of `fed_avg` with `central(plan, noise_key)`. It holds against the
  clients and anyone who sees the parameters; the server itself sees every message. `.server` holds
  `.state`, of which `plan.spent` says what a private plan's rounds cost, and `.infos` (not private:
  do not release).

  Raises:
    UserError: flwr is not installed; an argument is wrong; a round comes after the plan's last; a
      private plan whose sampler draws clients in each other's place, such as `FixedSizeSampler`, or
      whose relation is replace_special.
  """
  base = _flwr("flwr.serverapp.strategy").Strategy
  return type("Rounds", (_Strategy, base), {})(_Server(make, params, **options))


def server_app(
  strategy: _Strategy,
  *,
  num_rounds: int,
  min_clients: int | None = None,
  timeout: float = 3600.0,
) -> Any:
  """Makes a `flwr.serverapp.ServerApp` that runs the rounds of `rounds(...)`.

  Args:
    num_rounds: number of rounds to run.
    min_clients: number of connected programs to wait for; None for the strategy's `num_clients`.
    timeout: seconds to wait for these programs, and then for the answers of each round. A client
      that has not answered by then is left out of the round.

  Raises:
    UserError: an argument is wrong; the plan has fewer rounds left. While the app runs: too few
      programs are connected in time; in none of the rounds a reply could be used.
  """
  server = strategy.server
  wanted = server.num_clients if min_clients is None else min_clients
  validate.integer_at_least(1, num_rounds=num_rounds, min_clients=wanted)
  validate.positive(timeout=timeout)
  left = server.plan.num_steps - int(server.state.round)
  if num_rounds > left:
    raise UserError(
      f"must be <= {left}, what the plan charges for", field="num_rounds", value=num_rounds
    )
  strategy.timeout = timeout
  app = _flwr("flwr.serverapp").ServerApp()

  @app.main()
  def main(grid: Any, context: Any) -> None:
    del context
    deadline = time.monotonic() + timeout
    while (there := len(list(grid.get_node_ids()))) < wanted:
      if time.monotonic() > deadline:
        raise UserError(
          f"{there} are connected after timeout={timeout:g} seconds",
          field="min_clients",
          value=wanted,
        )
      time.sleep(0.2)
    initial = _arrays(server.state.params)
    strategy.start(
      grid=grid, initial_arrays=initial, num_rounds=num_rounds, timeout=timeout
    )
    if not any(int(info.num_clients) for info in server.infos):
      raise UserError(
        "no reply could be used in any round, so the parameters learned nothing",
        field="num_rounds",
        value=num_rounds,
      )

  return app
