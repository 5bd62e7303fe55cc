"""GELU (tanh form) and its derivative in Triton, with four ways to compute the gate: see ``MATH``."""

from __future__ import annotations

from weft.backends.triton_jit import tl, triton

# Arithmetic of GELU's gate sigmoid(2u). PLAIN: exp and a division as Triton has them, which its interpreter
# supports. UNIT: exp2 and a reciprocal by the special-function unit, 2 ulp each. PAIRED: one reciprocal for
# two elements, 3/4 of UNIT's work for that unit. TANH: one tanh.approx, half the work, an error of 2^-11.
PLAIN, UNIT, TANH, PAIRED = (tl.constexpr(i) for i in range(4))
ROOT = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
EXPONENT = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634)  # exp(-2u) as a power of 2


@triton.jit
def gelu_gate(v, SIGN: tl.constexpr, MATH: tl.constexpr):
    """Return sigmoid(SIGN * 2u) for float32 v: the factor that GELU multiplies v by, for SIGN 1."""
    w = v * v
    exponent = v * (SIGN * EXPONENT + SIGN * EXPONENT * CUBIC * w)
    if MATH == UNIT:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            ex2.approx.ftz.f32 e, $1;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif MATH == PAIRED:
        # 1/a and 1/b as b/(ab) and a/(ab). Exponents are clamped to 63 (0f427C0000) so that ab stays
        # finite; a gate below 2^-63 becomes 0.
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, r;
            .reg .pred p, q;
            setp.gt.f32 p, $2, 0f427C0000;
            setp.gt.f32 q, $3, 0f427C0000;
            min.f32 a, $2, 0f427C0000;
            min.f32 b, $3, 0f427C0000;
            ex2.approx.ftz.f32 a, a;
            ex2.approx.ftz.f32 b, b;
            add.f32 a, a, 0f3F800000;
            add.f32 b, b, 0f3F800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 b, r, b;
            mul.f32 a, r, a;
            selp.f32 $0, 0f00000000, b, p;
            selp.f32 $1, 0f00000000, a, q;
            }""",
            "=f,=f,f,f",
            [exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return 1.0 / (1.0 + tl.exp2(exponent))


@triton.jit
def gelu(v, MATH: tl.constexpr):
    """Return GELU, tanh form, of float32 v."""
    if MATH == TANH:
        w = v * v
        u = v * (ROOT + ROOT * CUBIC * w)
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        half = 0.5 * v
        return half * t + half
    else:
        return v * gelu_gate(v, 1, MATH)


@triton.jit
def gelu_slope(v, MATH: tl.constexpr):
    """Return the derivative of GELU at float32 v: s + v s (1 - s) 2u', with s = sigmoid(2u)."""
    # v^2 is clamped: for large |v|, 0 * inf would turn a slope of exactly 0 or 1 into NaN.
    inner = 2 * ROOT * (1.0 + 3 * CUBIC * tl.minimum(v * v, 1e30))
    # 1 - s loses its digits near s = 1. sigmoid(-2u) is the same value and keeps them.
    if MATH == UNIT:
        # sigmoid(-2u) = e s with e = exp(-2u). This saves a second exponential: the special-function
        # unit is nearly as busy in this pass as memory is. Beyond an exponent of 126 (0f42FC0000), e
        # would overflow; the results are then exactly 0 and 1.
        exponent = v * (EXPONENT + EXPONENT * CUBIC * (v * v))
        s, rest = tl.inline_asm_elementwise(
            """{
            .reg .f32 e, t;
            .reg .pred p;
            setp.gt.f32 p, $2, 0f42FC0000;
            ex2.approx.ftz.f32 e, $2;
            add.f32 t, e, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 e, e, t;
            selp.f32 $0, 0f00000000, t, p;
            selp.f32 $1, 0f3F800000, e, p;
            }""",
            "=&f,=&f,f",
            [exponent],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        s = gelu_gate(v, 1, MATH)
        rest = tl.where(s < 0.5, 1.0 - s, gelu_gate(v, -1, MATH))
    return s + v * s * rest * inner
