"""A sum in one message of each client: exact, through any silence, and closed to colluders."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dpjax.secure import sums
from dpjax.secure.sums import committee, committee_parties, messages, primitives
from dpjax.secure.sums.committee_parties import CommitteeTerms
from dpjax.secure.sums.galois_shares import Sharing
from dpjax.secure.sums.interface import Present
from dpjax.secure.sums.messages import SERVER
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_SESSION = bytes(range(16))


def _terms(count=4, **changes):
  settings = {
    "session": _SESSION,
    "clients": tuple(range(count)),
    "num_members": 3,
    "colluding": 1,
    "packed": 1,
    "min_survivors": 2,
    "length": 5,
    **changes,
  }
  return CommitteeTerms(**settings)


@pytest.mark.parametrize(
  ("bits", "num_members", "colluding", "packed"), [(32, 5, 2, 1), (64, 6, 1, 3)]
)
def test_sums_are_exact(bits, num_members, colluding, packed):
  vectors = parties.vectors(7, bits=bits)
  protocol = sums.Committee(
    bits=bits, num_members=num_members, colluding=colluding, packed=packed
  )
  everybody = protocol.sum(vectors)
  oracle = sums.PlainSum(bits=bits).sum(vectors)
  np.testing.assert_array_equal(everybody.total, oracle.total)
  assert everybody.total.dtype == oracle.total.dtype
  assert everybody.survivors == oracle.survivors == tuple(range(7))


def test_every_pattern_of_silence_gives_the_sum_or_one_line():
  """Three clients, all of them members, each silent before one of three phases or never."""
  terms = _terms(3)
  vectors = parties.vectors(3)
  given = 0
  for silent in itertools.product(range(4), repeat=3):
    phases = [tuple(who for who in range(3) if silent[who] >= phase) for phase in (1, 2, 3)]
    there = Present(terms.clients, *phases)
    staying = set(terms.members) & set(there.unmasking)
    if len(there.uploading) < 2 or len(staying) < 2:
      with refuses("min_survivors" if len(there.uploading) < 2 else "committee"):
        committee.run(terms, there, vectors.__getitem__)
      continue
    summed = committee.run(terms, there, vectors.__getitem__)
    expected = np.sum([vectors[who] for who in there.uploading], axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(summed.total, expected)
    assert summed.survivors == there.uploading
    given += 1
  assert given == 10


def test_what_colluders_and_the_server_see_is_a_function_of_the_sum():
  """Modulo 2, every draw of both honest clients: all members' sums, and one member's shares."""
  seen = {}
  draws = list(itertools.product(range(2), repeat=4))
  for pair in itertools.product(range(4), repeat=2):
    vectors = [np.array([n % 2, n // 2], np.uint32) for n in pair]
    views = Counter()
    for words in draws:
      halves = np.array(words, np.uint32).reshape(2, 2)
      shares = [
        Sharing(num_members=3, colluding=1).split(
          vector, entropy=lambda size, half=half: half.tobytes()
        )
        for vector, half in zip(vectors, halves)
      ]
      totals = [(shares[0][k] + shares[1][k]) % 2 for k in range(3)]
      for colluder in range(3):
        held = [client[colluder] % 2 for client in shares]
        views[colluder, *np.concatenate([*held, *totals]).tolist()] += 1
    seen[pair] = views
  total = lambda pair: pair[0] ^ pair[1]  # modulo 2, word by word
  for one, other in itertools.combinations(seen, 2):
    assert (seen[one] == seen[other]) == (total(one) == total(other))


# --- messages on their way


def _shares_for(terms, who, roster, vector):
  """The message of a client that has begun anew."""
  client, _ = committee_parties.start(terms, who)
  return client.answer(roster, vector)[1]


class _Sum:
  """One sum, message by message."""

  def __init__(self, terms):
    self.terms = terms
    self.server = committee_parties.start_server(terms)
    self.members = {}
    for who in terms.members:
      member, message = committee_parties.start(terms, who)
      # Each has sent a message of its own, which `shares` makes anew.
      self.members[who] = member._replace(has_sent=True)
      self.server, _ = self.server.receive(message, who)
    self.server, self.rosters = self.server.close()
    self.vectors = parties.vectors(len(terms.clients), terms.length)

  def shares(self, who):
    return _shares_for(self.terms, who, self.rosters[who], self.vectors[who])

  def upload(self, who, skipping=()):
    """Sends a client's message, but nothing to the members in `skipping`."""
    self.server, forwarded = self.server.receive(self.shares(who), who)
    for member, message in forwarded.items():
      if member not in skipping:
        self.members[member], _ = self.members[member].answer(message)
    return forwarded

  def listed(self, clients):
    records = dict.fromkeys(clients, b"\1")
    return messages.write("survivors", self.terms.session, SERVER, records)

  def told(self, member, clients):
    """Returns the share of a sum that a member answers to this list."""
    _, message = self.members[member].answer(self.listed(clients))
    records = self.terms.read("sums", message, member)
    return np.frombuffer(records[member], self.terms.dtype)


def _replayed(other):
  return _Sum(_terms(session=bytes(16))).shares(other)


def test_a_letter_that_is_wrong_is_one_line_and_moves_nothing():
  first = _Sum(_terms())
  second = _Sum(_terms())
  message = first.shares(0)
  cases = [
    (_replayed(0), 0),
    (message, 1),  # is signed by client 0
    (message[:-1], 0),
    (first.rosters[0], 0),  # is not for the server
    (messages.write("shares", _SESSION, 9, {}), 9),  # is no client of this sum
    (messages.write("shares", _SESSION, 0, {}), 0),  # lacks what members wait for
  ]
  for data, sender in cases:
    with refuses("shares") as caught:
      first.server.receive(data, sender)
    assert "\n" not in str(caught.value)
  forwarded = first.upload(0)
  with refuses("shares"):
    first.server.receive(message, 0)
  member = first.terms.members[0]
  other = first.terms.members[1]
  with refuses("forwarded"):
    first.members[member].answer(forwarded[member])
  # Sealed for another member, for another sum, or changed.
  for_other = forwarded[other]
  changed = bytearray(first.upload(1)[member])
  changed[-1] ^= 1
  for state, data in [
    (second.members[member], for_other),
    (second.members[member], forwarded[member]),
    (second.members[member], bytes(changed)),
  ]:
    with refuses("envelope"):
      state.answer(data)


def test_a_member_answers_once_and_for_the_clients_that_it_added():
  play = _Sum(_terms())
  for who in (0, 1):
    play.upload(who)
  member = play.members[play.terms.members[0]]
  for clients, words in [
    ((0,), "survivors"),
    ((0, 1, 2), "survivors"),
  ]:
    with refuses(words):
      member.answer(play.listed(clients))
  after, _ = member.answer(play.listed((0, 1)))
  assert not after.private and not after.total.size
  with refuses("survivors"):
    after.answer(play.listed((0, 1)))
  with refuses("forwarded"):
    after.answer(play.upload(2)[play.terms.members[1]])
  alone = _Sum(_terms())
  alone.upload(3)
  with refuses("min_survivors", value=2):
    alone.members[alone.terms.members[0]].answer(alone.listed((3,)))


def test_a_client_refuses_a_roster_of_others_or_of_too_few():
  play = _Sum(_terms())
  keys = play.terms.read("roster", play.rosters[0], SERVER)
  stranger = next(who for who in range(4) if who not in keys)
  some = {who: bytes(key) for who, key in keys.items()}
  for records in ({**some, stranger: bytes(32)}, dict([next(iter(some.items()))])):
    roster = messages.write("roster", _SESSION, SERVER, records)
    with refuses("roster"):
      _shares_for(play.terms, 0, roster, play.vectors[0])
  with pytest.raises(UserError, match="is no point that a key can be agreed with"):
    roster = messages.write("roster", _SESSION, SERVER, dict.fromkeys(some, bytes(32)))
    _shares_for(play.terms, 0, roster, play.vectors[0])
  with refuses("vector"):
    _shares_for(play.terms, 0, play.rosters[0], np.full(5, np.nan))


def test_a_wrong_sum_of_a_member_is_seen_only_where_more_answer_than_needed():
  for answering, seen in [(3, True), (2, False)]:
    play = _Sum(_terms())
    for who in range(4):
      play.upload(who)
    play.server, lists = play.server.close()
    for place, who in enumerate(play.terms.members[:answering]):
      _, message = play.members[who].answer(lists[who])
      data = bytearray(message)
      # The first member adds one to its first word.
      data[messages.OVERHEAD + messages.ID] ^= place == 0
      play.server, _ = play.server.receive(bytes(data), who)
    play.server, _ = play.server.close()
    if seen:
      with refuses("shares"):
        play.server.result()
      continue
    expected = np.sum([*play.vectors.values()], axis=0, dtype=np.uint32)
    assert not np.array_equal(play.server.result().total, expected)


def test_a_server_that_tells_members_different_lists_learns_other_sums():
  """The attack that the documents name: two lists, and the difference is one client's vector."""
  play = _Sum(_terms(num_members=4))
  members = play.terms.members
  for who in (0, 1):
    play.upload(who)
  play.upload(2, skipping=members[2:])
  told = {
    place: play.told(who, (0, 1, 2) if place < 2 else (0, 1))
    for place, who in enumerate(members)
  }
  combine = play.terms.sharing.combine
  more = combine({place: told[place] for place in (0, 1)}, length=5)
  less = combine({place: told[place] for place in (2, 3)}, length=5)
  np.testing.assert_array_equal(more - less, play.vectors[2])


@pytest.mark.parametrize("num_spoilt", [1, 3])
def test_a_share_that_a_member_cannot_open_silences_it(num_spoilt, monkeypatch):
  """In one process as over sockets: the others' sum is exact, or refused."""
  terms = _terms(5, num_members=4)
  everybody = Present(*[terms.clients] * 4)
  seal = primitives.seal
  spoilt = [terms.context(b"committee share", 4, who) for who in terms.members]

  def changed(key, plain, context):
    sealed = seal(key, plain, context)
    return bytes(len(sealed)) if context in spoilt[:num_spoilt] else sealed

  monkeypatch.setattr(primitives, "seal", changed)
  vectors = parties.vectors(5)
  if num_spoilt == 3:
    with refuses("committee") as caught:
      committee.run(terms, everybody, vectors.__getitem__)
    assert "is not for this client" in str(caught.value)
    return
  summed = committee.run(terms, everybody, vectors.__getitem__)
  assert summed.survivors == terms.clients
  expected = np.sum([*vectors.values()], axis=0, dtype=np.uint32)
  np.testing.assert_array_equal(summed.total, expected)


# --- numbers, settings, rounds


def test_a_client_sends_one_message_and_its_bytes_are_counted():
  terms = _terms(6, packed=2, num_members=4, length=50)
  play = _Sum(terms)
  everybody = Present(*[terms.clients] * 4)
  cost = committee.run(terms, everybody, play.vectors.__getitem__).cost
  client = next(who for who in terms.clients if who not in terms.members)
  sent = len(play.shares(client))
  each = terms.record_bytes("shares")
  assert sent == messages.size(4, each) and each == terms.record_bytes("sums") + 48
  heard = len(play.rosters[client])
  answers = messages.size(1, terms.record_bytes("sums")) + messages.size(6, 1)
  member = sent + heard + messages.size(1, 32) + 6 * messages.size(1, each) + answers
  assert cost.client_bytes == member
  assert cost.server_bytes == 4 * member + 2 * (sent + heard)
  assert cost.operations == 2 * 4 * 6 and cost.expansions == 6


@pytest.mark.parametrize(
  ("num_clients", "corrupt", "dropout", "packed"),
  [(100, 0.1, 0.2, 1), (1000, 0.05, 0.1, 20), (30, 0.05, 0.1, 1)],
)
def test_committees_are_the_smallest_that_scipy_finds_safe(
  num_clients, corrupt, dropout, packed
):
  def safe(members, colluding):
    bad = stats.hypergeom(num_clients, int(corrupt * num_clients), members)
    stay = stats.hypergeom(num_clients, num_clients - int(dropout * num_clients), members)
    staying = stay.cdf(colluding + packed - 1)
    return bad.sf(colluding) <= 2**-40 and staying <= 2**-20

  members, colluding = committee.parameters(
    num_clients, corrupt=corrupt, dropout=dropout, packed=packed
  )
  assert safe(members, colluding)
  assert not any(safe(members - 1, t) for t in range(1, members - packed))
  assert (
    colluding == 1
    or stats.hypergeom(num_clients, int(corrupt * num_clients), members).sf(colluding - 1)
    > 2**-40
  )


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"num_members": 3, "colluding": 3}, "colluding"),
    (
      {"num_members": 3, "colluding": 2, "packed": 2},
      "num_members",
    ),
    ({"colluding": 0}, "colluding"),
    ({"num_members": 1}, "num_members"),
    ({"num_members": 5000}, "num_members"),
    ({"min_survivors": 1}, "min_survivors"),
    # More than there are points: the number of members had a bound below zero.
    ({"packed": 10**6}, "packed"),
  ],
)
def test_wrong_committees_are_one_line(settings, field):
  with refuses(field) as caught:
    sums.Committee(**settings)
  assert "\n" not in str(caught.value)


def test_sums_that_cannot_be_are_one_line():
  cases = [
    (lambda: sums.Committee().sum(parties.vectors(4)), "num_members"),
    (lambda: _terms(clients=(0, 1, 1, 2)), "clients"),
    (lambda: _terms(session=b"x"), "session"),
    (lambda: committee.parameters(10, corrupt=0.5, dropout=0.5), "corrupt"),
    (lambda: committee_parties.start(_terms(), 9), "client"),
  ]
  for call, field in cases:
    with refuses(field):
      call()


_FIELDS = {  # field of a record -> its place
  "keys": {"key": 3},
  "roster": {"key": 3},
  "shares": {"key": 3, "share": 40, "tag": -1},
  "forwarded": {"key": 3, "share": 40, "tag": -1},
  "survivors": {"mark": 0},
  "sums": {"share": 3},
}
_HEADER = {"magic": 0, "kind": 8, "session": 9, "sender": 25, "count": 29, "size": 33}


def _played(terms, damaged):
  """The total of a sum whose messages pass through `damaged`; who raises is silent from then on."""
  server = committee_parties.start_server(terms)
  members = {}
  out = set()
  vectors = parties.vectors(len(terms.clients), terms.length)

  def step(who, act):
    try:
      return act()
    except UserError:
      out.add(who)
      return None

  def receive(who, data):
    nonlocal server
    server, forwarded = server.receive(damaged(who, data), who)
    return forwarded

  for who in terms.clients:
    members[who], message = committee_parties.start(terms, who)
    if message is not None:
      step(who, lambda who=who, message=message: receive(who, message))
  server, told = server.close()
  for who in terms.clients:

    def share(who=who):
      members[who], message = members[who].answer(damaged(who, told[who]), vectors[who])
      return receive(who, message)

    for member, message in (step(who, share) or {}).items():
      message = damaged(member, message)
      add = lambda m=member, x=message: members.update({m: members[m].answer(x)[0]})
      step(member, add)
  server, told = server.close()
  for who in sorted(set(terms.members) - out):
    data = damaged(who, told[who])
    step(who, lambda who=who, data=data: receive(who, members[who].answer(data)[1]))
  server, _ = server.close()
  return server.result().total, sum(vectors[who] for who in server.uploaded)


def test_one_flipped_bit_in_any_field_leaves_out_or_refuses_and_never_errs():
  terms = _terms(8, num_members=5, colluding=1)
  victim = terms.members[1]
  found, exact = _played(terms, lambda who, data: data)
  np.testing.assert_array_equal(found, exact)
  num_refused = 0
  for kind, fields in _FIELDS.items():
    for field, place in {**_HEADER, "id": None, **fields}.items():

      def damaged(who, data, kind=kind, field=field, place=place):
        if who != victim or messages.KINDS[data[8]] != kind:
          return data
        at = {**_HEADER, "id": messages.OVERHEAD}.get(field)
        if at is None:
          size = terms.record_bytes(kind)
          at = messages.OVERHEAD + 4 + place % size
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

      try:
        found, exact = _played(terms, damaged)
      except UserError:
        num_refused += 1
        continue
      np.testing.assert_array_equal(found, exact, err_msg=f"{kind} {field}")
  assert num_refused > 0
