"""Which devices reach each other's memory, and the mailboxes through which they do.

A mailbox has a turn for each row, then what others write: [odd and even turns, sender, row] words, each with a turn's number
beside it (`exchange`). Behind that it has a turn for each CTA, flags [CTA, PLACES turns, shares and sums, sender], and rows
in the same order (`relay`); then turns of parts of tiles, and [odd and even turns, sender, part, piece] words with turns
(`tiles`).
"""

import ctypes
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.support import check_device

ROWS = 512  # of all senders together, so that this part of a mailbox is 32 MiB
MOST_COLUMNS = 8192
EVEN = 256  # columns are a multiple of it, two for each thread; others are padded
ROW = 4 * MOST_COLUMNS  # bytes: of each element of 2 bytes, and half of a turn's number
TURNS = 4 * ROWS  # bytes
# Elements that a device sends, 4 bytes of each: from so many on a relay is faster, which sends an N-th of that, twice.
AS_THEY_ARE = 3 << 18
RELAYS = 256  # CTAs that relay rows
PLACES = 4  # turns of a relay that have places of their own: at least three, and a power of two
RELAY_ROW = 2 * MOST_COLUMNS  # bytes
PARTS = 132  # of tiles: CTAs that each have one
MOST_PIECES = 16  # of a part: of four tokens, 64 in all
PIECE = 2048  # bytes: of four tokens' 128 columns, and as many of turns' numbers
PART_TURNS = 1024  # bytes
WAITS = -1  # a mask


def most_rows(devices: int) -> int:
    """Rows of tokens for which a mailbox has places as they are: each has a CTA, which waits for the same of the others."""
    return min(ROWS // devices, 256)


def are_few(rows: int, columns: int, devices: int) -> bool:
    """Whether rows are better sent as they are than relayed."""
    return rows <= most_rows(devices) and rows * columns * (devices - 1) < AS_THEY_ARE


def relay_begins(devices: int) -> int:
    """Where in a mailbox the part of `relay` begins, in bytes, with the CTAs' turns."""
    return TURNS + 2 * devices * most_rows(devices) * ROW


def relay_rows_begin(devices: int) -> int:
    """Where its rows begin, after turns and flags."""
    return relay_begins(devices) + 4 * RELAYS * (1 + 2 * PLACES * devices)


def tiles_begin(devices: int) -> int:
    """Where the part of `tiles` begins, with the parts' turns."""
    return relay_rows_begin(devices) + RELAYS * 2 * PLACES * devices * RELAY_ROW


def mailbox_bytes(devices: int) -> int:
    return tiles_begin(devices) + PART_TURNS + 2 * devices * PARTS * MOST_PIECES * PIECE


@functools.cache
def links_of(devices: tuple[jax.Device, ...]) -> jax.Array | None:
    """i32[N, 1 + N, 2], a part on each device: its number and WAITS, then all N mailboxes' addresses, low words first.

    None where the devices are not GPUs of this process that reach each other's memory, of a generation with kernels.
    """
    if not _reach_each_other(devices):
        return None
    count = len(devices)
    place = NamedSharding(Mesh(np.array(devices), ("tensor",)), PartitionSpec("tensor"))
    size = mailbox_bytes(count)
    boxes = jax.jit(lambda: jnp.zeros((count, size // 4), jnp.int32), out_shardings=place)()
    _MAILBOXES.append(jax.block_until_ready(boxes))
    address = {part.device: part.data.unsafe_buffer_pointer() for part in boxes.addressable_shards}
    return jax.device_put(link_table([address[device] for device in devices]), place)


def link_table(addresses: Sequence[int]) -> np.ndarray:
    """What `links_of` gives, of mailboxes that lie there."""
    count = len(addresses)
    table = np.zeros((count, 1 + count), np.int64)
    table[:, 0] = np.arange(count)
    table[:, 1:] = addresses
    words = table.view(np.int32).reshape(count, 1 + count, 2)
    words[:, 0, 1] = WAITS
    return words


def in_passing(links: jax.Array) -> jax.Array:
    """Links that are written to and not awaited: what is summed up over them is nothing.

    For the first run of a program. A GPU on which a kernel waits for others loads no kernels until that ends, and JAX loads
    ours one at a time: while it does so for a GPU that waits for another, the other starts none, so both may wait for good.

    All that ran before must have ended on all GPUs: who does not wait overwrites what others have not read yet, which then
    add up something else or wait for good.
    """
    table = np.array(links)
    table[:, 0, 1] = 0
    return jax.device_put(table, links.sharding)


# Never given back: the programs that write to them have no more of them than addresses.
_MAILBOXES: list[jax.Array] = []


def _reach_each_other(devices: tuple[jax.Device, ...]) -> bool:
    try:
        for device in devices:
            check_device(device)
        driver = ctypes.CDLL("libcuda.so.1")
    except (NotImplementedError, OSError):
        return False
    if any(device.process_index != jax.process_index() for device in devices):
        return False
    numbers = [device.local_hardware_id for device in devices]
    able = ctypes.c_int()
    return all(
        driver.cuDeviceCanAccessPeer(ctypes.byref(able), a, b) == 0 and able.value
        for a in numbers
        for b in numbers
        if a != b
    )
