"""What to do with each target file: a table, and what is so whatever is known and found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.records.logs import Record
from reshard.core.run.state.preflight import Do, Fate, FileState, Planned, Policy, fate, fates, files_with
from reshard.core.storage.page_cache import boot_id

NOW, OTHER = (10, 1), (10, 2)
WANTED = Planned("9f", 10)
BEGUN = Record("9f", 10, sources="s")
DONE = Record("9f", 10, ready=NOW, sources="s")
OLD = Record("old", 10, ready=NOW, sources="s")
REPLACING = Record("9f", 10, replaces=NOW, sources="s")
NOTHING = Record()

KEEP, RESUME, MAKE, CHANGED, UNMANAGED = Do


@pytest.mark.parametrize(
    ("record", "state", "is_begun", "options", "expected"),
    [
        # nothing is known
        (NOTHING, None, False, {}, MAKE),
        (NOTHING, None, True, {}, MAKE),
        (NOTHING, NOW, False, {}, UNMANAGED),
        (NOTHING, NOW, False, {"restart": True}, UNMANAGED),
        (NOTHING, NOW, False, {"overwrite": True}, MAKE),
        # an earlier run finished it as this one would
        (DONE, NOW, False, {}, KEEP),
        (DONE, NOW, False, {"overwrite": True}, KEEP),
        (DONE, NOW, False, {"restart": True}, MAKE),
        (DONE, NOW, False, {"sources": "t"}, KEEP),
        (DONE, None, False, {}, RESUME),
        (DONE, OTHER, False, {}, UNMANAGED),
        (DONE, OTHER, False, {"restart": True}, UNMANAGED),
        (DONE, OTHER, False, {"overwrite": True}, RESUME),
        (Record("9f", 10, ready=NOW, boot=boot_id()), NOW, False, {}, KEEP),
        (Record("9f", 10, ready=NOW, boot="another"), NOW, False, {}, RESUME),
        # it was begun
        (BEGUN, None, True, {}, RESUME),
        (BEGUN, None, True, {"overwrite": True}, RESUME),
        (BEGUN, None, True, {"restart": True}, MAKE),
        (BEGUN, None, True, {"sources": "t"}, MAKE),
        (BEGUN, None, True, {"sources": ""}, RESUME),
        (BEGUN, NOW, True, {}, UNMANAGED),
        (REPLACING, NOW, True, {}, RESUME),
        (REPLACING, OTHER, True, {}, UNMANAGED),
        # where files have their names early, one may not be noted yet
        (BEGUN, NOW, False, {"early": True}, RESUME),
        (BEGUN, (11, 1), False, {"early": True}, UNMANAGED),
        (BEGUN, NOW, False, {"early": True, "restart": True}, MAKE),
        (OLD, OTHER, False, {"early": True}, UNMANAGED),
        # another plan or other sources
        (OLD, NOW, False, {}, CHANGED),
        (OLD, NOW, False, {"overwrite": True}, MAKE),
        (OLD, NOW, False, {"restart": True}, MAKE),
        (OLD, None, False, {}, MAKE),
        (OLD, None, True, {}, CHANGED),
        (OLD, OTHER, False, {}, UNMANAGED),
        (Record("old", 10, replaces=NOW), NOW, False, {}, CHANGED),
    ],
)
def test_what_to_do(
    record: Record, state: tuple[int, int] | None, is_begun: bool, options: dict[str, Any], expected: Do
) -> None:
    found = fate(
        WANTED, FileState(record, state, ["a.partial"] if is_begun else []), Policy(**{"sources": "s", **options})
    )
    assert found.do is expected
    if found.do is not UNMANAGED and state in {record.ready, record.replaces}:
        assert found.ours == state


def test_a_link_may_be_there_before_it_is_noted() -> None:
    for is_link, expected in ((True, RESUME), (False, UNMANAGED)):
        assert fate(Planned("9f", 10, is_link=is_link), FileState(BEGUN, NOW), Policy()).do is expected


@pytest.mark.parametrize("lacking", [False, True])
def test_an_index_is_kept_with_all_that_it_is_of(lacking: bool) -> None:
    wanted = {"a": WANTED, "index": Planned("9f", 10, publish="index")}
    seen = {"index": FileState(DONE, NOW), **({} if lacking else {"a": FileState(DONE, NOW)})}
    found = fates(wanted, seen, Policy())
    assert found == ({"a": Fate(MAKE), "index": Fate(MAKE, NOW)} if lacking else dict.fromkeys(wanted, Fate(KEEP, NOW)))


@pytest.mark.parametrize("pointed", [DONE, OLD, NOTHING])
def test_an_index_is_kept_where_another_is_pointed_at(pointed: Record) -> None:
    wanted = {"index": Planned("9f", 10, publish="index"), "pointer": Planned("9f", 10, publish="pointer")}
    found = fates(wanted, {"index": FileState(DONE, NOW), "pointer": FileState(pointed, NOW)}, Policy())
    assert found["index"].do is KEEP
    assert found["pointer"].do is (KEEP if pointed is DONE else MAKE)


states = st.none() | st.sampled_from([NOW, OTHER, (11, 1)])
records = st.builds(
    Record,
    digest=st.sampled_from(["", "9f", "old"]),
    size=st.sampled_from([10, 11]),
    ready=states,
    replaces=states,
    boot=st.sampled_from(["", "another"]),
    sources=st.sampled_from(["", "s", "t"]),
)
seens = st.builds(FileState, records, states, st.booleans())
hows = st.builds(Policy, st.sampled_from(["", "s"]), st.booleans(), st.booleans(), st.booleans())


@given(st.builds(Planned, st.just("9f"), st.just(10), st.booleans()), seens, hows)
def test_nothing_of_others_is_touched_and_nothing_wrong_is_kept(
    wanted: Planned, seen: FileState, policy: Policy
) -> None:
    found = fate(wanted, seen, policy)
    record, state = seen.record, seen.state
    if found.do is KEEP:  # as this run would make it, and it is there as it was noted
        assert record.digest == wanted.digest
        assert state == record.ready is not None
        assert not record.may_be_lost
        assert not policy.restart
    may_replace = policy.overwrite or wanted.publish == "pointer"
    if found.do in {RESUME, MAKE} and state is not None and not may_replace:  # it is replaced: it is ours
        noted = state in {record.ready, record.replaces}
        assert noted or (record.digest == wanted.digest and record.ready is None)
    if found.do is RESUME:
        assert record.digest == wanted.digest
        assert not policy.restart
        assert not found.is_touched
    if wanted.publish == "pointer":  # whoever's it is, and never a part of it
        assert found.do in {KEEP, MAKE}
    if policy.overwrite:
        assert found.do in {KEEP, RESUME, MAKE}
    if policy.restart:
        assert found.do in {MAKE, UNMANAGED}
    if found.ours is not None:
        assert found.ours == state


@given(st.dictionaries(st.sampled_from("abc"), seens, min_size=3), hows)
def test_all_is_done_again_or_nothing_is_left_to_do(seen: dict[str, FileState], policy: Policy) -> None:
    """What a run has finished the next one keeps, whatever was there before."""
    wanted = {file: Planned("9f", 10, publish="index" if file == "c" else "file") for file in "abc"}
    found = fates(wanted, seen, policy)
    assert sorted(file for do in Do for file in files_with(found, do)) == sorted(wanted)
    after = {file: FileState(Record("9f", 10, ready=(10, 5)), (10, 5)) for file in wanted}
    assert files_with(fates(wanted, after, policy._replace(restart=False)), KEEP) == list(wanted)
