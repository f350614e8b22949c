"""The settings of decoding: the token tree, and the method, which is a draft, its secondary sources and their tree."""

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

    Dynamic (EAGLE-2): the `top_k` best nodes of a level propose `top_k` children each; the best ``nodes - 1`` stay. The
    defaults are the released code's tree: its ``depth=5`` counts the levels after the first.
    Static (EAGLE-1): `paths` names every node by the ranks on its path; depth, top_k and nodes follow from it.
    """

    depth: int = None  # type: ignore[assignment]  # levels below the root; default: DEFAULTS, or by paths
    top_k: int = None  # type: ignore[assignment]
    nodes: int = None  # type: ignore[assignment]
    paths: Any = None  # "eagle-1", or lists of ranks
    candidates: Literal["plain", "decoupled"] = "plain"  # from the averaged head; from the experts' merged lists
    # best, or drawn: how a static tree selects them above temperature 0; none: a chain, also of several sources
    siblings: Literal["best", "drawn", "none"] = "best"
    parallel: int | None = None  # number of last levels from one draft forward; default: the draft's maximum

    def __post_init__(self):
        self.require_at_least(1, "depth", "top_k", "parallel")
        self.require_at_least(2, "nodes")
        if self.siblings == "none":
            self._set_chain()
        for key, value in (DEFAULTS if self.paths is None else self._made_by_paths()).items():
            setting = getattr(self, key)
            if self.paths is not None and setting not in (value, None):
                raise ValueError(f"{key}={setting}, but paths make it {value}: leave it out")
            self._set(key, value if setting is None else setting)
        if self.nodes < self.depth + 1:
            raise ValueError(
                f"nodes={self.nodes} cannot hold a path of depth {self.depth}: use at least {self.depth + 1}"
            )
        if self.parallel is not None and self.parallel > self.depth:
            raise ValueError(f"parallel={self.parallel} levels from one forward, but the tree has depth {self.depth}")
        if self.siblings == "drawn" and self.paths is None:
            raise ValueError(
                f"siblings={self.siblings!r} needs a static tree (paths): keeping the best of the drawn ones would "
                "change the output's distribution"
            )

    def _set_chain(self) -> None:
        """Set the keys of a chain that are left out. Raise ValueError for a key that gives it siblings."""
        if self.paths is not None or self.top_k not in (1, None):
            key = "paths" if self.paths is not None else f"top_k={self.top_k}"
            raise ValueError(f"siblings='none' is a chain, but {key} gives it siblings: leave it out")
        depth = min(DEFAULTS["depth"], (self.nodes or DEFAULTS["nodes"]) - 1) if self.depth is None else self.depth
        for key, value in (("depth", depth), ("top_k", 1), ("nodes", depth + 1)):
            self._set(key, value if getattr(self, key) is None else getattr(self, key))

    def _made_by_paths(self) -> dict[str, int]:
        """Return the settings that follow from `paths`. Raise ValueError for paths that form no tree."""
        if self.paths != "eagle-1" and not _is_path_list(self.paths):
            raise ValueError(f"paths={self.paths!r}: expected 'eagle-1' or lists of ranks, as in [[0], [1], [0, 0]]")
        nodes = {tuple(path) for path in static_paths(self.paths)}
        if len(nodes) < len(static_paths(self.paths)):
            raise ValueError("paths names a node twice: siblings are different tokens")
        for path in nodes:
            missing = [p for p in (path[:-1], (*path[:-1], path[-1] - 1)) if p and p[-1] >= 0 and p not in nodes]
            if missing:
                raise ValueError(
                    f"paths holds {list(path)} without {list(missing[0])}: a node needs its parent and the better "
                    "siblings"
                )
        return {"depth": max(map(len, nodes)), "top_k": 1 + max(map(max, nodes)), "nodes": 1 + len(nodes)}

    @property
    def forwards(self) -> int:
        """Return the number of draft forwards of one round, including the first, over the accepted tokens."""
        assert self.parallel is not None, "a draft resolves it: TreeSupport.resolve"
        return self.depth - self.parallel + 1


def chain(depth: int, parallel: int | None = None, candidates: Any = "plain") -> TreeConfig:
    """Return a tree with one candidate per level."""
    return TreeConfig(depth=depth, top_k=1, nodes=depth + 1, parallel=parallel, candidates=candidates)


def _is_path_list(paths: Any) -> bool:
    lists = isinstance(paths, list) and bool(paths) and all(isinstance(path, list) and path for path in paths)
    return lists and all(type(rank) is int and rank >= 0 for path in paths for rank in path)


def static_paths(paths: list[list[int]] | str) -> list[list[int]]:
    """Return the nodes below the root of a static tree, parents before children and siblings in the order of their
    ranks.
    """
    rank_paths = [[int(rank) for rank in word] for word in EAGLE_1.split()] if isinstance(paths, str) else paths
    return sorted(rank_paths, key=lambda path: (len(path), path))


@dataclass(frozen=True, kw_only=True)
class Method(Settings):
    """A draft, its secondary sources and their tree; names are those of [draft.NAME] sections. `resolved` fills in what
    a recipe leaves out.
    """

    draft: str = ""  # default: the draft with the method's name
    secondary: list[str] = field(default_factory=list)  # sources that read only the text (kind = "prompt-lookup")
    tree: TreeConfig | None = None  # default: eval.tree

    @property
    def is_chain(self) -> bool:
        """Return whether no tree of a complete method has siblings."""
        tree = self.resolved_tree
        return tree.siblings == "none" or (tree.nodes == tree.depth + 1 and tree.top_k == 1 and not self.secondary)

    @property
    def sources(self) -> list[str]:
        return [self.draft, *self.secondary]

    @property
    def resolved_tree(self) -> TreeConfig:
        """Return the tree of a complete method."""
        assert self.tree is not None, "resolve() gives it a tree"
        return self.tree

    def resolve(self, support: "TreeSupport", draft: str, tree: TreeConfig) -> "Method":
        """Return a copy with its draft's name and its resolved tree: its own, or else `tree`. Raise ValueError where
        the sources cannot fill that.
        """
        from pipeline.decoding.sources import SharedTrees  # imports torch: a typo in a recipe is reported before

        shared = SharedTrees(support) if self.secondary else support
        return replace(self, draft=draft, tree=shared.resolve(self.tree or tree))

    def load(self, drafts: Mapping[str, "Source"]) -> "LoadedMethod":
        """Return a complete method with its drafts, which are bound to the target or read only the text."""
        from pipeline.decoding.sources import Sources

        draft: Draft = drafts[self.draft]
        if self.secondary:
            secondary = {name: drafts[name] for name in self.secondary}
            draft = Sources(drafts[self.draft], secondary)
        return LoadedMethod(draft, self.resolved_tree)


@dataclass(frozen=True)
class LoadedMethod:
    """A draft with the tree that it grows, ready for decoding."""

    draft: "Draft"
    tree: TreeConfig

    def __post_init__(self):
        object.__setattr__(self, "tree", self.draft.config.resolve(self.tree))

    def room(self, compiled: bool) -> int:
        """Return the number of positions after the last token of an answer that its last round may need; a compiled
        target writes all of a tree's rows.
        """
        deepest = self.draft.config.max_level(self.tree)
        return max(self.tree.nodes, deepest + 1) if compiled else deepest
