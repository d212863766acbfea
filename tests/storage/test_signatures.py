"""Signatures of requests to S3: Amazon's published examples, and botocore's signatures of any requests."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.storage.urls.s3.aws import Keys, encoded, query_of, signed

EXAMPLE = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ROOT = "https://examplebucket.s3.amazonaws.com/"


@pytest.mark.parametrize(
    ("method", "url", "headers", "signature"),
    [
        (
            "GET", f"{ROOT}test.txt", {"range": "bytes=0-9", "x-amz-content-sha256": EMPTY},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT", f"{ROOT}{encoded('test$file.text')}",
            {
                "date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY",
                "x-amz-content-sha256": "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
            },
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET", f"{ROOT}?{query_of({'lifecycle': ''})}", {"x-amz-content-sha256": EMPTY},
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "GET", f"{ROOT}?{query_of({'prefix': 'J', 'max-keys': '2'})}", {"x-amz-content-sha256": EMPTY},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
    ids=["get", "put", "lifecycle", "list"],
)  # fmt: skip
def test_amazons_examples(method: str, url: str, headers: dict[str, str], signature: str) -> None:
    """From "Signature Calculations for the Authorization Header: Transferring Payload in a Single Chunk"."""
    sent = signed(method, url, headers, EXAMPLE, "us-east-1", datetime(2013, 5, 24, tzinfo=UTC))
    names = ";".join(sorted({*headers, "host", "x-amz-date"}))
    assert sent["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    assert (sent["host"], sent["x-amz-date"]) == ("examplebucket.s3.amazonaws.com", "20130524T000000Z")


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
NAMES = st.text("abcXYZ-019", min_size=1, max_size=10)


@given(
    key=TEXT, query=st.dictionaries(NAMES, TEXT, max_size=4), method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    keys=st.builds(Keys, st.text("ABC012", min_size=1), st.text("abc/+=", min_size=1), st.text("abc/+=", max_size=9)),
    region=st.sampled_from(["us-east-1", "eu-west-3"]), span=st.sampled_from([{}, {"range": "bytes=0-9"}]),
    root=st.sampled_from(["https://bucket.s3.amazonaws.com", "http://127.0.0.1:9000/bucket"]),
)  # fmt: skip
def test_botocore_signs_alike(
    key: str, query: dict[str, str], method: str, keys: Keys, region: str, span: dict[str, str], root: str
) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    url = f"{root}/{encoded(key)}" + (f"?{query_of(query)}" if query else "")
    request = AWSRequest(method, url, headers=span)
    auth.S3SigV4Auth(Credentials(keys.access, keys.secret, keys.token or None), "s3", region).add_auth(request)
    now = datetime.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    content = request.headers["X-Amz-Content-SHA256"]
    sent = signed(method, url, span | {"x-amz-content-sha256": content}, keys, region, now)
    assert sent["authorization"] == request.headers["Authorization"]
    assert sent.get("x-amz-security-token", "") == keys.token


def test_nothing_is_signed_without_keys() -> None:
    assert signed("GET", f"{ROOT}a", {"range": "bytes=0-9"}, None, "us-east-1") == {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
    }
