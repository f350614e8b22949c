"""The settings of decoding: of a token tree, and of a method: a draft, its secondary sources and their tree."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.basics.settings import Settings

if TYPE_CHECKING:
    from pipeline.decoding.contract import Draft, Source, TreeSupport

# EAGLE-1's tree: 25 nodes below the root, each written as the ranks on its path.
EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"

DEFAULTS = {"depth": 6, "top_k": 10, "nodes": 60}  # of a dynamic tree


@dataclass(frozen=True, kw_only=True)
class TreeConfig(Settings):
    """A token tree. ``nodes`` counts every token that the target verifies, the root included.

    Dynamic (EAGLE-2): the `top_k` best nodes of a level propose `top_k` children each; of all, the best ``nodes - 1``
    stay. The defaults are the released code's tree: its ``depth=5`` counts the levels after the first.
    Static (EAGLE-1): `paths` names every node by the ranks on its path; depth, top_k and nodes follow from it.
    """

    depth: int = None  # type: ignore[assignment]  # levels below the root; default: DEFAULTS, or what paths make it
    top_k: int = None  # type: ignore[assignment]
    nodes: int = None  # type: ignore[assignment]
    paths: Any = None  # "eagle-1", or lists of ranks
    candidates: Literal["plain", "decoupled"] = "plain"  # the averaged head's; the experts' lists merged
    siblings: Literal["best", "drawn"] = "best"  # how a static tree takes them above temperature 0
    parallel: int | None = None  # so many last levels come from one draft forward; default: as many as the draft offers

    def __post_init__(self):
        self.at_least(1, "depth", "top_k", "parallel")
        self.at_least(2, "nodes")
        for key, value in (DEFAULTS if self.paths is None else self._made_by_paths()).items():
            given = getattr(self, key)
            if self.paths is not None and given not in (value, None):
                raise ValueError(f"{key}={given}, but paths make it {value}: leave it out")
            self._set(key, value if given is None else given)
        if self.nodes < self.depth + 1:
            raise ValueError(
                f"nodes={self.nodes} cannot hold a path of depth {self.depth}: use at least {self.depth + 1}"
            )
        if self.parallel is not None and self.parallel > self.depth:
            raise ValueError(f"parallel={self.parallel} levels from one forward, but the tree has depth {self.depth}")
        if self.siblings != "best" and self.paths is None:
            raise ValueError(
                f"siblings={self.siblings!r} needs a static tree (paths): keeping the best of what was drawn would "
                "change the output's distribution"
            )

    def _made_by_paths(self) -> dict[str, int]:
        """What follows from `paths`. Raises ValueError for paths that make no tree."""
        if self.paths != "eagle-1" and not _are_paths(self.paths):
            raise ValueError(f"paths={self.paths!r}: expected 'eagle-1' or lists of ranks, as in [[0], [1], [0, 0]]")
        known = {tuple(path) for path in static_paths(self.paths)}
        if len(known) < len(static_paths(self.paths)):
            raise ValueError("paths names a node twice: siblings are different tokens")
        for path in known:
            missing = [p for p in (path[:-1], (*path[:-1], path[-1] - 1)) if p and p[-1] >= 0 and p not in known]
            if missing:
                raise ValueError(
                    f"paths holds {list(path)} without {list(missing[0])}: a node needs its parent and the better "
                    "siblings"
                )
        return {"depth": max(map(len, known)), "top_k": 1 + max(map(max, known)), "nodes": 1 + len(known)}

    @property
    def forwards(self) -> int:
        """Draft forwards of one round, the one that takes in the accepted tokens included."""
        assert self.parallel is not None, "a draft resolves it: TreeSupport.resolve"
        return self.depth - self.parallel + 1


def chain(depth: int, parallel: int | None = None, candidates: Any = "plain") -> TreeConfig:
    """The tree of one candidate a level."""
    return TreeConfig(depth=depth, top_k=1, nodes=depth + 1, parallel=parallel, candidates=candidates)


def _are_paths(paths: Any) -> bool:
    lists = isinstance(paths, list) and bool(paths) and all(isinstance(path, list) and path for path in paths)
    return lists and all(type(rank) is int and rank >= 0 for path in paths for rank in path)


def static_paths(paths: list[list[int]] | str) -> list[list[int]]:
    """The nodes below the root of a static tree, parents before children and siblings in the order of their ranks."""
    found = [[int(rank) for rank in word] for word in EAGLE_1.split()] if isinstance(paths, str) else paths
    return sorted(found, key=lambda path: (len(path), path))


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
