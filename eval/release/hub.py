"""A repository on the Hub that files are committed to. Every request has a time-out, and every failure is one line that
says what is there now. The token is huggingface_hub's own (HF_TOKEN or its login).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
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
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging, validate_repo_id

from pipeline.basics.errors import PipelineError
from pipeline.basics.public import public_name

TIMEOUT = httpx2.Timeout(60, connect=15)  # seconds without a byte; huggingface_hub's own client waits for ever
_FAILED = (HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, ValueError, KeyError)


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
        self.name, self._kind, self._again = name, kind, again
        self._asked, self._there, self._commits = _Asked(), None, 0
        self._card_is_valid = False  # the card: before that nothing is created
        set_client_factory(self._asked.client)
        # That one uploads through a client of its own, with its own patience and errors.
        constants.HF_HUB_DISABLE_XET = True
        logging.set_verbosity_error()  # warnings of each try name addresses that are signed
        self._api = HfApi()

    def create(self, private: bool, card: str) -> str:
        """Makes it, unless it is there: then it is left as private or public as it is. Who sees it, in words. A `card`
        that the Hub refuses is refused before.
        """
        with self._told():
            ModelCard(card).validate(self._kind)
            self._card_is_valid = True
            self._there = str(self._api.create_repo(self.name, repo_type=self._kind, private=private, exist_ok=True))
            hidden = self._api.repo_info(self.name, repo_type=self._kind).private
        if hidden is None:  # the Hub did not say
            return ""
        said = f" (a {'private' if hidden else 'public'} repository"
        return said + (")" if hidden == private else "; it was so before, and --push changes no existing repository)")

    def commit_of(self, revision: str | None = None) -> str:
        """The commit of a branch or tag; default: the last one."""
        with self._told(reading=True):
            return str(self._api.repo_info(self.name, repo_type=self._kind, revision=revision).sha)

    def open_pull_request(self, title: str) -> str | None:
        """The address of one with this title."""
        with self._told(reading=True):
            found = self._api.get_repo_discussions(
                self.name, repo_type=self._kind, discussion_type="pull_request", discussion_status="open"
            )
            return next((one.url for one in found if one.title == title), None)

    def files(self) -> dict[str, RepoFile]:
        """By path."""
        with self._told(reading=True):
            tree = self._api.list_repo_tree(self.name, repo_type=self._kind, recursive=True)
            return {found.path: found for found in tree if isinstance(found, RepoFile)}

    def read(self, path: str, folder: Path) -> bytes:
        """Return the content of a file of the last commit, which is brought to `folder`."""
        with self._told(reading=True):
            return Path(self._api.hf_hub_download(self.name, path, repo_type=self._kind, local_dir=folder)).read_bytes()

    def commit(
        self, message: str, files: dict[str, Path | bytes], gone: Iterable[str] = (), proposed_to: str | None = None
    ) -> CommitInfo:
        """One commit that brings these files, by path there, and removes others: it arrives as a whole or not at all.
        Contents are read from disk as they are sent; those that the Hub has are not sent. `proposed_to`: the commit
        that it changes, in a pull request.
        """
        with self._told():
            changes: list = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()
            ]
            changes += [CommitOperationDelete(path_in_repo=name) for name in gone]
            found = self._api.create_commit(
                self.name,
                changes,
                commit_message=message,
                repo_type=self._kind,
                create_pr=proposed_to is not None,
                parent_commit=proposed_to,
            )
        self._commits += 1
        return found

    @contextmanager
    def _told(self, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except (*_FAILED, RuntimeError) as caught:  # huggingface_hub hides a file's failed upload in a RuntimeError
            error = caught if isinstance(caught, _FAILED) else caught.__cause__
            if not isinstance(error, _FAILED):
                raise
            asked = f"{'the reading of' if reading else 'the upload to'} {self.name}"
            why = _why(error, asked, public_name(self._api.endpoint), self._asked.last)
            raise PipelineError(
                " ".join([f"{why}.", "" if reading else self._state(error), self._again]).strip()
            ) from None

    def _state(self, error: Exception) -> str:
        """What the Hub holds now."""
        if self._commits:
            return (
                f"The repository {self._there or self.name} holds what was committed before, and that is not sent "
                "again; the rest arrives as a whole or not at all."
            )
        if self._there is not None:
            return (
                f"The repository {self._there} is there; the upload into it did not end, and arrives as a whole or not "
                "at all."
            )
        refused = not self._card_is_valid or (isinstance(error, HfHubHTTPError) and error.response.status_code < 500)
        return (
            "Nothing was created."
            if refused
            else "Nothing was uploaded; whether the repository was created is not known."
        )


class _Asked:
    """What huggingface_hub asks through."""

    def __init__(self) -> None:
        self.last: httpx2.Response | None = None

    def client(self) -> httpx2.Client:
        hooks = {"request": [self._refuse_offline], "response": [self._remember]}
        return httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=TIMEOUT)

    def _refuse_offline(self, _: httpx2.Request) -> None:
        if is_offline_mode():
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")

    def _remember(self, response: httpx2.Response) -> None:
        self.last = response


def _why(error: Exception, asked: str, endpoint: str, last: httpx2.Response | None) -> str:
    """What went wrong, and whose fault it is. `asked`: what it was that failed."""
    answer = error.response if isinstance(error, HfHubHTTPError) else last
    status = answer.status_code if answer is not None else None
    if isinstance(error, HfHubHTTPError | ValueError | KeyError) and status is not None and status >= 500:
        return f"the Hub at {endpoint} failed ({status}): that is its own fault, not your token's; try again later"
    if isinstance(error, HfHubHTTPError):
        refused = f"the Hub refused {asked} ({status})"
        if status in (401, 403):
            return f"{refused}: check that HF_TOKEN is valid and may do that"
        if status == 404:
            return (
                f"{refused}: it knows no such owner or repository, or does not show it to this token: check the "
                "name and HF_TOKEN"
            )
        return f"{refused}: {' '.join(str(error.server_message or 'without a reason').split())}"
    if isinstance(error, httpx2.TimeoutException):
        return (
            f"the Hub at {endpoint} did not answer in time ({TIMEOUT.connect:g} s to connect, {TIMEOUT.read:g} s "
            "for an answer)"
        )
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | KeyError):
        kind = answer.headers.get("content-type", "nothing") if answer is not None else "nothing"
        return (
            f"{endpoint} answered {status} with {kind}, which is no answer of a Hub: check HF_ENDPOINT, and any "
            "proxy on the way"
        )
    if isinstance(error, ValueError):
        return f"{asked} was refused: {' '.join(str(error).split())}"
    reason = f": {error}" if isinstance(error, OfflineModeIsEnabled) else ""
    return f"the Hub cannot be reached at {endpoint} ({type(error).__name__}{reason})"
