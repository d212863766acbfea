"""Encryption: MindSpore's recorded files, every range of a file by itself, and what a wrong key does."""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import reshard.core.storage.cipher
import reshard.core.storage.decryption
from reshard.core.storage.cipher import Cipher
from reshard.core.storage.decryption import MAGICS, DecryptingStore
from reshard.errors import ReshardError, SourceError, UsageError
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cryptography")

KEY = b"0123456789ABCDEF"
MODES = sorted(MAGICS.values())
RECORDED = {
    "aes-gcm": Cipher("AES-GCM", KEY),
    "aes-cbc": Cipher("AES-CBC", KEY),
    "sm4-cbc": Cipher("SM4-CBC", KEY),
    "aes-gcm-192": Cipher("AES-GCM", bytes(range(24))),
    "aes-gcm-256": Cipher("AES-GCM", bytes(range(32))),
}


def encrypted(path: Path, cipher: Cipher, plain: bytes) -> str:
    path.write_bytes(b"".join(cipher.encrypt([plain])))
    return str(path)


def decrypted(path: str, cipher: Cipher) -> bytes:
    store = DecryptingStore(cipher)
    buffer = bytearray(store.size(path))
    store.read_into(path, 0, memoryview(buffer))
    store.close()
    return bytes(buffer)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 100 bytes and pieces of 32, so that a small file has many of both."""
    monkeypatch.setattr(reshard.core.storage.cipher, "BLOCK_BYTES", 100)
    monkeypatch.setattr(reshard.core.storage.decryption, "_PIECE_BYTES", 32)
    return 100


@pytest.mark.parametrize("name", RECORDED)
def test_what_mindspore_encrypted_is_read(mindspore_data: Path, name: str) -> None:
    folder = mindspore_data / "encrypted"
    path = str(folder / f"{name}.ckpt")
    plain = decrypted(path, RECORDED[name])
    index = index_file(path, store=DecryptingStore(RECORDED[name]))
    whole = (folder / "plain.ckpt").read_bytes()
    assert plain.startswith(whole)  # the others have append_dict entries behind it
    assert list(index.entries)[:4] == ["w.f32", "b.i32", "scalar", "h.f16"]
    assert {"epoch_num", "note", "lr", "flag"} <= set(index.entries) or plain == whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 99, 100, 101, 200, 1000])
def test_what_is_encrypted_comes_back_block_by_block(tmp_path: Path, small_blocks: int, mode: str, nbytes: int) -> None:
    plain = os.urandom(nbytes)
    cipher = Cipher(mode, KEY)
    path = encrypted(tmp_path / "a.ckpt", cipher, plain)
    content = (tmp_path / "a.ckpt").read_bytes()
    assert len(content) == cipher.encrypted_size(nbytes)
    assert MAGICS[int.from_bytes(content[:4], "little")] == mode
    assert decrypted(path, cipher) == plain
    if nbytes >= 16:
        assert plain[:16] not in content


@given(data=st.data(), mode=st.sampled_from(MODES))
def test_every_range_is_decrypted_by_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, mode: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard.core.storage.cipher, "BLOCK_BYTES", 100)
        patch.setattr(reshard.core.storage.decryption, "_PIECE_BYTES", 32)
        plain = data.draw(st.binary(min_size=1, max_size=400))
        begin = data.draw(st.integers(0, len(plain)))
        end = data.draw(st.integers(begin, len(plain)))
        path = encrypted(tmp_path_factory.mktemp("range") / "a", Cipher(mode, KEY), plain)
        store = DecryptingStore(Cipher(mode, KEY))
        buffer = bytearray(end - begin)
        store.read_into(path, begin, memoryview(buffer))
        store.close()
        assert bytes(buffer) == plain[begin:end]


def test_an_iv_is_never_used_twice(small_blocks: int) -> None:
    blocks = list(Cipher("AES-CBC", KEY).encrypt([bytes(1000)]))
    assert len({block[12:28] for block in blocks}) == len(blocks) == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_key_is_found_before_a_byte_is_given_out(tmp_path: Path, mindspore_data: Path, mode: str) -> None:
    """Also by those wrong keys whose padding looks right, one in 256 for the CBC modes."""
    plain = (mindspore_data / "encrypted" / "plain.ckpt").read_bytes()
    path = encrypted(tmp_path / "a.ckpt", Cipher(mode, KEY), plain)
    codes = set()
    for number in range(2000 if mode != "AES-GCM" else 50):
        key = number.to_bytes(16, "big")
        with pytest.raises(SourceError) as raised:
            index_file(path, store=DecryptingStore(Cipher(mode, key)))
        codes.add(raised.value.code)
    assert "wrong-key" in codes
    assert mode == "AES-GCM" or len(codes) > 1  # some passed the padding


def test_a_changed_byte_is_found_by_the_tag(tmp_path: Path, small_blocks: int) -> None:
    cipher = Cipher("AES-GCM", KEY)
    path = encrypted(tmp_path / "a", cipher, bytes(300))
    content = bytearray((tmp_path / "a").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a").write_bytes(content)
    store = DecryptingStore(cipher)
    buffer = bytearray(100)
    store.read_into(path, 0, memoryview(buffer))  # blocks stand by themselves: the first is valid
    with refused(SourceError, "wrong-key"):
        store.read_into(path, 200, memoryview(buffer))


def test_the_order_of_blocks_is_bound_by_nothing(tmp_path: Path, small_blocks: int) -> None:
    """A limit of MindSpore's format, which the README names: two blocks of one length exchange their places."""
    cipher, plain = Cipher("AES-GCM", KEY), os.urandom(300)
    path = encrypted(tmp_path / "a", cipher, plain)
    content = (tmp_path / "a").read_bytes()
    size = len(content) // 3
    (tmp_path / "a").write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
    assert decrypted(path, cipher) == plain[100:200] + plain[:100] + plain[200:]


def test_the_trailer_that_mindspore_puts_behind_an_encrypted_file_is_passed_over(tmp_path: Path) -> None:
    """It is of zeros, whatever the contents; MindSpore 2.10 cannot load such a file itself."""
    cipher = Cipher("AES-CBC", KEY)
    path = encrypted(tmp_path / "a", cipher, b"contents")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes() + b"crc_num" + bytes(10))
    assert decrypted(path, cipher) == b"contents"


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    path = encrypted(tmp_path / "a", Cipher("AES-CBC", KEY), b"contents")
    with refused(SourceError, "truncated", "byte 8", "2 more"):
        DecryptingStore(Cipher("AES-CBC", KEY)).read_into(path, 4, memoryview(bytearray(6)))


def test_a_file_that_was_replaced_is_indexed_anew(tmp_path: Path) -> None:
    cipher = Cipher("AES-GCM", KEY)
    store = DecryptingStore(cipher)
    for plain in (b"first", b"the second, longer"):
        path = encrypted(tmp_path / "a", cipher, plain)
        buffer = bytearray(store.size(path))
        store.read_into(path, 0, memoryview(buffer))
        assert bytes(buffer) == plain


def test_the_key_is_checked_and_not_shown() -> None:
    with refused(UsageError, "unknown-mode", "AES-ECB", "AES-GCM, AES-CBC, SM4-CBC"):
        Cipher("AES-ECB", KEY)
    with refused(UsageError, "bad-key", "5 bytes", "AES-GCM", "16 or 24 or 32"):
        Cipher("AES-GCM", b"short")
    with refused(UsageError, "bad-key", "str"):
        Cipher("AES-GCM", "0123456789ABCDEF")  # type: ignore[arg-type]
    assert KEY.decode() not in repr(Cipher("AES-GCM", KEY))


def test_a_store_travels_with_its_key(tmp_path: Path) -> None:
    cipher = Cipher("SM4-CBC", KEY)
    path = encrypted(tmp_path / "a", cipher, b"contents")
    store = pickle.loads(pickle.dumps(DecryptingStore(cipher)))  # noqa: S301 -- its own
    assert store.size(path) == 8


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with refused(ReshardError, "library-missing", "reshard[crypto]"):
        DecryptingStore(Cipher("AES-GCM", KEY))
