"""Checkpoints in buckets of S3: TensorStore writes to these, and Orbax is taught to tell it so.

Orbax 0.12.8 takes an address s3://BUCKET/RUN for a folder on a disk (google/orbax, pull request 2739, still
open). All that it does by an address and not by TensorStore, it does by etils, which knows both services.
"""

import functools
import os
from typing import Any

import fsspec
import tensorstore
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxthru.runtime.bucket import unreachable

SCHEME = "s3://"


@functools.cache
def where() -> dict[str, Any]:
    """Returns what TensorStore needs to know besides bucket and path, and finds less well than S3's own
    libraries: the server, where it is not Amazon's, and that it need not search for credentials."""
    client = fsspec.filesystem("s3").s3.meta
    found: dict[str, Any] = {"driver": "s3"}
    if not client.endpoint_url.endswith(".amazonaws.com"):  # there it asks for the bucket's own region
        found |= {"endpoint": client.endpoint_url, "aws_region": client.region_name}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # else it complains of each file that could hold some
        found["aws_credentials"] = {"type": "environment"}
    return found


def check(url: str) -> None:
    """Raises InputError if TensorStore, which has ways of its own to find credentials, may not read there."""
    bucket, _, path = url.removeprefix(SCHEME).partition("/")
    try:
        spec = {"bucket": bucket, "path": f"{path.strip('/')}/", **where()}
        tensorstore.KvStore.open(spec).result().read(".run").result()
    except Exception as error:
        raise unreachable(url, error) from error


@functools.cache
def teach_orbax() -> None:
    """Has Orbax write and read arrays in buckets of S3, as in those of Google."""
    known = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, name: str | None = None, **options: Any) -> dict[str, Any]:
        if not directory.startswith(SCHEME):
            return known(directory, name, **options)
        spec = known(directory.replace(SCHEME, "gs://", 1), name, **options)
        spec.get("base", spec).update(where())
        return spec

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
