"""The equal shares of one layer, planned on the host: what `plan_decode` makes on the device, in NumPy.

For comparing the two places: an engine that plans every layer at run time pays for this, and for the copy, once a layer.
"""

import numpy as np

from pallas_kernels.ragged_decode import plan as P


def host_plan(
    length: np.ndarray,
    offset: np.ndarray,
    column: np.ndarray,
    table: np.ndarray,
    *,
    page_size: int,
    unit: int,
    num_shares: int,
    least: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(shares i32[W, SHARE_COLUMNS], items i32[N + 1, ITEM_COLUMNS]) of N items that all hold entries.

    length, offset, column i32[N] of each (request, KV head); table i32[...], read flat. Equal to `plan_decode`'s rows of
    one layer. `least`: units of a share at least.
    """
    count = len(length)
    number = np.argsort(column, kind="stable")  # in the line's order
    length, offset, column = length[number], offset[number], column[number]
    begin = np.zeros(count + 1, np.int32)  # units
    units = -(-length // unit)
    rounded = -(-units // least) * least
    np.cumsum(rounded if rounded.sum() <= num_shares * least else units, out=begin[1:])
    total = begin[-1]
    used, parts = -(-total // max(-(-total // num_shares), least)), column.max() + 1
    if used * least != total:
        used = min(-(-used // parts) * parts, num_shares, total)
    borders = np.minimum(np.arange(num_shares + 1), used) * total // used
    items = np.zeros((count + 1, P.ITEM_COLUMNS), np.int32)
    items[:, P.ITEM_BEGIN] = begin
    items[:-1, P.ITEM_LENGTH], items[:-1, P.ITEM_OFFSET] = length, offset
    items[:-1, P.ITEM_COLUMN], items[:-1, P.ITEM_NUMBER] = column, number

    start, end = borders[:-1], borders[1:]
    first = np.clip(np.searchsorted(begin, start, side="right") - 1, 0, count - 1)
    last = np.clip(np.searchsorted(begin, end - 1, side="right") - 1, first, count - 1)
    last_begin, stop = begin[last], begin[last + 1]
    shares = np.zeros((num_shares, P.SHARE_COLUMNS), np.int32)
    for at, values in (
        (P.START, start),
        (P.END, end),
        (P.FIRST_ITEM, first),
        (P.LAST_ITEM, last),
        (P.BEGIN, last_begin),
        (P.STOP, stop),
        (P.LENGTH, length[last]),
        (P.OFFSET, offset[last]),
        (P.COLUMN, column[last]),
        (P.NUMBER, number[last]),
        (P.HAND_TO, np.searchsorted(borders, stop - 1, side="right") - 1),
        (P.FIRST_SHARE, np.searchsorted(borders, begin[first], side="right") - 1),
    ):
        shares[:, at] = values
    page = (np.maximum(start, last_begin) - last_begin) * (unit // page_size)
    limit = np.minimum((np.minimum(end, stop) - last_begin) * unit, length[last])
    at = np.minimum(page[:, None] + np.arange(P.MAX_FIRST_PAGES), ((limit - 1) // page_size)[:, None])
    flat = table.reshape(-1)
    shares[:, P.FIRST_PAGES :] = flat[np.clip(offset[last][:, None] + at, 0, flat.size - 1)]
    return shares, items
