"""Hostile distributed checkpoints: pickled metadata that do or take what they like, next to a valid file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from item import Item
from makers import TENSORS, fifo, repeated, sparse, st, tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMANDS = (
    "inspect {bad}",
    "convert --to=mindspore {bad} {out}",
    "convert {bad} {out} --to hf --dry-run",
    "verify {bad}",
    ".open {bad}",
)

SHOWN = ("inspect {bad}", "inspect {bad} --json", "convert --to=mindspore {bad} {out}", ".open {bad}")
CARRIED = ("convert {bad} {out} --to dcp",)

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


def nested(count: int) -> Callable[[Path], None]:
    """A checkpoint of PyTorch, of items in each other, which all end in the same 100,000 lists."""
    content = b"](" + (b"](" + b"]" * 1000 + b"e") * 100 + b"e."
    items = [stored((b"a/data.pkl", b"\x80\x03" + content))]
    for _ in range(count):
        inner = items[-1][: -len(content)]
        content = b"C" + bytes([len(inner)]) + inner + content
        items.append(stored((b"a/data.pkl", b"\x80\x03" + content)))
    whole, data = items[-1], stored((b"a/data/0", b"abcd"))
    names = [text(b"w%d" % number) for number in range(count)]
    chunk = record(b"ChunkStorageMetadata", offsets=SPAN, sizes=b"K\x04\x85")
    tensors = b"".join(name + a_tensor(chunks=b"]" + chunk + b"a") for name in names)
    places = b"".join(
        record(b"MetadataIndex", fqn=name, offset=SPAN) + record(b"_StorageInfo", relative_path=text(b"__0_0.distcp"), offset=b"J" + (len(whole) - len(item)).to_bytes(4, "little"), length=b"J" + len(item + data).to_bytes(4, "little"))
        for name, item in zip(names, items, strict=False)
    )
    return tree({".metadata": metadata(b"}(" + tensors + b"u", b"}(" + places + b"u"), "__0_0.distcp": whole + data})


def stored(*records: tuple[bytes, bytes]) -> bytes:
    """The head of a zip archive of plain records, whose sizes are in front of them."""
    heads = ((name, content, b"PK\x03\x04" + bytes(14) + 2 * len(content).to_bytes(4, "little") + len(name).to_bytes(2, "little") + bytes(2)) for name, content in records)
    return b"".join(head + name + content for name, content, head in heads)


def an_item(pickle: bytes, data: bytes = b"abcd") -> bytes:
    return archive(pickle, data)


def rebuilt(shape: bytes = b"K\x04\x85", strides: bytes = b"K\x01\x85", elements: bytes = b"K\x04", first: bytes = b"K\x00") -> bytes:
    pid = b"(" + text(b"storage") + b"ctorch\nCharStorage\n" + text(b"0") + text(b"cpu") + elements + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + first + shape + strides + b"\x89}tR."


DOUBLED = b"(]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60)) + b"t"
"""Lists, each of which has the one before twice, where nothing else is in the memo."""

def with_objects(item: bytes, names: int = 1, **beside: bytes | Callable[[Path], None]) -> Callable[[Path], None]:
    """A checkpoint of PyTorch, of one tensor, and of objects that are all at the same place; with files beside, Megatron's."""
    right, at = an_item(rebuilt()), b"J" + len(an_item(rebuilt())).to_bytes(4, "little")
    tensor = record(b"MetadataIndex", fqn=text(b"w"), offset=SPAN) + record(b"_StorageInfo", relative_path=text(b"__0_0.distcp"), offset=b"K\x00", length=at)
    info = record(b"_StorageInfo", relative_path=text(b"__0_0.distcp"), offset=at, length=b"J" + len(item).to_bytes(4, "little"))
    listed = b"".join(text(b"o%d" % n) + record(b"BytesStorageMetadata") for n in range(names))
    places = b"".join(record(b"MetadataIndex", fqn=text(b"o%d" % n)) + info for n in range(names))
    chunk = record(b"ChunkStorageMetadata", offsets=SPAN, sizes=b"K\x04\x85")
    tensors = b"}(" + text(b"w") + a_tensor(chunks=b"]" + chunk + b"a") + listed + b"u"
    files = {".metadata": metadata(tensors, b"}(" + tensor + places + b"u"), "__0_0.distcp": right + item}
    more = {name.replace("_", "."): content for name, content in beside.items()}
    return tree({**files, **({"metadata.json": b"{}"} if beside else {}), **more})


def archive(pickle: bytes, data: bytes | None = None, *, times: int = 1, size: int | None = None, crc: int = 0, at: int = 0, method: int = 0) -> bytes:
    """A zip archive of one or two records, that its directory lists so often, with another size, sum, place or method."""
    records = [(b"archive/data.pkl", b"\x80\x02" + pickle), *([] if data is None else [(b"archive/data/0", data)])]
    directory, local = b"", b""
    for name, content in records:
        sizes = 2 * (len(content) if size is None else size).to_bytes(4, "little")
        lengths, place = len(name).to_bytes(2, "little") + bytes(12), (at or len(local)).to_bytes(4, "little")
        directory += b"PK\x01\x02" + bytes(6) + method.to_bytes(2, "little") + bytes(4) + crc.to_bytes(4, "little") + sizes + lengths + place + name
        local += stored((name, content))
    end = b"PK\x05\x06" + bytes(4) + 2 * (times * len(records)).to_bytes(2, "little") + (times * len(directory)).to_bytes(4, "little")
    return local + directory * times + end + len(local).to_bytes(4, "little") + bytes(2)


HELD = b"(]q\x00" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)) + b"t."

DAMAGED = {
    "zeros": with_objects(bytes(4000)),
    "nothing": with_objects(b""),
    "a record that is listed thousands of times": with_objects(archive(b"N.", times=60_000)),
    "a record beyond its archive": with_objects(archive(b"N.", size=1 << 31)),
    "a record before its archive": with_objects(archive(b"N.", at=(1 << 32) - 1)),
    "a compressed record": with_objects(archive(b"N.", method=8)),
    "a wrong sum": with_objects(archive(b"N.", crc=7)),
}

CLASS = b"(ca\nb\n\x94]"
MANY = {
    "lists": (b"]", b"](" + b"]" * 1000 + b"e"),
    "dicts": (b"}", b"(" + b"}" * 1000 + b"u"),
    "sets": (b"]", b"(" + b"\x8f" * 1000 + b"e"),
    "tuples": (b"]", b"(" + b"NN\x86" * 1000 + b"e"),
    "what is recalled": (b"(]\x94]", b"(" + b"h\0" * 1000 + b"e"),
    "numbers": (b"]", b"(" + b"K\1" * 1000 + b"e"),
    "texts": (b"]", b"(" + b"\x8c\1a" * 1000 + b"e"),
    "bytes": (b"]", b"(" + b"C\0" * 1000 + b"e"),
    "frames": (b"N", b"\x95" + b"\xff" * 8),
    "imports": (b"]", b"(" + b"ca\nb\n" * 1000 + b"e"),
    "calls": (CLASS, b"(" + b"h\0)R" * 1000 + b"e"),
    "objects": (CLASS, b"(" + b"h\0)\x81" * 1000 + b"e"),
    "objects without attributes": (CLASS, b"(" + b"h\0)\x81\x94}\x94(ub" * 1000 + b"e"),
}
"""What is in a pickle again and again: what it begins with, and what follows."""

WHAT = "expected the metadata of a distributed checkpoint (DCP)"


def made(name: str, content: bytes, says: str, *, code: int = 4, headroom: int = 100_000_000, seconds: int = 2) -> Item:
    make = tree({".metadata": content, "_rank0_.safetensors": st(TENSORS, b"abcd")})
    return Item(name, make, says, COMMANDS, code, "bad", headroom=headroom, seconds=seconds)


PICKLES = [
    Item(f"50 MB of {what}", tree({".metadata": repeated(pickled(begin), piece, 50_000_000 // len(piece)), "_rank0_.safetensors": st(TENSORS, b"abcd")}), "bad-pickle", ("inspect {bad}",), file="bad", headroom=100_000_000, seconds=2)
    for what, (begin, piece) in MANY.items()
]

VAST = b"\x8a\x08" + (1 << 58).to_bytes(8, "little") + b"\x85"
EXPANDED = torchs(an_item(rebuilt(VAST, b"K\x00\x85")), size=VAST)
torch = partial(Item, commands=COMMANDS, file="bad", headroom=100_000_000, seconds=2)

DCP = [
    made("nothing wrong", metadata(b"}" + text(b"w") + a_tensor(chunks=b"]" + CHUNK + b"a") + b"s", b"}" + PLACE + b"s"), "", code=0),
    made("a call", pickled(b"cos\nsystem\n(" + text(b"echo called >/tmp/called") + b"tR."), "bad-metadata @ bad/.metadata"),
    made("a call in the place of a shape", metadata(b"}" + text(b"w") + a_tensor(size=b"cos\nsystem\n(" + text(b"touch called") + b"tR") + b"s"), "bad-shape"),
    made("a name that is not there to be imported", pickled(b"cno.such\nthing\n)R."), f"is not {WHAT[9:]}"),
    made("marks without end", pickled(b"(" * 5_000_000), "bad-pickle @ byte 1,179"),
    made("an integer of 2 GB", pickled(b"\x8b\xff\xff\xff\x7f"), "bad-pickle @ 647 bytes"),
    made("a text of 4 GB", pickled(b"X\xff\xff\xff\xff"), "bad-pickle @ 295 bytes"),
    made("a place in the memo of 4 billion", pickled(b"]r\xff\xff\xff\xff."), "bad-pickle @ place 4"),
    made("a memo that doubles, without a wrong instruction", pickled(b"(]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60)) + b"t."), f"is not {WHAT[9:]}"),
    made("a shape that is lists again and again", metadata(b"}" + text(b"w") + a_tensor(size=DOUBLED) + b"s"), "bad-shape @ of 61"),
    made("a name that is lists again and again", metadata(b"}" + DOUBLED + a_tensor() + b"s"), "bad-name @ of 61"),
    made("a persistent id", pickled(b"K\x01Q."), "bad-pickle"),
    made("a tensor of 2**70 elements", metadata(b"}" + text(b"w") + a_tensor(size=b"\x8a\x09" + (1 << 70).to_bytes(9, "little") + b"\x85") + b"s"), "bad-shape"),
    made("a name for a terminal", metadata(b"}" + text(b"\x1b[2J\nerror: no") + a_tensor() + b"s"), "no-tensors"),
    made("a name of 5,000 bytes", metadata(b"}" + text(b"a" * 5000) + a_tensor() + b"s"), "bad-name @ most 4096"),
    made("millions of boxes that are one", metadata(b"}(" + b"".join(text(b"w%d" % n) + (a_tensor(chunks=b"](" + CHUNK + b"\x94" + b"h\x00" * 60_000 + b"e\x94") if not n else record(b"TensorStorageMetadata", size=b"K\x04\x85", chunks=b"h\x01")) for n in range(100)) + b"u"), "too-many-blocks @ 152 boxes"),
    made("no tensors", metadata(b"}"), "no-tensors"),
    made("tensors that are a list", metadata(b"]"), "bad-metadata"),
    made("a file above", metadata(b"}" + text(b"w") + a_tensor() + b"s", b"}" + PLACE.replace(b"\x13\x00\x00\x00_rank0_", b"\x16\x00\x00\x00../_rank0_") + b"s"), "bad-file-name"),
    Item("a text of 1 GB of zeros", tree({".metadata": sparse(pickled(b"X\x00\x00\x00\x40"), 1 << 30), "_rank0_.safetensors": st(TENSORS, b"abcd")}), "bad-pickle", COMMANDS, file="bad", headroom=100_000_000, seconds=2),
    torch("an item with nothing wrong", torchs(an_item(rebuilt())), "", code=0),
    torch("an item that calls", torchs(an_item(b"cos\nsystem\n(" + text(b"touch called") + b"tR.")), "no-tensors @ 'system'"),
    torch("an item that is no zip archive", torchs(b"\xff" * 4000), "no-tensors"),
    torch("an item that is empty", torchs(b"", 0), "empty-file @ __0_0.distcp"),
    torch("an item beyond its file", torchs(an_item(rebuilt()), 1 << 30), "truncated @ of 1073741824"),
    torch("items in each other", nested(200), "overlapping-items"),
    torch("an item without a tensor", torchs(stored((b"archive/data.pkl", b"\x80\x02N."), (b"archive/data/0", b"abcd"))), "no-tensors @ 'w' is"),
    torch("an item whose head goes on and on", torchs(stored(*[(b"archive/x", b"abcd")] * 20_000)), "no-tensors"),
    torch("a storage of 2**62 elements", torchs(an_item(rebuilt(elements=b"\x8a\x08" + (1 << 62).to_bytes(8, "little")))), "no-tensors"),
    torch("strides of 2**62", torchs(an_item(rebuilt(strides=b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"\x85"))), "no-tensors"),
    Item("a shape of 2**58 that lies in one element", EXPANDED, "", ("inspect {bad}", "convert {bad} {out} --dry-run", "verify {bad}", ".open {bad}"), 0, "bad", headroom=100_000_000, seconds=2),
    Item("a shape of 2**58 that is written", EXPANDED, "no-space @ 288230.4", ("convert --to=mindspore {bad} {out}",), 5, "bad", headroom=100_000_000, seconds=2),
    torch("a parameter in a parameter, a hundred deep", torchs(an_item(b"ctorch._utils\n_rebuild_parameter\n" * 100 + b"}" + b"\x85R" * 100 + b".")), "no-tensors @ 'w'"),
    *(
        Item(f"an object: {name}", make, "", (*SHOWN, "verify {bad}"), 0, "bad", headroom=100_000_000, seconds=2)
        for name, make in {
            "nothing wrong": with_objects(archive(b"K\x01.")),
            "a call": with_objects(archive(b"cos\nsystem\n(" + text(b"touch called") + b"tR.")),
            "a list of itself": with_objects(archive(b"]q\x00h\x00a.")),
            "lists again and again": with_objects(archive(HELD)),
            "lists again and again, in a thousand": with_objects(archive(HELD), 1000),
            "keys whose hashes are equal": with_objects(archive(b"}(" + b"".join(b"\x8a\x10" + (((1 << 61) - 1) * n).to_bytes(16, "little") + b"N" for n in range(20_000)) + b"u.")),
            "a key that is a list": with_objects(archive(b"}(]Nu.")),
            "a million numbers": with_objects(archive(b"](" + b"K\x01" * 1_000_000 + b"e.")),
            "lists in lists": with_objects(archive(b"]" * 1_000_000)),
            "a text for a terminal": with_objects(archive(text(b"\x1b[2J\nerror: no") + b".")),
            "common.pt that is no archive": with_objects(archive(b"N."), common_pt=b"no"),
            "common.pt that is a pipe": with_objects(archive(b"N."), common_pt=fifo),
            "common.pt whose iteration is for a terminal": with_objects(archive(b"N."), common_pt=archive(b"}(" + text(b"iteration") + text(b"\x1b[2J\nerror: no") + b"u.")),
        }.items()
    ),
    *(Item(f"an object that is damaged: {name}", make, "", SHOWN, 0, "bad", headroom=100_000_000, seconds=2) for name, make in DAMAGED.items()),
    *(
        Item(f"an object that is damaged, verified: {name}", make, "differs from what it carries of itself", ("verify {bad}",), 3, "bad", headroom=100_000_000, seconds=2)
        for name, make in DAMAGED.items()
    ),
    *(
        Item(f"an object to be carried: {name}", make, says, CARRIED, 4, "bad", headroom=100_000_000, seconds=2)
        for name, make, says in (
            ("zeros", with_objects(bytes(4000)), "not-torch-save @ exclude o0"),
            ("a compressed record", with_objects(archive(b"N.", method=8)), "not-torch-save @ 'data.pkl'"),
            ("a wrong sum", with_objects(archive(b"N.", crc=7)), "wrong-checksum @ 'archive/data.pkl'"),
            ("one that is thousands", with_objects(archive(b"N." + bytes(1 << 20)), 1000), "too-large @ have 1.0"),
        )
    ),
]
