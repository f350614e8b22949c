"""A repository on the Hub that files are committed to. Every request has a time-out, and every failure is one line that
says what is there now. The token is huggingface_hub's own (HF_TOKEN or its login).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    is_offline_mode,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging, validate_repo_id

from pipeline.basics.errors import PipelineError
from pipeline.basics.public import public_name

TIMEOUT = httpx2.Timeout(60, connect=15)  # seconds without a byte; huggingface_hub's own client waits for ever
_FAILED = (HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, ValueError, KeyError, yaml.YAMLError)


def require_repository_name(repository: str, option: str = "--push") -> None:
    """Raises PipelineError when `repository` is no OWNER/NAME that the Hub can hold; asks nobody."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PipelineError(f"{option} {repository!r}: {error}") from None
    if repository.count("/") != 1:
        raise PipelineError(f"{option} {repository!r}: expected OWNER/NAME")


class Repository:
    """One of models or datasets. Every method raises PipelineError."""

    def __init__(self, name: str, kind: str, again: str):
        """`kind`: "model" or "dataset"; `again`: how its messages end."""
        if is_offline_mode():
            raise PipelineError(f"HF_HUB_OFFLINE is set, so the Hub is not asked for {name}. {again}")
        self.name, self._kind, self._again, self._state = name, kind, again, ""
        set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=TIMEOUT))
        # That one uploads through a client of its own, with its own patience and errors.
        constants.HF_HUB_DISABLE_XET = True
        logging.set_verbosity_error()  # warnings of each try name addresses that are signed
        self._api = HfApi()

    def create(self, private: bool, card: str) -> str:
        """Makes it, unless it is there: then it is left as private or public as it is. Who sees it, in words. A `card`
        that the Hub refuses is refused before.
        """
        self._state = "Nothing was uploaded. "
        with self._asking("the upload to"):
            ModelCard(card).validate(self._kind)
            url = self._api.create_repo(self.name, repo_type=self._kind, private=private, exist_ok=True)
            self._state = f"The repository {url} is there, and each commit arrives as a whole or not at all. "
            hidden = self._api.repo_info(self.name, repo_type=self._kind).private
        if hidden is None:  # the Hub did not say
            return ""
        seen = f" (a {'private' if hidden else 'public'} repository"
        return seen + (")" if hidden == private else "; it was so before, and --push changes no existing repository)")

    def commit_of(self, revision: str | None = None) -> str:
        """The commit of a branch or tag; default: the last one."""
        with self._asking("the reading of"):
            return str(self._api.repo_info(self.name, repo_type=self._kind, revision=revision).sha)

    def files(self) -> dict[str, RepoFile]:
        """By path."""
        with self._asking("the reading of"):
            tree = self._api.list_repo_tree(self.name, repo_type=self._kind, recursive=True)
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def read(self, path: str) -> str:
        """Return the text of a file of the last commit."""
        with self._asking("the reading of"), TemporaryDirectory() as folder:
            file = self._api.hf_hub_download(self.name, path, repo_type=self._kind, local_dir=folder)
            return Path(file).read_text(encoding="utf-8", errors="replace")

    def commit(self, message: str, files: dict[str, Path | bytes], gone: Iterable[str] = ()) -> CommitInfo:
        """One commit that brings these files, by path there, and removes others. Contents are read from disk as they
        are sent; those that the Hub has are not sent.
        """
        with self._asking("the upload to"):
            changes: list = [CommitOperationAdd(path, file) for path, file in files.items()]
            changes += [CommitOperationDelete(path_in_repo=path) for path in gone]
            return self._api.create_commit(self.name, changes, commit_message=message, repo_type=self._kind)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (*_FAILED, RuntimeError) as caught:  # huggingface_hub hides a file's failed upload in a RuntimeError
            error = caught if isinstance(caught, _FAILED) else caught.__cause__
            if not isinstance(error, _FAILED):
                raise
            why = _why(error, f"{what} {self.name}", public_name(self._api.endpoint))
            raise PipelineError(f"{why}. {self._state}{self._again}") from None


def _why(error: Exception, asked: str, endpoint: str) -> str:
    """What went wrong, and whose fault it is. `asked`: what it was that failed."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status >= 500:
            return f"the Hub at {endpoint} failed ({status}): that is its own fault, not your token's; try again later"
        reason = " ".join(str(error.server_message or "without a reason").split())
        if status in (401, 403):
            reason = "check that HF_TOKEN is valid and may do that"
        if status == 404:
            reason = "it knows no such owner or repository, or does not show it: check the name and HF_TOKEN"
        return f"the Hub refused {asked} ({status}): {reason}"
    if isinstance(error, httpx2.TimeoutException):
        patience = f"{TIMEOUT.connect:g} s to connect, {TIMEOUT.read:g} s for an answer"
        return f"the Hub at {endpoint} did not answer in time ({patience})"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | KeyError):
        return f"{endpoint} gave no answer of a Hub: check HF_ENDPOINT, and any proxy on the way"
    if isinstance(error, ValueError | yaml.YAMLError):
        return f"{asked} was refused: {' '.join(str(error).split())}"
    return f"the Hub cannot be reached at {endpoint} ({type(error).__name__})"
