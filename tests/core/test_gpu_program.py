"""The list of kernels that `benchmarks.gpu_program` reads off a compiled program."""

from benchmarks.gpu_program import kernels, open_loops

PROGRAM = """
%fused (p: bf16[2]) -> bf16[2] {
  ROOT %inner = bf16[2]{0} negate(%p)
}

ENTRY %main (a: bf16[4,8], b: f32[]) -> (bf16[4,8]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %view = bf16[32]{0} bitcast(%a)
  %both.1 = (bf16[4,8]{1,0}, s32[3]{0}) fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/x/mul" x=1}
  %first = bf16[4,8]{1,0} get-tuple-element(%both.1), index=0
  ROOT %copy-it = f32[]{:T(128)} copy(%b)
}
"""


def test_kernels_of_a_program():
    assert kernels(PROGRAM) == [
        ("both.1", "(bf16[4,8], s32[3])", 76, "jit(f)/x/mul"),
        ("copy-it", "f32[]", 4, ""),
    ]


def test_loops_whose_length_only_the_device_knows():
    loop = '%while.{0} = (s32[]) while(%x), condition=%c, body=%b, metadata={{op_name="jit(f)/{0}/while"}}'
    known = loop.format("known") + ', backend_config={"known_trip_count":{"n":"10"}}'
    bare = loop.format("bare").split(", metadata")[0]
    assert open_loops("\n".join([loop.format("open"), known, "%y = while_not(%x)", bare])) == [
        "jit(f)/open/while",
        "unnamed",
    ]
