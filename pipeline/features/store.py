"""Feature folders in an object store: s3://, gs://, abfs://, hdfs:// through pyarrow, anything else through fsspec.

A dump's worker writes a shard on its own disk and sends it off; a trainer's node fetches what it lacks to its own disk and maps
it from there. The manifest in the store is the truth: an object that it does not list does not count, so a broken upload costs
nothing. Credentials are the libraries' own (environment, profiles, roles).
"""

from pathlib import Path

import fsspec
import pyarrow as pa
from filelock import FileLock
from pyarrow import fs

from pipeline.errors import PipelineError
from pipeline.features.schema import FeatureSpec, require_same
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest, damage, require_whole
from pipeline.files import atomic_path
from pipeline.progress import Progress
from pipeline.provenance import public_name
from pipeline.recipe import Recipe


class Store:
    """One folder of a store. Every method raises PipelineError when the store cannot be reached or refuses."""

    def __init__(self, url: str):
        self._url = public_name(url)  # without credentials
        try:
            try:
                self._fs, root = fs.FileSystem.from_uri(url)
            except pa.ArrowInvalid:  # not one of pyarrow's own
                other, root = fsspec.url_to_fs(url)
                self._fs = fs.PyFileSystem(fs.FSSpecHandler(other))
        except (OSError, ValueError, ImportError) as error:
            raise PipelineError(f"features.store {self._url} cannot be opened: {error}") from None
        self._root = root.rstrip("/")

    def _failed(self, what: str, error: Exception) -> PipelineError:
        return PipelineError(f"features.store {self._url}: {what} failed: {str(error).splitlines()[0]}")

    def sizes(self) -> dict[str, int]:
        """Bytes of every object of the folder, by name."""
        try:
            found = self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        except OSError as error:
            raise self._failed("listing", error) from None
        return {info.base_name: info.size for info in found if info.is_file}

    def put(self, path: Path) -> None:
        try:
            if isinstance(self._fs, fs.LocalFileSystem | fs.PyFileSystem):
                self._fs.create_dir(self._root)
            fs.copy_files(str(path), f"{self._root}/{path.name}", fs.LocalFileSystem(), self._fs)
        except OSError as error:
            raise self._failed(f"writing {path.name}", error) from None

    def get(self, name: str, folder: Path) -> None:
        """Fetches one object, whole or not at all."""
        with atomic_path(folder / name) as temporary:
            try:
                fs.copy_files(f"{self._root}/{name}", str(temporary), self._fs, fs.LocalFileSystem())
            except OSError as error:
                if not self._missing(name):
                    raise self._failed(f"reading {name}", error) from None
                raise PipelineError(
                    f"features.store {self._url} has no {name}: dump the features first, or dump again what is missing"
                ) from None

    def _missing(self, name: str) -> bool:
        try:
            return self._fs.get_file_info(f"{self._root}/{name}").type == fs.FileType.NotFound
        except OSError:
            return False

    def delete(self, name: str) -> None:
        try:
            self._fs.delete_file(f"{self._root}/{name}")
        except OSError as error:
            raise self._failed(f"deleting {name}", error) from None


def store_of(recipe: Recipe) -> Store | None:
    return Store(recipe.features.store) if recipe.features.store else None


def fetch(recipe: Recipe, expected: FeatureSpec | None = None, checksums: bool = True) -> None:
    """Where the recipe's features are in a store, brings them to the run's own folder; what is there already is kept.

    Any number of a node's processes may call it at once: one fetches, the others wait. `expected` is compared before anything is
    fetched; without `checksums` damaged shards come unnoticed, for `verify` to find.
    """
    store, folder = store_of(recipe), recipe.features_dir
    if store is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".fetch.lock"):
        store.get(MANIFEST, folder)
        manifest = Manifest.load(folder)
        if expected is not None:
            require_same(manifest.spec, expected, recipe.features.store)
        wanted = [record for record in manifest.shards if damage(folder, record, checksum=False)]
        with Progress("fetch", len(wanted), "shards", quiet=not wanted) as progress:
            for record in wanted:
                store.get(record.name, folder)
                if checksums:
                    require_whole(folder, record)
                progress.advance(1)
        fetch_prompts(recipe)


def fetch_prompts(recipe: Recipe) -> None:
    """Only the held-out prompts, for evaluation."""
    store = store_of(recipe)
    if store is not None and not (recipe.features_dir / HELDOUT_PROMPTS).exists():
        store.get(HELDOUT_PROMPTS, recipe.features_dir)
