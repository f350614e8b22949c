"""Feature folders in remote stores: s3://, gs://, abfs://, hdfs:// and file:// through pyarrow, others through fsspec.

A worker of the dump writes a shard on its own disk and uploads it; a trainer's node downloads the files that it lacks
to its own disk and maps them from there. The manifest in the store decides: an object that it does not list is
ignored, so a broken upload does no harm. The libraries find credentials by themselves (environment, profiles, roles).
"""

from pathlib import Path

import fsspec
import pyarrow as pa
from pyarrow import fs

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path, parse_sealed, sha256
from pipeline.features.shards import MANIFEST, UNREADABLE, Manifest


class Store:
    """A folder of a store. Every method raises PipelineError if the store cannot be reached or refuses the request."""

    def __init__(self, url: str, name: str = ""):
        """Open the folder at `url`. `name` stands for it in messages."""
        self.name = name or f"features.store {url}"
        if "://" not in url:
            raise PipelineError(f"{self.name} has no scheme: expected s3://BUCKET/FOLDER, gs://, file:///FOLDER, ...")
        try:
            try:
                self._fs, root = fs.FileSystem.from_uri(url)
            except pa.ArrowInvalid as error:
                if "Unrecognized filesystem" not in str(error):
                    raise
                file_system, root = fsspec.url_to_fs(url)  # a scheme that pyarrow does not support
                self._fs = fs.PyFileSystem(fs.FSSpecHandler(file_system))
        except (OSError, ValueError, ImportError) as error:
            raise self._access_error("opening", error) from None
        self._root = root.rstrip("/")

    def _access_error(self, action: str, error: Exception) -> PipelineError:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return PipelineError(f"{self.name}: {action} failed: {reason}")

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object of the folder, by name."""
        try:
            infos = self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        except OSError as error:
            raise self._access_error("listing", error) from None
        return {info.base_name: info.size for info in infos if info.is_file}

    def put(self, path: Path) -> None:
        try:
            if isinstance(self._fs, fs.LocalFileSystem | fs.PyFileSystem):
                self._fs.create_dir(self._root)
            fs.copy_files(str(path), f"{self._root}/{path.name}", fs.LocalFileSystem(), self._fs)
        except OSError as error:
            raise self._access_error(f"writing {path.name}", error) from None

    def get(self, name: str, folder: Path, checksum: str | None = None) -> None:
        """Download an object into `folder`, complete or not at all. Raises PipelineError if its SHA-256 is not
        `checksum`.
        """
        with atomic_path(folder / name) as temporary:
            try:
                fs.copy_files(f"{self._root}/{name}", str(temporary), self._fs, fs.LocalFileSystem())
            except OSError as error:
                raise self._read_error(name, error) from None
            if checksum is not None and sha256(temporary) != checksum:
                raise PipelineError(
                    f"{self.name}: {name} is damaged there, its SHA-256 is not the manifest's. Dump it again: "
                    "jakiro verify OUTPUT/features --recipe RECIPE --repair"
                )

    def read(self, name: str) -> bytes:
        """Return the content of one object."""
        try:
            with self._fs.open_input_stream(f"{self._root}/{name}") as file:
                return file.read()
        except OSError as error:
            raise self._read_error(name, error) from None

    def manifest(self) -> Manifest:
        content, where = self.read(MANIFEST), f"{self.name}/{MANIFEST}"
        return Manifest.parse(parse_sealed(content, where, UNREADABLE), where)

    def _read_error(self, name: str, error: OSError) -> PipelineError:
        if not self._missing(name):
            return self._access_error(f"reading {name}", error)
        return PipelineError(f"{self.name} has no {name}: dump the features first, or dump the missing file again")

    def _missing(self, name: str) -> bool:
        try:
            return self._fs.get_file_info(f"{self._root}/{name}").type == fs.FileType.NotFound
        except OSError:
            return False

    def delete(self, name: str) -> None:
        try:
            self._fs.delete_file(f"{self._root}/{name}")
        except OSError as error:
            if not self._missing(name):
                raise self._access_error(f"deleting {name}", error) from None
