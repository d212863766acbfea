"""Hostile distributed checkpoints: pickled metadata that do or take what they like, next to a valid file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from item import Item
from makers import TENSORS, sparse, st, tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMANDS = (
    "inspect {bad}",
    "unify {bad} {out}",
    "transform {bad} {out} --dry-run",
    "verify {bad}",
    ".open {bad}",
)

HEAD = b"\x80\x04"

# fmt: off


def pickled(content: bytes) -> bytes:
    return HEAD + content


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


def record(name: bytes, **state: bytes) -> bytes:
    """An object of a class of that name, with a state."""
    items = b"".join(text(key.encode()) + value for key, value in state.items())
    return b"chyper_parallel.core.checkpoint.metadata\n" + name + b"\n)\x81}(" + items + b"ub"


def metadata(tensors: bytes, places: bytes = b"}") -> bytes:
    return pickled(record(b"Metadata", state_dict_metadata=tensors, storage_data=places) + b".")


def a_tensor(size: bytes = b"K\x04\x85", chunks: bytes = b"]") -> bytes:
    return record(b"TensorStorageMetadata", properties=record(b"TensorProperties", dtype=text(b"Int8")), size=size, chunks=chunks)


CHUNK = record(b"ChunkStorageMetadata", offsets=b"K\x00\x85", sizes=b"K\x04\x85")
PLACE = record(b"MetadataIndex", fqn=text(b"w"), offset=b"K\x00\x85") + record(b"StorageInfo", relative_path=text(b"_rank0_.safetensors"))
SPAN = b"K\x00\x85"


def torchs(item: bytes, length: int | None = None, *, size: bytes = b"K\x04\x85") -> Callable[[Path], None]:
    """A checkpoint of PyTorch, of one tensor of one item."""
    place = record(b"MetadataIndex", fqn=text(b"w"), offset=SPAN)
    place += record(b"_StorageInfo", relative_path=text(b"__0_0.distcp"), offset=b"K\x00", length=b"J" + (len(item) if length is None else length).to_bytes(4, "little"))
    chunk = record(b"ChunkStorageMetadata", offsets=SPAN, sizes=size)
    tensors = b"}" + text(b"w") + a_tensor(size, b"]" + chunk + b"a") + b"s"
    return tree({".metadata": metadata(tensors, b"}" + place + b"s"), "__0_0.distcp": item})


def stored(*records: tuple[bytes, bytes]) -> bytes:
    """The head of a zip archive of plain records, whose sizes are in front of them."""
    heads = ((name, content, b"PK\x03\x04" + bytes(14) + 2 * len(content).to_bytes(4, "little") + len(name).to_bytes(2, "little") + bytes(2)) for name, content in records)
    return b"".join(head + name + content for name, content, head in heads)


def an_item(pickle: bytes, data: bytes = b"abcd") -> bytes:
    return stored((b"archive/data.pkl", b"\x80\x02" + pickle), (b"archive/data/0", data))


def rebuilt(shape: bytes = b"K\x04\x85", strides: bytes = b"K\x01\x85", elements: bytes = b"K\x04", first: bytes = b"K\x00") -> bytes:
    pid = b"(" + text(b"storage") + b"ctorch\nCharStorage\n" + text(b"0") + text(b"cpu") + elements + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + first + shape + strides + b"\x89}tR."


DOUBLED = b"(]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60)) + b"t"
"""Lists, each of which has the one before twice, where nothing else is in the memo."""

WHAT = "expected the metadata of a distributed checkpoint (DCP)"


def made(name: str, content: bytes, says: str, *, code: int = 4, headroom: int = 100_000_000, seconds: int = 2) -> Item:
    make = tree({".metadata": content, "_rank0_.safetensors": st(TENSORS, b"abcd")})
    return Item(name, make, says, COMMANDS, code, "bad", headroom=headroom, seconds=seconds)


torch = partial(Item, commands=COMMANDS, file="bad", headroom=100_000_000, seconds=2)

DCP = [
    made("nothing wrong", metadata(b"}" + text(b"w") + a_tensor(chunks=b"]" + CHUNK + b"a") + b"s", b"}" + PLACE + b"s"), "", code=0),
    made("a call", pickled(b"cos\nsystem\n(" + text(b"echo called >/tmp/called") + b"tR."), f"bad/.metadata: is not {WHAT[9:]}"),
    made("a call in the place of a shape", metadata(b"}" + text(b"w") + a_tensor(size=b"cos\nsystem\n(" + text(b"touch called") + b"tR") + b"s"), "for a shape or offsets; expected whole numbers"),
    made("a name that is not there to be imported", pickled(b"cno.such\nthing\n)R."), f"is not {WHAT[9:]}"),
    made("marks without end", pickled(b"(" * 5_000_000), f"is nested too deeply (byte 259 of a pickle); {WHAT}"),
    made("lists in lists", pickled(b"]" * 5_000_000), "is nested too deeply, or has too many values"),
    made("an integer of 2 GB", pickled(b"\x8b\xff\xff\xff\x7f"), "has an integer of 2,147,483,647 bytes; at most 32 are taken"),
    made("a text of 4 GB", pickled(b"X\xff\xff\xff\xff"), "has a text or value of 4,294,967,295 bytes; at most 65,536 are taken"),
    made("a place in the memo of 4 billion", pickled(b"]r\xff\xff\xff\xff."), "remembers a value at place 4,294,967,295 of 0"),
    made("a memo that doubles", pickled(b"]\x94" + b"".join(b"0" + b"](h" + bytes([n]) * 1 + b"h" + bytes([n]) + b"e\x94" for n in range(60)) + b"."), "has the instruction POP, which is not followed"),
    made("a memo that doubles, without a wrong instruction", pickled(b"(]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60)) + b"t."), f"is not {WHAT[9:]}"),
    made("a shape that is lists again and again", metadata(b"}" + text(b"w") + a_tensor(size=DOUBLED) + b"s"), "has a tuple of 61 for a shape or offsets"),
    made("a name that is lists again and again", metadata(b"}" + DOUBLED + a_tensor() + b"s"), "a tuple of 61 is the name of a tensor"),
    made("a place of lists again and again", metadata(b"}" + text(b"w") + a_tensor() + b"s", b"}" + record(b"MetadataIndex", fqn=DOUBLED) + record(b"StorageInfo") + b"s"), "has a place of a tuple of 61, and no such tensor"),
    made("a file that is lists again and again", metadata(b"}" + text(b"w") + a_tensor() + b"s", b"}" + record(b"MetadataIndex", fqn=text(b"w")) + record(b"StorageInfo", relative_path=DOUBLED) + b"s"), "tensor 'w' is in a tuple of 61"),
    made("a persistent id", pickled(b"K\x01Q."), "refers to something outside of itself"),
    made("an extension", pickled(b"\x84\x01\x00\x00\x00."), "has the instruction EXT4, which is not followed"),
    made("a tensor of 2**70 elements", metadata(b"}" + text(b"w") + a_tensor(size=b"\x8a\x09" + (1 << 70).to_bytes(9, "little") + b"\x85") + b"s"), "for a shape or offsets; expected whole numbers"),
    made("a tensor of 2**62 by 2**62", metadata(b"}" + text(b"w") + a_tensor(size=(b"\x8a\x08" + (1 << 62).to_bytes(8, "little")) * 2 + b"\x86") + b"s"), "which no array can have"),
    made("a name for a terminal", metadata(b"}" + text(b"\x1b[2J\nerror: no") + a_tensor() + b"s"), "holds no tensor that can be read"),
    made("a name of 5,000 bytes", metadata(b"}" + text(b"a" * 5000) + a_tensor() + b"s"), "expected at most 4096 bytes of text"),
    made("millions of boxes that are one", metadata(b"}(" + b"".join(text(b"w%d" % n) + (a_tensor(chunks=b"](" + CHUNK + b"\x94" + b"h\x00" * 60_000 + b"e\x94") if not n else record(b"TensorStorageMetadata", size=b"K\x04\x85", chunks=b"h\x01")) for n in range(100)) + b"u"), "has more than 2,097,152 boxes"),
    made("no tensors", metadata(b"}"), "holds no tensor that can be read"),
    made("tensors that are a list", metadata(b"]"), "has no state_dict_metadata"),
    made("a file above", metadata(b"}" + text(b"w") + a_tensor() + b"s", b"}" + PLACE.replace(b"\x13\x00\x00\x00_rank0_", b"\x16\x00\x00\x00../_rank0_") + b"s"), "expected a file of a rank, without directories"),
    Item("zeros, 1 GB", tree({".metadata": sparse(HEAD, 1 << 30), "_rank0_.safetensors": st(TENSORS, b"abcd")}), "has 1.1 GB; at most 268.4 MB are taken", COMMANDS, file="bad", headroom=100_000_000, seconds=2),
    Item("a text of 1 GB of zeros", tree({".metadata": sparse(pickled(b"X\x00\x00\x00\x40"), 1 << 30), "_rank0_.safetensors": st(TENSORS, b"abcd")}), "has 1.1 GB; at most 268.4 MB are taken", COMMANDS, file="bad", headroom=100_000_000, seconds=2),
    torch("an item with nothing wrong", torchs(an_item(rebuilt())), "", code=0),
    torch("an item that calls", torchs(an_item(b"cos\nsystem\n(" + text(b"touch called") + b"tR.")), "'w' is kept as 'system', which is not read"),
    torch("an item that is no zip archive", torchs(b"\xff" * 4000), "is not a tensor that torch.save stored"),
    torch("an item of zeros", torchs(bytes(4000)), "is not a tensor that torch.save stored"),
    torch("an item that is empty", torchs(b"", 0), "__0_0.distcp: is empty; a checkpoint was expected"),
    torch("an item beyond its file", torchs(an_item(rebuilt()), 1 << 30), "bytes; its items end at 1073741824; was saving it interrupted?"),
    torch("an item without a tensor", torchs(stored((b"archive/data.pkl", b"\x80\x02N."), (b"archive/data/0", b"abcd"))), "'w' is kept as a value, which is not read"),
    torch("an item of no records but one", torchs(stored((b"archive/data.pkl", b"\x80\x02N."))), "is not a tensor that torch.save stored: it has no bytes"),
    torch("an item whose head goes on and on", torchs(stored(*[(b"archive/x", b"abcd")] * 20_000)), "its head is too long"),
    torch("a storage of 2**62 elements", torchs(an_item(rebuilt(elements=b"\x8a\x08" + (1 << 62).to_bytes(8, "little")))), "has an item that is shorter than the tensor"),
    torch("strides of 2**62", torchs(an_item(rebuilt(strides=b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"\x85"))), "goes beyond its storage"),
    torch("a first element of 2**62", torchs(an_item(rebuilt(first=b"\x8a\x08" + (1 << 62).to_bytes(8, "little")))), "goes beyond its storage"),
    torch("a shape of 2**40 that lies in one element", torchs(an_item(rebuilt(b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85", b"K\x00\x85")), size=b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85"), "is transposed in its file, in 1,099,511,627,776 pieces"),
    torch("a parameter in a parameter, a hundred deep", torchs(an_item(b"ctorch._utils\n_rebuild_parameter\n" * 100 + b"}" + b"\x85R" * 100 + b".")), "is kept as '_rebuild_parameter', which is not read"),
]
