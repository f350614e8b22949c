"""A decoding method: a draft, its secondary sources, and the tree that they fill.

One class, as a recipe, a tuned file, a report and a release have it. Its `load` makes what decodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig

if TYPE_CHECKING:
    from pipeline.decoding.contract import Draft, Source, TreeSupport


@dataclass(frozen=True, kw_only=True)
class Method(Settings):
    """`draft` and `secondary` are names of [draft.NAME] sections. What a recipe leaves out `resolved` fills in."""

    draft: str = ""  # default: the one of the method's name
    secondary: list[str] = field(default_factory=list)  # read nothing but the text (kind = "prompt-lookup")
    tree: TreeConfig | None = None  # default: eval.tree

    @property
    def sources(self) -> list[str]:
        return [self.draft, *self.secondary]

    @property
    def resolved_tree(self) -> TreeConfig:
        """The tree of a method that is complete."""
        assert self.tree is not None, "resolved() gives it a tree"
        return self.tree

    def resolved(self, support: "TreeSupport", draft: str, tree: TreeConfig) -> "Method":
        """A copy with its draft's name and its resolved tree: its own, else `tree`. Raises ValueError where the sources
        cannot fill that.
        """
        from pipeline.decoding.sources import SharedTrees  # torch, which a recipe's typo need not wait for

        shared = SharedTrees(support) if self.secondary else support
        return replace(self, draft=draft, tree=shared.resolve(self.tree or tree))

    def load(self, drafts: Mapping[str, "Source"]) -> "LoadedMethod":
        """A complete method with its drafts: they are bound to the target, or read nothing but the text."""
        from pipeline.decoding.sources import Sources

        draft: Draft = drafts[self.draft]
        if self.secondary:
            others = {name: drafts[name] for name in self.secondary}
            draft = Sources(drafts[self.draft], others)
        return LoadedMethod(draft, self.resolved_tree)


@dataclass(frozen=True)
class LoadedMethod:
    """A draft with the tree that it grows: what decodes."""

    draft: "Draft"
    tree: TreeConfig

    def __post_init__(self):
        object.__setattr__(self, "tree", self.draft.config.resolve(self.tree))

    def room(self, compiled: bool) -> int:
        """Positions behind the last token of an answer that its last round may need; a compiled target writes all of a
        tree's rows.
        """
        deepest = self.draft.config.reach(self.tree)
        return max(self.tree.nodes, deepest + 1) if compiled else deepest
