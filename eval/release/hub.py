"""A repository on the Hub that files are committed to. Every request has a time-out, and every failure is one line with
the state of the repository. The token is huggingface_hub's own (HF_TOKEN or its login).
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

TIMEOUT = httpx2.Timeout(60, connect=15)  # seconds without a byte; huggingface_hub's own client has no limit
_FAILURES = (HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, ValueError, KeyError, yaml.YAMLError)


def require_repository_name(repository: str, option: str = "--push") -> None:
    """Raise PipelineError if `repository` is no OWNER/NAME that the Hub can hold; no request is sent."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PipelineError(f"{option} {repository!r}: {error}") from None
    if repository.count("/") != 1:
        raise PipelineError(f"{option} {repository!r}: expected OWNER/NAME")


class Repository:
    """A repository of models or datasets. Every method raises PipelineError."""

    def __init__(self, name: str, kind: str, remedy: str):
        """Open the repository. `kind` is "model" or "dataset"; `remedy` ends its messages."""
        if is_offline_mode():
            raise PipelineError(f"HF_HUB_OFFLINE is set, so the Hub is not asked for {name}. {remedy}")
        self.name, self._kind, self._remedy, self._state = name, kind, remedy, ""
        set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=TIMEOUT))
        # Xet uploads through its own client, with its own time-outs and errors.
        constants.HF_HUB_DISABLE_XET = True
        logging.set_verbosity_error()  # warnings about retries contain signed addresses
        self._api = HfApi()

    def create(self, private: bool, card: str) -> str:
        """Create the repository unless it exists: then it stays private or public. Return who sees it, in words. A
        `card` that the Hub would refuse is refused first.
        """
        self._state = "Nothing was uploaded. "
        with self._report_failures("the upload to"):
            ModelCard(card).validate(self._kind)
            url = self._api.create_repo(self.name, repo_type=self._kind, private=private, exist_ok=True)
            self._state = f"The repository {url} is there, and each commit arrives as a whole or not at all. "
            is_private = self._api.repo_info(self.name, repo_type=self._kind).private
        if is_private is None:  # the Hub did not say
            return ""
        visibility = f" (a {'private' if is_private else 'public'} repository"
        return visibility + (
            ")" if is_private == private else "; it was so before, and --push changes no existing repository)"
        )

    def commit_of(self, revision: str | None = None) -> str:
        """Return the commit of a branch or tag; default: the last one."""
        with self._report_failures("the reading of"):
            return str(self._api.repo_info(self.name, repo_type=self._kind, revision=revision).sha)

    def files(self) -> dict[str, RepoFile]:
        """Return the files of the last commit, by path."""
        with self._report_failures("the reading of"):
            tree = self._api.list_repo_tree(self.name, repo_type=self._kind, recursive=True)
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def read(self, path: str) -> str:
        """Return the text of a file of the last commit."""
        with self._report_failures("the reading of"), TemporaryDirectory() as folder:
            file = self._api.hf_hub_download(self.name, path, repo_type=self._kind, local_dir=folder)
            return Path(file).read_text(encoding="utf-8", errors="replace")

    def commit(self, message: str, files: dict[str, Path | bytes], removed: Iterable[str] = ()) -> CommitInfo:
        """Commit these files, by their path in the repository, and remove others. Contents are read from disk as they
        are sent; those that the Hub already has are not sent.
        """
        with self._report_failures("the upload to"):
            changes: list = [CommitOperationAdd(path, file) for path, file in files.items()]
            changes += [CommitOperationDelete(path_in_repo=path) for path in removed]
            return self._api.create_commit(self.name, changes, commit_message=message, repo_type=self._kind)

    @contextmanager
    def _report_failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except (*_FAILURES, RuntimeError) as caught:  # huggingface_hub hides a file's failed upload in a RuntimeError
            error = caught if isinstance(caught, _FAILURES) else caught.__cause__
            if not isinstance(error, _FAILURES):
                raise
            reason = _explain_failure(error, f"{action} {self.name}", public_name(self._api.endpoint))
            raise PipelineError(f"{reason}. {self._state}{self._remedy}") from None


def _explain_failure(error: Exception, request: str, endpoint: str) -> str:
    """Return what went wrong, and whose fault it is. `request` is what failed."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status >= 500:
            return f"the Hub at {endpoint} failed ({status}): that is its own fault, not your token's; try again later"
        reason = " ".join(str(error.server_message or "without a reason").split())
        if status in (401, 403):
            reason = "check that HF_TOKEN is valid and may do that"
        if status == 404:
            reason = "it knows no such owner or repository, or does not show it: check the name and HF_TOKEN"
        return f"the Hub refused {request} ({status}): {reason}"
    if isinstance(error, httpx2.TimeoutException):
        limits = f"{TIMEOUT.connect:g} s to connect, {TIMEOUT.read:g} s for an answer"
        return f"the Hub at {endpoint} did not answer in time ({limits})"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | KeyError):
        return f"{endpoint} gave no answer of a Hub: check HF_ENDPOINT, and any proxy on the way"
    if isinstance(error, ValueError | yaml.YAMLError):
        return f"{request} was refused: {' '.join(str(error).split())}"
    return f"the Hub cannot be reached at {endpoint} ({type(error).__name__})"
