"""Where a run's files are: each name once."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """Of a run's folder, and of the folder where a trainer's node reads the features."""

    run: Path
    shards: Path

    @classmethod
    def of(cls, output: str, shards: str | None) -> "Paths":
        """`shards`: a folder of each node's own disk; None: they are read where they are."""
        run = Path(output).expanduser()
        return cls(run, Path(shards) if shards else run / "features")

    @property
    def features(self) -> Path:
        return self.run / "features"

    @property
    def copies(self) -> bool:
        """Whether a trainer's node reads copies of its own."""
        return self.shards.resolve() != self.features.resolve()

    @property
    def regenerated(self) -> Path:
        return self.run / "regenerated"

    def draft(self, name: str) -> Path:
        return self.run / "drafts" / name

    def resume(self, draft: str) -> Path:
        return self.draft(draft) / "resume"

    @property
    def eval(self) -> Path:
        return self.run / "eval"

    @property
    def tuned(self) -> Path:
        """The trees that eval/tune.py chose."""
        return self.eval / "tuned.json"

    @property
    def release(self) -> Path:
        return self.run / "release"
