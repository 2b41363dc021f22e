"""The value objects: keys, descriptions, settings, addresses, errors, reports."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import string
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvlink.errors
from kvlink.checks import check_blocks
from kvlink.config import (
    Address,
    ClusterConfig,
    ClusterInfo,
    check_seconds,
    default_listen,
    parse_address,
    parse_nbytes,
)
from kvlink.errors import (
    CacheNotFoundError,
    KVLinkError,
    LinkError,
    MismatchError,
    NotLinkedError,
    OutOfMemoryError,
    ParameterError,
    ParameterTypeError,
    ParameterValueError,
    PartialTransferError,
    RoleError,
    StatusCode,
    TransferTimeoutError,
    error_for,
)
from kvlink.geometry import CacheDesc, DataType, Placement, Role, check_int
from kvlink.keys import ABSENT, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, KeyName, check_pull_key
from kvlink.report import BlockFailure, LinkResult, LinkResults, TransferReport, failed_result

UINT64_MAX: Final = 2**64 - 1
NOT_INTEGERS: Final[list[Any]] = [True, np.True_, 1.0, "1", None, [1]]

# ---- enumerations


def test_roles_and_placements_have_the_numbers_of_the_spec() -> None:
    """Roles are 1, 2, 3 and placements 0, 1, as in the spec, section 1.2."""
    assert {role.name: role.value for role in Role} == {"PROMPT": 1, "DECODER": 2, "MIX": 3}
    assert {placement.name: placement.value for placement in Placement} == {"HOST": 0, "DEVICE": 1}


STATUS_NUMBERS: Final = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 0xFFFFFFFF,
    "LLM_UNKNOWN_ERROR": -1,
    "LLM_WAIT_PROCESS_TIMEOUT": 0x5010B001,
    "LLM_KV_CACHE_NOT_EXIST": 0x5010B002,
    "LLM_REPEAT_REQUEST": 0x5010B003,
    "LLM_REQUEST_ALREADY_COMPLETED": 0x5010B004,
    "LLM_PARAM_INVALID": 0x5010B005,
    "LLM_ENGINE_FINALIZED": 0x5010B006,
    "LLM_NOT_YET_LINK": 0x5010B007,
    "LLM_ALREADY_LINK": 0x5010B008,
    "LLM_LINK_FAILED": 0x5010B009,
    "LLM_UNLINK_FAILED": 0x5010B00A,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 0x5010B00B,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 0x5010B00C,
    "LLM_PROCESSING_LINK": 0x5010B00D,
    "LLM_DEVICE_OUT_OF_MEMORY": 0x5010B00E,
    "LLM_PREFIX_ALREADY_EXIST": 0x5010B00F,
    "LLM_PREFIX_NOT_EXIST": 0x5010B010,
    "LLM_SEQ_LENOVERLIMIT": 0x5010B011,
    "LLM_NO_FREE_BLOCK": 0x5010B012,
    "LLM_BLOCKS_OUT_OF_MEMORY": 0x5010B013,
    "LLM_EXIST_LINK": 0x5010B018,
    "LLM_FEATURE_NOT_ENABLED": 0x5010B019,
    "LLM_TIMEOUT": 0x5010B01A,
    "LLM_LINK_BUSY": 0x5010B01B,
    "LLM_OUT_OF_MEMORY": 0x5010B01C,
}


def test_status_codes_have_the_numbers_of_the_spec() -> None:
    """Every code of the spec's table, section 2.1, is there under its name and number, and no two are equal."""
    numbers = {code.name: code.value for code in StatusCode}
    assert STATUS_NUMBERS.items() <= numbers.items()
    assert set(numbers) - set(STATUS_NUMBERS) == {"LLM_DEVICE_MEM_ERROR", "LLM_SUSPECT_REMOTE_ERROR"}
    assert len(set(numbers.values())) == len(StatusCode.__members__)
    assert [code.name for code in StatusCode if code.is_ok] == ["LLM_SUCCESS"]


ITEMSIZES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "float64": 8,
    "string": 0,
}


def test_data_types_have_the_sizes_of_their_names() -> None:
    """Every element type has the width that its name says, text has none, and views have elements of that width."""
    assert {kind.value: kind.itemsize for kind in DataType} == ITEMSIZES
    for kind in DataType:
        if kind is not DataType.STRING:
            assert kind.numpy_dtype.itemsize == kind.itemsize
            assert kind.numpy_dtype.name == kind.value
    with pytest.raises(ParameterError, match="'string' has no fixed size"):
        _ = DataType.STRING.numpy_dtype


@pytest.mark.parametrize(
    ("kind", "raw"),
    [(DataType.BFLOAT16, "uint16"), (DataType.FLOAT8_E4M3, "uint8"), (DataType.FLOAT8_E5M2, "uint8")],
)
def test_without_ml_dtypes_views_show_raw_bits(kind: DataType, raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed, bfloat16 and the 8-bit floats are unsigned integers of their width."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert kind.numpy_dtype == np.dtype(raw)
    assert DataType.FLOAT16.numpy_dtype == np.dtype("float16")


# ---- CacheDesc


def test_sizes_of_a_description() -> None:
    """Bytes of a slot, of a tensor and of the cache follow from the shape, whose first dimension is the slots."""
    desc = CacheDesc(60, (128, 16, 8, 64), "bfloat16")
    assert desc.num_slots == 128
    assert desc.slot_nbytes == 16 * 8 * 64 * 2
    assert desc.tensor_nbytes == 128 * desc.slot_nbytes
    assert desc.nbytes == 60 * desc.tensor_nbytes
    assert CacheDesc(1, (5,), DataType.INT64).slot_nbytes == 8


@given(st.integers(1, 100), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(list(DataType)))
def test_slots_tile_the_cache(num_tensors: int, shape: list[int], kind: DataType) -> None:
    """Slots times their bytes is a tensor, and tensors times their bytes is the cache, for any shape and type."""
    desc = CacheDesc(num_tensors, shape, kind)
    assert desc.slot_nbytes * desc.num_slots == desc.tensor_nbytes
    assert desc.tensor_nbytes * desc.num_tensors == desc.nbytes
    assert desc.tensor_nbytes == int(np.prod(shape)) * kind.itemsize


def test_a_description_is_a_plain_value() -> None:
    """Equal descriptions are equal and hash alike, whatever integers and sequences they were made of; none changes."""
    desc = CacheDesc(2, (4, 3), "int8", Placement.HOST, layout="NHD")
    same = CacheDesc(np.int64(2), [np.int32(4), 3], DataType.INT8, Placement.HOST, layout="NHD")
    assert desc == same
    assert hash(desc) == hash(same)
    assert type(same.num_tensors) is int
    assert all(type(length) is int for length in same.shape)
    assert desc != CacheDesc(2, (4, 3), "int8", Placement.HOST)
    assert CacheDesc(2, (4, 3), "int8").placement is Placement.DEVICE
    with pytest.raises(dataclasses.FrozenInstanceError):
        desc.num_tensors = 3  # type: ignore[misc]  # that is the test
    assert pickle.loads(pickle.dumps(desc)) == desc
    assert copy.deepcopy(desc) == desc


@pytest.mark.parametrize(
    ("arguments", "error", "fragments"),
    [
        ((0, (4,), "int8"), ParameterValueError, ["num_tensors", "0"]),
        ((-1, (4,), "int8"), ParameterValueError, ["num_tensors", "-1"]),
        ((2**32, (4,), "int8"), ParameterValueError, ["num_tensors", str(2**32)]),
        ((True, (4,), "int8"), ParameterTypeError, ["num_tensors", "True"]),
        ((2.0, (4,), "int8"), ParameterTypeError, ["num_tensors", "2.0"]),
        ((1, (), "int8"), ParameterValueError, ["shape", "0"]),
        ((1, (1,) * 32, "int8"), ParameterValueError, ["shape", "31", "32"]),
        ((1, 4, "int8"), ParameterTypeError, ["shape", "4"]),
        ((1, "44", "int8"), ParameterTypeError, ["shape", "'44'"]),
        ((1, np.array([4]), "int8"), ParameterTypeError, ["shape", "array([4])"]),
        ((1, (4, 0), "int8"), ParameterValueError, ["shape[1]", "0"]),
        ((1, (4, -2), "int8"), ParameterValueError, ["shape[1]", "-2"]),
        ((1, (4, 2.5), "int8"), ParameterTypeError, ["shape[1]", "2.5"]),
        ((1, (np.True_, 2), "int8"), ParameterTypeError, ["shape[0]", "True"]),
        ((1, (2**63,), "int8"), ParameterValueError, ["shape[0]", str(2**63)]),
        ((1, (4,), "float33"), ParameterValueError, ["data_type", "float32", "'float33'"]),
        ((1, (4,), None), ParameterValueError, ["data_type", "None"]),
        ((1, (4,), []), ParameterValueError, ["data_type", "[]"]),
        ((1, (4,), 5), ParameterValueError, ["data_type", "5"]),
        ((1, (4,), "int8", 1), ParameterTypeError, ["placement", "1"]),
        ((1, (4,), "int8", "DEVICE"), ParameterTypeError, ["placement", "'DEVICE'"]),
        ((2**32 - 1, (2**62,), "int8"), ParameterValueError, [str((2**32 - 1) * 2**62)]),
        ((1, (2**32, 2**32), "int64"), ParameterValueError, [str(2**67)]),
    ],
    ids=repr,
)
def test_a_bad_description_is_refused_by_name(arguments: Any, error: type, fragments: list[str]) -> None:
    """Each wrong argument raises the error of its kind, with its name and value."""
    with pytest.raises(error) as caught:
        CacheDesc(*arguments)
    for fragment in fragments:
        assert fragment in str(caught.value)
    with pytest.raises(ParameterTypeError, match="layout must be a string or None, got 7"):
        CacheDesc(1, (4,), "int8", layout=7)  # type: ignore[arg-type]  # that is the test


def test_the_largest_descriptions() -> None:
    """31 dimensions and 2**63 - 1 bytes are the last that pass."""
    assert CacheDesc(1, (1,) * 31, "int8").nbytes == 1
    assert CacheDesc(1, (2**63 - 1,), "int8").nbytes == 2**63 - 1


# ---- keys


@pytest.mark.parametrize(
    ("kind", "names", "highest"),
    [
        (CacheKey, ["cluster_id", "req_id", "model_id", "prefix_id"], [UINT64_MAX] * 4),
        (BlocksCacheKey, ["cluster_id", "model_id"], [UINT64_MAX] * 2),
        (CacheKeyByIdAndIndex, ["cluster_id", "cache_id", "batch_index"], [UINT64_MAX, 2**63 - 1, 2**32 - 1]),
    ],
    ids=["CacheKey", "BlocksCacheKey", "CacheKeyByIdAndIndex"],
)
def test_keys_take_integers_of_their_widths(kind: Any, names: list[str], highest: list[int]) -> None:
    """Positions and widths are those of the spec, section 1.4; anything else is refused with field and value."""
    key = kind(*highest)
    assert [getattr(key, name) for name in names] == highest
    assert kind(*[0] * len(names)) == kind(*[np.uint64(0)] * len(names))
    assert all(type(getattr(kind(*[np.int64(1)] * len(names)), name)) is int for name in names)
    for index, (name, most) in enumerate(zip(names, highest, strict=True)):
        for value in (-1, most + 1, 2**70):
            arguments = [1] * len(names)
            arguments[index] = value
            with pytest.raises(ParameterValueError, match=rf"^{name} must be in 0\.\.{most}, got {value}$"):
                kind(*arguments)
        for wrong in NOT_INTEGERS:
            arguments = [1] * len(names)
            arguments[index] = wrong
            with pytest.raises(ParameterTypeError, match=rf"^{name} must be an integer"):
                kind(*arguments)


def test_keys_are_plain_values() -> None:
    """Equal keys are equal and hash alike, keys of different kinds are not equal, none changes, all can be pickled."""
    keys: list[CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex] = [
        CacheKey(1, 2),
        CacheKey(1, 2, 3),
        CacheKey(1, ABSENT, 0, 2),
        BlocksCacheKey(1),
        CacheKeyByIdAndIndex(1, 2),
    ]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert pickle.loads(pickle.dumps(key)) == key
        if not isinstance(key, CacheKeyByIdAndIndex):
            assert key.prompt_cluster_id == key.cluster_id
        with pytest.raises(dataclasses.FrozenInstanceError):
            key.cluster_id = 9  # type: ignore[misc]  # that is the test
    assert CacheKey(1, 2) == CacheKey(cluster_id=1, req_id=2, model_id=0, prefix_id=ABSENT)


IDS = st.integers(0, 3) | st.just(ABSENT)


@given(st.tuples(IDS, IDS, IDS, IDS), st.tuples(IDS, IDS, IDS, IDS))
def test_names_of_keys_never_collide(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> None:
    """Two keys name the same slot exactly if prefix and model, or without a prefix request and model, are equal.

    The cluster id is ignored; a request, a prefix and a blocks key of the same number are three names
    (the spec, section 1.4).
    """
    left, right = CacheKey(*one), CacheKey(*other)
    assert ABSENT == UINT64_MAX
    has_prefix = left.prefix_id != ABSENT
    same = (
        left.model_id == right.model_id
        and has_prefix == (right.prefix_id != ABSENT)
        and (left.prefix_id == right.prefix_id if has_prefix else left.req_id == right.req_id)
    )
    assert (left.name == right.name) is same
    assert left.name not in {BlocksCacheKey(left.cluster_id, model).name for model in (*range(4), ABSENT)}
    assert left.is_placeholder is (left.req_id == ABSENT and left.prefix_id == ABSENT)


def test_a_blocks_key_names_the_model() -> None:
    """One name per model, whatever the cluster; a placeholder of the same model does not collide with it."""
    assert BlocksCacheKey(1, 5).name == BlocksCacheKey(2, 5).name
    assert BlocksCacheKey(1, 5).name != BlocksCacheKey(1, 6).name
    assert CacheKey(1, ABSENT, 5).name != BlocksCacheKey(1, 5).name


def test_names_read_well_in_errors() -> None:
    """A name says its namespace, number and model."""
    assert str(CacheKey(1, 7, 2).name) == "request 7 of model 2"
    assert str(CacheKey(1, ABSENT, 2, 9).name) == "prefix 9 of model 2"
    assert str(KeyName("blocks", 0, 3)) == "blocks key of model 3"


def test_a_pull_needs_exactly_one_of_request_and_prefix() -> None:
    """Both or neither is refused, showing the key; a key by id needs neither (the spec, section 1.4)."""
    for good in (CacheKey(1, 7), CacheKey(1, ABSENT, 0, 7), CacheKeyByIdAndIndex(1, 2)):
        assert check_pull_key(good) is good
    for bad in (CacheKey(1, ABSENT), CacheKey(1, 7, 0, 8)):
        with pytest.raises(ParameterError, match="exactly one of req_id and prefix_id") as caught:
            check_pull_key(bad)
        assert repr(bad) in str(caught.value)
    for wrong in (BlocksCacheKey(1), (1, 7), None, "1"):
        with pytest.raises(ParameterTypeError, match="the key must be a CacheKey or CacheKeyByIdAndIndex, got"):
            check_pull_key(wrong)


# ---- sizes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (np.int64(4096), 4096),
        ("1", 1),
        ("4096B", 4096),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("500 MB", 500 * 10**6),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("0.5KiB", 512),
        ("4611686018427387904", 2**62),
    ],
)
def test_sizes_in_bytes(size: int | str, nbytes: int) -> None:
    """Integers are bytes; KiB counts 1024s and KB 1000s, in any case, with or without a blank or a fraction."""
    assert parse_nbytes(size) == nbytes
    assert type(parse_nbytes(size)) is int


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ("", ParameterValueError),
        ("GiB", ParameterValueError),
        ("-1GiB", ParameterValueError),
        ("1 G", ParameterValueError),
        ("1GiB2", ParameterValueError),
        ("1e9", ParameterValueError),
        ("1_000", ParameterValueError),
        ("0x10", ParameterValueError),
        ("1,5GiB", ParameterValueError),
        ("nan", ParameterValueError),
        ("inf", ParameterValueError),
        ("0", ParameterValueError),
        ("0.5B", ParameterValueError),
        (0, ParameterValueError),
        (-5, ParameterValueError),
        (2**62 + 1, ParameterValueError),
        ("9999999TiB", ParameterValueError),
        ("9" * 400, ParameterValueError),  # more than a float can hold
        ("1\N{KELVIN SIGN}B", ParameterValueError),  # which some take for a K
        (True, ParameterTypeError),
        (1.5, ParameterTypeError),
        (None, ParameterTypeError),
        (b"1GiB", ParameterTypeError),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, type) else value.__name__,
)
def test_bad_sizes_are_refused_by_name(size: Any, error: type) -> None:
    """What is no size, too small or too large raises the error of its kind, naming the argument."""
    with pytest.raises(error, match=r"^pool must be"):
        parse_nbytes(size, "pool")


@given(st.integers(1, 2**62))
def test_bytes_in_digits_are_exact(nbytes: int) -> None:
    """A plain number of bytes in text is that number, to the last byte."""
    assert parse_nbytes(str(nbytes)) == nbytes


@given(st.text(st.sampled_from("0123456789. kKmMgGtTiIbB-+e"), max_size=12) | st.text(max_size=12))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    """No text makes `parse_nbytes` raise anything but its own error."""
    with suppress(ParameterValueError):
        assert 1 <= parse_nbytes(text) <= 2**62


# ---- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("node-7.rack:65535", Address("node-7.rack", 65535)),
        ("[::1]:7000", Address("::1", 7000)),
        ("[fe80::1%eth0]:7", Address("fe80::1%eth0", 7)),
        ("unix:/run/kvlink.sock", Address(path="/run/kvlink.sock")),
        ("unix:relative:with:colons", Address(path="relative:with:colons")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    """An address is read into its parts, and written again as it was."""
    assert parse_address(text) == address
    assert str(address) == text
    if address.port or address.path:
        assert ClusterInfo(3, text).address == text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ParameterValueError),
        ("127.0.0.1", ParameterValueError),
        (":7000", ParameterValueError),
        ("[]:7000", ParameterValueError),
        ("[[]]:7000", ParameterValueError),
        ("[[::1]]:7000", ParameterValueError),
        ("host:", ParameterValueError),
        ("host:port", ParameterValueError),
        ("host:-1", ParameterValueError),
        ("host:+1", ParameterValueError),
        ("host: 1", ParameterValueError),
        ("host:1.0", ParameterValueError),
        ("host:65536", ParameterValueError),
        ("host:\N{SUPERSCRIPT TWO}", ParameterValueError),
        ("host:\N{ARABIC-INDIC DIGIT ONE}", ParameterValueError),
        ("host:" + "1" * 5000, ParameterValueError),  # more digits than Python reads
        ("::1:7000", ParameterValueError),
        ("::1", ParameterValueError),
        ("a..b:7000", ParameterValueError),
        ("a b:7000", ParameterValueError),
        ("a\0b:7000", ParameterValueError),
        ("\ud800:7000", ParameterValueError),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 80 + ":7000", ParameterValueError),
        ("a" * 64 + ":7000", ParameterValueError),
        ("unix:", ParameterValueError),
        ("unix:/a\0b", ParameterValueError),
        ("unix:\ud800", ParameterValueError),
        ("unix:/" + "a" * 107, ParameterValueError),
        (7000, ParameterTypeError),
        (None, ParameterTypeError),
        (("127.0.0.1", 7000), ParameterTypeError),
        (b"127.0.0.1:7000", ParameterTypeError),
    ],
    ids=lambda value: repr(value)[:24] if not isinstance(value, type) else value.__name__,
)
def test_bad_addresses_are_refused(text: Any, error: type) -> None:
    """What is no address raises the error of its kind, with the value, also inside a `ClusterInfo`."""
    for make in (parse_address, lambda address: ClusterInfo(1, address)):
        with pytest.raises(error) as caught:
            make(text)
        assert repr(text) in str(caught.value) or text == "unix:"


LABELS = st.text(string.ascii_letters + string.digits + "-:%", min_size=1, max_size=20)
HOSTS = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=25)


@given(st.builds(Address, host=HOSTS, port=st.integers(0, 65535)) | st.builds(Address, path=PATHS))
def test_an_address_that_is_written_is_read_back(address: Address) -> None:
    """Whatever its host, IPv6 ones among them, its port or its path."""
    assert parse_address(str(address)) == address


@given(st.text(st.sampled_from("host.127[]:0%-unix/ "), max_size=20) | st.text(max_size=20))
@example("unix:\0")
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    """No text makes `parse_address` raise anything but its own error."""
    try:
        address = parse_address(text)
    except ParameterValueError:
        return
    assert (address.host and 0 <= address.port <= 65535) or address.path


def test_a_port_to_dial_is_not_zero() -> None:
    """Port 0 means any free port to who listens, and nothing to who dials."""
    with pytest.raises(ParameterValueError, match="port 0"):
        ClusterInfo(1, "127.0.0.1:0")


@pytest.mark.parametrize("layout", ["\ud800", "a\0", "N\nHD", "x" * 257])
def test_a_layout_is_a_short_printable_tag(layout: str) -> None:
    """It travels to peers with the cache: what cannot travel, or is no tag, is refused where it is made."""
    with pytest.raises(ParameterValueError, match="layout"):
        CacheDesc(2, (4, 8), "uint8", layout=layout)


@pytest.mark.parametrize("cluster_id", [-1, 2**64, True, 1.0, "1", None])
def test_a_cluster_id_has_64_bits(cluster_id: Any) -> None:
    """`ClusterInfo` refuses any other id with its name."""
    with pytest.raises(ParameterError, match=r"^cluster_id must be"):
        ClusterInfo(cluster_id, "host:1")


def test_a_cluster_info_holds_a_plain_int() -> None:
    """A numpy integer is accepted as an id and kept as int: it has to go into a message."""
    info = ClusterInfo(np.uint64(3), "host:1")
    assert info == ClusterInfo(3, "host:1")
    assert type(info.cluster_id) is int


def test_a_decoder_does_not_listen_by_default() -> None:
    """A decoder only dials; the others listen on the loopback, at any free port."""
    assert default_listen(Role.DECODER) is None
    assert default_listen(Role.PROMPT) == default_listen(Role.MIX) == "127.0.0.1:0"


# ---- settings

SECONDS: Final = [field.name for field in dataclasses.fields(ClusterConfig) if field.name.endswith("_s")]
COUNTS: Final = [field.name for field in dataclasses.fields(ClusterConfig) if type(field.default) is int]
FLAGS: Final = [field.name for field in dataclasses.fields(ClusterConfig) if type(field.default) is bool]


def config(**fields: Any) -> ClusterConfig:
    return ClusterConfig(**fields)


def test_every_setting_is_tested() -> None:
    """The lists that the tests below go through have every field but those that may be None, or have tests apart."""
    apart = {
        "numa_node",
        "permit_peer_access",
        "secret",
        "tls_server",
        "tls_client",
        "allowed_uids",
        "transports",
        "ucx",
    }
    assert {*SECONDS, *COUNTS, *FLAGS, *apart} == {field.name for field in dataclasses.fields(ClusterConfig)}


@pytest.mark.parametrize("name", SECONDS)
def test_durations_are_positive_and_finite(name: str) -> None:
    """Every ``_s`` field takes a positive number of seconds and refuses all else, naming the field and the value."""
    for good in (0.001, 1, 10**8):
        assert getattr(config(**{name: good}), name) == good
    for bad in (0, -1, 0.0, float("nan"), float("inf"), 10**9):
        with pytest.raises(ParameterValueError, match=rf"^{name} must be positive and finite, got {bad}$"):
            config(**{name: bad})
    for wrong in (True, "1", None):
        with pytest.raises(ParameterTypeError, match=rf"^{name} must be a number of seconds, got {wrong!r}$"):
            config(**{name: wrong})


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_integers_in_range(name: str) -> None:
    """Every other field takes its default and refuses what is no integer or out of range, naming the field."""
    default = getattr(ClusterConfig(), name)
    assert getattr(config(**{name: default}), name) == default
    for bad in (-1, 2**70):
        with pytest.raises(ParameterValueError, match=rf"^{name} must be in .*, got {bad}$"):
            config(**{name: bad})
    for wrong in (True, 1.5, "1", None):
        with pytest.raises(ParameterTypeError, match=rf"^{name} must be an integer, got {wrong!r}$"):
            config(**{name: wrong})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(name: str) -> None:
    """A flag takes True and False and nothing like them; in the environment it is yes or no, true or false, 1 or 0."""
    for value in (True, False):
        assert getattr(config(**{name: value}), name) is value
    for wrong in (1, 0, None, "yes"):
        with pytest.raises(ParameterTypeError, match=rf"^{name} must be True or False, got {wrong!r}$"):
            config(**{name: wrong})
    variable = f"KVLINK_{name.upper()}"
    for text, value in (("1", True), ("yes", True), ("TRUE", True), ("0", False), ("no", False), ("False", False)):
        assert ClusterConfig.from_environ({variable: text}) == config(**{name: value})
    for text in ("", "2", "on"):
        with pytest.raises(ParameterValueError, match=rf"^{variable} must be .* got {text!r}$"):
            ClusterConfig.from_environ({variable: text})


def test_a_numa_node_is_a_small_number_or_none() -> None:
    """`numa_node` is unset, or 0 to 1023, also from the environment; all else is refused by name."""
    assert ClusterConfig().numa_node is None
    for node in (0, 1023):
        assert config(numa_node=node).numa_node == node
        assert ClusterConfig.from_environ({"KVLINK_NUMA_NODE": str(node)}) == config(numa_node=node)
    for bad in (-1, 1024, True, 1.0, "0"):
        with pytest.raises(ParameterError, match=r"^numa_node must be"):
            config(numa_node=bad)


def test_peer_access_is_one_of_three_words() -> None:
    """`permit_peer_access` is unset, ``peer`` or ``any``, also from the environment; all else is refused by name."""
    assert ClusterConfig().permit_peer_access is None
    for good in (None, "peer", "any"):
        assert config(permit_peer_access=good).permit_peer_access == good
    assert ClusterConfig.from_environ({"KVLINK_PERMIT_PEER_ACCESS": "any"}) == config(permit_peer_access="any")
    for bad in ("", "all", True, 1, ["any"]):
        with pytest.raises(ParameterError, match=r"^permit_peer_access must be None, 'peer' or 'any', got") as caught:
            config(permit_peer_access=bad)
        assert repr(bad) in str(caught.value)
    with pytest.raises(ParameterError, match="permit_peer_access"):
        ClusterConfig.from_environ({"KVLINK_PERMIT_PEER_ACCESS": "all"})


def test_settings_do_not_change() -> None:
    """A configuration is frozen, takes keywords only, and compares by value."""
    assert ClusterConfig() == ClusterConfig()
    assert ClusterConfig(max_links=7) != ClusterConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterConfig().max_links = 7  # type: ignore[misc]  # that is the test
    with pytest.raises(TypeError):
        ClusterConfig(1.0)  # type: ignore[call-arg]  # that is the test


def test_the_limits_of_the_spec_are_the_defaults() -> None:
    """3 s for linking, 512 links, 16 clusters in a call: the spec, section 13."""
    defaults = ClusterConfig()
    assert (defaults.link_timeout_s, defaults.max_links, defaults.max_clusters_per_call) == (3.0, 512, 16)


def test_copy_threads_follow_the_machine() -> None:
    """0 means one per core that this process may use, but one, at most 4; any other number is that number."""
    cores = len(os.sched_getaffinity(0))
    assert ClusterConfig().num_copy_threads == max(1, min(4, cores - 1))
    assert ClusterConfig(copy_threads=9).num_copy_threads == 9


@pytest.mark.parametrize("name", [*SECONDS, *COUNTS])
def test_the_environment_overrides_each_default(name: str) -> None:
    """``KVLINK_<FIELD>`` sets one field and no other."""
    value = getattr(ClusterConfig(), name)
    value = value / 2 if name in SECONDS else value + 1
    environ = {f"KVLINK_{name.upper()}": str(value), "KVLINK_OTHER": "x", "HOME": "/"}
    assert ClusterConfig.from_environ(environ) == dataclasses.replace(ClusterConfig(), **{name: value})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVLINK_MAX_LINKS", ""),
        ("KVLINK_MAX_LINKS", "many"),
        ("KVLINK_MAX_LINKS", "1.5"),
        ("KVLINK_MAX_LINKS", "0"),
        ("KVLINK_LIVENESS_S", "soon"),
        ("KVLINK_LIVENESS_S", "-1"),
        ("KVLINK_LIVENESS_S", "nan"),
        ("KVLINK_LIVENESS_S", "inf"),
    ],
)
def test_a_bad_variable_is_refused_by_name(variable: str, text: str) -> None:
    """Text that is no number, or a number out of range, names the variable or its field, and the value."""
    with pytest.raises(ParameterValueError) as caught:
        ClusterConfig.from_environ({variable: text})
    assert variable.removeprefix("KVLINK_").lower() in str(caught.value).lower()
    assert text in str(caught.value)


def test_the_environment_is_read_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument it is the process's environment, which stays as it was."""
    monkeypatch.setenv("KVLINK_MAX_LINKS", "77")
    before = dict(os.environ)
    assert ClusterConfig.from_environ().max_links == 77
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_a_timeout_out_of_range_is_refused(value: float) -> None:
    """`check_seconds` takes positive finite numbers, names the argument, and returns a float."""
    with pytest.raises(ParameterValueError, match=r"^timeout_s must be positive and finite"):
        check_seconds("timeout_s", value)
    assert check_seconds("timeout_s", 3) == 3.0
    assert type(check_seconds("timeout_s", np.float64(3))) is float


# ---- errors

REPORT: Final = TransferReport(
    7, "shm", 4096, 2, 0.5, (1, 2), (BlockFailure((3,), StatusCode.LLM_LINK_FAILED, "the peer went away"),)
)


def error_kinds(kind: type[KVLinkError] = KVLinkError) -> Iterator[type[KVLinkError]]:
    """`KVLinkError` and all that derives from it in the module of the errors."""
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == kvlink.errors.__name__:
            yield from error_kinds(child)


KINDS: Final = sorted(set(error_kinds()), key=lambda kind: kind.__name__)


def make_error(kind: type[KVLinkError]) -> KVLinkError:
    if issubclass(kind, OutOfMemoryError):
        return kind("no room", needed=3, free=2, largest_hole=1)
    if issubclass(kind, PartialTransferError):
        return kind("half", report=REPORT, peer=7)
    return kind("what happened", status=StatusCode.LLM_LINK_BUSY, peer=7, phase="transfer")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_a_process_boundary(kind: type[KVLinkError], protocol: int) -> None:
    """Every error can be pickled and copied: type, text, status, peer, phase and what else it carries stay."""
    error = make_error(kind)
    for back in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is kind
        assert str(back) == str(error)
        assert back.args == error.args
        assert vars(back) == vars(error)
        assert isinstance(back.status, StatusCode)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_was_told(kind: type[KVLinkError]) -> None:
    """The text of every error is the message, also of those that are an OSError, and it is a RuntimeError."""
    error = make_error(kind)
    assert str(error) == error.args[0]
    assert isinstance(error, RuntimeError)
    assert error.status is not StatusCode.LLM_SUCCESS


def test_default_status_of_each_error() -> None:
    """Each error has the code of the spec's table for its case."""
    expected = {
        "KVLinkError": "LLM_FAILED",
        "ParameterError": "LLM_PARAM_INVALID",
        "ParameterTypeError": "LLM_PARAM_INVALID",
        "ParameterValueError": "LLM_PARAM_INVALID",
        "RoleError": "LLM_PARAM_INVALID",
        "MismatchError": "LLM_PARAM_INVALID",
        "CacheNotFoundError": "LLM_KV_CACHE_NOT_EXIST",
        "OutOfMemoryError": "LLM_DEVICE_OUT_OF_MEMORY",
        "LinkError": "LLM_LINK_FAILED",
        "HandshakeError": "LLM_LINK_FAILED",
        "NotLinkedError": "LLM_NOT_YET_LINK",
        "LinkLostError": "LLM_LINK_FAILED",
        "LinkExistsError": "LLM_EXIST_LINK",
        "TransferTimeoutError": "LLM_WAIT_PROCESS_TIMEOUT",
        "PartialTransferError": "LLM_FAILED",
        "PartialTimeoutError": "LLM_WAIT_PROCESS_TIMEOUT",
        "PartialLinkLostError": "LLM_LINK_FAILED",
        "PartialNotLinkedError": "LLM_NOT_YET_LINK",
        "PartialTransportError": "LLM_FAILED",
        "TransportError": "LLM_FAILED",
        "FeatureNotEnabledError": "LLM_FEATURE_NOT_ENABLED",
        "ProtocolError": "LLM_FAILED",
        "ClosedError": "LLM_ENGINE_FINALIZED",
    }
    found = {kind.__name__: kind.default_status.name for kind in KINDS}
    assert expected.items() <= found.items()
    assert KVLinkError("x").status is StatusCode.LLM_FAILED
    assert KVLinkError("x", status=StatusCode.LLM_TIMEOUT).status is StatusCode.LLM_TIMEOUT


def test_errors_are_what_python_would_have_raised_too() -> None:
    """Wrong types are `TypeError`, wrong values `ValueError`, timeouts `TimeoutError`: the spec, section 1.1."""
    assert issubclass(ParameterTypeError, TypeError)
    assert issubclass(ParameterValueError, ValueError)
    assert issubclass(TransferTimeoutError, TimeoutError)
    for kind in (ParameterTypeError, ParameterValueError, RoleError, MismatchError):
        assert issubclass(kind, ParameterError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (StatusCode.LLM_PARAM_INVALID, ParameterError),
        (StatusCode.LLM_KV_CACHE_NOT_EXIST, CacheNotFoundError),
        (StatusCode.LLM_NOT_YET_LINK, NotLinkedError),
        (StatusCode.LLM_LINK_FAILED, LinkError),
        (StatusCode.LLM_WAIT_PROCESS_TIMEOUT, TransferTimeoutError),
        (StatusCode.LLM_UNLINK_FAILED, KVLinkError),
        (StatusCode.LLM_DEVICE_OUT_OF_MEMORY, KVLinkError),
    ],
)
def test_a_peers_status_becomes_its_error(status: StatusCode, kind: type) -> None:
    """A status that came as a number becomes the exception of that status, with all that it was told."""
    error = error_for(int(status), "text", peer=3, phase="look-up")
    assert type(error) is kind
    assert (error.status, str(error), error.peer, error.phase) == (status, "text", 3, "look-up")


@given(st.integers(0, 2**32 - 1) | st.sampled_from(sorted(StatusCode)))
@example(0)
def test_any_number_of_a_peer_becomes_a_failure(number: int) -> None:
    """Whatever number a peer answers a request with, the exception's status is a known one, and is not success."""
    error = error_for(number, "text")
    assert isinstance(error.status, StatusCode)
    assert not error.status.is_ok
    if number not in set(StatusCode):
        assert error.status is StatusCode.LLM_FAILED


# ---- reports


def test_a_report_has_its_speed() -> None:
    """10**9 bytes in a second are 1 GB/s; a movement of no duration has none."""
    assert TransferReport(1, "shm", 3 * 10**9, 1, 1.5, ()).gb_per_s == pytest.approx(2.0)
    assert TransferReport(1, "shm", 10, 1, 0.0, ()).gb_per_s == 0.0
    assert REPORT.failed[0].blocks == (3,)


def test_a_report_is_a_plain_value() -> None:
    """Reports compare by value, do not change, and can be pickled."""
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
    with pytest.raises(AttributeError):
        REPORT.nbytes = 0  # type: ignore[misc]  # that is the test


OK: Final = LinkResult(1, StatusCode.LLM_SUCCESS)
FAILURE: Final = LinkResult.failed(2, NotLinkedError("no link", peer=2))


def test_link_results_unpack_as_the_specs_pair() -> None:
    """``status, results = ...`` and indexing give what the attributes give, in the order of the call."""
    outcome = LinkResults(StatusCode.LLM_LINK_FAILED, (OK, FAILURE))
    status, results = outcome
    assert status is outcome.status is outcome[0] is StatusCode.LLM_LINK_FAILED
    assert results == outcome.results == outcome[1] == (OK, FAILURE)
    assert len(outcome) == 2
    assert tuple(outcome) == (StatusCode.LLM_LINK_FAILED, (OK, FAILURE))
    assert not outcome.is_ok
    assert LinkResults(StatusCode.LLM_SUCCESS, (OK,)).is_ok


def test_raise_for_status_raises_the_cause() -> None:
    """A good outcome raises nothing; a bad one its own cause, else that of the first cluster that failed."""
    LinkResults(StatusCode.LLM_SUCCESS, (OK, FAILURE)).raise_for_status()
    other = failed_result(3, StatusCode.LLM_LINK_FAILED, "nobody listens")
    with pytest.raises(NotLinkedError) as first:
        LinkResults(StatusCode.LLM_LINK_FAILED, (OK, FAILURE, other)).raise_for_status()
    assert first.value is FAILURE.error
    refusal = RoleError("a prompt does not dial")
    with pytest.raises(RoleError) as own:
        LinkResults(StatusCode.LLM_PARAM_INVALID, (FAILURE,), refusal).raise_for_status()
    assert own.value is refusal
    with pytest.raises(LinkError, match="LLM_PROCESSING_LINK") as bare:
        LinkResults(StatusCode.LLM_PROCESSING_LINK, (OK,)).raise_for_status()
    assert bare.value.status is StatusCode.LLM_PROCESSING_LINK


def test_raise_for_status_passes_over_harmless_results() -> None:
    """A cluster that was linked already is no failure, though its result may carry an error."""
    already = failed_result(1, StatusCode.LLM_ALREADY_LINK, "linked")
    with pytest.raises(NotLinkedError):
        LinkResults(StatusCode.LLM_LINK_FAILED, (already, FAILURE)).raise_for_status()


def test_a_refused_call_has_no_results() -> None:
    """A call that was refused as a whole has its error's status, an empty list, and the error."""
    refusal = RoleError("a prompt does not dial")
    outcome = LinkResults.refused(refusal)
    assert tuple(outcome) == (StatusCode.LLM_PARAM_INVALID, ())
    assert outcome.error is refusal


@pytest.mark.parametrize("status", list(StatusCode), ids=lambda status: status.name)
def test_which_results_are_ok(status: StatusCode) -> None:
    """A result is ok when it was done or there was nothing to be done: the spec, section 4.2."""
    harmless = {StatusCode.LLM_SUCCESS, StatusCode.LLM_ALREADY_LINK, StatusCode.LLM_REPEAT_REQUEST}
    assert LinkResult(1, status).is_ok is (status in harmless)


def test_failed_results_carry_their_error() -> None:
    """The result's status is that of its error, which names the cluster."""
    assert tuple(FAILURE) == (2, StatusCode.LLM_NOT_YET_LINK, FAILURE.error)
    result = failed_result(3, StatusCode.LLM_LINK_FAILED, "nobody listens")
    assert isinstance(result.error, LinkError)
    assert (result.status, result.error.status, result.error.peer) == (*[StatusCode.LLM_LINK_FAILED] * 2, 3)


def test_link_results_can_be_pickled_and_copied() -> None:
    """The outcome of a call can go to another process, cause and all."""
    outcome = LinkResults(StatusCode.LLM_LINK_FAILED, (OK,), RoleError("a prompt does not dial"))
    for back in (pickle.loads(pickle.dumps(outcome)), copy.copy(outcome), copy.deepcopy(outcome)):
        assert type(back) is LinkResults
        assert back == outcome
        assert isinstance(back.error, RoleError)


def test_messages_stay_short_whatever_was_handed_in() -> None:
    """A wrong block table of a million entries is named, not repeated; and naming it holds the loop for no time."""
    many: Any
    started = time.perf_counter()
    for many in ([0.5] * 10**6, dict.fromkeys(range(10**6)), "x" * 10**6, tuple(range(10**6)), np.zeros(10**6)):
        for check in (
            lambda value: check_blocks("src_blocks", value, 10),
            lambda value: check_int("cache", value, 0, 1),
            lambda value: CacheDesc(2, value, "uint8"),
        ):
            with pytest.raises(ParameterError) as caught:
                check(many)
            assert len(str(caught.value)) < 1000
    assert time.perf_counter() - started < 5
