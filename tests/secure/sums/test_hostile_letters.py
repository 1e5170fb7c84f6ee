"""Broken and malicious peers: one line each, nothing revealed, and the sum goes on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import sums
from dpjax.secure.sums import messages, primitives, secagg_client, secagg_server
from dpjax.secure.sums.messages import OVERHEAD, SERVER
from dpjax.secure.sums.secagg_client import ALIVE, DEAD
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_N, _T = 6, 4
_KINDS = ("keys", "envelopes", "masked", "revealed")


def _terms(**others):
  return parties.terms(_N, _T, **others)


def _with(data, **changed):
  """The message with other contents."""
  kind = messages.KINDS[data[8]]
  terms = _terms()
  sender = int.from_bytes(data[25:29], "little")
  records = terms.read(kind, data, sender)
  given = {
    "kind": kind,
    "session": terms.session,
    "sender": sender,
    "records": {who: bytes(record) for who, record in records.items()},
  }
  return messages.write(**{**given, **changed})


def _record(data, change):
  """The message with its first record changed."""
  kind = messages.KINDS[data[8]]
  size = _terms().record_bytes(kind)
  at = OVERHEAD + 4
  return data[:at] + change(data[at : at + size]) + data[at + size :]


_WRONG = {  # what reaches the server of client 2 -> what the refusal says
  "nothing": (lambda d: b"", "no message of a secure sum"),
  "noise": (lambda d: np.random.default_rng(0).bytes(len(d)), "no message of a secure sum"),
  "cut": (lambda d: d[:-1], "of the wrong length"),
  "longer": (lambda d: d + b"\0", "of the wrong length"),
  "huge count": (lambda d: d[:29] + b"\xff\xff\xff\xff" + d[33:], "of the wrong length"),
  "another session": (lambda d: _with(d, session=bytes(16)), "of another session"),
  "another client": (lambda d: _with(d, sender=3), "who says to be client 3"),
  "the server": (lambda d: _with(d, sender=SERVER), "who says to be the server"),
  "nobody": (lambda d: _with(d, sender=77), "who says to be client 77"),
  "no records": (lambda d: _with(d, records={}), "client 2"),
  "unknown kind": (lambda d: d[:8] + b"\xee" + d[9:], "sent 238"),
}


def _survives(wrong, kind, says):
  """The others' sum is exact; client 2 counts if it uploaded before."""
  vectors = parties.vectors(_N)
  sent = lambda k, who, d: [wrong(d)] if (k, who) == (kind, 2) else [d]
  played = parties.play(_terms(), vectors, sent=sent)
  left = [who for who in range(_N) if who != 2 or kind == "revealed"]
  np.testing.assert_array_equal(
    played.total, sums.PlainSum().sum({who: vectors[who] for who in left}).total
  )
  (line,) = played.refusals
  assert says in line and "\n" not in line


@pytest.mark.cases(long=[29])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", list(_WRONG))
def test_a_wrong_letter_makes_its_client_silent_and_no_more(name, kind):
  wrong, says = _WRONG[name]
  _survives(wrong, kind, says)


@pytest.mark.parametrize("kind", _KINDS)
def test_p36_a_letter_that_comes_twice_counts_once(kind):
  """Replayed at once, and the one of the phase before instead."""
  vectors = parties.vectors(_N)
  twice = lambda k, who, d: [d, d] if (k, who) == (kind, 2) else [d]
  before = _KINDS[max(0, _KINDS.index(kind) - 1)]
  old = {}

  def replayed(k, who, data):
    old[k, who] = data
    return [old[before, who] if (k, who) == (kind, 2) else data]

  plain = sums.PlainSum()
  played = parties.play(_terms(), vectors, sent=twice)
  assert played.refusals == [f"{kind}: of client 2 is a second one, or too late"]
  if kind in ("masked", "revealed"):  # it had uploaded by then
    np.testing.assert_array_equal(played.total, plain.sum(vectors).total)
  if kind != "keys":
    played = parties.play(_terms(), vectors, sent=replayed)
    assert played.refusals == [f"{kind}: expected from client 2, who sent {before}"]


def test_envelopes_for_others_and_shares_not_asked_for_are_refused():
  more = lambda d: _with(d, records={who: bytes(48) for who in (0, 1, 3, 4, 5, 9)})
  _survives(more, "envelopes", "are not one for each neighbour")
  less = lambda d: _with(d, records={0: bytes(48)})
  _survives(less, "envelopes", "are not one for each neighbour")
  other = lambda d: _record(
    d, lambda r: b"\1" + r[1:]
  )  # a key's share, of one who is there
  _survives(other, "revealed", "are not the shares asked for")
  about = lambda d: _with(d, records={3: bytes(96)})
  _survives(about, "keys", "must be about itself alone")


def test_one_wrong_share_does_no_harm_and_too_many_refuse_the_sum():
  vectors = parties.vectors(_N)
  spoilt = lambda d: _record(d, lambda r: r[:1] + bytes(16))

  def liars(those):
    sent = lambda k, who, d: [spoilt(d) if k == "revealed" and who in those else d]
    return parties.play(_terms(), vectors, sent=sent)

  np.testing.assert_array_equal(liars({2}).total, sums.PlainSum().sum(vectors).total)
  with refuses("revealed"):
    liars({0, 2, 4})


_OF_NO_USE = {  # public keys of client 2, of its own, from those of client 1
  "of low order": lambda own, other: bytes(64) + own[64:],
  "of low order, for masks": lambda own, other: own[:32] + bytes(32) + own[64:],
  "one for both": lambda own, other: own[:32] + own[:32] + own[64:],
  "of another client": lambda own, other: other[:32] + own[32:],
}


@pytest.mark.parametrize("name", _OF_NO_USE)
def test_keys_with_which_nobody_would_go_on_cost_their_client_alone(name):
  vectors, seen = parties.vectors(_N), {}

  def sent(kind, who, data):
    seen[kind, who] = data[OVERHEAD + 4 :]
    if (kind, who) != ("keys", 2):
      return [data]
    return [_record(data, lambda own: _OF_NO_USE[name](own, seen["keys", 1]))]

  played = parties.play(_terms(), vectors, sent=sent)
  assert played.survivors == (0, 1, 3, 4, 5) and len(played.refusals) == 1
  del vectors[2]
  np.testing.assert_array_equal(played.total, sums.PlainSum().sum(vectors).total)


def test_an_envelope_that_was_changed_silences_who_opens_it():
  vectors = parties.vectors(_N)
  spoilt = lambda k, who, d: (
    [_record(d, lambda r: bytes(48))] if (k, who) == ("envelopes", 2) else [d]
  )
  played = parties.play(_terms(), vectors, sent=spoilt)  # 2's first envelope is for 0
  assert played.refusals == ["envelope: was changed on its way, or is not for this client"]
  assert played.survivors == (1, 2, 3, 4, 5)


def _until(kind):
  """Client 0 about to answer with this kind of message, what it is told, and its vector."""
  terms, vectors = _terms(), parties.vectors(_N)
  played = parties.play(terms, vectors, entropy=parties.seeded)
  member, _ = secagg_client.start(terms, 0, entropy=parties.seeded(0))
  for step in ("envelopes", "masked", "revealed"):
    if step == kind:
      break
    member, _ = member.answer(played.told[step, 0], vectors[0])
  return member, played.told[kind, 0], vectors[0]


def _survivors(terms, alive, sender=SERVER):
  marks = {who: ALIVE if who in alive else DEAD for who in terms.clients}
  return messages.write("survivors", terms.session, sender, marks)


def _refused(member, data, says, vector=None):
  with pytest.raises(UserError, match=says) as caught:
    member.answer(data, vector)
  assert "\n" not in str(caught.value)


def test_p36_a_client_never_reveals_both_shares_of_anybody():
  member, asked, _ = _until("revealed")
  after, said = member.answer(asked)
  shares = member.terms.read("revealed", said, 0)
  assert {*shares} == {*range(_N)} and {bytes(r[:1]) for r in shares.values()} == {b"\0"}
  assert after.shares == {}  # it could not, whatever it is asked
  for alive in (range(_N), range(5), range(1, _N)):
    _refused(after, _survivors(member.terms, alive), "has said all it says")
  both = bytearray(asked)  # client 5 twice: alive and dead
  both[29:33] = (7).to_bytes(4, "little")
  _refused(member, bytes(both) + (5).to_bytes(4, "little") + DEAD, "names client 5 twice")


def test_a_client_refuses_requests_that_would_open_a_vector():
  member, _, _ = _until("revealed")
  terms = member.terms
  _refused(member, _survivors(terms, {1, 2, 3, 4, 5}), "client 0 is said to be gone")
  _refused(member, _survivors(terms, {0, 1, 2}), "only 3; fewer than 4")
  _refused(
    member,
    _survivors(terms, range(_N), sender=3),
    "from the server, who says to be client 3",
  )
  few = messages.write("survivors", terms.session, SERVER, dict.fromkeys(range(4), ALIVE))
  _refused(member, few, "must say of each client")
  odd = messages.write("survivors", terms.session, SERVER, dict.fromkeys(range(_N), b"\2"))
  _refused(member, odd, "must say of each client")
  more = messages.write("survivors", terms.session, SERVER, dict.fromkeys(range(7), ALIVE))
  _refused(member, more, "must say of each client")


def test_a_client_refuses_rosters_that_are_not_of_its_neighbours():
  member, roster, _ = _until("envelopes")
  records = {w: bytes(r) for w, r in member.terms.read("roster", roster, SERVER).items()}
  roster_of = lambda r: messages.write("roster", member.terms.session, SERVER, r)
  own = primitives.public_key(member.channel_key)
  _refused(member, roster_of({**records, 9: bytes(96)}), "client 9 is no neighbour")
  _refused(
    member, roster_of({**records, 0: bytes(96)}), "client 0 is no neighbour of client 0"
  )
  _refused(
    member, roster_of({1: records[1], 2: records[2]}), "3 to share with; the threshold is 4"
  )
  _refused(member, roster_of({**records, 1: records[2]}), "two clients have the same key")
  mirrored = {**records, 1: own + records[1][32:]}
  _refused(member, roster_of(mirrored), "two clients have the same key")
  zero = {**records, 1: bytes(32) + records[1][32:]}
  _refused(member, roster_of(zero), "no point that a key can be agreed with")


def test_a_client_refuses_envelopes_and_vectors_that_are_wrong():
  member, forwarded, vector = _until("masked")
  session = member.terms.session
  sealed = member.terms.read("forwarded", forwarded, SERVER)
  records = {w: bytes(r) for w, r in sealed.items()}
  forwarded_of = lambda r: messages.write("forwarded", session, SERVER, r)
  swapped = {**records, 1: records[2]}
  _refused(member, forwarded_of(swapped), "was changed on its way", vector)
  _refused(member, forwarded_of({1: records[1]}), "shares of 1; with its own", vector)
  _refused(
    member,
    forwarded_of({**records, 9: bytes(48)}),
    "client 9 was not on the roster",
    vector,
  )
  _refused(member, forwarded, "must be 5 entries of uint32", vector[:4])
  _refused(member, forwarded, "must be 5 entries of uint32", vector.astype(np.int32))
  _refused(member, forwarded, "must be 5 entries of uint32", None)


@settings(max_examples=60)
@given(
  st.sampled_from(["envelopes", "masked", "revealed"]),
  st.lists(st.tuples(st.integers(0, 600), st.integers(1, 255)), min_size=1, max_size=3),
  st.integers(-9, 9),
)
def test_whatever_a_client_is_told_it_answers_or_says_one_line(kind, flips, extra):
  member, data, vector = _KNOWN[kind]
  changed = bytearray(data)
  for at, by in flips:
    changed[at % len(changed)] ^= by
  changed = bytes(changed)[:extra] if extra < 0 else bytes(changed) + bytes(extra)
  try:
    member.answer(changed, vector if kind == "masked" else None)
  except UserError as error:
    assert "\n" not in str(error)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.sampled_from(_KINDS))
def test_whatever_the_server_is_sent_it_says_one_line(data, kind):
  state = secagg_server.start(_terms())._replace(phase=kind)
  for sent in (data, b"dpjxsum1" + data):
    with pytest.raises(UserError):
      state.receive(sent, 0)


_KNOWN = {kind: _until(kind) for kind in ("envelopes", "masked", "revealed")}


# --- a server that lies


def _signed(n=5, t=4):
  keys = {who: parties.seeded(50 + who)(32) for who in range(n)}
  directory = tuple(primitives.signing_public_key(keys[who]) for who in range(n))
  return parties.terms(n, t, directory=directory), keys


def _two_stories(terms, victim):
  """Half of the clients hear that the victim is there, half that it is not."""

  def changed(kind, who, data):
    if data[8] != messages.KINDS.index("survivors"):
      return data
    alive = set(terms.clients) - ({victim} if who in (3, 4) else set())
    return _survivors(terms, alive)

  return changed


def test_a_server_that_lies_opens_a_vector_where_2t_is_at_most_n_and_nothing_is_signed():
  """What the guarantee, for an honest-but-curious server, leaves out: see `sums.secagg`."""
  terms, vectors, said = parties.terms(5, 2), parties.vectors(5), {}
  played = parties.play(terms, vectors, told=_two_stories(terms, 0), messages=said)
  shares = {b"\0": {}, b"\1": {}}  # of client 0's own mask, of its key
  for who in terms.clients:
    revealed = terms.read("revealed", said["revealed", who], who)
    shares[bytes(revealed[0][:1])][who] = bytes(revealed[0][1:])
  own, key = (primitives.combine(dict([*those.items()][:2])) for those in shares.values())
  streams = [(secagg_client.own_stream(terms, 0, own), False)]
  private = secagg_client.mask_key(terms, 0, key)
  for other in range(1, 5):
    public = played.server.keys[other][32:64]
    streams.append((secagg_client.pair_stream(terms, 0, private, other, public), False))
  opened = np.frombuffer(said["masked", 0][OVERHEAD + 4 :], np.uint32).copy()
  primitives.add_streams(opened, streams)
  np.testing.assert_array_equal(opened, vectors[0])


def test_with_signatures_nobody_reveals_to_a_server_that_tells_two_stories():
  terms, keys = _signed()
  said = {}
  with refuses("min_survivors"):
    parties.play(
      terms, parties.vectors(5), told=_two_stories(terms, 0), keys=keys, messages=said
    )
  assert not [kind for kind, _ in said if kind == "revealed"]


def _masked(terms, keys):
  """The members of a sum, each of whom has sent its vector."""
  vectors, members, data = parties.vectors(5), {}, {}
  server = secagg_server.start(terms)
  for who in terms.clients:
    members[who], data[who] = secagg_client.start(terms, who, signing_key=keys[who])
  for _ in range(3):
    for who, message in data.items():
      server, _ = server.receive(message, who)
    server, said = server.close()
    for who, message in said.items() if server.phase != "agreed" else ():
      given_ = vectors[who] if server.phase == "masked" else None
      members[who], data[who] = members[who].answer(message, given_)
  return members


def _told_apart(colluders):
  """What a lying server gets of client 0 of 5, t = 4, when these sign whatever it likes:
  (client 0, shares of its own mask and of its key)."""
  terms, keys = _signed()
  members = _masked(terms, keys)
  shares = {b"\0": {}, b"\1": {}}  # of client 0's own mask, of its key
  for who in colluders:
    held = members[who].shares[0]
    shares[b"\1"][who], shares[b"\0"][who] = held[:16], held[16:]
  honest = [who for who in terms.clients if who not in colluders]
  for group in (honest[:-1], honest[-1:]):  # the last one hears that client 0 is gone
    alive = {*group, *colluders}
    text = secagg_client.signed_survivors(terms, dict.fromkeys(alive, ALIVE))
    signed = {who: primitives.sign(keys[who], text) for who in alive}
    message = messages.write("signatures", terms.session, SERVER, signed)
    for who in group:
      member, _ = members[who].answer(_survivors(terms, alive))
      _, revealed = member.answer(message)
      record = terms.read("revealed", revealed, who)[0]
      shares[bytes(record[:1])][who] = bytes(record[1:])
  return members[0], shares


def test_a_server_that_lies_needs_2t_minus_n_clients_that_sign_two_stories():
  """The limit of signatures, as `sums.secagg` states it: t - 1 colluders are too many."""
  member, shares = _told_apart({2, 3, 4})
  own, key = (primitives.combine(those) for those in shares.values())
  assert (own, key) == (member.own_seed, member.mask_seed)
  with refuses("survivors"):
    _told_apart({3, 4})


def test_with_signatures_keys_of_the_servers_own_making_are_refused():
  terms, keys = _signed()
  forged = secagg_client.start(parties.terms(5, 4), 1)[1][-96:]

  def changed(kind, who, data):
    if data[8] != messages.KINDS.index("roster") or who != 0:
      return data
    at = data.index((1).to_bytes(4, "little"), OVERHEAD) + 4
    return data[:at] + forged + data[at + 96 :]

  vectors = parties.vectors(5)
  played = parties.play(terms, vectors, told=changed, keys=keys)
  assert played.refusals == ["roster: the keys of client 1 are not signed by it"]
  assert played.survivors == (1, 2, 3, 4)


def test_who_signs_must_be_in_the_directory_and_t_above_two_thirds():
  terms, keys = _signed()
  with refuses("signing_key"):
    secagg_client.start(terms, 1, signing_key=keys[2])
  with refuses("signing_key"):
    secagg_client.start(terms, 1)
  with refuses("threshold"):
    parties.terms(6, 4, directory=(bytes(32),) * 6)
  with refuses("directory"):
    parties.terms(6, 5, directory=(bytes(32),) * 6, degree=4)


# --- every field of every message, damaged on its way

_FIELDS = {  # field of a record -> its place
  "keys": {"channel key": 3, "mask key": 40, "commitment": 70, "signature": 100},
  "roster": {"channel key": 3, "mask key": 40, "commitment": 70, "signature": 100},
  "envelopes": {"shares": 5, "tag": -1},
  "forwarded": {"shares": 5, "tag": -1},
  "survivors": {"mark": 0},
  "agreed": {"signature": 9},
  "signatures": {"signature": 9},
  "revealed": {"kind": 0, "share": 7},
}
_HEADER = {"magic": 0, "kind": 8, "session": 9, "sender": 25, "count": 29, "size": 33}
_SECAGGS = {
  "plain": {},
  "graph": {"degree": 4},
  "signed": {"directory": True},
}


def _damaged(data, kind, field, terms):
  """The message with one bit flipped: in its header, or in its first record."""
  size = terms.record_bytes(kind)
  place = {**_HEADER, "id": OVERHEAD}.get(field)
  if place is None:
    place = OVERHEAD + 4 + _FIELDS[kind][field] % size
  changed = bytearray(data)
  changed[place] ^= 1
  return bytes(changed)


@pytest.mark.cases(slow=["plain"])
@pytest.mark.parametrize(
  "name", ["plain", "graph", pytest.param("signed", marks=pytest.mark.slow)]
)
def test_one_flipped_bit_in_any_field_leaves_out_or_refuses_and_never_errs(name):
  """In a masked vector alone nobody sees it: that is another vector of its client."""
  options = dict(_SECAGGS[name])
  signing = {}
  if options.pop("directory", False):
    signing = {who: bytes([who + 1] * 32) for who in range(_N)}
    options["directory"] = tuple(map(primitives.signing_public_key, signing.values()))
    options["min_survivors"] = 5
  terms = parties.terms(_N, 5 if signing else 3, **options)
  vectors = parties.vectors(_N)
  right = sum(vectors.values())
  assert (parties.play(terms, vectors, keys=signing).total == right).all()
  # A client that said its last word in a phase before must not hide what happens to its shares.
  silent = {"masked": [5]} if not signing else {}
  num_left_out = num_refused = 0
  kinds = [kind for kind in _FIELDS if signing or kind not in ("agreed", "signatures")]
  for kind in kinds:
    fields = {**_HEADER, "id": None, **_FIELDS[kind]}
    for field in fields:
      if field == "signature" and kind in ("keys", "roster") and not signing:
        continue
      change = lambda k, who, data, kind=kind, field=field: (
        _damaged(data, kind, field, terms)
        if who == 2 and messages.KINDS[data[8]] == kind
        else data
      )
      try:
        played = parties.play(
          terms,
          vectors,
          keys=signing,
          silent=silent,
          sent=lambda k, who, data, change=change: [change(k, who, data)],
          told=change,
        )
      except UserError:
        num_refused += 1
        continue
      num_left_out += len(played.survivors) < _N - len(silent)
      exact = sum(vectors[who] for who in played.survivors)
      assert (played.total == exact).all(), (kind, field)
  assert num_refused + num_left_out > 30
