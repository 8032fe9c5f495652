"""A process that puts objects and says so: python -m tests.store.writer DIR BYTES FIRST COUNT."""

import sys

from dalsegno.store.base import Status
from dalsegno.store.embedded import EmbeddedStore
from tests.store.objects import put_number


def main() -> None:
    path, num_bytes, first, count = sys.argv[1], *map(int, sys.argv[2:])
    store = EmbeddedStore(path, num_bytes, sync_interval_s=0.05)
    print("open", flush=True)
    for number in range(first, first + count):
        if put_number(store, number) in (Status.OK, Status.EXISTS):
            print(number, flush=True)
        store.touch([])
    store.close()


if __name__ == "__main__":
    main()
