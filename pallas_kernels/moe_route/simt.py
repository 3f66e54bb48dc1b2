"""Warp-level code in a Mosaic GPU kernel: values of one thread with Python operators, and what threads do together.

Pallas has tiles of a whole warpgroup; a choice among experts and the places of rows are work of single threads. A body
is a function of a machine: this one emits MLIR, `emulator.Emulator` runs the same body in numpy. Integers are unsigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm
from jaxlib.mlir.dialects import math as mlir_math

_LESS = {"u32": arith.CmpIPredicate.ult, "f32": arith.CmpFPredicate.OLT}
_EQUAL = {"u32": arith.CmpIPredicate.eq, "f32": arith.CmpFPredicate.OEQ}


class Value:
    """A value of each thread: kind u32, f32 or bool. Python numbers become constants of the other side's kind."""

    __slots__ = ("ir", "kind")
    __hash__ = None  # type: ignore[assignment] - == compares in the kernel

    def __init__(self, value: ir.Value, kind: str) -> None:
        self.ir, self.kind = value, kind

    def _other(self, other: Value | float) -> ir.Value:
        return other.ir if isinstance(other, Value) else mgpu.c(other, self.ir.type)

    def _pick(self, ints: Any, floats: Any, other: Value | float, swapped: bool = False) -> Value:
        pair = (self.ir, self._other(other))
        op = floats if self.kind == "f32" else ints
        return Value(op(*(pair[::-1] if swapped else pair)), self.kind)

    def __add__(self, other: Value | float) -> Value:
        return self._pick(arith.addi, arith.addf, other)

    __radd__ = __add__

    def __sub__(self, other: Value | float) -> Value:
        return self._pick(arith.subi, arith.subf, other)

    def __rsub__(self, other: Value | float) -> Value:
        return self._pick(arith.subi, arith.subf, other, swapped=True)

    def __mul__(self, other: Value | float) -> Value:
        return self._pick(arith.muli, arith.mulf, other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._pick(None, arith.divf, other)

    def __and__(self, other: Value | int) -> Value:
        return self._pick(arith.andi, None, other)

    def __or__(self, other: Value | int) -> Value:
        return self._pick(arith.ori, None, other)

    def __xor__(self, other: Value | int) -> Value:
        return self._pick(arith.xori, None, other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._pick(arith.shli, None, other)

    def __rlshift__(self, other: int) -> Value:
        return self._pick(arith.shli, None, other, swapped=True)

    def __rshift__(self, other: Value | int) -> Value:
        return self._pick(arith.shrui, None, other)

    def __lt__(self, other: Value | float) -> Value:
        op = arith.cmpf if self.kind == "f32" else arith.cmpi
        return Value(op(_LESS[self.kind], self.ir, self._other(other)), "bool")

    def __gt__(self, other: Value | float) -> Value:
        op = arith.cmpf if self.kind == "f32" else arith.cmpi
        return Value(op(_LESS[self.kind], self._other(other), self.ir), "bool")

    def __eq__(self, other: Value | float) -> Value:  # type: ignore[override]
        op = arith.cmpf if self.kind == "f32" else arith.cmpi
        return Value(op(_EQUAL[self.kind], self.ir, self._other(other)), "bool")


class Machine:
    """Emits code for every thread of a CTA. All threads must reach what they do together."""

    def __init__(self, clustered: bool) -> None:
        self.clustered = clustered
        self._u32, self._f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.thread = Value(mgpu.thread_idx(), "u32")
        self.lane, self.warp = self.thread & 31, self.thread >> 5
        number = "%cluster_ctarank" if clustered else "%ctaid.x"
        self.cta = Value(llvm.inline_asm(self._u32, [], f"mov.u32 $0, {number};", "=r"), "u32")

    # One thread's own.

    def where(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        """yes or no; one of them may be a number."""
        like = yes if isinstance(yes, Value) else no
        assert isinstance(like, Value)
        pair = [one.ir if isinstance(one, Value) else mgpu.c(one, like.ir.type) for one in (yes, no)]
        return Value(arith.select(condition.ir, *pair), like.kind)

    def max(self, a: Value, b: Value) -> Value:
        """Of u32 or f32 (of which none is NaN)."""
        return Value((arith.maximumf if a.kind == "f32" else arith.maxui)(a.ir, b.ir), a.kind)

    def min(self, a: Value, b: Value) -> Value:
        """See max."""
        return Value((arith.minimumf if a.kind == "f32" else arith.minui)(a.ir, b.ir), a.kind)

    def exp(self, x: Value) -> Value:
        """The same steps as XLA's: equal inputs give equal bits."""
        return Value(mlir_math.exp(x.ir), "f32")

    def inverse(self, x: Value) -> Value:
        """1 / x, as XLA's division of 1."""
        return Value(llvm.inline_asm(self._f32, [x.ir], "rcp.approx.f32 $0, $1;", "=f,f"), "f32")

    def bits(self, x: Value) -> Value:
        """f32 -> u32."""
        return Value(arith.bitcast(self._u32, x.ir), "u32")

    def floats(self, x: Value) -> Value:
        """u32 -> f32."""
        return Value(arith.bitcast(self._f32, x.ir), "f32")

    def count_bits(self, x: Value) -> Value:
        """Bits that are set."""
        return Value(mlir_math.ctpop(x.ir), "u32")

    # Memory. Refs are of 32-bit elements, indexed in their row-major order.

    def _address(self, ref: ir.Value, index: Value) -> ir.Value:
        # The pointer type follows the memory space of the ref.
        return utils.getelementptr(utils.memref_ptr(ref), [index.ir], ir.MemRefType(ref.type).element_type)

    def load(self, ref: ir.Value, index: Value, count: int = 1) -> list[Value]:
        """`count` elements in a row, 16 bytes at once where 4 divides index and count."""
        element = ir.MemRefType(ref.type).element_type
        kind = "f32" if element == self._f32 else "u32"
        width = 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1
        found = []
        for start in range(0, count, width):
            pointer = self._address(ref, index + start)
            if width == 1:
                found.append(Value(llvm.load(element, pointer), kind))
                continue
            values = llvm.load(ir.VectorType.get((width,), element), pointer, alignment=4 * width)
            for i in range(width):
                found.append(Value(llvm.extractelement(values, mgpu.c(i, self._u32)), kind))
        return found

    def load_of(self, ref: ir.Value, index: Value, cta: int) -> Value:
        """From shared memory of another CTA of the cluster; its own where there is none."""
        if not self.clustered:
            return self.load(ref, index)[0]
        pointer = utils.get_cluster_ptr(self._address(ref, index), mgpu.c(cta, self._u32))
        return Value(llvm.load(self._u32, pointer), "u32")

    def store(self, ref: ir.Value, index: Value, value: Value | int, where: Value) -> None:
        """Where `where`."""
        element = ir.MemRefType(ref.type).element_type
        with utils.when(where.ir):
            stored = value.ir if isinstance(value, Value) else mgpu.c(value, element)
            llvm.store(stored, self._address(ref, index))

    def store_or(self, ref: ir.Value, index: Value, value: Value, where: Value) -> None:
        """ref |= value in shared memory, whoever else does so at once."""
        with utils.when(where.ir):
            address = llvm.ptrtoint(self._u32, self._address(ref, index))
            code = "red.shared.or.b32 [$0], $1;"
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [address, value.ir], code, "r,r,~{memory}", has_side_effects=True
            )

    # Threads together.

    def largest(self, x: Value) -> Value:
        """Of a warp's u32."""
        return self._reduced(x, utils.ReductionKind.UMAX)

    def smallest(self, x: Value) -> Value:
        """Of a warp's u32."""
        return self._reduced(x, utils.ReductionKind.UMIN)

    def total(self, x: Value) -> Value:
        """Of a warp's u32."""
        return self._reduced(x, utils.ReductionKind.ADD)

    def _reduced(self, x: Value, kind: utils.ReductionKind) -> Value:
        return Value(utils.redux(x.ir, mgpu.c(-1, self._u32), kind), "u32")

    def of_lane(self, x: Value, lane: Value | int) -> Value:
        """Another lane's x."""
        lane_ir = lane.ir if isinstance(lane, Value) else mgpu.c(lane, self._u32)
        every, last = mgpu.c(-1, self._u32), mgpu.c(31, self._u32)
        return Value(nvvm.shfl_sync(every, x.ir, lane_ir, last, nvvm.ShflKind.idx), x.kind)

    def sync(self) -> None:
        """All threads of the CTA."""
        gpu.barrier()

    def sync_all(self) -> None:
        """All threads of the cluster, which is the CTA where there is none."""
        if not self.clustered:
            return self.sync()
        code = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], code, "~{memory}", has_side_effects=True, convergent=True)
        return None


def ordered(m: Any, x: Any) -> Any:
    """f32 -> u32 with the same order; minus infinity is LEAST."""
    bits = m.bits(x)
    return m.where(bits < 1 << 31, bits | 1 << 31, bits ^ 0xFFFFFFFF)


LEAST = 0x007FFFFF


def unordered(m: Any, key: Any) -> Any:
    """The inverse of ordered."""
    return m.floats(m.where(key < 1 << 31, key ^ 0xFFFFFFFF, key & 0x7FFFFFFF))


def float_total(m: Any, x: Any) -> Any:
    """Sum of a warp's f32, always in the same order; every lane has it."""
    for distance in (16, 8, 4, 2, 1):
        x = x + m.of_lane(x, m.lane ^ distance)
    return x


def running_total(m: Any, x: Any) -> Any:
    """Sum of a warp's u32 up to each lane, its own included."""
    for distance in (1, 2, 4, 8, 16):
        below = m.of_lane(x, (m.lane - distance) & 31)
        x = x + m.where(m.lane < distance, 0, below)
    return x


def largest_of(m: Any, values: Sequence[Any]) -> Any:
    """Of one thread's values, as a tree."""
    values = list(values)
    while len(values) > 1:
        pairs = [m.max(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
