"""Checkpoints in buckets of S3: TensorStore writes to these, and Orbax is taught to tell it so.

Orbax 0.12.8 takes an address s3://BUCKET/RUN for a folder on a disk (google/orbax, pull request 2739, still
open). All that it does by an address and not by TensorStore, it does by etils, which knows both services.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from jaxthru.runtime.bucket import reason_of
from jaxthru.runtime.errors import InputError, require

SCHEME = "s3://"
KNOWN = "0.12.8"
"""The version of Orbax whose private name is used below."""
TIMEOUT = 60
"""Seconds that one request of a check may take, with what it tries again."""


@functools.cache
def where() -> dict[str, Any]:
    """Returns what TensorStore needs to know besides bucket and path: the server, where it is not Amazon's
    public one, and where credentials are, which it finds less well than S3's own libraries."""
    client = fsspec.filesystem("s3").s3.meta
    found = {"driver": "s3", "aws_credentials": _credentials()}
    public = ("https://s3.amazonaws.com", f"https://s3.{client.region_name}.amazonaws.com")
    if client.endpoint_url not in public:  # there it asks for the bucket's own region
        found |= {"endpoint": client.endpoint_url, "aws_region": client.region_name}
    return found


def _credentials() -> dict[str, str]:
    """Returns TensorStore's name for where S3's own libraries have found credentials. Left to search, it
    passes profiles over that it is not told of, and complains of each file that is not there."""
    from botocore.session import Session  # not before: who has no bucket of S3 has it not

    session = Session()
    found = session.get_credentials()
    method, profile = found.method if found else "", session.profile or "default"
    if method == "shared-credentials-file":
        files = {name: session.get_config_variable(name) for name in ("credentials_file", "config_file")}
        paths = {name: str(Path(path).expanduser()) for name, path in files.items()}
        return {"type": "profile", "profile": profile, **paths}
    known = {"env": "environment", "iam-role": "imds", "container-role": "ecs"}
    return {"type": known[method]} if method in known else {"type": "default", "profile": profile}


def check(place: epath.Path, name: str) -> None:
    """Raises InputError if TensorStore cannot read and write a file that is in a bucket, where Orbax sends
    it: it asks with credentials that it has found by itself."""
    spec = teach_orbax()
    try:
        file = tensorstore.KvStore.open(spec(str(place), name, use_ocdbt=False)).result(TIMEOUT)
        found = file.read("").result(TIMEOUT)
        require(found.state == "value", f"finds no {name} there")  # and makes none
        file.write("", found.value).result(TIMEOUT)
    except Exception as error:
        why = f"TensorStore, which writes checkpoints, cannot ({reason_of(error)})"
        remedy = 'give it credentials by `eval "$(aws configure export-credentials --format env)"`'
        raise InputError(f"--run-dir {place}: {why}; {remedy}") from error


@functools.cache
def teach_orbax() -> Callable[..., dict[str, Any]]:
    """Has Orbax write and read arrays in buckets of S3, as in those of Google. Returns what it now tells
    TensorStore by. Raises InputError for an Orbax that has another way."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        known = tensorstore_utils.build_kvstore_tspec
    except (ImportError, AttributeError) as error:
        why = f"Orbax {ocp.__version__} cannot be told of {SCHEME} ({reason_of(error)})"
        raise InputError(f"{why}; `pip install orbax-checkpoint=={KNOWN}`") from error

    def build_kvstore_tspec(directory: str, name: str | None = None, **options: Any) -> dict[str, Any]:
        if not directory.startswith(SCHEME):
            return known(directory, name, **options)
        spec = known(directory.replace(SCHEME, "gs://", 1), name, **options)
        spec.get("base", spec).update(where())
        return spec

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    return build_kvstore_tspec
