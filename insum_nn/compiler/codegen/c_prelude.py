"""The numbers of generated C: how each dtype is read, computed with and written, alone and in vectors.

Vectors are those of GNU C, which gcc and clang compile for any processor: the lanes of a sum are apart in the text, so
that no flag has to allow another order. What a function needs stands before it in pieces, each of which names what it
defines; equal pieces are printed once in a translation unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from string import Formatter

from insum_nn.compiler.lang.combining import COMBINING, COMPARISONS
from insum_nn.dtypes import Dtype, dtype_of

__all__ = ["PIECES", "Helpers", "NotInC", "Number", "literal", "number_of"]

# What separates the pieces of a prelude.
PIECES = "\n\n"


class NotInC(Exception):
    """What the printer of C does not print; the message says why."""


@dataclass(frozen=True, slots=True)
class Number:
    """A dtype in C.

    Attributes:
        stored: the type in memory.
        number: the type that is computed with; integers are unsigned, whose sums may wrap.
        tag: the name of vectors of `number`.
        mask: the type of the lanes of a comparison of such vectors.
        bytes: of `number`.
    """

    stored: str
    number: str
    tag: str
    mask: str
    bytes: int


_NUMBERS = {
    "float32": Number("float", "float", "f32", "int", 4),
    "float64": Number("double", "double", "f64", "long long", 8),
    "float16": Number("unsigned short", "float", "f32", "int", 4),
    "bfloat16": Number("unsigned short", "float", "f32", "int", 4),
    "int8": Number("signed char", "unsigned", "u32", "int", 4),
    "uint8": Number("unsigned char", "unsigned", "u32", "int", 4),
    "int16": Number("short", "unsigned", "u32", "int", 4),
    "int32": Number("int", "unsigned", "u32", "int", 4),
    "int64": Number("long", "unsigned long", "u64", "long", 8),
}
_BITS = {"float16", "bfloat16"}


def number_of(dtype: str) -> Number:
    """Return how C has a dtype.

    Raises:
        NotInC: `_NUMBERS` has no row of it.
    """
    if dtype not in _NUMBERS:
        raise NotInC(f"numbers of {dtype}")
    return _NUMBERS[dtype]


def literal(value: float | bool, dtype: str) -> str:
    """Print a number in the type that a dtype is computed with."""
    number = number_of(dtype).number
    if not dtype_of(dtype).is_floating:
        return f"({number}){int(value)}L"
    if math.isfinite(value):
        return f"({number}){float(value)!r}"
    # No header is included: these are what its names stand for.
    text = '__builtin_nan("")' if math.isnan(value) else "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return f"({number}){text}"


# A number of 16 bits from its bits, and back: rounded to nearest, ties to even.
_GET = {
    "bfloat16": """INSUM_INLINE float get_bfloat16(unsigned short x) {
  unsigned bits = (unsigned)x << 16; float r; __builtin_memcpy(&r, &bits, 4); return r;
}""",
    "float16": """INSUM_INLINE float get_float16(unsigned short x) {
#ifdef __FLT16_MAX__
  _Float16 h; __builtin_memcpy(&h, &x, 2); return h;
#else
  unsigned sign = (unsigned)(x & 0x8000) << 16, bits = x & 0x7fff; float r;
  if (bits < 0x400) { r = bits * 5.9604644775390625e-8f; return sign ? -r : r; }
  bits = sign | (bits >= 0x7c00 ? 0x7f800000 | (bits & 0x3ff) << 13 : (bits << 13) + 0x38000000);
  __builtin_memcpy(&r, &bits, 4); return r;
#endif
}""",
}
_PUT = {
    "bfloat16": """INSUM_INLINE unsigned short put_bfloat16(float x) {
  unsigned bits; __builtin_memcpy(&bits, &x, 4);
  return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}""",
    "float16": """INSUM_INLINE unsigned short put_float16(float x) {
#ifdef __FLT16_MAX__
  _Float16 h = x; unsigned short r; __builtin_memcpy(&r, &h, 2); return r;
#else
  unsigned bits, sign; __builtin_memcpy(&bits, &x, 4); sign = bits >> 16 & 0x8000; bits &= 0x7fffffff;
  if (bits >= 0x47800000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (bits < 0x38800000) {
    unsigned shift = 126 - (bits >> 23), m = (bits & 0x7fffff) | 0x800000;
    if (shift > 24) return sign;
    unsigned half = 1u << (shift - 1), rest = m & ((half << 1) - 1);
    return sign | ((m >> shift) + (rest > half || (rest == half && m >> shift & 1)));
  }
  return sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
#endif
}""",
}
# Functions of the C library that glibc has for whole vectors too: within 4 units in the last place.
_OF_LIBRARY = ("exp", "log", "log1p", "sin", "cos", "tanh", "erf")
# The processors that have them, and how glibc names them, by bytes of a vector.
_VARIANTS = {16: ("__SSE4_1__", "b"), 32: ("__AVX2__", "d"), 64: ("__AVX512F__", "e")}
# Those that are made of others, of a number or of a vector.
_COMPOSED = {
    "rsqrt": "1 / {sqrt}(x)",
    "sigmoid": "1 / (1 + {exp}(-x))",
    "silu": "x / (1 + {exp}(-x))",
    "softplus": "{relu}(x) + {log1p}({exp}(-{abs}(x)))",
    "gelu": "x * (1 + {erf}(x * ({t})0.70710678118654752)) / 2",
}
# Functions of x, and of y, as the language has them.
_FUNCTIONS = {
    **{name: f"__builtin_{name}{{f}}(x)" for name in (*_OF_LIBRARY, "sqrt")},
    **_COMPOSED,
    "abs": "__builtin_fabs{f}(x)",
    "relu": "x > 0 || x != x ? x : 0",
    "leaky_relu": "x > 0 ? x : x * y",
    "sign": "(x > 0) - (x < 0)",
    "step": "x > 0",
    "eq": "x == y",
    **{dtype: f"get_{dtype}(put_{dtype}(x))" for dtype in _BITS},
}
# Those of whole vectors `v`, of which some select by masks `m`: lane by lane they take six times as long.
_OF_VECTORS = {
    **_COMPOSED,
    "abs": "({v})(({m})x & ~({m})-({v}){{0}})",
    "relu": "({v})(({m})x & ((x > ({v}){{0}}) | (x != x)))",
    "leaky_relu": "({v})((({m})x & (x > ({v}){{0}})) | (({m})(x * y) & ~(x > ({v}){{0}})))",
    "step": "({v})(({m})(({v}){{0}} + 1) & (x > ({v}){{0}}))",
    "eq": "({v})(({m})(({v}){{0}} + 1) & (x == y))",
}
_RANGES = {
    "least": "INSUM_INLINE long least(long a, long b) { return a < b ? a : b; }",
    "most": "INSUM_INLINE long most(long a, long b) { return a > b ? a : b; }",
    "down": "INSUM_INLINE long down(long a, long b) { return a / b - (a % b != 0 && a < 0); }",
}
# Reads of some lanes by one instruction, of vectors of some bytes.
_MASKED = {
    ("f32", 32): ("__AVX__", "__builtin_ia32_maskloadps256((const f32x8 *)p, m)"),
    ("f64", 32): ("__AVX__", "__builtin_ia32_maskloadpd256((const f64x4 *)p, m)"),
    ("f32", 64): (
        "__AVX512F__",
        "__builtin_ia32_loadups512_mask((const float *)p, r, (unsigned short)insum_bits(lo, hi, 16))",
    ),
    ("f64", 64): (
        "__AVX512F__",
        "__builtin_ia32_loadupd512_mask((const double *)p, r, (unsigned char)insum_bits(lo, hi, 8))",
    ),
}
# Some lanes of two vectors.
_PICK = """#ifdef __clang__
#define INSUM_PICK(mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INSUM_PICK(mask, a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif"""
_MASK_BITS = """INSUM_INLINE unsigned insum_bits(long lo, long hi, int w) {
  return ((1u << least(most(hi, 0), w)) - 1) & ~((1u << least(most(lo, 0), w)) - 1);
}"""


class Helpers:
    """The functions that a kernel calls, by name, each after those that it calls itself.

    Args:
        dtype: of the factors.
    """

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype.name
        self.number = number_of(self.dtype)
        self.pieces: dict[str, None] = {
            "#define INSUM_INLINE static inline __attribute__((always_inline, unused))": None
        }

    def add(self, text: str) -> None:
        self.pieces[text] = None

    @property
    def prelude(self) -> str:
        return PIECES.join(self.pieces)

    def range(self, name: str) -> str:
        """The lesser or greater of two integers, or their quotient rounded down."""
        self.add(_RANGES[name])
        return name

    def clamping(self) -> None:
        """What brings a number of lanes between two bounds."""
        self.range("least")
        self.range("most")

    def vector(self, width: int) -> str:
        """The type of so many lanes."""
        number = self.number
        if width == 1:
            return number.number
        name = f"{number.tag}x{width}"
        size = f"vector_size({width * number.bytes})"
        self.add(
            f"typedef {number.number} {name} __attribute__(({size})); "
            f"typedef {number.mask} m{name} __attribute__(({size}));"
        )
        return name

    def get(self, dtype: str) -> str:
        """What makes a number of one in memory."""
        if dtype in _BITS:
            self.add(_GET[dtype])
            return f"get_{dtype}"
        return f"({number_of(dtype).number})"

    def put(self, dtype: str) -> str:
        """What makes one of the output's dtype of a number."""
        if dtype in _BITS:
            self.add(_PUT[dtype])
            return f"put_{dtype}"
        # An integer is what its memory would hold.
        own = "" if dtype_of(self.dtype).is_floating else f"({self.number.stored})"
        return f"({number_of(dtype).stored}){own}"

    def zero(self, width: int) -> str:
        """A vector of zeros."""
        return f"({self.vector(width)}){{0}}"

    @property
    def sums_dtype(self) -> str:
        """The dtype of sums in memory of their own."""
        return {"f32": "float32", "f64": "float64", "u32": "int32", "u64": "int64"}[self.number.tag]

    def function(self, name: str, result: str, arguments: str, body: str) -> str:
        """Define a function once, and return its name."""
        # Lanes that are apart are read one by one, which takes longer to compile many times than to call.
        kind = "static __attribute__((noinline, unused))" if "long s" in arguments else "INSUM_INLINE"
        self.add(f"{kind} {result} {name}({arguments}) {{ {body} }}")
        return name

    # Reads.

    def load(self, width: int, *, some: bool, near: bool) -> str:
        """Read lanes that are neighbours or `s` apart; `some`: those from `lo` to `hi`, and 0 in the others."""
        vector, get, dtype, near = self.vector(width), self.get(self.dtype), self.dtype, near or width == 1
        name = f"ld{'m' if some else ''}{'' if near else 's'}{width}_{dtype}"
        arguments = f"const {self.number.stored} *p{'' if near else ', long s'}" + (
            ", long lo, long hi" if some else ""
        )
        place, lanes = "p[i]" if near else "p[i * s]", f"for (int i = 0; i < {width}; i++) "
        if some and width == 1:
            body = f"return lo <= 0 && hi > 0 ? {get}(*p) : 0;"
        elif some:
            whole = f"{self.load(width, some=False, near=near)}(p{'' if near else ', s'})"
            body = f"if (lo <= 0 && hi >= {width}) return {whole}; {vector} r = {{0}}; "
            body += self.masked(width, near, f"{lanes}r[i] = i >= lo && i < hi ? {get}({place}) : 0; return r;")
        elif width == 1:
            body = f"return {get}(*p);"
        elif near and dtype != "float16":
            body = self.neighbours(width)
        else:
            body = f"{vector} r; {lanes}r[i] = {get}({place}); return r;"
            if near:
                half = self.neighbours(width)
                body = f"\n#ifdef __FLT16_MAX__\n  {half}\n#else\n  {body}\n#endif\n"
        return self.function(name, vector, arguments, body)

    def neighbours(self, width: int) -> str:
        """Read a vector as it stands in memory, and convert it."""
        number, vector = self.number, self.vector(width)
        if number.stored == number.number or self.dtype in ("int32", "int64"):
            # Or gcc reads a vector again for each product that it is a factor of, if it tunes for AMD's processors.
            feature = {32: "__AVX__", 64: "__AVX512F__"}.get(number.bytes * width)
            held = f'\n#ifdef {feature}\n  __asm__("" : "+v"(r));\n#endif\n  ' if feature else ""
            return f"{vector} r; __builtin_memcpy(&r, p, sizeof r); {held}return r;"
        lane, size = ("_Float16" if self.dtype == "float16" else number.stored), dtype_of(self.dtype).torch.itemsize
        read = f"typedef {lane} n __attribute__((vector_size({size * width}))); n x; __builtin_memcpy(&x, p, sizeof x);"
        if self.dtype == "bfloat16":
            wide = f"typedef unsigned w __attribute__((vector_size({4 * width}))); "
            return f"{read} {wide}return ({vector})(__builtin_convertvector(x, w) << 16);"
        return f"{read} return __builtin_convertvector(x, {vector});"

    def masked(self, width: int, near: bool, one_by_one: str) -> str:
        """Read some lanes by one instruction, where the processor has it."""
        number = self.number
        found = _MASKED.get((number.tag, width * number.bytes))
        if found is None or not near or number.stored != number.number:
            return one_by_one
        feature, read = found
        self.clamping()
        mask = ""
        if feature == "__AVX__":
            mask = f"m{self.vector(width)} m = {self.inside(width)}(lo, hi); "
        else:
            self.add(_MASK_BITS)
        return f"\n#ifdef {feature}\n  {mask}return {read};\n#else\n  {one_by_one}\n#endif\n"

    def inside(self, width: int) -> str:
        """The lanes from `lo` to `hi`, as a mask."""
        self.clamping()
        vector, mask = self.vector(width), self.number.mask
        lanes = ", ".join(map(str, range(width)))
        body = (
            f"const m{vector} at = {{{lanes}}}; "
            f"return (at >= ({mask})least(most(lo, 0), {width})) & (at < ({mask})least(most(hi, 0), {width}));"
        )
        return self.function(f"in{width}_{self.number.tag}", f"m{vector}", "long lo, long hi", body)

    def only(self, width: int, combine: str) -> str:
        """A value in the lanes from `lo` to `hi`, in the others what changes no sum, or no extremum."""
        vector, tag = self.vector(width), self.number.tag
        rest = "0" if combine == "add" else self.identity(combine)
        body = f"return lo <= 0 && hi > 0 ? a : {rest};"
        if width > 1:
            mask = f"m{vector}"
            rest = "" if combine == "add" else f" | (({mask})({rest} + {self.zero(width)}) & ~m)"
            body = f"if (lo <= 0 && hi >= {width}) return a; {mask} m = {self.inside(width)}(lo, hi); "
            body += f"return ({vector})((({mask})a & m){rest});"
        name = f"only{width}_{tag}" if combine == "add" else f"{combine}{width}_{self.dtype}_of_some"
        return self.function(name, vector, f"{vector} a, long lo, long hi", body)

    def highest(self, dtype: str) -> str:
        """The largest of some entries, and at least 0."""
        arguments, body = f"const {number_of(dtype).stored} *x, long n", "r = x[i] > r ? x[i] : r; return r;"
        return self.function(f"highest_{dtype}", "long", arguments, f"long r = 0; for (long i = 0; i < n; i++) {body}")

    def finite(self) -> str:
        """Whether no number is infinite, nor would be after some multiplications and sums."""
        number, width = self.number, 32 // self.number.bytes
        vector, total = self.vector(width), self.total(width, "add")
        body = (
            f"{number.number} s = 0; "
            f"\n#pragma omp parallel for num_threads(threads) if(threads > 1) reduction(+:s)\n"
            f"for (long c = 0; c < n; c += 4096) {{ {vector} a = {{0}}; "
            f"for (long i = c; i < n && i < c + 4096; i += {width}) "
            f"a += {self.load(width, some=True, near=True)}(x + i, 0, n - i) * 1e8f * 0; "
            f"s += {total}(a); }} return s == 0;"
        )
        return self.function(f"finite_{self.dtype}", "int", f"const {number.stored} *x, long n, long threads", body)

    # Arithmetic.

    def total(self, width: int, combine: str) -> str:
        """The sum of the lanes, or their extremum: of halves, and of their halves."""
        vector, number = self.vector(width), self.number
        if width == 1:
            return ""
        half = self.vector(width // 2)
        inner = self.total(width // 2, combine)
        both = self.both(combine, width // 2, "l", "h")
        body = (
            f"{half} l, h; __builtin_memcpy(&l, &a, sizeof l); "
            f"__builtin_memcpy(&h, (const char *)&a + sizeof l, sizeof h); return {inner}({both});"
        )
        name = f"sum{width}_{number.tag}" if combine == "add" else f"{combine}_of{width}_{self.dtype}"
        return self.function(name, number.number, f"{vector} a", body)

    def both(self, combine: str, width: int, a: str, b: str) -> str:
        """The sum of two values, or their extremum."""
        return f"{a} + {b}" if combine == "add" else f"{self.select(combine, width)}({a}, {b})"

    def totals(self, count: int, width: int, combine: str) -> str:
        """What `total` is, of each of several vectors, a power of two up to `width`: neighbours first."""
        self.add(_PICK)
        number, lines = self.number, list[str]()

        def halved(vector: int, a: str, b: str) -> str:
            """The lanes of two vectors with even numbers, and those with odd ones, combined."""
            kind, name = self.vector(vector), f"v{len(lines)}"
            even = (
                f"INSUM_PICK(m{kind}, {a}, {b}, {', '.join(map(str, range(odd, 2 * vector, 2)))})" for odd in (0, 1)
            )
            lines.append(f"{kind} {name} = {self.both(combine, vector, *even)};")
            return name

        parts = [f"a{place}" for place in range(count)]
        while len(parts) > 1:
            parts = [halved(width, *parts[place : place + 2]) for place in range(0, len(parts), 2)]
        (last,), left = parts, width
        while left > count:
            both = halved(left, last, last)
            left //= 2
            last = f"h{left}"
            lines.append(f"{self.vector(left)} {last}; __builtin_memcpy(&{last}, &{both}, sizeof {last});")
        vector = self.vector(width)
        arguments = ", ".join([f"{number.number} *r", *(f"{vector} a{place}" for place in range(count))])
        lines.append(f"__builtin_memcpy(r, &{last}, sizeof {last});")
        name = f"sums{count}x{width}_{number.tag}" if combine == "add" else f"{combine}{count}x{width}_{self.dtype}"
        return self.function(name, "void", arguments, " ".join(lines))

    def select(self, combine: str, width: int) -> str:
        """The greater or lesser of a value and a term; what is not a number stays."""
        vector, sign = self.vector(width), COMPARISONS[combine]
        signed = self.number.stored if not dtype_of(self.dtype).is_floating else ""
        if width == 1:
            cast = f"({signed})" if signed else ""
            body = f"return {cast}t {sign} {cast}a || t != t ? t : a;"
        else:
            mask = f"m{vector}"
            body = f"{mask} m = (t {sign} a) | (t != t); return ({vector})((({mask})t & m) | (({mask})a & ~m));"
        return self.function(f"{combine}{width}_{self.dtype}", vector, f"{vector} a, {vector} t", body)

    def identity(self, combine: str) -> str:
        """What every term of an extremum replaces, or equals."""
        row = dtype_of(self.dtype)
        (mode,) = (mode for mode in COMBINING.values() if mode.name == combine)
        value = mode.identity_of(row.torch)
        if row.is_floating:
            return literal(value, self.dtype)
        return f"({self.number.number})({value + 1}L - 1)" if value < 0 else literal(value, self.dtype)

    def of_numbers(self, name: str, width: int) -> str:
        """A function of one number or two, or of each number of vectors."""
        vector, number = self.vector(width), self.number
        if name in _BITS:
            self.get(name)
            self.put(name)
        suffix = "f" if number.number == "float" else ""
        known = {"f": suffix, "t": number.number, "v": vector, "m": f"m{vector}"}

        def of_values(text: str) -> str:
            called = [each for _, each, *_ in Formatter().parse(text) if each and each not in known]
            return f"return {text.format(**known, **{each: self.of_numbers(each, width) for each in called})};"

        names = "xy" if "y" in _FUNCTIONS[name].split("x", 1)[1] else "x"
        if width == 1 or name in _OF_VECTORS:
            body = of_values((_FUNCTIONS if width == 1 else _OF_VECTORS)[name])
        else:
            one = self.of_numbers(name, 1)
            apart = ", ".join(f"{each}[i]" for each in names)
            body = f"for (int i = 0; i < {width}; i++) x[i] = {one}({apart}); return x;"
        bytes_ = width * number.bytes
        if width > 1 and name in _OF_LIBRARY and bytes_ in _VARIANTS:
            feature, variant = _VARIANTS[bytes_]
            own = f"_ZGV{variant}N{width}v_{name}{suffix}"
            own = f"extern {vector} {own}({vector}); return {own}(x);"
            body = f"\n#if defined INSUM_VECTORS && defined {feature}\n  {own}\n#else\n  {body}\n#endif\n"
        arguments = ", ".join(f"{vector} {each}" for each in names)
        return self.function(f"{name}{'' if width == 1 else width}_{number.tag}", vector, arguments, body)

    # Writes.

    def store(self, width: int, out: str, *, adds: bool, some: bool, near: bool) -> str:
        """Write the lanes of a vector `s` apart, or add them to what is there; `some`: those from `lo` to `hi`."""
        vector, number, put = self.vector(width), self.number, self.put(out)
        stored = number_of(out).stored
        row, own = dtype_of(out), dtype_of(self.dtype)
        same = row.torch.itemsize == number.bytes and row.is_floating == own.is_floating
        near = near or width == 1
        how = f"{'add' if adds else 'st'}{'m' if some else ''}{'' if near else 's'}"
        name = f"{how}{width}_{self.dtype}_{out}"
        arguments = f"{stored} *p, {'' if near else 'long s, '}{vector} a" + (", long lo, long hi" if some else "")
        place, value = ("p[i]" if near else "p[i * s]"), "a[i]"
        if width == 1:
            place, value = "*p", "a"
        new = f"{self.get(out)}({place}) + {value}" if adds else value
        write = f"{place} = {put}({new});"
        if width == 1:
            body = f"if (lo <= 0 && hi > 0) {write}" if some else write
        elif near and same and not some:
            copy = "__builtin_memcpy"
            body = f"{copy}(p, &a, sizeof a);"
            if adds:
                body = f"{vector} r; {copy}(&r, p, sizeof r); r += a; {copy}(p, &r, sizeof r);"
        elif near and same and not adds:
            self.clamping()
            body = (
                f"lo = most(lo, 0); hi = least(hi, {width}); "
                "if (lo < hi) __builtin_memcpy(p + lo, (const char *)&a + lo * sizeof *p, (hi - lo) * sizeof *p);"
            )
        else:
            guard = "if (i >= lo && i < hi) " if some else ""
            body = f"for (int i = 0; i < {width}; i++) {guard}{write}"
        return self.function(name, "void", arguments, body)
