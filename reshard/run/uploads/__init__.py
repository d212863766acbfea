"""Uploads to S3 of a run: begun before its tasks, recorded in the ledger, and gone on with by a later run.

A killed run loses the parts that were being sent, and no others: the next run asks the store for the parts that each
recorded upload has, and neither reads nor sends what is in them. So do the tasks that repeat those of a lost worker.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import ChangedError, GoneError, TargetError
from reshard.plan.uploads.copies import upload_of
from reshard.storage.threads import map_ordered
from reshard.storage.urls.clients import client_at, in_s3
from reshard.storage.urls.lines import ask
from reshard.storage.urls.remote import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.plan.plan import Plan
    from reshard.storage.urls.s3.client import S3Client
    from reshard.storage.urls.s3.parts import Upload


def _client(url: str) -> tuple[S3Client, str]:
    from reshard.storage.urls.s3.client import S3Client

    client, key = client_at(url)
    assert isinstance(client, S3Client)  # noqa: S101 -- of the scheme
    return client, key


def layout_of(plan: Plan, number: int) -> str:
    """Return a text that identifies the parts of a file; only equal parts can be gone on with."""
    parts = upload_of(plan, number).parts
    return f"{len(parts)}.{parts[0].end if parts else 0}.{sum(part.copied is not None for part in parts)}"


def begin_uploads(plan: Plan, directory: str, recorded: Mapping[int, str]) -> dict[int, str]:
    """Begin the uploads of the files of a plan, and return their identifiers by file number.

    Args:
        plan: the unfinished remainder of a plan.
        directory: the URL of the target.
        recorded: identifiers of an earlier run, each with the layout of its parts, as this function returns them.

    Raises:
        TargetError: an upload cannot be begun.
    """
    numbers = [n for n, file in enumerate(plan.files) if can_resume(plan, n) and not (file.done or file.link)]
    if not in_s3(directory) or not numbers:
        return {}

    def begin(number: int) -> str:
        layout, earlier = layout_of(plan, number), recorded.get(number, "")
        identifier, _, earlier_layout = earlier.rpartition(" ")
        url = f"{directory}/{plan.files[number].path}"
        if identifier and earlier_layout == layout:
            return earlier
        client, key = _client(url)
        if identifier:
            end_upload(url, earlier)
        return f"{ask(url, 'written', partial(client.begin, key), TargetError)} {layout}"

    return dict(zip(numbers, map_ordered(begin, numbers, REQUESTS), strict=True))


def can_resume(plan: Plan, number: int) -> bool:
    """Return whether a file is sent in parts that a later run can use: without sums and literals of all its bytes."""
    file = plan.files[number]
    is_plain = plan.coding is None and plan.cipher is None and not file.layout.crcs
    return is_plain and not plan.exclusive and not file.last and len(upload_of(plan, number).parts) > 1


def end_upload(url: str, recorded: str) -> None:
    """End an upload, so that the store drops its parts; never raises."""
    client, key = _client(url)
    with suppress(Exception):
        ask(url, "removed", partial(client.abort, key, recorded.rpartition(" ")[0]), TargetError)


def sent_bytes(url: str, recorded: str) -> int:
    """Return how many bytes of a file an upload has."""
    client, key = _client(url)
    parts = ask(url, "looked at", partial(client.parts, key, recorded.rpartition(" ")[0]))
    return sum(nbytes for nbytes, _ in parts.values())


def uploads_of(plan: Plan, numbers: Iterable[int], directory: str) -> dict[int, Upload]:
    """Return how the files of a task are sent, with the parts that the store has already.

    Raises:
        ChangedError: a source file that is copied changed since it was opened.
        SourceError, TargetError: the store cannot be reached.
    """
    numbers = list(numbers)
    if not in_s3(directory) or plan.coding is not None or plan.exclusive:
        return {}
    used = sorted({copied.source for number in numbers for copied in plan.copies.get(number, ())})
    sources = dict(zip(used, map_ordered(partial(_source, plan), used, min(REQUESTS, len(used))), strict=True))
    uploads = {}
    for number in numbers:
        upload = upload_of(plan, number)._replace(sources=sources)
        if recorded := plan.uploads.get(number):
            upload = _with_done(upload, f"{directory}/{plan.files[number].path}", recorded.rpartition(" ")[0])
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
        raise ChangedError(
            f"{file.path} changed since it was opened", code="source-changed", facts=[], hint="start again"
        )
    return client.bucket, key, info.version
