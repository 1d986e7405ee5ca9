"""The address of a run directory in a bucket, gs://BUCKET/RUN. Loads neither JAX nor Orbax."""

from pathlib import Path

import fsspec
from etils import epath

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

AnyPath = Path | epath.Path
SCHEME = "gs://"


def is_url(path: AnyPath | str) -> bool:
    """Says whether a path is an address such as gs://BUCKET/RUN."""
    return "://" in str(path)


def address(url: str) -> epath.Path:
    """Returns the place in a bucket that a --run-dir names. Raises InputError, before anything else is done,
    if it cannot be one or cannot be reached."""
    said = f"--run-dir {url}"
    scheme, _, rest = url.partition("://")
    why = "Orbax writes checkpoints to gs:// and to mounted file systems; mount it, and give its folder"
    require(f"{scheme}://" == SCHEME, f"{said}: {scheme}:// is not supported: {why}")
    require(
        bool(rest.strip("/").partition("/")[2]), f"{said}: names no folder of a bucket, as gs://BUCKET/RUN"
    )
    place = epath.Path(url)
    # What Orbax and other hosts write comes by no way that its cache of listings would notice.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    try:
        place.exists()
    except ImportError as error:
        raise InputError(f"{said}: needs gcsfs, which is not installed: `pip install gcsfs`") from error
    except Exception as error:  # of whichever library it is
        remedy = "`gcloud auth application-default login` gives credentials"
        raise InputError(f"{said}: cannot be reached ({reason_of(error)}); {remedy}") from error
    return place


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
