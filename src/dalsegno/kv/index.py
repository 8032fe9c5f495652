"""Which device block vouches for which prefix.

The index is a tree of hash units. A node is one boundary of one chain; per group it names the block that vouches for
it. Two facts every eviction policy must respect are kept up to date here, each in time proportional to what changes:

* *live*: a boundary state lies at the node or below it. Attention of a node that is not live can serve no hit.
* *reachable*: attention is there for every unit up to the node. What is not reachable can serve no hit.

A model without state group has only live nodes, one without attention group only reachable ones.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from dalsegno.kv.layout import GroupSpec
from dalsegno.types import NULL_BLOCK, BlockHash, GroupKind

__all__ = ["Node", "PrefixIndex"]


class Node:
    """One boundary of one chain; `blocks[g]` is the vouching block of group g, or the null block."""

    __slots__ = ("blocks", "boundary", "children", "hash", "live_children", "parent", "reachable")

    def __init__(self, block_hash: BlockHash, parent: "Node | None", num_groups: int) -> None:
        """Hang a node with no blocks under `parent`; the caller enters it in the children."""
        self.hash = block_hash
        self.parent = parent
        self.boundary = 0
        self.children: dict[BlockHash, Node] = {}
        self.blocks = [NULL_BLOCK] * num_groups
        self.live_children = 0
        self.reachable = False


def _boundary(node: Node) -> int:
    return node.boundary


class PrefixIndex:
    """Published blocks by hash and group; one block per hash and group, the first published stays.

    Counts no references and frees nothing. Used on the engine thread only.
    """

    def __init__(self, groups: Sequence[GroupSpec], hash_block_size: int) -> None:
        """Start empty; `on_rank_change(group, block)` is called whenever a block becomes dead or alive again."""
        self.unit = hash_block_size
        self.groups = groups
        kinds = {group.kind: group.group_id for group in groups}
        self._attention = kinds.get(GroupKind.ATTENTION)
        self._state = kinds.get(GroupKind.STATE)
        self.nodes: dict[BlockHash, Node] = {}
        self._vouched: list[dict[int, list[Node]]] = [{} for _ in groups]
        self.on_rank_change: Callable[[int, int], None] = lambda group, block: None

    def __len__(self) -> int:
        """Number of published blocks, all groups."""
        return sum(map(len, self._vouched))

    def find(self, group: int, block_hash: BlockHash) -> int:
        """Return the block of `group` published under `block_hash`, or the null block."""
        node = self.nodes.get(block_hash)
        return node.blocks[group] if node is not None else NULL_BLOCK

    def attention_reach(self, hashes: Sequence[BlockHash], limit: int) -> dict[int, int]:
        """The longest boundary of at most `limit` that the attention group covers, by group; empty without one.

        Reachability only ever ends along a chain, so a bisection over the hashes finds it.
        """
        if self._attention is None:
            return {}
        nodes = self.nodes

        def ends(block_hash: BlockHash) -> bool:
            node = nodes.get(block_hash)
            return node is None or not node.reachable

        return {self._attention: self.unit * bisect_left(hashes, True, hi=limit // self.unit, key=ends)}

    def blocks_at(self, group: int, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of `group` published under hashes that are all known to the index."""
        nodes = self.nodes
        return [nodes[block_hash].blocks[group] for block_hash in hashes]

    def has_continuation(self, block_hash: BlockHash) -> bool:
        """Whether some chain goes on behind `block_hash` with attention."""
        node = self.nodes.get(block_hash)
        if node is None:
            return False
        return any(self._attention is None or child.blocks[self._attention] for child in node.children.values())

    def is_published(self, group: int, block: int) -> bool:
        """Whether any hash names `block`."""
        return block in self._vouched[group]

    def vouched(self, group: int, block: int) -> Sequence[Node]:
        """Nodes that `block` vouches for, by rising boundary."""
        return self._vouched[group].get(block, ())

    def published(self, group: int) -> Iterator[int]:
        """All published blocks of a group."""
        return iter(self._vouched[group])

    def is_dead(self, group: int, block: int) -> bool:
        """Whether no hit can ever use the published `block` as things stand."""
        nodes = self._vouched[group][block]
        if group == self._state:
            return not any(node.reachable for node in nodes)
        return not any(node.reachable and self._is_live(node) for node in nodes)

    def publish(self, group: int, root: BlockHash, hashes: Sequence[BlockHash], boundary: int, block: int) -> int:
        """Let `block` vouch for `boundary` of the chain `hashes`; its bytes must be written by now.

        Returns:
            The block that vouches for it: `block`, or the one published first, which stays.
        """
        node = self._node(root, hashes, boundary // self.unit)
        if node.blocks[group]:
            return node.blocks[group]
        was_live = self._is_live(node)
        for covered in self._covered(group, node):
            covered.blocks[group] = block
            insort(self._vouched[group].setdefault(block, []), covered, key=_boundary)
            parent = covered.parent
            if group == self._attention and not covered.reachable and parent is not None and parent.reachable:
                self._set_reachable(covered, True)
        if group == self._state and not was_live:
            self._wake(node)
        self.on_rank_change(group, block)
        return block

    def unpublish(self, group: int, block: int) -> list[Node]:
        """Take every hash of `block` back; returns the nodes it vouched for.

        A node that a longer block of the same chain also covers passes to that block, so that dropping a duplicate
        tail costs no boundary.
        """
        nodes = self._vouched[group].pop(block, [])
        lost = []
        heir = NULL_BLOCK
        for node in reversed(nodes):
            heir = self._heir(group, node) or heir
            node.blocks[group] = heir
            if heir:
                insort(self._vouched[group][heir], node, key=_boundary)
                self.on_rank_change(group, heir)
            else:
                lost.append(node)
        for node in lost:
            if group == self._state and not node.live_children:
                self._put_to_sleep(node)
            if group == self._attention and node.reachable:
                self._set_reachable(node, False)
            self._prune(node)
        return lost

    def clear(self) -> None:
        """Forget everything."""
        self.nodes.clear()
        for vouched in self._vouched:
            vouched.clear()

    def _node(self, root: BlockHash, hashes: Sequence[BlockHash], depth: int) -> Node:
        """The node of `hashes[depth - 1]`; missing ancestors are made, without blocks."""
        missing = []
        level = depth
        while level and hashes[level - 1] not in self.nodes:
            missing.append(level)
            level -= 1
        node = self.nodes[hashes[level - 1]] if level else self._root(root)
        for level in reversed(missing):
            child = Node(hashes[level - 1], node, len(self.groups))
            child.boundary = level * self.unit
            child.reachable = self._attention is None
            node.children[child.hash] = child
            self.nodes[child.hash] = child
            node = child
        return node

    def _root(self, root: BlockHash) -> Node:
        node = self.nodes.get(root)
        if node is None:
            node = self.nodes[root] = Node(root, None, len(self.groups))
            node.reachable = True
        return node

    def _covered(self, group: int, node: Node) -> Sequence[Node]:
        """`node` and the nodes before it in the same block that nobody vouches for, by rising boundary.

        Blocks are append-only, so who vouches for a boundary vouches for those before it: where a node has a block,
        all nodes before it in that block have one too.
        """
        covered = [node]
        size = self.groups[group].block_size
        parent = node.parent
        while parent is not None and parent.boundary % size and not parent.blocks[group] and group != self._state:
            covered.append(parent)
            parent = parent.parent
        return covered[::-1]

    def _is_live(self, node: Node) -> bool:
        return self._state is None or node.live_children > 0 or node.blocks[self._state] != NULL_BLOCK

    def _wake(self, node: Node) -> None:
        """`node` became live: tell its ancestors, up to the first that was live already."""
        while True:
            self._announce(node)
            parent = node.parent
            if parent is None:
                return
            was_live = self._is_live(parent)
            parent.live_children += 1
            if was_live:
                return
            node = parent

    def _put_to_sleep(self, node: Node) -> None:
        """`node` is live no more: tell its ancestors, up to the first that stays live."""
        while True:
            self._announce(node)
            parent = node.parent
            if parent is None:
                return
            parent.live_children -= 1
            if self._is_live(parent):
                return
            node = parent

    def _set_reachable(self, node: Node, reachable: bool) -> None:
        """Flip `node` and every descendant that follows from it."""
        assert self._attention is not None, "without attention every node is reachable"
        pending = [node]
        while pending:
            node = pending.pop()
            node.reachable = reachable
            self._announce(node)
            pending += (
                child
                for child in node.children.values()
                if child.reachable != reachable and (not reachable or child.blocks[self._attention])
            )

    def _announce(self, node: Node) -> None:
        for group, block in enumerate(node.blocks):
            if block:
                self.on_rank_change(group, block)

    def _heir(self, group: int, node: Node) -> int:
        """A block of the chain behind `node` that covers the node's own block index too, or the null block."""
        if group == self._state:
            return NULL_BLOCK
        block_size = self.groups[group].block_size
        if node.boundary % block_size == 0:
            return NULL_BLOCK
        return next((child.blocks[group] for child in node.children.values() if child.blocks[group]), NULL_BLOCK)

    def _prune(self, node: Node) -> None:
        """Remove `node` and its ancestors as far as they hold nothing and lead nowhere."""
        while not node.children and not any(node.blocks) and self.nodes.get(node.hash) is node:
            del self.nodes[node.hash]
            parent = node.parent
            if parent is None:
                return
            del parent.children[node.hash]
            node = parent
