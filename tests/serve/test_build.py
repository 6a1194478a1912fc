"""The shapes that a server compiles."""

import pytest

from serve.build import make_buckets


@pytest.mark.parametrize(
    ("requests", "batches"),
    [(1, (1,)), (3, (1, 3)), (16, (1, 4, 8, 16)), (20, (1, 4, 10, 16, 20)), (128, (1, 4, 16, 32, 64, 128))],
)
def test_batches_are_at_most_four_times_apart_and_twice_beyond_16(requests, batches):
    assert make_buckets(requests, 512, 32, 4096).batches == batches


@pytest.mark.parametrize(
    ("tokens", "length", "mixed", "largest", "scored"),
    [
        (512, 8192, (32, 128), 512, 128),
        (8192, 131_072, (32, 128, 512, 2048), 8192, 512),
        (8192, 1000, (32, 128, 512), 1024, 512),
        (1000, 1000, (32, 128, 512), 1000, 512),
        (16, 8192, (32,), 32, 32),
    ],
)
def test_chunks_hold_a_window_and_little_more_than_the_longest_request(
    tokens, length, mixed, largest, scored
):
    buckets = make_buckets(4, tokens, 32, length)
    assert (buckets.mixed_chunks, buckets.largest_chunk, buckets.prompt_logprobs) == (mixed, largest, scored)
