"""All-reduces between linked Hopper GPUs; one alone sends to itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.sharding import tensor_mesh
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce.links import link_table, mailbox_bytes
from pallas_kernels.all_reduce.reference import added_norm_reference, all_reduce_reference
from tests.kernels.all_reduce_cases import EPS, Case, close, make_case

pytestmark = pytest.mark.gpu
DEVICES = [1, 2, 4, 8]
SHAPES = [(1, 256), (2, 4096), (5, 5120), (32, 8192), (3, 3840), (4, 2880), (64, 512)]  # sent as they are
RELAYED = [(515, 512), (1025, 3840), (2048, 4096), (600, 8192), (700, 2880)]  # added up on one device each


def over(devices, function):
    """`function` of a device's share and all of everything else, on a mesh; it ran once without waiting."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    mesh = tensor_mesh(devices)
    links = all_reduce.links_of(tuple(mesh.devices.flat))
    if links is None:
        pytest.skip("these GPUs do not reach each other's memory")
    run = jax.jit(
        jax.shard_map(
            lambda x, shares, weight, links: function(x, shares[0], weight, links[0]),
            mesh=mesh,
            in_specs=(P(), P("tensor"), P(), P("tensor")),
            out_specs=P("tensor"),
            check_vma=False,
        )
    )

    def placed(case):
        specs = Case(P(), P("tensor"), P())
        return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(case, specs, strict=True)]

    def run_twice(case):
        case = placed(case)
        jax.block_until_ready(run(*case, all_reduce.in_passing(links)))
        return run(*case, links)

    return run_twice


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("devices", DEVICES)
def test_sums_and_norms(devices, dtype):
    def both(x, share, weight, links):
        summed = all_reduce.all_reduce(share, links)
        share, summed = jax.lax.optimization_barrier((share, summed))  # one after another
        total, normed = all_reduce.added_norm(x, share, weight, links, eps=EPS, offset=1.0)
        return jnp.stack([summed, total, normed])[None]

    run = over(devices, both)
    for _ in range(3):  # odd and even turns, rows that have had more of them than others
        for shape in SHAPES + RELAYED:
            case = make_case(devices, *shape, dtype)
            got = np.asarray(run(case), np.float32)
            assert (got == got[:1]).all()  # the same bits on all devices
            summed = all_reduce_reference(case.shares)
            shares = summed[None] if shape[1] % all_reduce.EVEN else case.shares  # padded: rounded twice
            total, normed = added_norm_reference(case.x, shares, case.weight, eps=EPS, offset=1.0)
            for part, want in zip(got[0], (summed, total, normed), strict=True):
                close(part, want, dtype)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [2, 600])
def test_nobody_waits_in_passing(rows):
    """Both mailboxes are on one GPU, and the second device never sends."""
    boxes = jax.block_until_ready([jnp.zeros(mailbox_bytes(2) // 4, jnp.int32) for _ in range(2)])
    links = jnp.asarray(link_table([box.unsafe_buffer_pointer() for box in boxes]))
    share = jnp.ones((rows, 512), jnp.bfloat16)
    for _ in range(3):
        jax.block_until_ready(jax.jit(all_reduce.all_reduce)(share, all_reduce.in_passing(links)[0]))
    assert all(box.any() for box in boxes)


@pytest.mark.parametrize("rows", [32, 1500])
@pytest.mark.parametrize("devices", DEVICES)
def test_many_in_a_row(devices, rows):
    """Numbers whose sums are exact stay what they are, in turns that follow as fast as they can."""

    def chain(x, share, weight, links):
        def turn(x, _):
            return all_reduce.all_reduce(x * jnp.asarray(1 / devices, x.dtype), links), None

        return jax.lax.scan(turn, share, None, 2000)[0][None]

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 8, (rows, 4096)), jnp.bfloat16)
    case = Case(x, jnp.broadcast_to(x, (devices, *x.shape)), x[0])
    assert (over(devices, chain)(case) == x).all()
