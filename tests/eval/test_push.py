"""Upload to a Hub that fails in every way a server can: one line with the reason and the state of the repository; the
next try completes.
"""

import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from eval.release.folder import install
from eval.release.publish import push
from pipeline.artifacts.reports import REPORT
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from tests.eval.test_reports import REPORT_FIELDS
from tests.hub import Hub, hurry, reach, reached

LISTED = {"README.md", "model.safetensors", "report.json"}


@pytest.fixture
def release(tmp_path) -> Path:
    built = tmp_path / ".built"
    built.mkdir()
    (built / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nthe card")
    (built / "model.safetensors").write_bytes(bytes(1000))
    write_sealed(built / REPORT, REPORT_FIELDS)
    install(built, tmp_path / "release")
    return tmp_path / "release"


@pytest.fixture
def hub(monkeypatch):
    with Hub() as hub, reached(monkeypatch, hub):
        yield hub


def refusal(release: Path) -> str:
    with pytest.raises(PipelineError) as caught:
        push(release, "me/draft", private=True)
    message = str(caught.value)
    assert "\n" not in message and "hf_" not in message.replace("HF_", "")
    assert f"The release stays in {release}: run the same command again, it measures nothing twice" in message
    return message


NOTHING = "Nothing was uploaded."
EXISTS = "is there, and each commit arrives as a whole or not at all."


@pytest.mark.parametrize(
    ("where", "fault", "reason", "now"),
    [
        ("repos/create", "hang", r"did not answer in time \(5 s to connect, 0.3 s for an answer\)", NOTHING),
        ("repos/create", "html", "gave no answer of a Hub: check HF_ENDPOINT", NOTHING),
        ("repos/create", "drop", r"cannot be reached at http://127.0.0.1:\d+ \(RemoteProtocolError\)", NOTHING),
        ("repos/create", 503, r"failed \(503\): that is its own fault, not your token's", NOTHING),
        ("repos/create", 403, r"refused the upload to me/draft \(403\): check that HF_TOKEN is valid", NOTHING),
        ("repos/create", 404, r"refused the upload to me/draft \(404\): it knows no such owner", NOTHING),
        ("api/models/me/draft", 500, r"failed \(500\): that is its own fault", EXISTS),
        ("validate-yaml", 502, r"failed \(502\): that is its own fault", NOTHING),
        ("preupload", 401, r"refused the upload to me/draft \(401\): check that HF_TOKEN", EXISTS),
        ("objects/", 500, r"failed \(500\)", EXISTS),
        ("/store/", "cut", r"cannot be reached at http://127.0.0.1:\d+ \(\w+\)", EXISTS),
        ("/commit/", "hang", "did not answer in time", EXISTS),
        ("/commit/", 409, r"refused the upload to me/draft \(409\)", EXISTS),
        ("/commit/", 504, r"failed \(504\)", EXISTS),
    ],
)
def test_every_failure_is_one_line_and_the_next_try_completes(release, hub, monkeypatch, where, fault, reason, now):
    """Files that were uploaded before a commit failed are not sent again."""
    hub.faults[where] = fault
    with monkeypatch.context() as while_it_fails:
        if fault == "hang":
            hurry(while_it_fails, 0.3)
        message = refusal(release)
    assert re.search(reason, message) and now in message
    assert ("token" in message.lower()) == (fault in (401, 403, 404, 500, 502, 503, 504))
    assert not hub.files
    hub.faults.clear()
    lines = push(release, "me/draft", private=True)
    assert set(hub.files) == LISTED and len(hub.created) == 1
    assert lines == [f"uploaded: {hub.url}/me/draft/commit/{'1' * 40} (a private repository)"]
    if fault == 504:
        assert len([request for request in hub.requests if request.startswith("PUT")]) == 1


@pytest.mark.parametrize(
    ("card", "reason"), [("---\nlicense: mit\n---\n", "as the test wants it"), ("---\n{\n---\n", "expected")]
)
def test_a_card_that_the_hub_refuses_leaves_no_empty_repository(release, hub, card, reason):
    """A card that is no YAML is refused as well."""
    (release / "README.md").write_text(card)
    hub.faults["validate-yaml"] = 400
    message = refusal(release)
    assert "was refused: " in message and reason in message and NOTHING in message
    assert not hub.exists and not hub.created


def test_a_hub_that_is_not_there_is_told(release, hub, monkeypatch):
    reach(monkeypatch, "http://user:hf_secret@127.0.0.1:9")
    assert "the Hub cannot be reached at http://127.0.0.1:9 (ConnectError)" in refusal(release)
    reach(monkeypatch, "no address")
    assert "cannot be reached at no address (UnsupportedProtocol)" in refusal(release)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, so the Hub is not asked for me/draft" in refusal(release)
    assert not hub.requests


@pytest.mark.parametrize(
    ("hidden", "visibility"),
    [
        (True, " (a private repository)"),
        (False, " (a public repository; it was so before, and --push changes no existing repository)"),
        (None, ""),
    ],
)
def test_a_repository_that_exists_is_left_as_it_is_and_who_sees_it_is_said(release, hub, hidden, visibility):
    hub.exists, hub.private = True, hidden
    (line,) = push(release, "me/draft", private=True)
    assert line.endswith(f"/commit/{'1' * 40}{visibility}")
    assert not hub.created and not [request for request in hub.requests if "settings" in request]


def test_only_what_the_release_lists_is_uploaded_and_the_rest_is_told(release, hub):
    """An edited card is uploaded; the release's own card next to it is not."""
    for name in ("notes.txt", "secrets/key", "README.new.md"):
        (release / name).parent.mkdir(exist_ok=True)
        (release / name).write_text("mine")
    (release / "README.md").write_text("---\nlicense: mit\n---\n\nmy card")
    lines = push(release, "me/draft", private=True)
    assert set(hub.files) == LISTED and b"my card" in hub.files["README.md"]
    assert lines[1:] == ["not uploaded: README.new.md, notes.txt, secrets/key"]


def test_a_changed_report_is_not_uploaded(release, hub):
    (release / REPORT).write_text((release / REPORT).read_text().replace("float32", "float64"))
    with pytest.raises(PipelineError, match=r"report.json was changed or damaged"):
        push(release, "me/draft", private=True)
    assert not hub.requests
