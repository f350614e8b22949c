"""Addresses of models, data and stores: find credentials in them, and remove what must not be published.

An address is a path, a name of the Hub, or a URL. A recipe that holds a credential is refused when it is loaded, so no
later code has to hide one: logs, errors, artifacts and command lines may show every address unchanged. A published
artifact (`public_name`) leaves out more: folders of this machine, user names, queries and fragments, and parts of a
path that look like a secret, such as a webhook's. No text of an error shows the credentials of the environment
(`public_text`).
"""

import json
import os
import re
from pathlib import Path
from urllib.parse import quote

from pipeline.basics.errors import PipelineError

REMEDY = (
    "Leave it out; the libraries read credentials from the environment (HF_TOKEN, AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY), from ~/.aws and 'hf auth login', or from fsspec's configuration (~/.config/fsspec/*.json, "
    "FSSPEC_HTTP and its like)"
)
# In these schemes the part before "@" is a container, a repository or an owner, not a user.
_NO_USER = {"abfs", "abfss", "adl", "az", "github", "hf", "wasb", "wasbs"}
_USER_IS_SECRET = {
    "http",
    "https",
    "s3",
    "gs",
}  # a token, or half of a key; sftp://USER@HOST is no secret
_HOST_AND_PORT = re.compile(r"[^:]+:\d+")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_URL = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>]*""")
# Query keys whose values are credentials: some by their last word, some as the complete name. A folder
# KEY=VALUE of a partitioned data set is none.
_SECRET_KEY = re.compile(
    r"SharedAccess\w*|(?i:code|access|delegation|jwt)"
    r"|(?:.*(?:[^A-Za-z]|(?<=[a-z])(?=[A-Z])))?"
    r"(?i:(?:api|auth|access|secret)?(?:token|key|keyid)|secret|passw(?:or)?d|pwd|sig|signature|credentials?|auth)"
)
# Environment variables that hold credentials and do not match `_SECRET_KEY`, as HF_TOKEN, OPENAI_API_KEY,
# AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, WANDB_API_KEY and MLFLOW_TRACKING_PASSWORD do.
_SECRET_VARIABLES = {"AZURE_STORAGE_CONNECTION_STRING", "PGPASSWORD"}
_FOLDERS = {"PWD", "OLDPWD"}  # of a shell: the name is no password's
_SHORTEST = 6  # characters of a credential: servers without authentication receive "EMPTY", "none" and the like
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, except line breaks and tabs
_ISSUED = re.compile(  # tokens issued by the Hub, GitHub, GitLab and AWS
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}|AKIA[A-Z0-9]{16})\b"
)
# A published address shows these parts of its path as HIDDEN: more than a recipe is refused for, as a wrong guess
# costs little here.
HIDDEN = "***"
_NAMED_SECRET = re.compile(r"(?i)((?:token|key|secret|password|passwd|pwd|signature|sig|auth)=)[^/&;,]+")
_LIKELY_ISSUED = re.compile(
    r"\b(?:(?:hf|gh[pousr]|github_pat)_|(?:glpat|xox[abprs])-|sk[_-](?=[\w-]*\d))[\w-]{8,}|\bAKIA[A-Z0-9]{12,}"
)
_RANDOM = re.compile(  # all three kinds of characters, or a long run of letters and digits that nobody types
    r"(?<![A-Za-z0-9])(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])"
    r"(?:[A-Za-z0-9]{32,}|(?=[A-Z0-9]*[a-z])(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{20,})"
)
ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")  # a repository at a commit, since a branch can move
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def require_no_credential(text: str, source: str) -> None:
    """Raise PipelineError, which names `where` and not the credential, if the text holds one."""
    if credential := _credential(text):
        raise PipelineError(f"{source} holds a credential ({credential}), but no recipe or command line may. {REMEDY}")


def _credential(text: str) -> str | None:
    """Return the kind of credential that the text holds, in words; None if it holds none."""
    if _ISSUED.search(text):
        return "an access token"
    schemes = list(_SCHEME.finditer(text))
    scheme_ends = [*(match.start() for match in schemes), len(text)][1:]
    for match, end in zip(schemes, scheme_ends, strict=True):  # fsspec chains addresses
        scheme, rest = match[1].lower(), text[match.end() : end]
        user, _ = _split(scheme, rest)  # a password may hold white space, which otherwise ends the address
        if ":" in user and scheme != "github":
            return "USER:PASSWORD@ before the host"
        address = re.split(r"\s", rest, maxsplit=1)[0]
        if _split(scheme, address)[0] and scheme in _USER_IS_SECRET:
            return "a token or key before the host's @"
        if any(
            _SECRET_KEY.fullmatch(part.partition("=")[0]) for part in re.split("[?&;#]", _query(address)) if "=" in part
        ):
            return "a key or signature in the query"
    return None


def public_name(source: str) -> str:
    """Return a model or data address without the folders of this machine, and without a URL's user, query, fragment and
    the parts of its path that look like a secret.
    """
    if "::" in source:  # fsspec's chains
        return "::".join(map(public_name, source.split("::")))
    scheme, colon, rest = source.partition("://")
    if colon:
        return Path(rest).name if scheme == "file" else _hide_secrets(_strip_private_parts(source))
    path = Path(source)
    local = path.is_absolute() or source.startswith("~") or ".." in path.parts
    return path.name if local else source


def public_text(text: str) -> str:
    """Return a text for the terminal without the environment's credentials and cursor-moving characters, each URL
    without its user and query. A library may quote an address that it signed, a server the headers that it received.
    """
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    return _URL.sub(lambda match: _strip_private_parts(match[0]), text)


def _secrets() -> list[str]:
    """Return the environment's credentials, verbatim, in JSON and in an address; the longest first, as one may begin
    another.
    """
    variables = {name: value for name, value in os.environ.items() if name not in _FOLDERS}
    named = (value for name, value in variables.items() if _SECRET_KEY.fullmatch(name) or name in _SECRET_VARIABLES)
    values = [value for value in map(str.strip, named) if len(value) >= _SHORTEST]
    forms = {form for value in values for form in (value, json.dumps(value)[1:-1], quote(value, safe=""))}
    return sorted(forms, key=len, reverse=True)


def _strip_private_parts(url: str) -> str:
    scheme, _, rest = url.partition("://")
    _, address = _split(scheme, rest)
    return f"{scheme}://{re.split(r'[?#]', address, maxsplit=1)[0]}"


def _hide_secrets(url: str) -> str:
    url = _LIKELY_ISSUED.sub(HIDDEN, _NAMED_SECRET.sub(rf"\g<1>{HIDDEN}", url))
    return _RANDOM.sub(lambda match: match[0] if _COMMIT.fullmatch(match[0]) else HIDDEN, url)


def _query(address: str) -> str:
    """Return the part after the first "?", "#" or ";", which includes the parameters of a path."""
    return next(iter(re.split("[?#;]", address, maxsplit=1)[1:]), "")


def _split(scheme: str, rest: str) -> tuple[str, str]:
    """Split what follows a URL's scheme into (user, or USER:PASSWORD; the part after its @). A password may hold any
    character, so all up to the last @ counts where a ":" that begins no port comes before the first "/".
    """
    before, at, after = rest.rpartition("@")
    host = re.split(r"[/?#]", before, maxsplit=1)[0]
    password = ":" in host and (host == before or not _HOST_AND_PORT.fullmatch(host))
    user_only = host == before and scheme.rpartition("::")[2].lower() not in _NO_USER
    return (before, after) if at and (password or user_only) else ("", rest)
