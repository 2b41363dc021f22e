"""The arithmetic of the proofs: what is accepted, and that nothing else is."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.links.seal import Seal, WrongProofError, make_nonce
from kvlink.wire import Challenge, Hello, Message, Ready, Sealed, unpack
from tests.support.stranger import hello

SECRET = secrets.token_bytes(32)
CARD = b"a card that others must not read, of more than one block of the stream"
SAID: list[Message] = [
    hello(2, expects=1),
    hello(1, offers={"shm": CARD, "ucx": CARD}),
    Ready(transport="shm", card=CARD),
    Ready(transport="shm", reason="why not", card=CARD),
]


class Talk:
    """Two halves of one handshake; what they differ in may be chosen."""

    def __init__(self, **acceptor: Any) -> None:
        shared = {"secret": SECRET, "binding": b"", "dialler_nonce": make_nonce(), "acceptor_nonce": make_nonce()}
        self.dialler = Seal(is_dialler=True, **shared)
        self.acceptor = Seal(is_dialler=False, **{**shared, **acceptor})
        self.challenge: Challenge = self.acceptor.challenge(make_nonce())

    def seals(self, index: int) -> tuple[Seal, Seal]:
        """Return who says message `index`, and who hears it."""
        return (self.acceptor, self.dialler) if index % 2 else (self.dialler, self.acceptor)

    def run(self, upto: int) -> None:
        """Say the challenge and the first messages."""
        self.dialler.check(self.challenge)
        for index in range(upto):
            sender, receiver = self.seals(index)
            assert receiver.open(sender.close(SAID[index])) == SAID[index]


def test_two_who_know_the_secret_understand_each_other() -> None:
    """A whole handshake goes through, message by message."""
    Talk().run(len(SAID))


@pytest.mark.parametrize(
    "change",
    [{"secret": SECRET[:-1] + b"x"}, {"binding": b"x"}, {"dialler_nonce": bytes(32)}, {"acceptor_nonce": bytes(32)}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_differs_shows_in_the_first_proof(change: dict[str, bytes]) -> None:
    """Another secret, another TLS connection or another nonce on either side: refused before anything is said."""
    with pytest.raises(WrongProofError):
        Talk(**change).run(0)


@given(st.integers(0, len(SAID) - 1), st.booleans(), st.integers(0, 10**6), st.integers(0, 7))
def test_one_changed_bit_is_noticed(index: int, is_proof: bool, where: int, bit: int) -> None:
    """In any message, in its words or in its proof."""
    talk = Talk()
    talk.run(index)
    sender, receiver = talk.seals(index)
    sealed = sender.close(SAID[index])
    part = bytearray(sealed.proof if is_proof else sealed.body)
    part[where % len(part)] ^= 1 << bit
    forged = Sealed(sealed.body, bytes(part)) if is_proof else Sealed(bytes(part), sealed.proof)
    with pytest.raises(WrongProofError):
        receiver.open(forged)


@pytest.mark.parametrize("index", range(len(SAID)))
def test_nothing_can_be_sent_back_to_its_sender(index: int) -> None:
    """A mirror knows no secret: what one side said is no proof to that side, in this handshake's next step or any."""
    talk = Talk()
    talk.run(index)
    sender, _ = talk.seals(index)
    with pytest.raises(WrongProofError):
        sender.open(sender.close(SAID[index]))


def test_the_two_roles_prove_differently() -> None:
    """At one place of one handshake the same words have another proof from the dialler than from the acceptor."""
    shared: dict[str, Any] = {"secret": SECRET, "binding": b"", "dialler_nonce": bytes(32), "acceptor_nonce": bytes(32)}
    proofs = [Seal(is_dialler=role, **shared).close(SAID[2]).proof for role in (True, False)]
    assert proofs[0] != proofs[1]
    with pytest.raises(WrongProofError):
        Seal(is_dialler=True, **shared).open(Seal(is_dialler=True, **shared).close(SAID[2]))


@pytest.mark.parametrize("index", range(len(SAID)))
def test_what_was_recorded_is_worth_nothing_later(index: int) -> None:
    """A message of another handshake is refused at the same place of this one, and so is one of this one said twice."""
    talk, other = Talk(), Talk()
    talk.run(index)
    other.run(index)
    sealed = other.seals(index)[0].close(SAID[index])
    with pytest.raises(WrongProofError):
        talk.seals(index)[1].open(sealed)
    sender, receiver = talk.seals(index)
    receiver.open(said := sender.close(SAID[index]))
    for side in (sender, receiver):
        with pytest.raises(WrongProofError):
            side.open(said)


def test_a_proof_stands_for_all_that_was_said_before() -> None:
    """Whoever takes a transport out of an offer and could forge that proof would fail at the next one."""
    talk = Talk()
    talk.run(1)
    talk.acceptor.close(hello(1, transports=("ucx", "shm")))
    with pytest.raises(WrongProofError):
        talk.acceptor.open(talk.dialler.close(Ready(transport="shm")))


def test_cards_are_hidden_each_in_its_own_way() -> None:
    """Who reads along sees no card, nor that two are the same, in one message, in both directions, or another time."""
    hidden = []
    for talk in (Talk(), Talk()):
        talk.dialler.check(talk.challenge)
        for index, message in enumerate(SAID):
            sender, receiver = talk.seals(index)
            sealed = sender.close(message)
            assert receiver.open(sealed) == message
            seen = unpack(sealed.body)
            hidden += (
                [*seen.offers.values()] if isinstance(seen, Hello) else [seen.card] if isinstance(seen, Ready) else []
            )
    assert len(hidden) == 8
    assert {len(card) for card in hidden} == {len(CARD)}
    for start in range(len(CARD) - 8):
        assert len({card[start : start + 8] for card in (*hidden, CARD)}) == 9


def test_the_first_proof_says_nothing_of_who_it_is_from() -> None:
    """Neither half has been told an id, a role or an incarnation when the challenges have been exchanged."""
    first, second = Talk(), Talk()
    assert first.challenge.proof != second.challenge.proof
    with pytest.raises(WrongProofError):
        first.dialler.check(second.challenge)
