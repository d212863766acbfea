"""Uploads to S3 of a run: begun before its tasks, recorded in the ledger, and resumed by a later run.

A killed run loses the parts that were being sent, and no others: the next run asks the store for the parts that each
recorded upload has, and neither reads nor sends what is in them. So do the tasks that repeat those of a lost worker.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from reshard.core.plan.uploads.copies import upload_of
from reshard.core.storage.threads import map_ordered
from reshard.core.storage.urls.clients import in_s3
from reshard.core.storage.urls.remote import REQUESTS
from reshard.core.storage.urls.retries import ask
from reshard.core.storage.urls.schemes import client_at
from reshard.errors import ChangedError, GoneError, ReshardError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from reshard.core.plan.plan import Plan
    from reshard.core.storage.urls.s3.client import S3Client
    from reshard.core.storage.urls.s3.upload_parts import Upload


def _client(url: str) -> tuple[S3Client, str]:
    from reshard.core.storage.urls.s3.client import S3Client

    client, key = client_at(url)
    assert isinstance(client, S3Client)  # noqa: S101 -- of the scheme
    return client, key


def layout_of(plan: Plan, number: int) -> str:
    """Return a text that identifies the parts of a file; only an upload with equal parts can be resumed."""
    parts = upload_of(plan, number).parts
    edges = array("Q", [part.end for part in parts])
    return f"{len(parts)}.{sha256(edges).hexdigest()[:16]}"


def _identifier(recorded: str) -> str:
    """Return the identifier of an upload from a record, in which the layout of its parts follows."""
    return recorded.rpartition(" ")[0]


def begin_uploads(
    plan: Plan,
    directory: str,
    recorded: Mapping[int, str],
    resumed: Collection[int],
    record: Callable[[Mapping[int, str]], None],
) -> dict[int, str]:
    """Begin the uploads of the files of a plan, and return their identifiers by file number.

    Args:
        plan: the unfinished remainder of a plan.
        directory: the URL of the target.
        recorded: the identifiers that earlier runs recorded, as this function returns them; "" if there is none.
        resumed: the numbers of files that earlier runs began with the same contents.
        record: records the identifiers; if that fails, the new uploads are ended.

    Raises:
        TargetError: an upload cannot be begun.
    """
    if not in_s3(directory):
        record({})
        return {}

    new: list[tuple[str, str]] = []

    def begin(number: int) -> str:
        url, earlier = f"{directory}/{plan.files[number].path}", recorded[number]
        layout = layout_of(plan, number) if can_resume(plan, number) else ""
        if earlier and layout and number in resumed and earlier.rpartition(" ")[2] == layout:
            return earlier
        if earlier:
            end_upload(url, earlier)
        if not layout:
            return ""
        client, key = _client(url)
        upload = f"{ask(url, 'written', partial(client.begin, key), TargetError)} {layout}"
        new.append((url, upload))
        return upload

    try:
        uploads = dict(zip(recorded, map_ordered(begin, list(recorded), REQUESTS), strict=True))
        uploads = {number: upload for number, upload in uploads.items() if upload}
        record(uploads)
    except BaseException:  # no ledger tells a later run of them
        for _ in map_ordered(lambda begun: end_upload(*begun), new, REQUESTS):
            pass
        raise
    return uploads


def can_resume(plan: Plan, number: int) -> bool:
    """Return whether a file is sent in parts that a later run can use."""
    file = plan.files[number]
    is_plain = plan.coding is None and plan.cipher is None and not file.layout.crcs  # whose sums need all bytes
    is_first = file.link is None and file.publish == "file" and plan.shape != "store"
    return is_plain and is_first and len(upload_of(plan, number).parts) > 1


def end_upload(url: str, recorded: str) -> None:
    """End an upload, so that the store drops its parts; never raises."""
    client, key = _client(url)
    with suppress(Exception):
        ask(url, "removed", partial(client.abort, key, _identifier(recorded)), TargetError)


def sent_bytes(plan: Plan, number: int, directory: str, *, ends: bool) -> int | None:
    """Return how many bytes of contents the upload of a file has; None if there is none to resume.

    An upload that has nothing is ended, and so is any upload if `ends`.
    """
    recorded = plan.uploads.get(number)
    if recorded is None:
        return None
    url = f"{directory}/{plan.files[number].path}"
    client, key = _client(url)
    try:
        parts = {} if ends else ask(url, "looked at", partial(client.parts, key, _identifier(recorded)))
    except GoneError:  # the file is complete
        return None
    except ReshardError:  # the store does not answer
        return 0
    if not parts:
        end_upload(url, recorded)
        return None
    return min(sum(nbytes for nbytes, _ in parts.values()), plan.files[number].layout.content_bytes)


def uploads_of(plan: Plan, numbers: Iterable[int], directory: str) -> dict[int, Upload]:
    """Return how the files of a task are sent, with the parts that the store has already.

    Raises:
        ChangedError: a source file that is copied changed since it was opened.
        SourceError, TargetError: the store cannot be reached.
    """
    numbers = list(numbers)
    if not in_s3(directory) or plan.coding is not None or plan.shape == "store":
        return {}
    used = sorted({copied.source for number in numbers for copied in plan.copies.get(number, ())})
    sources = dict(zip(used, map_ordered(partial(_source, plan), used, min(REQUESTS, len(used))), strict=True))
    uploads = {}
    for number in numbers:
        upload = upload_of(plan, number)._replace(sources=sources)
        if recorded := plan.uploads.get(number):
            upload = _with_done(upload, f"{directory}/{plan.files[number].path}", _identifier(recorded))
        uploads[number] = upload
    return uploads


def _with_done(upload: Upload, url: str, identifier: str) -> Upload:
    """Return an upload with the parts that the store has; one that is gone is begun anew."""
    client, key = _client(url)
    try:
        parts = ask(url, "written", partial(client.parts, key, identifier), TargetError)
    except TargetError as error:
        if error.code != "not-found":
            raise
        return upload
    sizes = {number: part.end - part.begin for number, part in enumerate(upload.parts, 1)}
    done = {number: tag for number, (nbytes, tag) in parts.items() if sizes.get(number) == nbytes}
    return upload._replace(identifier=identifier, done=done)


def _source(plan: Plan, number: int) -> tuple[str, str, str]:
    """Return bucket, key and entity tag of a source file."""
    file = plan.source.files[number]
    client, key = _client(file.path)
    try:
        info = ask(file.path, "looked at", partial(client.info, key))
    except GoneError:
        info = None
    if info is None or info.status[:2] != file.status[:2]:
        raise ChangedError(f"{file.path} changed since it was opened", code="source-changed", hint="start again")
    return client.bucket, key, info.version
