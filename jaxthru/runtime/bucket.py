"""The address of a run directory in a bucket: gs:// or s3://BUCKET/RUN. Loads neither JAX nor Orbax."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import fsspec
from etils import epath

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

AnyPath = Path | epath.Path


@dataclasses.dataclass(frozen=True)
class Store:
    """A service that keeps buckets. protocol: its name in fsspec. package: by which fsspec reaches it. login,
    copy: commands of its own, which leave credentials and copy a folder."""

    protocol: str
    package: str
    login: str
    copy: str


STORES = {
    "gs": Store("gcs", "gcsfs", "gcloud auth application-default login", "gcloud storage cp --recursive"),
    "s3": Store("s3", "s3fs", "aws configure", "aws s3 cp --recursive"),
}
"""By the scheme of their addresses."""


def is_url(path: AnyPath | str) -> bool:
    """Says whether a path is an address such as gs://BUCKET/RUN."""
    return "://" in str(path)


def scheme_of(path: AnyPath | str) -> str:
    """Returns the scheme of an address, as `gs`; empty for a path on a disk."""
    scheme, found, _ = str(path).partition("://")
    return scheme if found else ""


def address(url: str) -> epath.Path:
    """Returns the place in a bucket that a --run-dir names. Raises InputError, before anything else is done,
    if it cannot be one or cannot be reached."""
    said = f"--run-dir {url}"
    scheme, _, rest = url.partition("://")
    why = "checkpoints are written to gs://, s3:// and mounted file systems; mount it, and give its folder"
    require(scheme in STORES, f"{said}: {scheme}:// is not supported: {why}")
    store, (bucket, _, run) = STORES[scheme], rest.strip("/").partition("/")
    require(bool(run), f"{said}: names no folder of a bucket, as {scheme}://BUCKET/RUN")
    place = epath.Path(url)
    # What Orbax and other hosts write comes by no way that its cache of listings would notice.
    fsspec.config.conf.setdefault(store.protocol, {})["use_listings_cache"] = False
    try:
        place.exists()
        # S3's client would make a bucket that is not there, of whoever has that name in mind.
        there = scheme != "s3" or epath.Path(f"s3://{bucket}").exists()
    except ImportError as error:
        needs = f"needs {store.package}, which is not installed: `pip install {store.package}`"
        raise InputError(f"{said}: {needs}") from error
    except Exception as error:  # of whichever library it is
        remedy = f"`{store.login}` gives credentials"
        raise InputError(f"{said}: cannot be reached ({reason_of(error)}); {remedy}") from error
    require(there, f"{said}: there is no bucket {bucket}, or these credentials may not list it")
    return place


def store_of(place: epath.Path) -> fsspec.AbstractFileSystem:
    """Returns fsspec's way to the service that keeps a place in a bucket."""
    return fsspec.filesystem(STORES[scheme_of(place)].protocol)


def entries(directory: AnyPath) -> Iterator[AnyPath]:
    """Yields what lies in a directory. Of a folder that S3's console has made, and that is an object there,
    S3's client lists the folder too."""
    return (path for path in directory.iterdir() if path != directory)


def write_whole(path: AnyPath, text: str) -> None:
    """Writes a file that is whole or not there, as any is in a bucket. Raises InputError if it cannot be."""
    if isinstance(path, Path):
        return write_atomically(path, text)
    try:
        path.write_text(text)
    except Exception as error:  # of whichever library it is
        raise InputError(f"{path}: cannot be written ({reason_of(error)})") from error


def reason_of(error: Exception) -> str:
    """Returns what an error says, in a line."""
    return " ".join(str(error).split()) or type(error).__name__
