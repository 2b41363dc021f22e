"""Tokens of tickets: what they say, and that a damaged one never says anything."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlink as kv
from kvlink.tokens import TOKEN_LENGTH, Token, parse_token

TOKENS = st.builds(
    Token,
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)
ONE = Token(True, 7, bytes(range(16)), 9, bytes(range(16, 32)))


@given(TOKENS)
def test_round_trip(token: Token) -> None:
    """A token says what it was made of, as bytes and as text, and goes through JSON unchanged."""
    text = token.encode().decode("ascii")
    assert len(text) == TOKEN_LENGTH
    assert parse_token(token.encode()) == parse_token(json.loads(json.dumps(text))) == token


def test_every_flipped_bit_is_noticed() -> None:
    """Each of the bits of what travels, and of what it stands for, makes the token unusable when it is flipped."""
    encoded, packed = ONE.encode(), base64.urlsafe_b64decode(ONE.encode())
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kv.TicketError):
            parse_token(bytes(damaged))
    for bit in range(len(packed) * 8):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kv.TicketError):
            parse_token(base64.urlsafe_b64encode(flipped))


@given(TOKENS, st.data())
def test_truncated_swapped_and_spliced(token: Token, data: st.DataObject) -> None:
    """A piece of a token, one with two characters exchanged, and one made of two tokens are refused."""
    text = token.encode().decode()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(kv.TicketError):
        parse_token(text[:cut])
    first, second = data.draw(st.integers(0, 71)), data.draw(st.integers(0, 71))
    swapped = list(text)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    if swapped != list(text):
        with pytest.raises(kv.TicketError):
            parse_token("".join(swapped))
    spliced = text[:cut] + ONE.encode().decode()[cut:]
    if spliced not in (text, ONE.encode().decode()):
        with pytest.raises(kv.TicketError):
            parse_token(spliced)


@settings(max_examples=300)
@given(
    st.one_of(st.binary(max_size=100), st.text(max_size=100), st.text(alphabet="AQz09-_+/=", min_size=72, max_size=72))
)
def test_anything_else_is_refused(token: bytes | str) -> None:
    """Whatever is no token is refused with one error, never with another and never silently."""
    with pytest.raises(kv.TicketError):
        parse_token(token)


def test_a_token_has_one_spelling() -> None:
    """The characters of the other base64 alphabet, white space and padding are not accepted in its place."""
    text = Token(False, 2**64 - 1, b"\xff" * 16, 2**64 - 1, b"\xfb" * 16).encode().decode()
    assert "_" in text
    assert "-" in text
    for other in (text.replace("_", "/"), text.replace("-", "+"), text + "\n", " " + text[1:], text[:-1] + "="):
        with pytest.raises(kv.TicketError):
            parse_token(other)


def test_other_types_are_refused() -> None:
    """A token is bytes or text."""
    for other in (None, 7, ["x"], object()):
        with pytest.raises(kv.ParameterTypeError):
            parse_token(other)  # type: ignore[arg-type]  # on purpose
