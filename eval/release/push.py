"""Uploads a release to the Hub: only the files that its list names. Every request has a time-out, and every failure is
one line that says what is there now; the same command completes an upload that was broken off.
"""

import json
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, constants, is_offline_mode, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import logging, validate_repo_id

from eval.release.folder import NEW_CARD, STALE, files_in
from pipeline.artifacts.reports import RELEASE, REPORT, read_release, read_report
from pipeline.basics.errors import PipelineError
from pipeline.basics.public import public_name

TIMEOUT = httpx2.Timeout(60, connect=15)  # seconds without a byte; huggingface_hub's own client waits for ever
_FAILED = (HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, ValueError, KeyError)


def require_repository_name(repository: str) -> None:
    """Raises PipelineError when `repository` is no OWNER/NAME that the Hub can hold; asks nobody."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PipelineError(f"--push {repository!r}: {error}") from None
    if repository.count("/") != 1:
        raise PipelineError(f"--push {repository!r}: expected OWNER/NAME")


def push(release: Path, repository: str, private: bool) -> list[str]:
    """Uploads what the release lists; returns lines for the user: where it is, who sees it, what stayed behind. The
    token is huggingface_hub's own (HF_TOKEN or its login). A repository that exists is left as private or public as it
    is.
    """
    names = sorted(set(read_release(release)["files"]) - {NEW_CARD})
    message = f"Release {read_report(release / REPORT)['name']}"
    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=release / name) for name in names]
    api, asked, there = HfApi(), _Asked(), None
    set_client_factory(asked.client)
    constants.HF_HUB_DISABLE_XET = (
        True  # that one uploads through a client of its own, with its own patience and errors
    )
    logging.set_verbosity_error()  # warnings of each try name addresses that are signed
    try:
        there = str(api.create_repo(repository, private=private, exist_ok=True))
        hidden = api.repo_info(repository).private
        found = api.create_commit(repository, files, commit_message=message)
    except (*_FAILED, RuntimeError) as caught:  # huggingface_hub hides a file's failed upload in a RuntimeError
        error = caught if isinstance(caught, _FAILED) else caught.__cause__
        if not isinstance(error, _FAILED):
            raise
        raise PipelineError(
            f"{_why(error, repository, public_name(api.endpoint), asked.last)}. {_state(error, there)} The release "
            f"stays in {release}: run the same command again, it measures nothing twice"
        ) from None
    lines = [f"uploaded: {found.commit_url}{_seen_by(hidden, private)}"]
    if (release / NEW_CARD).exists():
        lines.append(STALE)
    staying = _unlisted(release, names)
    return lines + ([f"not uploaded, for the release does not list them: {', '.join(staying)}"] if staying else [])


def _unlisted(release: Path, names: list[str]) -> list[str]:
    """What else lies there; of the release's own folders, the files."""
    own = {name.partition("/")[0] for name in names if "/" in name}
    inside = {name for name in files_in(release) if name.partition("/")[0] in own}
    outside = {path.name for path in release.iterdir()} - own
    return sorted((inside | outside) - {*names, RELEASE, NEW_CARD})


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


def _why(error: Exception, repository: str, endpoint: str, last: httpx2.Response | None) -> str:
    """What went wrong, and whose fault it is."""
    answer = error.response if isinstance(error, HfHubHTTPError) else last
    status = answer.status_code if answer is not None else None
    if isinstance(error, HfHubHTTPError | ValueError | KeyError) and status is not None and status >= 500:
        return f"the Hub at {endpoint} failed ({status}): that is its own fault, not your token's; try again later"
    if isinstance(error, HfHubHTTPError):
        refused = f"the Hub refused the upload to {repository} ({status})"
        if status in (401, 403):
            return f"{refused}: check that HF_TOKEN is valid and may write there"
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
        return f"the upload to {repository} was refused: {' '.join(str(error).split())}"
    reason = f": {error}" if isinstance(error, OfflineModeIsEnabled) else ""
    return f"the Hub cannot be reached at {endpoint} ({type(error).__name__}{reason})"


def _state(error: Exception, there: str | None) -> str:
    """What the Hub holds now."""
    if there is not None:
        return f"The repository {there} is there; the upload into it did not end, and arrives as a whole or not at all."
    refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    return (
        "Nothing was created." if refused else "Nothing was uploaded; whether the repository was created is not known."
    )


def _seen_by(hidden: bool | None, private: bool) -> str:
    if hidden is None:  # the Hub did not say
        return ""
    said = f" (a {'private' if hidden else 'public'} repository"
    return said + (")" if hidden == private else "; it was so before, and --push changes no existing repository)")
