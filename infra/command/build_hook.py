"""Add the command's package, and the commit that it is built from, to a wheel with the project's folders."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # editable: infra/command is on the path, and git knows the commit
            return
        self.scratch = tempfile.TemporaryDirectory()
        commit = Path(self.scratch.name) / "COMMIT"
        commit.write_text(self._commit())
        build_data["force_include"] |= {f"{self.root}/infra/command/jakiro": "jakiro", str(commit): "jakiro/COMMIT"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self.scratch.cleanup()

    def _commit(self) -> str:
        if commit := os.environ.get("JAKIRO_COMMIT"):  # an image is built from a copy without git history
            return commit
        changes = self._git("status", "--porcelain", "--untracked-files=no")
        return self._git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")

    def _git(self, *arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", self.root, *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git in an image
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""
