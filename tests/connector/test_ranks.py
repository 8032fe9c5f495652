"""An object counts as stored only when every rank's part of it is."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.connector.base import BoundPool, MatchStatus
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import StoredObject
from dalsegno.kv.manager import KVCacheManager
from dalsegno.store.keys import StoreKey, salt_tag
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.builders import make_layout, make_request
from dalsegno.testing.fake_worker import FakeClock

H, B = 16, 32
BOUNDARIES = (32, 64, 96)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_hit_stops_where_one_rank_lacks_one_object(world_size: int) -> None:
    """44: whichever rank, group and boundary it is."""
    config = CacheConfig(B, H)
    layout = make_layout("as", config)
    context = ConnectorContext(layout, config, {"weights": "w"}, FakeClock(), range(world_size), world_size)
    store = MemoryStore()
    extra = {"store": store, "store_block_size": B}
    scheduler, _ = create_connector(KVTransferConfig("StoreConnector", kv_connector_extra_config=extra), context)
    manager = KVCacheManager(layout, config, max_step_tokens=100)
    scheduler.bind_block_pool(BoundPool(manager.layout, manager.index, manager.pins))
    request = make_request("r", range(100))
    manager.start_request(request)

    def key(rank: int, group: int, boundary: int) -> StoreKey:
        maker = KeyMaker(context, rank, B, "")
        item = StoredObject(group, 0, boundary, request.block_hashes[boundary // H - 1])
        return maker.key(salt_tag(None), item)

    def hit() -> int:
        computed, _, _ = manager.get_computed_blocks(request)
        match = scheduler.get_num_new_matched_tokens(request, computed)
        assert (match.status is MatchStatus.HIT) == (match.num_tokens > 0)
        return match.num_tokens

    every = [(rank, group, end) for rank in range(world_size) for group in range(2) for end in BOUNDARIES]
    store.put([key(*place) for place in every], [[memoryview(b"x")]] * len(every))
    assert hit() == 96
    for rank, group, end in every:
        store.remove([key(rank, group, end)])
        # An absent state costs its own boundary; an absent attention object all from its beginning.
        others = {b for b in BOUNDARIES if (b != end if group else b < end)}
        assert hit() == max(others, default=0), (rank, group, end)
        store.put([key(rank, group, end)], [[memoryview(b"x")]])
    assert hit() == 96
